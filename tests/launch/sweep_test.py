"""`lockstep sweep`: what it asks, what its trials get, how they end, and that Optuna alone would have asked the same."""

import json
import pathlib
import re
import shlex
import signal

import pytest
from sweeps import BOWL, LOSS, MISUSE, PROGRAM, WITHOUT_READER, losses, needs_toml

optuna = pytest.importorskip("optuna")
pytest.importorskip("lockstep_sweep", reason="there is no Python module in this build")
optuna.logging.set_verbosity(optuna.logging.ERROR)

SAME = {
    "tpe": lambda: optuna.samplers.TPESampler(seed=7, n_startup_trials=4),
    "random": lambda: optuna.samplers.RandomSampler(seed=7),
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=2),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9),
}


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
    file.write('{"metrics": {"validation/loss": 0}, "step": 1e999}\\n{"metrics": {"validation/loss": 0}, "st')
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
    example = pathlib.Path(__file__).resolve().parents[2] / "examples" / "sweep.toml"
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


@pytest.mark.parametrize("step, shown", [("1e300", "1e+300"), ("1e999", "inf"), ("NaN", "nan"), (2**63, 2**63), (-1, -1)])
def test_a_report_at_a_step_that_is_no_count_is_left_out_and_said_so(sweep, step, shown):
    (sweep.folder / "line").write_text(f'{{"metrics": {{"loss": 1}}, "step": {step}}}\n')
    words = ["--param", "x=int:0:9", "--metric", "loss", "--trials", 1]
    sweep.run(*words, "--", "cp", "line", "{folder}/metrics.jsonl", status=1)
    [trial] = sweep.study().trials
    assert trial.state.name == "FAIL" and not trial.intermediate_values
    assert f"a report at step {shown} was left out, for steps go from 0 to 2^63 - 1" in trial.user_attrs["failure"]


@pytest.mark.parametrize("said", ["terminate called after throwing an instance of std::bad_alloc", "MemoryError"])
def test_running_out_of_memory_is_a_result(sweep, said):
    program = ["sh", "-c", f"if [ {{x}} = 1 ]; then echo '{said}' >&2; exit 1; fi; echo loss: 1"]
    words = ["--param", "x=choice:0,1", "--metric", "loss", *LOSS, "--enqueue", "x=1", "--enqueue", "x=0", "--retries", 5]
    sweep.run(*words, "--trials", 2, "--", *program)
    large, small = sweep.study().trials
    assert large.state.name == "PRUNED" and large.user_attrs["out_of_memory"] and small.state.name == "COMPLETE"
