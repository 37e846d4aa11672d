"""What a sweep shows: progress while it runs, its state, its best trial, and plots."""

import contextlib
import importlib.util
import json
import math
import os
import shlex
import shutil
import sys
import threading
import time

from optuna.study import StudyDirection
from optuna.trial import TrialState
from tqdm import tqdm

from lockstep_sweep import job, study
from lockstep_sweep.options import Misuse, names, text_of

FIGURES = ("optimization_history", "param_importances", "parallel_coordinate", "slice", "contour", "intermediate_values",
           "timeline")
STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed", TrialState.RUNNING: "running"}


def discard_output():
    """Of standard output, whose reader has gone: what Python still holds for it, too, which it writes at its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


def _describe(params):
    return " ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={text_of(value)}"
                    for name, value in params.items())


def _best_of(asked, trials):
    """The best complete one, or None."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    pick = max if asked.direction == StudyDirection.MAXIMIZE else min
    return pick(complete, key=lambda trial: trial.value, default=None)


def _best_line(best):
    return f"best: {best.value:.6g}, trial {best.number}: {_describe(best.params)}"


def _summary(trials, most):
    counts = [f"{sum(trial.state == state for trial in trials)} {name}" for state, name in STATES.items()]
    return f"trials: {', '.join(counts)}, {max(0, most - len(trials))} left"


class Progress:
    """A line on standard output for each trial that has ended, and on a terminal one of how far it is."""

    def __init__(self, asked, options):
        self._study, self._options, self._begun, self._said = asked, options, {}, set()
        tqdm.monitor_interval = 0  # its thread would take the signals that the driver waits for
        tqdm.set_lock(threading.RLock())  # not one between processes, which may start one
        columns, lines = shutil.get_terminal_size()  # tqdm shows nothing on a terminal that does not know its size
        self._bar = tqdm(total=options.trials, initial=self._look(), mininterval=0.5, miniters=0, smoothing=0, leave=False,
                         disable=None, bar_format="{n_fmt}/{total_fmt} trials, {remaining} left{postfix}",
                         ncols=columns - 1, nrows=lines)

    def _look(self):
        """How many have ended by now, other drivers' too; also looks for the best one."""
        self._trials = study.own_trials(self._study)
        self._best = _best_of(self._study, self._trials)
        return sum(trial.state.is_finished() for trial in self._trials)

    def say(self, text):
        """Also where its reader has gone, as `| tee` goes by the Ctrl-C that ends the sweep: jobs are still to be ended."""
        with tqdm.external_write_mode():
            try:
                print(text, flush=True)
            except OSError as error:
                discard_output()
                with contextlib.suppress(OSError):
                    print(f"lockstep sweep: standard output can't be written any more: {error.strerror}", file=sys.stderr)

    def say_once(self, text):
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def begun(self, trial):
        self._begun[trial.number] = time.monotonic()

    def ended(self, trial, result, value, note):
        took = time.monotonic() - self._begun.pop(trial.number)
        self._bar.update(self._look() - self._bar.n)
        mark = " (best)" if result == "complete" and self._best.number == trial.number else ""
        reason, *lines = note.splitlines() or [""]
        words = ["" if value is None else f"{value:.6g}{mark}", reason, _describe(trial.params), f"{took:.1f} s"]
        self.say("\n    ".join([f"trial {trial.number}: {', '.join(word for word in words if word)}", *lines]))

    def show(self, running):
        """Called often; paints at most twice a second."""
        best = f", {_best_line(self._best)}" if self._best else ""
        self._bar.set_postfix_str(f"{running} running{best}", refresh=False)
        self._bar.update(0)

    def finish(self):
        """Says what came of it. Whether a trial has succeeded."""
        self._bar.close()
        self._look()
        self.say(_summary(self._trials, self._options.trials))
        self.say("no trial has succeeded" if self._best is None else _best_line(self._best))
        if len(self._trials) < self._options.trials:
            self.say(f"to go on: lockstep sweep resume {shlex.quote(str(self._options.folder))}")
        return self._best is not None


# ---- Commands


def status(asked, options):
    trials = study.own_trials(asked)
    print(_summary(trials, options.trials))
    for trial in trials:
        words = [f"trial {trial.number}", _describe(trial.params)]
        if trial.state == TrialState.RUNNING:
            words += [f"{options.metric} {value:.6g} at {step}" for step, value in list(trial.intermediate_values.items())[-1:]]
            driver = trial.user_attrs["driver"]
            print(", ".join(["running: " + words[0], *words[1:], f"driver pid {driver['pid']} on {driver['host']}"]))
        elif trial.state == TrialState.FAIL:
            print(f"failed: {', '.join(words)}: {trial.user_attrs.get('failure', 'why is not known').partition(chr(10))[0]}")
    best = _best_of(asked, trials)
    if best is not None:
        print(_best_line(best))
    return 0


def best(asked, options):
    """Prints the best trial as JSON."""
    found = _best_of(asked, study.own_trials(asked))
    if found is None:
        print("lockstep sweep: error: no trial has succeeded yet", file=sys.stderr)
        return 1
    command = ["lockstep", "run", *job.command_of(options, found)]
    if not set(options.space) <= names(options.program):
        command = ["env", f"LOCKSTEP_TRIAL={job.description_of(options, found)}", *command]
    metrics = {name: _number(value) for name, value in found.user_attrs["metrics"].items()}
    print(json.dumps({"trial": found.number, "value": _number(found.value), "parameters": found.params, "metrics": metrics,
                      "command": shlex.join(command)}, indent=2))
    return 0


def _number(value):
    """As a JsonLinesWriter has it: JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else json.dumps(value)


def plot(asked, options):
    """Writes a page of what optuna.visualization draws, as far as these trials allow."""
    if importlib.util.find_spec("plotly") is None:
        raise Misuse("plots need plotly, which this Python does not have; do: pip install plotly")
    from optuna import visualization

    figures = []
    for name in FIGURES:
        try:
            figures.append(getattr(visualization, f"plot_{name}")(asked))
        except (ValueError, RuntimeError, ImportError) as error:  # too few trials for this one, or it needs scikit-learn
            print(f"lockstep sweep: no {name}: {error}", file=sys.stderr)
    path = options.folder / "report.html"
    # The first figure brings the library.
    bodies = [figure.to_html(full_html=False, include_plotlyjs=index == 0) for index, figure in enumerate(figures)]
    path.write_text(f"<!doctype html><meta charset=utf-8><title>{asked.study_name}</title>{''.join(bodies)}", encoding="utf-8")
    print(path)
    return 0
