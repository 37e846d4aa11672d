"""The accounts of a sweep, whenever its drivers are killed. What it does as a whole, tests/sweep_test.py tests."""

import json
import os

import pytest
from processes import run_python

optuna = pytest.importorskip("optuna")
from lockstep_sweep import cores, host, options, slots, study  # noqa: E402


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
    monkeypatch.setattr(cores.tempfile, "tempdir", None)
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
    monkeypatch.setattr(cores.tempfile, "tempdir", str(tmp_path / "nowhere"))
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


def test_a_half_line_at_the_end_of_a_journal_is_cut_off(begun, tmp_path):
    other = begun()
    other.begin()
    for number in (1, 2):
        with open(tmp_path / "sweep" / "study.journal", "a") as journal:
            journal.write('{"op_code": 4, "work')
        trials = other if number == 1 else begun()  # also where a driver goes on that read what lies before
        assert trials.begin().number == number


@pytest.fixture
def on_cores(begun, monkeypatch):
    """on_cores(N): this host has cores 0 to N - 1, whose locks lie in the test's folder."""
    return lambda count: monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(count)))


def test_a_core_is_one_trials_at_a_time(on_cores):
    on_cores(3)
    one, other = cores.Cores(), cores.Cores()
    assert one.claim(2) == [0, 1]
    assert other.claim(2) == []
    assert other.claim(1) == [2]
    one.release([0, 1])
    assert other.claim(1) == [0]


@pytest.mark.parametrize("words, usable, plan", [
    ([], 8, (8, 1)), (["--jobs", "2"], 8, (4, 2)), (["-n", "2", "--jobs", "3"], 8, (2, 3)),
    (["--jobs", "auto"], 8, (1, 8)), (["-n", "3", "--jobs", "auto"], 8, (3, 2)), (["-n", "3"], 8, (6, 1))])  # fmt: skip
def test_cores_are_shared_out(on_cores, words, usable, plan):
    on_cores(usable)
    found = slots.Slots(asked("sweep", *words), "lockstep")
    [share] = found.take()
    assert (len(share.cores), found.at_once) == plan


@pytest.fixture
def two_hosts(on_cores, monkeypatch):
    """two_hosts(HOSTS, processes): the slots of hosts "a" and "b", of two cores each."""

    class TwoCores(cores.Cores):
        def __init__(self, name, shell):
            self.name, self.usable, self._taken = name, [0, 1], {}

        def claim(self, count):
            free = [core for core in self.usable if core not in self._taken]
            taken = free[:count] if len(free) >= count else []
            self._taken.update(dict.fromkeys(taken))
            return taken

        def release(self, taken):
            for core in taken:
                del self._taken[core]

    monkeypatch.setattr(slots, "_cores_of", TwoCores)
    return lambda hosts, processes: slots.Slots(asked("sweep", "--host", hosts, "-n", str(processes)), "true")


def placed(place):
    return place and [(share.host.name, share.cores) for share in place]


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
    found._hosts[0].cores.claim(1)
    assert placed(found.take()) == [("b", [0, 1])]
    assert found.take() is None
    found._hosts[1].cores.release([1])  # as if a sweep of another user's had ended
    found._hosts[1].free = 1
    assert placed(found.take()) == [("a", [1]), ("b", [1])]


def test_a_folder_of_locks_that_others_can_enter_is_refused(begun, tmp_path):
    folder = cores.private_folder()
    assert folder.parent == tmp_path and os.stat(folder).st_mode & 0o077 == 0
    folder.chmod(0o755)
    with pytest.raises(OSError, match="this user's alone"):
        cores.private_folder()
