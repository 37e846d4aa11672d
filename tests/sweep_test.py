"""`lockstep sweep`: what it asks, what its trials get, how they end, and that Optuna alone would have asked the same."""

import concurrent.futures
import importlib.util
import inspect
import json
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from ports import free_port

optuna = pytest.importorskip("optuna")
pytest.importorskip("lockstep_sweep", reason="there is no Python module in this build")
from lockstep_sweep.__main__ import main  # noqa: E402
from lockstep_sweep.study import own_trials  # noqa: E402

optuna.logging.set_verbosity(optuna.logging.ERROR)

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python reads no TOML, which --file takes")
MISUSE = 2
BOWL = ["--param", "lr=log:1e-5:1", "--param", "hidden=logint:16:512", "--metric", "loss"]
LOSS = ["--regex", "loss=loss: ([0-9.e+-]+)"]
# Two parameters and nine reports, some of which are worth pruning.
def losses(lr, hidden):
    return [(math.log10(lr) + 2.5) ** 2 + ((hidden - 200) / 200) ** 2 + (1 + hidden % 7) / epoch for epoch in range(1, 10)]


PROGRAM = f"""
import math, sys
{inspect.getsource(losses)}
for loss in losses(float(sys.argv[1]), int(sys.argv[2])):
    print("loss:", loss, flush=True)
"""
# As where the Ctrl-C that ends a sweep has ended `tee` behind it.
WITHOUT_READER = [sys.executable, "-c", """if True:
    import os, signal, sys
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
"""]
SAME = {
    "tpe": lambda: optuna.samplers.TPESampler(seed=7, n_startup_trials=4),
    "random": lambda: optuna.samplers.RandomSampler(seed=7),
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=2),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9),
}


@pytest.fixture
def sweep(programs):
    """sweep(words…): starts `lockstep sweep` with this Python in the test's folder; .run(), .script(), .study() beside it."""

    class Sweep:
        folder = programs.folder
        wait_until_gone = staticmethod(programs.wait_until_gone)
        find = staticmethod(programs.find)

        def start(self, *words, before=(), **variables):
            return programs.start(*before, "lockstep", "sweep", *words, LOCKSTEP_SWEEP_PYTHON=sys.executable, **variables)

        def run(self, *words, status=0, **variables):
            return self._finish(self.start(*words, **variables), status)

        def run_with_cards(self, count, *words, status=0, **variables):
            """On a host with the devices of so many cards."""
            folder = programs.folder / f"{count} cards"
            folder.mkdir(exist_ok=True)
            for number in range(count):
                (folder / f"nvidia{number}").touch()
            start = f"from lockstep_sweep import keeper; keeper.DEVICES = {str(folder)!r}; from lockstep_sweep.__main__ import main"
            command = [sys.executable, "-c", f"import sys; {start}; sys.exit(main())", "--launcher", programs.find("lockstep")]
            return self._finish(programs.start(*command, *words, **variables), status)

        @staticmethod
        def _finish(driver, status):
            done = driver.finish()
            assert done.status == status, done.text
            return done

        def script(self, text, name="train.py"):
            """A program of Python that starts at once."""
            path = programs.folder / name
            path.write_text(f"#!{sys.executable} -S\n{text}")
            path.chmod(0o755)
            return path

        def study(self, name="sweep"):
            from lockstep_sweep import options, study

            return study.load(study.Place(options.begun(programs.folder / name)[1]))

    return Sweep()


def told(study):
    return [(trial.state.name, trial.params, trial.value, trial.intermediate_values) for trial in study.trials]


# ---- What is asked


@pytest.mark.parametrize("sampler, pruner, own, many", [
    ("tpe:n_startup_trials=4", "median:n_startup_trials=2", ("tpe", "median"), 10),
    ("random", "hyperband:min_resource=1,max_resource=9", ("random", "hyperband"), 8)])  # fmt: skip
def test_a_loop_of_optuna_alone_asks_the_same_and_prunes_the_same(sweep, sampler, pruner, own, many):
    program = sweep.script(PROGRAM)
    words = [*BOWL, *LOSS, "--sampler", sampler, "--pruner", pruner, "--seed", 7, "--trials", many]
    sweep.run(*words, "--", program, "{lr}", "{hidden}")

    def objective(trial):
        asked = trial.suggest_float("lr", 1e-5, 1, log=True), trial.suggest_int("hidden", 16, 512, log=True)
        for step, loss in enumerate(losses(*asked), 1):
            trial.report(loss, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return loss

    alone = optuna.create_study(study_name="sweep", sampler=SAME[own[0]](), pruner=SAME[own[1]]())
    alone.optimize(objective, n_trials=many)
    assert told(sweep.study()) == told(alone)
    assert any(trial.state.name == "PRUNED" for trial in alone.trials)


def test_a_grid_is_tried_once_with_two_at_a_time(sweep):
    words = ["--param", "a=choice:x,true,3", "--param", "b=int:1:5:2", "--param", "c=uniform:0:0.5:0.5", "--metric", "v"]
    program = ["sh", "-c", "echo v=1 {a} {b} {c}"]
    sweep.run(*words, "--regex", "v=v=(.)", "--sampler", "grid", "--jobs", "auto", "--", *program)
    asked = {tuple(trial.params.values()) for trial in sweep.study().trials}
    assert asked == {(a, b, c) for a in ("x", True, 3) for b in (1, 3, 5) for c in (0.0, 0.5)}
    assert len(sweep.study().trials) == 18
    text = "".join(path.read_text() for path in sweep.folder.glob("sweep/trials/*/output.log"))
    assert "v=1 true 3 0.5" in text and "v=1 3 5 0.0" in text


def test_it_begins_with_what_is_enqueued_and_knows_an_older_sweep(sweep):
    program = sweep.script(PROGRAM)
    # With these seeds the sampler finds nothing better than what is enqueued.
    sweep.run("--folder", "old", *BOWL, *LOSS, "--seed", 8, "--trials", 2, "--", program, "{lr}", "{hidden}")
    sweep.run("--folder", "new", *BOWL, *LOSS, "--seed", 7, "--trials", 2, "--warm-start", "old", "--enqueue",
              "lr=0.003,hidden=200", "--", program, "{lr}", "{hidden}")  # fmt: skip
    trials = sweep.study("new").trials
    assert [trial.params for trial in trials[:2]] == [trial.params for trial in sweep.study("old").trials]
    assert trials[2].params == {"lr": 0.003, "hidden": 200} and len(trials) == 4
    best = json.loads(sweep.run("best", "new").stdout)
    assert best["trial"] == 2 and best["command"] == f"lockstep run --nproc-per-node 1 -- {program} 0.003 200"
    shown = sweep.run("status", "new").stdout
    assert "trials: 2 complete, 0 pruned, 0 failed, 0 running, 0 left" in shown, "those of the older sweep do not count"


def test_an_older_sweeps_trials_of_another_form_or_range_are_left_out(sweep):
    words = ["--metric", "loss", *LOSS, "--trials", 2]
    program = ["--", "echo", "loss: {x}"]
    sweep.run("--folder", "old", "--param", "x=int:1:4", "--enqueue", "x=1", "--enqueue", "x=4", *words, *program)
    for folder, form, fitting in (("other", "x=uniform:1:4", []), ("range", "x=int:2:9", [4])):
        done = sweep.run("--folder", folder, "--param", form, "--warm-start", "old", *words, *program)
        trials = sweep.study(folder).trials
        assert [trial.params["x"] for trial in trials if "origin" in trial.user_attrs] == fitting
        assert f"{2 - len(fitting)} trials are left out" in done.stderr and len(trials) == len(fitting) + 2
    other = ["--folder", "up", "--param", "x=int:1:4", "--warm-start", "old", "--direction", "maximize"]
    assert "judged by another metric: minimize loss" in sweep.run(*other, *words, *program, status=MISUSE).stderr


def test_readers_may_stop_and_each_command_has_help(sweep):
    sweep.run("--param", "x=int:1:4", "--metric", "loss", *LOSS, "--trials", 1, "--", "echo", "loss: 1")
    for command in ("status", "best"):
        done = sweep.start(command, before=WITHOUT_READER).finish()
        assert done.status == 128 + signal.SIGPIPE and done.stderr == "", done.text
    for command in ("status", "best", "plot", "resume"):
        assert "--warm-start FOLDER" in sweep.run(command, "--help").stdout


@needs_toml
def test_a_files_unknown_key_is_named(sweep):
    (sweep.folder / "sweep.toml").write_text('nonsense = 3\n')
    assert "error: sweep.toml: unrecognized arguments: --nonsense 3\n" in sweep.run("--file", "sweep.toml", status=MISUSE).stderr


@needs_toml
@pytest.mark.parametrize("wish", ["[enqueue]\nx = 3\ny = true", "[[enqueue]]\nx = 3\ny = true", 'enqueue = "x=3,y=true"'])
def test_a_files_table_is_one_trial_to_begin_with(sweep, wish):
    (sweep.folder / "sweep.toml").write_text(f'metric = "loss"\ntrials = 1\n{wish}\n')
    words = ["--param", "x=int:1:4", "--param", "y=choice:true,false", *LOSS, "--file", "sweep.toml"]
    sweep.run(*words, "--", "echo", "loss: {x}")
    assert [trial.params for trial in sweep.study().trials] == [{"x": 3, "y": True}]


@needs_toml
def test_a_file_says_the_same_as_the_command_line(sweep):
    program = sweep.script(PROGRAM)
    (sweep.folder / "sweep.toml").write_text(f"""
        program = "{program} {{lr}} {{hidden}}"
        metric = "loss"
        trials = 9
        seed = 3
        [param]
        lr = "log:1e-5:1"
        hidden = "logint:16:512"
        [regex]
        loss = 'loss: ([0-9.e+-]+)'
    """)
    sweep.run("--file", "sweep.toml", "--trials", 2)
    sweep.run("--folder", "other", *BOWL, *LOSS, "--seed", 3, "--trials", 2, "--", program, "{lr}", "{hidden}")
    assert told(sweep.study()) == told(sweep.study("other")) and len(told(sweep.study())) == 2


# ---- What a trial gets and reports


def test_parameters_come_by_variable_and_reports_as_json_lines(sweep):
    program = sweep.script("""
import json, os
trial = json.loads(os.environ["LOCKSTEP_TRIAL"])
with open(trial["report"], "a") as file:
    for step, loss in ((1, 3.0), (2, "NaN"), (5, trial["parameters"]["lr"])):
        file.write(json.dumps({"metrics": {"validation/loss": loss, "accuracy": 0.5}, "step": step}) + "\\n")
    file.write('{"metrics": {"validation/loss": 0}, "st')
print(os.sched_getaffinity(0), os.environ["OMP_NUM_THREADS"], trial["number"])
""")
    words = ["--param", "lr=uniform:1:2", "--metric", "validation/loss", "--trials", 1, "--jobs", "auto"]
    sweep.run(*words, "--", program)
    [trial] = sweep.study().trials
    assert trial.value == trial.params["lr"] and list(trial.intermediate_values) == [1, 2, 5]
    assert trial.user_attrs["metrics"] == {"validation/loss": trial.value, "accuracy": 0.5}
    assert re.match(r"\{\d+\} 1 0$", (sweep.folder / "sweep/trials/0000/output.log").read_text())
    best = json.loads(sweep.run("best").stdout)
    variable, *command = shlex.split(best.pop("command"))[1:]
    assert best == {"trial": 0, "value": trial.value, "parameters": trial.params, "metrics": trial.user_attrs["metrics"]}
    assert command == ["lockstep", "run", "--nproc-per-node", "1", "--", str(program)], "the variable has the parameters"
    assert json.loads(variable.removeprefix("LOCKSTEP_TRIAL="))["parameters"] == trial.params


def test_rank_0_alone_is_heard(sweep):
    program = sweep.script("import os; print('loss:', 1 + int(os.environ['RANK']))")
    sweep.run("--param", "x=int:0:9", "--metric", "loss", *LOSS, "--trials", 1, "-n", 2, "--", program)
    [trial] = sweep.study().trials
    assert trial.intermediate_values == {1: 1.0}


@needs_toml
def test_a_trainer_reports_by_itself(sweep, small_data):
    """examples/sweep.toml, with less to do."""
    example = pathlib.Path(__file__).resolve().parents[1] / "examples" / "sweep.toml"
    sweep.run("--file", example, "--trials", 2, "--pruner", "none", "-n", 2, "--jobs", 1, "--", sweep.find("trainer"),
              "--data", small_data, "--run", "{folder}", "--epochs", 3, "--batch-size", "{batch}",
              "--learning-rate", "{lr}")  # fmt: skip
    for trial in sweep.study().trials:
        assert list(trial.intermediate_values) == [1, 2, 3], "the steps are epochs"
        assert trial.value == trial.user_attrs["metrics"]["validation/accuracy"]
        assert {"validation/loss", "epoch/loss", "train/loss"} <= set(trial.user_attrs["metrics"])


# ---- How trials end


def test_pruning_ends_the_whole_job(sweep):
    program = sweep.script("""
import subprocess, sys
for step in range(3):
    print("loss:", sys.argv[1], flush=True)
if sys.argv[1] == "9":
    subprocess.run(["sleep", "1000"])
""")
    words = ["--param", "x=choice:1,9", "--metric", "loss", *LOSS, "--pruner", "median:n_startup_trials=1", "-n", 2]
    sweep.run(*words, "--enqueue", "x=1", "--enqueue", "x=9", "--trials", 2, "--", program, "{x}")
    sweep.wait_until_gone()
    assert [trial.state.name for trial in sweep.study().trials] == ["COMPLETE", "PRUNED"]


def test_values_are_found_in_a_progress_bar(sweep):
    program = ["printf", r"epoch 1 loss: 3\repoch 2 loss: {x}\r"]
    sweep.run("--param", "x=int:1:2", "--metric", "loss", *LOSS, "--trials", 1, "--", *program)
    [trial] = sweep.study().trials
    assert trial.intermediate_values == {1: 3.0, 2: trial.params["x"]}


def test_a_failure_is_told_with_its_last_lines_and_run_again_by_policy(sweep):
    program = sweep.script("""
import pathlib, sys
flag = pathlib.Path("failed")
print("loss: 1", flush=True)
if not flag.exists():
    flag.touch()
    sys.exit("the disk is full")
""")
    done = sweep.run("--param", "x=int:0:9", "--metric", "loss", *LOSS, "--trials", 2, "--retries", 1, "--", program)
    first, again, other = sweep.study().trials
    assert first.state.name == "FAIL" and "the disk is full" in first.user_attrs["failure"]
    assert "the disk is full" in done.stdout
    assert again.user_attrs["retry_of"] == 0 and again.params == first.params and again.state.name == "COMPLETE"
    assert other.state.name == "COMPLETE" and "retry_of" not in other.user_attrs


def test_a_sweep_of_failures_ends(sweep):
    done = sweep.run("--param", "x=int:0:9", "--metric", "loss", "--trials", 9, "--max-failures", 2, "--", "sh", "-c", "exit 3",
                     status=1)  # fmt: skip
    assert "no trial has succeeded" in sweep.run("best", status=1).stderr
    assert [trial.state.name for trial in sweep.study().trials] == ["FAIL", "FAIL"]
    assert "2 failed, 0 running, 7 left" in done.stdout


def test_a_missing_metric_and_nan_are_failures_that_say_so(sweep):
    program = ["sh", "-c", "case {x} in 1) echo loss: nan ;; 2) echo loss: 0.3, accuracy: 0.9 ;; esac"]
    words = ["--param", "x=choice:0,1,2", "--metric", "loss", "--regex", "loss=loss: (.*)"]
    sweep.run(*words, *(f"--enqueue=x={x}" for x in range(3)), "--trials", 3, "--", *program, status=1)
    missing, nan, no_number = [trial.user_attrs["failure"].splitlines()[0] for trial in sweep.study().trials]
    assert "reported no 'loss'" in missing and "NaN" in nan
    assert "a --regex has matched '0.3, accuracy: 0.9', which is no number" in no_number


@pytest.mark.parametrize("said", ["terminate called after throwing an instance of std::bad_alloc", "MemoryError"])
def test_running_out_of_memory_is_a_result(sweep, said):
    program = ["sh", "-c", f"if [ {{x}} = 1 ]; then echo '{said}' >&2; exit 1; fi; echo loss: 1"]
    words = ["--param", "x=choice:0,1", "--metric", "loss", *LOSS, "--enqueue", "x=1", "--enqueue", "x=0", "--retries", 5]
    sweep.run(*words, "--trials", 2, "--", *program)
    large, small = sweep.study().trials
    assert large.state.name == "PRUNED" and large.user_attrs["out_of_memory"] and small.state.name == "COMPLETE"


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
    ([*BOWL, "python", "train.py"], "the program stands behind --"),
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
