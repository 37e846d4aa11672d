"""What a sweep shows: progress while it runs, its state, its best trial, and plots."""

import datetime
import importlib.util
import json
import shlex
import sys
import time

from optuna.study import StudyDirection
from optuna.trial import TrialState

from lockstep_sweep import job, study
from lockstep_sweep.options import Misuse, names, text_of

FIGURES = ("optimization_history", "param_importances", "parallel_coordinate", "slice", "contour", "intermediate_values",
           "timeline")
STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed", TrialState.RUNNING: "running"}


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


def _counts(trials):
    """{result: number}"""
    return {name: sum(trial.state == state for trial in trials) for state, name in STATES.items()}


def _summary(trials):
    counts = _counts(trials)
    return f"{len(trials) - counts['running']} trials have ended: " + ", ".join(f"{many} {name}" for name, many in counts.items())


class Progress:
    """One line on standard output for each trial that has ended, and on a terminal a line of how far it is."""

    def __init__(self, asked, most, at_once):
        self._study, self._most, self._at_once = asked, most, at_once
        self._terminal, self._shown, self._shown_at, self._said = sys.stderr.isatty(), "", 0.0, set()
        self._begun, self._seconds = {}, []

    def say(self, text):
        self._clear()
        print(text, flush=True)

    def say_once(self, text):
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def begun(self, trial):
        self._begun[trial.number] = time.monotonic()

    def ended(self, trial, result, value, note):
        took = time.monotonic() - self._begun.pop(trial.number)
        self._seconds.append(took)
        best = _best_of(self._study, study.own_trials(self._study))
        mark = " (best)" if result == "complete" and best.number == trial.number else ""
        reason, *lines = note.splitlines() or [""]
        words = ["" if value is None else f"{value:.6g}{mark}", reason, _describe(trial.params), f"{took:.1f} s"]
        self.say("\n    ".join([f"trial {trial.number}: {', '.join(word for word in words if word)}", *lines]))

    def show(self, running):
        """Called often; paints at most twice a second, on a terminal alone."""
        now = time.monotonic()
        if not self._terminal or now - self._shown_at < 0.5:
            return
        self._shown_at = now
        trials = study.own_trials(self._study)
        counts, best = _counts(trials), _best_of(self._study, trials)
        done = len(trials) - counts["running"]
        words = [f"{done}/{self._most}", *(f"{many} {name}" for name, many in counts.items() if many)]
        words += [] if best is None else [_best_line(best)]
        if self._seconds:
            left = sum(self._seconds) / len(self._seconds) * (self._most - done) / max(self._at_once, running)
            words.append(f"{datetime.timedelta(seconds=round(left))} left")
        self._clear()
        self._shown = ", ".join(words)
        print(f"\r{self._shown}", end="", file=sys.stderr, flush=True)

    def _clear(self):
        if self._shown:
            print(f"\r{' ' * len(self._shown)}\r", end="", file=sys.stderr, flush=True)
            self._shown = ""

    def finish(self):
        """Says what came of it. Whether a trial has succeeded."""
        trials = study.own_trials(self._study)
        best = _best_of(self._study, trials)
        self.say(_summary(trials))
        self.say("no trial has succeeded" if best is None else _best_line(best))
        if len(trials) < self._most:
            self.say(f"{self._most - len(trials)} trials are left; lockstep sweep resume goes on with them")
        return best is not None


# ---- Commands


def status(asked, options):
    trials = study.own_trials(asked)
    print(f"study {asked.study_name}: {_summary(trials)}, of {options.trials}")
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
        raise Misuse("no trial has succeeded yet")
    command = ["lockstep", *job.command_of(options, found)]
    if not set(options.space) <= names(options.program):
        command = ["env", f"LOCKSTEP_TRIAL={job.description_of(options, found)}", *command]
    print(json.dumps({"trial": found.number, "value": found.value, "parameters": found.params,
                      "metrics": found.user_attrs["metrics"], "command": shlex.join(command)}, indent=2))
    return 0


def plot(asked, options):
    """Writes a page of what optuna.visualization draws, as far as these trials allow."""
    if importlib.util.find_spec("plotly") is None:
        raise Misuse("plots need plotly, which this Python does not have; do: pip install plotly")
    from optuna import visualization

    page = f"<!doctype html><meta charset=utf-8><title>{asked.study_name}</title>"
    plotly = True  # the first figure brings the library
    for name in FIGURES:
        try:
            figure = getattr(visualization, f"plot_{name}")(asked)
        except (ValueError, RuntimeError, ImportError) as error:  # too few trials for this one, or it needs scikit-learn
            print(f"lockstep sweep: no {name}: {error}", file=sys.stderr)
            continue
        page += figure.to_html(full_html=False, include_plotlyjs=plotly)
        plotly = False
    path = options.folder / "report.html"
    path.write_text(page, encoding="utf-8")
    print(path)
    return 0
