"""The accounts of a sweep, whenever its drivers are killed. What it does as a whole, tests/launch/sweep_test.py tests."""

import inspect
import json
import os
import subprocess

import pytest
from processes import run_python

optuna = pytest.importorskip("optuna")
from lockstep_sweep import host, keeper, options, slots, study  # noqa: E402


@pytest.mark.parametrize("kind, moment", [
    ("journal", "after"), ("grid", "after"),
    *(pytest.param(*words, marks=pytest.mark.long) for words in (("journal", "before"), ("grid", "before"), ("sqlite", "after")))
])  # fmt: skip
def test_no_write_at_which_a_driver_is_killed_loses_or_doubles_a_trial(tmp_path, kind, moment):
    lines = run_python("killed_drivers.py", tmp_path, kind, moment, environment={"TMPDIR": tmp_path}).splitlines()
    assert len(lines) > 30, "so many writes has a driver"
    for write, line in enumerate(lines, 1):
        trials = {number: (state, params, marks) for number, state, params, marks in json.loads(line)}
        told = f"killed {moment} write {write}: {line}"
        complete = {number for number, (state, _, _) in trials.items() if state == "COMPLETE"}
        failed = sorted(number for number, (state, _, _) in trials.items() if state == "FAIL")
        assert len(complete) == 4 and len(complete) + len(failed) == len(trials), told
        followers = {marks["retry_of"]: number for number, (*_, marks) in trials.items() if "retry_of" in marks}
        assert sorted(followers) == failed and len(set(followers.values())) == len(failed), told
        for number in failed:
            last = followers[number]
            while last in followers:
                last = followers[last]
            assert trials[number][1].items() <= trials[last][1].items(), told
        assert sum(trials[number][1]["lr"] == 0.5 for number in complete) == 1, told
        assert kind != "grid" or len({trials[number][1]["lr"] for number in complete}) == 4, told


def asked(folder, *words):
    return options.parse(["--param", "x=int:0:9", "--metric", "v", "--folder", str(folder), *words, "--", "true"])


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """begun(words…): the trials of a study in the test's folder, as a driver of it has them."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(keeper.tempfile, "tempdir", None)
    return lambda *words: study.begin_or_join(asked(tmp_path / "sweep", "--trials", "3", *words))


def test_a_trial_of_a_driver_on_another_host_is_left_alone(begun):
    trial = begun().begin()
    trial.set_user_attr("driver", {**host.this_driver(), "host": "elsewhere", "started": 0})
    other = begun()
    assert [other.begin().number, other.begin().number] == [1, 2]
    assert other.begin() is None, "three have begun"


def test_a_trial_of_a_driver_that_has_ended_is_run_again_with_its_parameters(begun):
    trial = begun().begin()
    trial.set_user_attr("driver", {**host.this_driver(), "started": 0})
    again = begun().begin()
    assert again.user_attrs["retry_of"] == trial.number and again.params == trial.params


def test_drivers_of_sqlite_share_a_lock_whatever_their_tmpdir(begun, tmp_path, monkeypatch):
    begun("--storage", f"sqlite:///{tmp_path}/study.db")
    monkeypatch.setattr(keeper.tempfile, "tempdir", str(tmp_path / "nowhere"))
    place = study.Place(asked(tmp_path / "sweep", "--storage", f"sqlite:///{tmp_path}/study.db"))
    assert place.locks_all and (tmp_path / "study.db.drivers").exists()


def test_without_a_lock_of_all_a_trial_without_a_driver_is_left_alone_for_a_while(begun, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(study.time, "monotonic", lambda: now[0])
    trials = begun()
    trials._locks_all = False  # as with a database on a server
    undriven = trials.study.ask(trials._space)
    assert "retry_of" not in trials.begin().user_attrs
    now[0] += study.MOMENT + 1
    again = trials.begin()
    assert again.user_attrs["retry_of"] == undriven.number and again.params == undriven.params


def test_a_driver_that_comes_second_to_make_a_study_draws_other_numbers_and_enqueues_nothing(begun, tmp_path, monkeypatch):
    words = ["--storage", f"sqlite:///{tmp_path}/study.db", "--seed", "1", "--sampler", "random", "--enqueue", "x=3"]
    first, load, missed = begun(*words), study.load, []

    def load_late(place):  # as where another host's driver, which has another lock, makes the study at that moment
        missed.append(place)
        return load(place) if len(missed) > 1 else None

    monkeypatch.setattr(study, "load", load_late)
    second = begun(*words, "--folder", str(tmp_path / "second"), "--name", "sweep")
    assert len(missed) == 2 and len(first.study.trials) == 1
    assert [sampled(trials) for trials in (first, second)] != [sampled(first)] * 2


def sampled(trials):
    return trials.study.sampler._rng.rng.randint(1 << 30)


def test_a_password_of_a_database_is_not_shown(tmp_path):
    place = study.Place(asked(tmp_path, "--storage", "postgresql://me:secret@server:5432/sweeps"))
    assert str(place) == "postgresql://me:***@server:5432/sweeps"


def test_a_trial_that_another_driver_has_ended_is_not_run_again(begun):
    trials = begun()
    trial = trials.begin()
    trials.study.tell(trial.number, 1.0)
    trials.end_and_run_again(trial, 1, failure="too late")
    assert [found.state.name for found in trials.study.trials] == ["COMPLETE"]


def test_a_process_with_the_number_of_a_driver_that_ended_is_not_that_driver():
    me = host.this_driver()
    assert not host.has_ended(me)
    assert host.has_ended({**me, "started": me["started"] - 1})
    assert host.has_ended({**me, "boot": "another"})
    assert not host.has_ended({**me, "boot": "another", "machine": "another"}), "it is of another machine with this name"
    assert not host.has_ended({**me, "started": 0, "pids": 0}), "in another container its number says nothing"


def test_a_driver_of_another_user_that_proc_hides_has_not_ended():
    hides = "mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid 65534 --regid 65534 --clear-groups"
    if subprocess.run(["unshare", "--mount", "sh", "-c", f"{hides} true"], capture_output=True).returncode:
        pytest.skip("hiding processes needs root")
    # By its text, for another user may not enter the folder of the package.
    asks = inspect.getsource(host) + "import json, sys\nprint([has_ended(driver) for driver in json.loads(sys.argv[1])])"
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    drivers = json.dumps([host.this_driver(), {**host.this_driver(), "pid": ended.pid}])
    asking = ["unshare", "--mount", "sh", "-c", f'{hides} "$@"', "sh", "/usr/bin/env", "python3", "-c", asks, drivers]
    seen = subprocess.run(asking, capture_output=True, text=True)
    assert seen.stdout == "[False, True]\n", seen.stderr


def test_a_half_line_at_the_end_of_a_journal_is_cut_off(begun, tmp_path):
    other = begun()
    other.begin()
    for number in (1, 2):
        with open(tmp_path / "sweep" / "study.journal", "a") as journal:
            journal.write('{"op_code": 4, "work')
        trials = other if number == 1 else begun()  # also where a driver goes on that read what lies before
        assert trials.begin().number == number


@pytest.fixture
def have_cards(tmp_path, monkeypatch):
    """have_cards(N): this host has the devices of so many cards."""

    def have(count):
        monkeypatch.setattr(keeper, "DEVICES", tmp_path / "devices")
        keeper.DEVICES.mkdir()
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(count))):
            (keeper.DEVICES / name).touch()

    return have


@pytest.fixture
def on_cores(begun, have_cards, monkeypatch):
    """on_cores(N, cards=""): this host has cores 0 to N - 1, whose locks lie in the test's folder, and these of eight cards."""
    have_cards(8)

    def have(count, cards=""):
        monkeypatch.setattr(keeper.os, "sched_getaffinity", lambda _: set(range(count)))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cards)

    return have


def test_a_core_and_a_card_are_one_trials_at_a_time(on_cores):
    on_cores(3, "GPU-a/1,7")
    one, other = keeper.Keeper(None), keeper.Keeper(None)
    assert one.claim({"core": 2, "card": 1}) == {"core": [0, 1], "card": ["GPU-a/1"]}
    assert other.claim({"core": 2, "card": 0}) == {}
    assert other.claim({"core": 1, "card": 2}) == {}
    assert other.claim({"core": 1, "card": 1}) == {"core": [2], "card": ["7"]}
    one.release({"core": [0, 1], "card": ["GPU-a/1"]})
    assert other.claim({"core": 1, "card": 1}) == {"core": [0], "card": ["GPU-a/1"]}


@pytest.mark.parametrize("variable, cards", [
    (None, ["0", "1", "2", "3"]), ("", []), ("-1", []), ("0", ["0"]), (" 2, 3", ["2", "3"]), ("1,-1,2", ["1"]),
    ("1,4,2", ["1"]), ("NoDevFiles", []), ("0,1,0", []), ("GPU-8932f937,MIG-3", ["GPU-8932f937", "MIG-3"])])  # fmt: skip
def test_cards_are_those_that_cuda_reads_in_the_variable(have_cards, variable, cards):
    have_cards(4)
    assert keeper.visible_cards(variable) == cards


@pytest.mark.parametrize("variable", [None, "0", "0,0", "GPU-8932f937"])
def test_a_host_without_cards_has_none_whatever_the_variable_says(tmp_path, monkeypatch, variable):
    monkeypatch.setattr(keeper, "DEVICES", tmp_path / "none")
    assert keeper.visible_cards(variable) == []


def test_a_card_that_is_named_twice_is_not_waited_for(on_cores):
    on_cores(2, "0,0")
    [share] = slots.Slots(asked("sweep"), "lockstep").take()
    assert share.units == {"core": [0, 1], "card": []}, "a program sees no card where one is named twice"


@pytest.mark.parametrize("words, usable, plan", [
    ([], 8, (8, 1)), (["--jobs", "2"], 8, (4, 2)), (["-n", "2", "--jobs", "3"], 8, (2, 3)),
    (["--jobs", "auto"], 8, (1, 8)), (["-n", "3", "--jobs", "auto"], 8, (3, 2)), (["-n", "3"], 8, (6, 1))])  # fmt: skip
def test_cores_are_shared_out(on_cores, words, usable, plan):
    on_cores(usable)
    found = slots.Slots(asked("sweep", *words), "lockstep")
    [share] = found.take()
    assert (len(share.units["core"]), found.at_once) == plan
    assert "--gpu-list" not in slots.run_options(asked("sweep", *words), [share])


@pytest.mark.parametrize("words, cards, lists", [
    ([], "4,5", ["4,5"]), (["--jobs", "2"], "4,5,6,7", ["4,5", "6,7"]), (["--jobs", "auto"], "4,5", ["4", "5"]),
    (["-n", "2", "--jobs", "2"], "0,1,2,3", ["0,1", "2,3"]), (["-n", "4"], "0", ["0"]),
    (["--jobs", "2", "-x", "CUDA_VISIBLE_DEVICES=1,3"], "0,1,2,3", ["1", "3"])])  # fmt: skip
def test_cards_are_shared_out(on_cores, words, cards, lists):
    on_cores(8, cards)
    options = asked("sweep", *words)
    found = slots.Slots(options, "lockstep")
    given = [slots.run_options(options, found.take()) for _ in range(found.at_once)]
    assert [words[words.index("--gpu-list") + 1] for words in given] == lists
    assert found.take() is None


def test_fewer_cards_than_processes_of_trials_at_once_are_refused(on_cores):
    on_cores(8, "0,1")
    with pytest.raises(options.Misuse, match=r"4 processes .* the 2 cards .* on localhost; .* CUDA_VISIBLE_DEVICES="):
        slots.Slots(asked("sweep", "-n", "2", "--jobs", "2"), "lockstep")


@pytest.fixture
def two_hosts(on_cores, monkeypatch):
    """two_hosts(HOSTS, processes): the slots of hosts "a" and "b", of two cores each; "b" has the cards of `cards`."""

    class Units(keeper.Keeper):
        def __init__(self, name, shell, visible):
            self.place = name
            self.units, self._taken = {"core": [0, 1], "card": Units.cards if name == "b" else []}, {}

        def _take(self, kind, count):
            free = [unit for unit in self.units[kind] if (kind, unit) not in self._taken][:count]
            self._taken.update(dict.fromkeys((kind, unit) for unit in free))
            return free

        def release(self, units):
            for kind, names in units.items():
                for name in names:
                    del self._taken[kind, name]

    monkeypatch.setattr(slots, "_keeper_of", Units)

    def make(hosts, processes, cards=()):
        Units.cards = list(cards)
        return slots.Slots(asked("sweep", "--host", hosts, "-n", str(processes)), "true")

    return make


def test_each_host_of_a_trial_gets_its_list_of_cards(two_hosts):
    found = two_hosts("a:1,b:2", 3, ["2", "3"])
    words = slots.run_options(asked("sweep", "--host", "a:1,b:2", "-n", "3"), found.take())
    assert words[words.index("--cpu-list") + 1] == "0,1;0,1" and words[words.index("--gpu-list") + 1] == ";2,3"


def placed(place):
    return place and [(share.host.name, share.units["core"]) for share in place]


def test_a_trial_is_on_one_host_where_one_has_room(two_hosts):
    found = two_hosts("a:1,b:2", 2)
    assert found.at_once == 1
    assert placed(found.take()) == [("b", [0, 1])]
    assert found.take() is None, "one slot is free"


def test_a_trial_is_on_several_hosts_where_none_has_room(two_hosts):
    found = two_hosts("a:2,b:2", 3)
    first = found.take()
    assert placed(first) == [("a", [0, 1]), ("b", [0])]
    assert found.take() is None
    for share in first:
        share.release()
    assert placed(found.take()) == [("a", [0, 1]), ("b", [0])]


def test_cores_of_other_sweeps_are_left_alone(two_hosts):
    found = two_hosts("a:2,b:2", 2)
    found._hosts[0].keeper.claim({"core": 1})
    assert placed(found.take()) == [("b", [0, 1])]
    assert found.take() is None
    found._hosts[1].keeper.release({"core": [1]})  # as if a sweep of another user's had ended
    found._hosts[1].free = 1
    assert placed(found.take()) == [("a", [1]), ("b", [1])]


def test_a_folder_of_locks_that_others_can_enter_is_refused(begun, tmp_path):
    folder = keeper.private_folder()
    assert folder.parent == tmp_path and os.stat(folder).st_mode & 0o077 == 0
    folder.chmod(0o755)
    with pytest.raises(OSError, match="this user's alone"):
        keeper.private_folder()
