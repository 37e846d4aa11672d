"""`lockstep sweep`: its drivers, what it refuses, and what it shows."""

import concurrent.futures
import importlib.util
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from ports import free_port
from support import HANG, takes_hangups
from sweeps import BOWL, LOSS, MISUSE, PROGRAM, WITHOUT_READER

optuna = pytest.importorskip("optuna")
pytest.importorskip("lockstep_sweep", reason="there is no Python module in this build")
from lockstep_sweep import keeper  # noqa: E402
from lockstep_sweep.__main__ import main  # noqa: E402
from lockstep_sweep.driver import TWICE  # noqa: E402
from lockstep_sweep.study import own_trials  # noqa: E402

optuna.logging.set_verbosity(optuna.logging.ERROR)


def wait_for(condition):
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- Drivers


@pytest.mark.parametrize("before", [(), WITHOUT_READER], ids=["read", "its reader gone"])
def test_ctrl_c_ends_the_job_and_resume_runs_it_again(sweep, before):
    program = sweep.script("""
import os, pathlib, sys, time
print("loss:", sys.argv[1], flush=True)
if not pathlib.Path("go").exists():
    pathlib.Path("begun").touch()
    os.kill(int(pathlib.Path("driver").read_text()), 2)
    time.sleep(1000)
""")
    waiting = f"while ! [ -s driver ]; do sleep 0.01; done; exec {program} {{lr}}"
    words = [*BOWL, *LOSS, "--trials", 2, "--", "sh", "-c", waiting]
    driver = sweep.start(*words, before=before)
    (sweep.folder / "driver.new").write_text(str(driver.pid))
    (sweep.folder / "driver.new").rename(sweep.folder / "driver")
    done = driver.finish()
    assert done.status == 128 + signal.SIGINT, done.text
    if before:
        assert done.stderr == "lockstep sweep: standard output can't be written any more: Broken pipe\n"
    else:
        assert f"lockstep sweep resume {sweep.folder}/sweep" in done.stdout and done.stderr == "", done.text
    sweep.wait_until_gone()
    (sweep.folder / "go").touch()
    sweep.run("resume", "sweep")
    first, again, other = sweep.study().trials
    assert again.user_attrs["retry_of"] == first.number and again.params == first.params
    assert [again.state.name, other.state.name] == ["COMPLETE", "COMPLETE"]


SAVES_ON_SIGNAL = """
import os, pathlib, signal, sys, time
def end(*_):
    pathlib.Path("asked").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    pathlib.Path("saved").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
pathlib.Path("begun").touch()
while True:
    time.sleep(1)
"""


def test_the_same_signal_again_at_once_kills_no_job(sweep):
    """timeout(1) sends its signal to its program, and then to the process group."""
    driver = sweep.start(*BOWL, *LOSS, "--trials", 1, "--", sweep.script(SAVES_ON_SIGNAL))
    wait_for(lambda: (sweep.folder / "begun").exists())
    begin = time.monotonic()
    driver.kill(signal.SIGTERM)
    while is_pending(driver.pid, signal.SIGTERM):  # otherwise both would be one for the kernel already
        pass
    driver.kill(signal.SIGTERM)
    if time.monotonic() > begin + TWICE:
        pytest.skip("this machine is so busy that two signals in a row are not at once")
    wait_for(lambda: (sweep.folder / "asked").exists())
    (sweep.folder / "go").touch()
    done = driver.finish()
    assert done.status == 128 + signal.SIGTERM and (sweep.folder / "saved").exists(), done.text


@takes_hangups
def test_a_terminal_that_closes_kills_no_job(sweep):
    """Its shell and the kernel send SIGHUP each."""
    driver = sweep.start(*BOWL, *LOSS, "--trials", 1, "--", sweep.script(SAVES_ON_SIGNAL))
    wait_for(lambda: (sweep.folder / "begun").exists())
    driver.kill(signal.SIGHUP)
    wait_for(lambda: (sweep.folder / "asked").exists())
    driver.kill(signal.SIGHUP)
    wait_for(lambda: not is_pending(driver.pid, signal.SIGHUP))
    (sweep.folder / "go").touch()
    done = driver.finish()
    assert done.status == 128 + signal.SIGHUP and (sweep.folder / "saved").exists(), done.text


def is_pending(pid, number):
    fields = re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)$", pathlib.Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return any(int(field, 16) >> (number - 1) & 1 for field in fields)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_driver_that_waits_for_the_studys_lock_ends_by_a_signal(sweep, number):
    program = sweep.script("""
import pathlib, time
pathlib.Path("begun").touch()
while not pathlib.Path("locked").exists():
    time.sleep(0.01)
print("loss: 1", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
""")
    driver = sweep.start(*BOWL, *LOSS, "--trials", 1, "--", program)
    wait_for(lambda: (sweep.folder / "begun").exists())
    with keeper.Lock(sweep.folder / "sweep" / "study.journal.drivers"):
        (sweep.folder / "locked").touch()
        wait_for(lambda: re.search(rf"-> FLOCK .* {driver.pid} ", pathlib.Path("/proc/locks").read_text()))
        driver.kill(number)
        done = driver.finish()
    assert done.status == 128 + number and "ends its jobs" in done.stdout and done.stderr == "", done.text
    sweep.wait_until_gone()
    (sweep.folder / "go").touch()
    sweep.run("resume", "sweep")
    first, again = sweep.study().trials
    assert again.user_attrs["retry_of"] == first.number and again.state.name == "COMPLETE"


@pytest.mark.parametrize("storage", [None, "sqlite:///study.db"])
def test_two_drivers_share_a_study_and_no_core(sweep, storage):
    program = sweep.script("""
import os, pathlib, time
[core] = os.sched_getaffinity(0)
os.close(os.open(f"core-{core}", os.O_CREAT | os.O_EXCL))  # fails where another trial computes there
while not pathlib.Path("both").exists():
    time.sleep(0.01)
os.remove(f"core-{core}")
print("loss: 1")
""")
    place = ["--storage", storage] if storage else []
    words = [*place, *BOWL, *LOSS, "--trials", 8, "--jobs", "auto", "--", program]
    two_cores = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))]
    drivers = [sweep.start(*words, before=two_cores), sweep.start(*words, before=two_cores)]
    with concurrent.futures.ThreadPoolExecutor(2) as waiting:
        said = [waiting.submit(driver.wait_for, "cores or cards that another sweep computes on") for driver in drivers]
        concurrent.futures.wait(said, return_when=concurrent.futures.FIRST_COMPLETED)
        (sweep.folder / "both").touch()
    assert any(one.exception() is None for one in said)
    for driver in drivers:
        done = driver.finish()
        assert done.status == 0, done.text
    study = sweep.study()
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 8
    assert len({tuple(trial.params.values()) for trial in study.trials}) == 8


def test_trials_at_once_see_cards_of_their_own(sweep):
    seen = 'echo "cards $CUDA_VISIBLE_DEVICES"; echo loss: 1; until [ $(ls {folder}/.. | wc -l) = 2 ]; do sleep 0.01; done'
    words = ["--param", "x=int:0:9", "--metric", "loss", *LOSS, "--trials", 2, "--jobs", 2, "--", "sh", "-c", seen]
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two trials at once need two cores")
    for count, variable, cards in ((4, "3,1", ["1", "3"]), (0, "0", ["0", "0"])):
        sweep.run_with_cards(count, "--folder", f"of-{count}", *words, CUDA_VISIBLE_DEVICES=variable)
        logs = [path.read_text().splitlines()[0] for path in sweep.folder.glob(f"of-{count}/trials/*/output.log")]
        assert sorted(logs) == [f"cards {card}" for card in cards]
    done = sweep.run_with_cards(4, "--folder", "other", *words, CUDA_VISIBLE_DEVICES="3", status=MISUSE)
    assert "2 processes of several trials at once do not fit onto the 1 cards" in done.stderr


@pytest.mark.long
def test_a_driver_killed_twenty_times_loses_and_doubles_nothing(sweep):
    numbers = random.Random(27)
    program = sweep.script(PROGRAM)
    words = [*BOWL, *LOSS, "--jobs", "auto", "--", "sh", "-c", f"sleep 0.2; exec {program} {{lr}} {{hidden}}"]
    for _ in range(20):
        driver = sweep.start("--trials", 100000, *words)
        with pytest.raises(subprocess.TimeoutExpired):
            driver.process.wait(numbers.uniform(0.5, 4))
        driver.kill()
        driver.process.wait()
        sweep.wait_until_gone()
    many = len(own_trials(sweep.study())) + 5
    sweep.run("--trials", many, *words)
    check_accounts(sweep.study(), many)


def check_accounts(study, many):
    own = own_trials(study)
    assert len(own) == many and all(trial.state.name == "COMPLETE" for trial in own)
    failed = [trial.number for trial in study.trials if trial.state.name == "FAIL"]
    assert len(failed) + many == len(study.trials)
    assert failed == sorted(trial.user_attrs["retry_of"] for trial in study.trials if "retry_of" in trial.user_attrs)
    follower = {trial.user_attrs["retry_of"]: trial for trial in study.trials if "retry_of" in trial.user_attrs}
    for number in failed:
        last = follower[number]
        while last.number in follower:
            last = follower[last.number]
        assert study.trials[number].params.items() <= last.params.items()


# ---- What it refuses, and what it shows


@pytest.mark.parametrize("words, said", [
    (["--", "true"], "--param and --metric are missing"),
    ([*BOWL], "no program"),
    (["--param", "lr=log:0:1", "--metric", "v", "--", "true"], "low > 0"),
    (["--param", "lr=lg:1:2", "--metric", "v", "--", "true"], "log:LOW:HIGH"),
    (["--param", "lr=int:1:2.5", "--metric", "v", "--", "true"], "lr=int:1:2.5"),
    (["--param", "folder=int:1:2", "--metric", "v", "--", "true"], "none of number, folder"),
    ([*BOWL, "--", "echo", "{rate}"], "'{rate}'"),
    ([*BOWL, "--regex", "loss=(", "--", "true"], "--regex loss"),
    ([*BOWL, "--regex", "loss=x", "--", "true"], "no group"),
    ([*BOWL, "--sampler", "grid", "--", "true"], "lr has no grid"),
    ([*BOWL, "--sampler", "genetic", "--", "true"], "'genetic'"),
    ([*BOWL, "--sampler", "BruteForceSampler", "--", "true"], "--sampler BruteForceSampler: "),
    ([*BOWL, "--pruner", "median:patience=1", "--", "true"], "patience"),
    ([*BOWL, "--jobs", "4096", "--", "true"], "do not fit"),
    ([*BOWL, "--warm-start", "nowhere", "--", "true"], "nowhere"),
    ([*BOWL, "--storage", "nosql://sweep", "--", "true"], "nosql"),
    (["--file", "nothing.toml"], "nothing.toml"),
    ([*BOWL, "--enqueue", "lr=fast", "--", "true"], "'lr=fast' is not within log:1e-5:1"),
    ([*BOWL, "--enqueue", "hidden=1000", "--", "true"], "'hidden=1000' is not within logint:16:512"),
    ([*BOWL, "--enqueue", "rate=1", "--", "true"], "'rate' is none of the parameters lr, hidden"),
    ([*BOWL, "--retries", "-1", "--", "true"], "'-1' is not a number from 0"),
    ([*BOWL, "python", "train.py"], "the program comes after --"),
    (["resume", "nowhere"], "no sweep in"),
    (["best", "nowhere"], "no sweep in"),
    (["--bogus"], "--bogus"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)  # fmt: skip
def test_misuse_is_named(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    assert main(words) == MISUSE
    assert [signal.getsignal(number) for number in numbers] == handlers  # processes that this one forks inherit them
    text = capsys.readouterr().err
    assert said in text and "lockstep sweep --help" in text
    assert not list(tmp_path.glob("sweep/trials/*"))


def test_another_sweep_in_its_place_is_refused(sweep):
    words = ["--metric", "loss", *LOSS, "--trials", 1, "--", "echo", "loss: 1"]
    sweep.run("--param", "x=int:0:9", *words)
    assert "differs in parameters" in sweep.run("--param", "x=int:0:8", *words, status=MISUSE).stderr
    sweep.run("--param", "x=int:0:9", *words)
    assert len(sweep.study().trials) == 1
    assert "of another study" in sweep.run("--name", "other", "--param", "x=int:0:9", *words, status=MISUSE).stderr


def test_a_study_that_was_cut_off_before_its_first_trial_is_gone_on_with(sweep):
    words = ["--param", "x=int:0:9", "--metric", "loss", *LOSS, "--trials", 1, "--", "echo", "loss: 1"]
    sweep.run(*words)
    (sweep.folder / "sweep" / "study.journal").unlink()
    shutil.rmtree(sweep.folder / "sweep" / "trials")
    sweep.run("status", status=MISUSE)
    sweep.run("resume")
    lost = sweep.folder / "sweep" / "trials" / "0001" / "metrics.jsonl"  # of a trial that a crash of the host took
    lost.parent.mkdir()
    lost.write_text('{"metrics": {"accuracy": 0.5}, "step": 1}\n')
    sweep.run("resume", "--trials", 2)
    assert [trial.user_attrs["metrics"] for trial in sweep.study().trials] == [{"loss": 1.0}, {"loss": 1.0}]


def test_names_in_braces_may_be_meant(sweep):
    sweep.run("--param", "x=int:7:8", "--metric", "loss", *LOSS, "--trials", 1, "--", "echo", "loss: {x} {{x}} {\"a\": 1}")
    assert re.match(r'loss: [78] \{x\} \{"a": 1\}$', (sweep.folder / "sweep/trials/0000/output.log").read_text())


@pytest.mark.long  # loads two libraries of plots, for some seconds
def test_plots(sweep):
    pytest.importorskip("plotly")
    program = sweep.script(PROGRAM)
    sweep.run(*BOWL, *LOSS, "--trials", 3, "--", program, "{lr}", "{hidden}")
    [page] = sweep.run("plot").stdout.splitlines()
    text = pathlib.Path(page).read_text(encoding="utf-8")
    assert text.count("plotly-graph-div") >= 4 and "hidden" in text


@pytest.mark.long  # MLflow makes its database for some seconds
def test_trials_are_child_runs_of_mlflow(sweep):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{sweep.folder}/mlflow.db"
    program = ["sh", "-c", "echo loss: {x}; echo $MLFLOW_RUN_ID > {folder}/run"]
    sweep.run("--param", "x=int:1:9", "--metric", "loss", *LOSS, "--trials", 2, "--mlflow", uri, "--", *program)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("sweep").experiment_id
    runs = client.search_runs([experiment])
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    [parent] = [run for run in runs if run not in children]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {(run.info.status, run.data.params["x"], run.data.metrics["loss"]) for run in children} == {
        ("FINISHED", str(trial.params["x"]), trial.value) for trial in sweep.study().trials
    }
    assert parent.info.status == "FINISHED"
    named = {path.read_text().strip() for path in sweep.folder.glob("sweep/trials/*/run")}
    assert named == {run.info.run_id for run in children}


@pytest.mark.long  # loads MLflow's client
def test_an_mlflow_server_that_is_away_stops_nothing(sweep):
    pytest.importorskip("mlflow")
    words = ["--param", "x=int:1:9", "--metric", "loss", *LOSS, "--trials", 3, "--mlflow", f"http://127.0.0.1:{free_port()}"]
    done = sweep.run(*words, "--", "echo", "loss: {x}")
    assert [trial.state.name for trial in sweep.study().trials] == ["COMPLETE"] * 3
    assert done.stderr.count("warning: MLflow") == 1, done.text


def test_a_terminal_shows_how_far_it_is(sweep):
    terminal = [sys.executable, "-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"]
    program = ["sh", "-c", "echo loss: {x}; until [ {number} = 0 ] || [ -e go ]; do sleep 0.01; done"]
    words = ["--param", "x=int:3:4", "--metric", "loss", *LOSS, "--enqueue", "x=3", "--trials", 3, "--", *program]
    driver = sweep.start(*words, before=terminal)
    driver.wait_for(r"1/3 trials, \d\d:\d\d left, 1 running, best: 3, trial 0: x=3")
    (sweep.folder / "go").touch()
    done = driver.finish()
    assert done.status == 0 and "trials: 3 complete" in done.stdout, done.text


def test_help_lists_its_options(sweep):
    assert "--sampler" in sweep.run("--help").stdout


def test_a_python_without_the_package_is_named(programs):
    python = programs.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    done = programs.run("lockstep", "sweep", "status", LOCKSTEP_SWEEP_PYTHON=python)
    assert done.status == 1 and "pip install './python[sweep]'" in done.stderr, done.text
    done = programs.run("lockstep", "sweep", "status", LOCKSTEP_SWEEP_PYTHON="/nonexistent/python")
    assert done.status == 1 and "'/nonexistent/python'" in done.stderr, done.text


def test_without_optuna_it_says_how_to_get_it(programs):
    package = pathlib.Path(importlib.util.find_spec("lockstep_sweep").origin).parent
    (programs.folder / "site").mkdir()
    (programs.folder / "site" / "lockstep_sweep").symlink_to(package)
    done = programs.run(sys.executable, "-S", "-m", "lockstep_sweep", "status", PYTHONPATH=programs.folder / "site")
    assert done.status == 1 and "pip install 'optuna==" in done.stderr, done.text
