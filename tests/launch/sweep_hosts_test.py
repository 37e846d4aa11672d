"""`lockstep sweep --host`: trials on the slots of several hosts.

A shell of this test's leads to hosts that are none, but have core locks of their own (TMPDIR), and to network namespaces where
ranks of one trial are on two hosts.
"""

import os
import signal
import sys

import pytest

optuna = pytest.importorskip("optuna")
pytest.importorskip("lockstep_sweep", reason="there is no Python module in this build")

USABLE = sorted(os.sched_getaffinity(0))[:2]  # for each of these cores a trial runs at a time
CORES = len(USABLE)
VALUE = ["--metric", "loss", "--regex", "loss=loss: ([0-9]+)"]
# Says where it is, and waits until the test lets it go.
PROGRAM = f"""#!{sys.executable} -S
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
mine = os.environ["HOST"] + "-" + ",".join(map(str, sorted(os.sched_getaffinity(0))))
os.close(os.open(folder / mine, os.O_CREAT | os.O_EXCL))  # fails where another trial computes there
print(mine, os.environ["OMP_NUM_THREADS"], os.environ.get("GIVEN"), flush=True)
while not (folder / "go").exists():
    time.sleep(0.01)
os.remove(folder / mine)
print("loss:", sys.argv[2])
"""
SHELL = """#!/bin/sh
case $1 in a|a-too|b) ;; greets) echo "Welcome to $1" ;; floods) exec yes "Welcome" ;; hangs) read -r line; touch "$FOLDER/hangs"; exec sleep 1000 ;; *) echo "no host $1" >&2; exit 255 ;; esac
machine=${1%-too}
mkdir -p "$FOLDER/$machine"
exec env -i PATH="$PATH" LOCKSTEP_TEST_MARK="$LOCKSTEP_TEST_MARK" TMPDIR="$FOLDER/$machine" HOST="$1" sh -c "$2"
"""


class Sweep:
    def __init__(self, programs):
        self.programs, self.folder = programs, programs.folder
        self.shell = self.write("shell", SHELL)
        self.program = self.write("train", PROGRAM)

    def write(self, name, text):
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def start(self, *words, before=(), shell=None):
        shell = shell or self.shell
        own = ["taskset", "-c", ",".join(map(str, USABLE)), "env", "-u", "OMP_NUM_THREADS"]
        own += ["lockstep", "sweep", "--rsh", shell, "--param", "x=int:0:9", *VALUE]
        return self.programs.start(*before, *own, *words, LOCKSTEP_SWEEP_PYTHON=sys.executable, FOLDER=self.folder)

    def start_trials(self, *words):
        """Of the program above."""
        return self.start(*words, "--", self.program, self.folder, "{x}")

    def wait_for_trials(self, driver, many):
        """What the first trials have said of themselves, as soon as so many are there."""
        logs = [self.folder / "sweep" / "trials" / f"{number:04d}" / "output.log" for number in range(many)]
        script = 'for log; do until grep -q . "$log" 2> /dev/null; do sleep 0.01; done; done; cat "$@"'
        done = self.programs.run("sh", "-c", script, "sh", *logs)
        assert driver.process.poll() is None
        return sorted(done.stdout.splitlines())

    def study(self):
        from lockstep_sweep import options, study

        return study.load(study.Place(options.begun(self.folder / "sweep")[1]))


@pytest.fixture
def sweep(programs):
    return Sweep(programs)


def states(study):
    return [trial.state.name for trial in study.trials]


def test_trials_fill_the_slots_of_all_hosts_each_on_cores_of_its_own(sweep):
    driver = sweep.start_trials("--host", f"a:1,b:{CORES}", "--trials", CORES + 3, "-x", "GIVEN=it")
    lines = sweep.wait_for_trials(driver, 1 + CORES)
    assert lines == sorted([f"a-{','.join(map(str, USABLE))} {CORES} it", *(f"b-{core} 1 it" for core in USABLE)])
    (sweep.folder / "go").touch()
    done = driver.finish()
    assert done.status == 0, done.text
    assert states(sweep.study()) == ["COMPLETE"] * (CORES + 3)
    sweep.programs.wait_until_gone()
    best = sweep.programs.run("lockstep", "sweep", "best", LOCKSTEP_SWEEP_PYTHON=sys.executable).stdout
    assert f"lockstep run --host a:1,b:{CORES} --rsh {sweep.shell} -x GIVEN=it --nproc-per-node 1 -- " in best, best


@pytest.mark.parametrize("hosts", [["-H", f"a:{CORES},b:{CORES}"], ["-H", f"a:{CORES}", f"--host=b:{CORES}"]], ids=["one", "two"])
def test_trials_go_to_the_host_with_the_most_free_slots(sweep, hosts):
    """Of one --host or several."""
    driver = sweep.start_trials(*hosts, "--trials", 2)
    lines = sweep.wait_for_trials(driver, 2)
    assert [line.partition("-")[0] for line in lines] == ["a", "b"], lines
    (sweep.folder / "go").touch()
    assert driver.finish().status == 0


def test_the_hosts_of_a_resumed_sweep_take_the_place_of_its_own(sweep):
    from lockstep_sweep import options

    sweep.start("--host", "a", "--host", "b", "--trials", 1, "--", "echo", "loss: 1").finish()
    assert options.begun(sweep.folder / "sweep")[1].host == "a,b"
    assert options.begun(sweep.folder / "sweep", ["--host", "c:2"])[1].host == "c:2"


def test_two_sweeps_share_no_core_of_a_host(sweep):
    driver = sweep.start_trials("--host", "b:1", "--trials", 1)
    sweep.wait_for_trials(driver, 1)
    other = sweep.start("--host", "b:1", "--trials", 1, "--folder", "other", "--", "echo", "loss: 1")
    other.wait_for("waits for cores or cards that another sweep computes on")
    (sweep.folder / "go").touch()
    assert driver.finish().status == 0 and other.finish().status == 0


def test_no_process_on_any_host_outlives_the_driver(sweep):
    driver = sweep.start_trials("--host", "a,b", "--trials", 9)
    sweep.wait_for_trials(driver, 2)
    driver.kill()
    driver.finish()
    sweep.programs.wait_until_gone()


def test_a_host_that_is_lost_gets_no_more_trials(sweep):
    driver = sweep.start_trials("--host", "a,b", "--trials", 4, "--retries", 1)
    sweep.wait_for_trials(driver, 2)
    [keeper] = [pid for pid in sweep.programs.survivors() if is_keeper(pid, sweep.folder / "b")]
    os.kill(keeper, signal.SIGKILL)
    (sweep.folder / "go").touch()
    done = driver.finish()
    assert done.status == 0 and done.stdout.count("b is lost") == 1, done.text
    assert states(sweep.study()) == ["COMPLETE"] * 4


def is_keeper(pid, folder):
    """Whether that process keeps the cores of the host whose TMPDIR this is."""
    try:
        words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")
        variables = open(f"/proc/{pid}/environ", "rb").read().split(b"\0")
    except OSError:
        return False
    return words[:2] == [b"python3", b"-c"] and f"TMPDIR={folder}".encode() in variables


def test_a_sweep_without_a_host_ends_and_says_what_is_left(sweep):
    driver = sweep.start_trials("--host", "b", "--trials", 2)
    sweep.wait_for_trials(driver, 1)
    [keeper] = [pid for pid in sweep.programs.survivors() if is_keeper(pid, sweep.folder / "b")]
    os.kill(keeper, signal.SIGKILL)
    (sweep.folder / "go").touch()
    done = driver.finish()
    assert done.status == 1 and "1 left" in done.stdout, done.text


@pytest.mark.parametrize("words, status, said", [
    (["--host", "a,z"], 1, "z can't be reached by"),
    (["--host", "a,greets"], 1, "greets can't be reached by"),
    (["--host", "a,greets"], 1, "has written 'Welcome to greets' where an answer was due"),
    (["--host", "a,floods"], 1, "has written 'Welcome"),
    (["--host", "a:0"], 2, "--host has 'a:0'"),
    (["--host", "a,a:2"], 2, "names a host twice"),
    (["--host", "a,b,a-too"], 2, "--host names one machine twice, as a and as a-too: the locks of their cores lie in"),
    (["--host", "a:4096"], 2, "do not fit onto the"),
    (["--host", "a,b", "-n", 3], 2, "3 processes do not fit onto the slots"),
    (["--host", "a,b", "--jobs", 3], 2, "3 trials of 1 processes do not fit onto the slots"),
    (["--host", "localhost,b", "-n", 2], 2, "localhost"),
])  # fmt: skip
def test_hosts_that_cannot_be_meant_start_nothing(sweep, words, status, said):
    done = sweep.start(*words, "--", "true").finish()
    assert done.status == status and said in done.stderr, done.text
    assert not (sweep.folder / "sweep").exists()
    sweep.programs.wait_until_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_remote_shell_hangs_ends_all_and_prints_no_traceback(sweep, number):
    driver = sweep.start("--host", "a,hangs", "--", "true")
    sweep.programs.run("sh", "-c", "until [ -e hangs ]; do sleep 0.01; done")
    driver.kill(number)
    done = driver.finish()
    assert done.status == 128 + number and done.stderr == "", done.text
    sweep.programs.wait_until_gone()


def test_a_remote_shell_that_hangs_is_ended_and_named(sweep, monkeypatch):
    from lockstep_sweep import slots

    monkeypatch.setattr(slots, "FIRST_ANSWER", 0.1)
    monkeypatch.setenv("FOLDER", str(sweep.folder))
    monkeypatch.setenv("LOCKSTEP_TEST_MARK", sweep.programs.environment()["LOCKSTEP_TEST_MARK"])
    said = rf"hangs can't be reached by '{sweep.shell}' \(--rsh\): its remote shell has not answered for 0.1 s.* try: {sweep.shell} hangs"
    with pytest.raises(OSError, match=said):
        slots._keeper_of("hangs", str(sweep.shell), None)
    sweep.programs.wait_until_gone()


def test_a_host_that_stops_answering_is_lost(sweep, monkeypatch):
    from lockstep_sweep import slots

    shell = sweep.write("once", """#!/bin/sh
echo '{"core": [0, 1], "card": ["5"]}'
exec sleep 1000
""")
    monkeypatch.setattr(slots, "ANSWER", 0.1)
    monkeypatch.setenv("LOCKSTEP_TEST_MARK", sweep.programs.environment()["LOCKSTEP_TEST_MARK"])
    keeper = slots._keeper_of("a", str(shell), None)
    assert keeper.units == {"core": [0, 1], "card": ["5"]} and not keeper.lost
    assert keeper.claim({"core": 1, "card": 1}) == {} and "has not answered" in keeper.lost
    sweep.programs.wait_until_gone()


# ---- A trial over two hosts


@pytest.fixture
def net(programs, make_hosts):
    programs.run("lockstep", "run", "--dry-run", "-H", "a,b", "true").skip_without_openssl()
    return make_hosts(2)


def start_over_two_hosts(sweep, net, program, *words):
    """From the first one."""
    shell = sweep.write("lead", f"""#!/bin/sh
mkdir -p "$FOLDER/$1"
exec env -i PATH="$PATH" LOCKSTEP_TEST_MARK="$LOCKSTEP_TEST_MARK" TMPDIR="$FOLDER/$1" {net.remote_shell()} "$@"
""")
    words = ["--host", "host-a:1,host-b:1", "-n", 2, *words, "--", "sh", "-c", program]
    return sweep.start(*words, before=net.inside(0), shell=shell)


def test_a_trial_runs_over_two_hosts(sweep, net):
    program = 'echo "rank $RANK of $WORLD_SIZE on $(hostname), $OMP_NUM_THREADS"; echo loss: {x}$RANK'
    done = start_over_two_hosts(sweep, net, program, "--trials", 2).finish()
    assert done.status == 0, done.text
    for trial in sweep.study().trials:
        assert trial.value == 10 * trial.params["x"], "rank 0's"
        log = (sweep.folder / f"sweep/trials/{trial.number:04d}/output.log").read_text()
        for rank, host in enumerate("ab"):
            assert f"[rank {rank}] rank {rank} of 2 on host-{host}, {CORES}\n" in log, log
    sweep.programs.wait_until_gone()


def test_pruning_ends_the_job_on_both_hosts(sweep, net):
    program = 'if [ $RANK = 0 ]; then echo loss: {x}; echo loss: {x}; fi; [ {x} = 1 ] || exec sleep 1000'
    words = ["--enqueue", "x=1", "--enqueue", "x=9", "--trials", 2, "--pruner", "median:n_startup_trials=1"]
    done = start_over_two_hosts(sweep, net, program, *words).finish()
    assert done.status == 0, done.text
    assert states(sweep.study()) == ["COMPLETE", "PRUNED"]
    sweep.programs.wait_until_gone()
