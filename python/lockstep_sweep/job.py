"""One trial as a job of `lockstep run`: started, read, ended."""

import contextlib
import json
import math
import os
import re
import subprocess

from lockstep_sweep.options import fill
from lockstep_sweep.slots import run_options

LAST_LINES, LAST_BYTES = 20, 16384  # MySQL keeps attributes of up to 64 KiB, in which a byte may become six
STEPS = 2**63  # as lockstep::trial() counts them, MLflow, and the databases of studies; Optuna wants none below 0
RANK_0 = re.compile(r"\[rank 0\] (.*)", re.DOTALL)
OUT_OF_MEMORY = re.compile("out of memory|OutOfMemory|std::bad_alloc|MemoryError|[Cc]an('t|not) allocate memory|"
                           "by the kernel, for want of memory")  # the last one says lockstep run


def folder_of(options, number):
    return options.folder / "trials" / f"{number:04d}"


def command_of(options, trial, *place):
    """The job as one types it after `lockstep run`; `place` as for run_options()."""
    values = {**trial.params, "number": trial.number, "folder": folder_of(options, trial.number)}
    return [*run_options(options, *place), "--", *fill(options.program, values)]


def report_of(options, trial):
    return folder_of(options, trial.number) / "metrics.jsonl"


def description_of(options, trial):
    """What LOCKSTEP_TRIAL holds."""
    return json.dumps({"number": trial.number, "parameters": trial.params, "report": str(report_of(options, trial))})


class _Lines:
    """The lines of a file that grows, and what a progress bar writes over; a file that is not there yet has none."""

    def __init__(self, path):
        self._path, self._at = path, 0

    def new(self, ended):
        """Those that are whole; with `ended` also a last one without its end."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                text = file.read()
        except FileNotFoundError:
            return []
        if not ended:
            text = text[: max(text.rfind(b"\n"), text.rfind(b"\r")) + 1]
        self._at += len(text)
        return re.split("[\r\n]", text.decode("utf-8", "replace"))


def _metrics_of(line):
    """(metrics, step) of a line of a JsonLinesWriter, or ({}, None). The step may be any number, infinite or NaN too."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, ArithmeticError, RecursionError):
        content = json.loads(line)
        return {name: float(value) for name, value in content["metrics"].items()}, content["step"] + 0
    return {}, None


class Job:
    """A started one. Its output is in output.log in its folder, and what it reports by lockstep::trial() in metrics.jsonl."""

    def __init__(self, options, launcher, trial, place, variables):
        self.trial, self._place, self.folder = trial, place, folder_of(options, trial.number)
        self.metrics, self.reported, self.pruned, self.stopped = {}, {}, False, False
        self._options, self._matched, self._left_out = options, 0, ""
        self.folder.mkdir(parents=True, exist_ok=True)
        report, output = report_of(options, trial), self.folder / "output.log"
        report.unlink(missing_ok=True)  # of a trial of this number that a study lost when its host crashed
        self._reports, self._output = _Lines(report), _Lines(output)
        threads = min(len(share.units["core"]) // share.slots for share in place)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **options.exported, **variables,
                       "LOCKSTEP_TRIAL": description_of(options, trial)}
        with open(output, "wb") as file:  # no pipe, so that a driver that is stopped stops no job
            # The launcher dies with this driver, and the ranks with the launcher. No preexec_fn does it, which would have Python
            # fork all that Optuna has loaded.
            self._process = subprocess.Popen(
                [launcher, "run", "--parent-pid", str(os.getpid()), *command_of(options, trial, place, variables)], env=environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    def ended(self):
        """Whether the job has; reaps it, and gives its place back."""
        if self._process.poll() is None:
            return False
        for share in self._place:
            share.release()
        return True

    def stop(self):
        """Ends all its processes, which lockstep run gives its grace period."""
        if not self.stopped and self._process.poll() is None:
            self.stopped = True
            self._process.terminate()

    def kill(self):
        self._process.kill()

    def new_reports(self, ended):
        """[(step, value)] of the sweep's metric since the last call; notes the other metrics."""
        found, metric, regexes = [], self._options.metric, self._options.regex
        for line in self._output.new(ended) if regexes else ():
            for name, regex in regexes.items():
                for value in self._matches(regex, line):
                    self.metrics[name] = value
                    if name == metric:
                        self._matched += 1
                        found.append((self._matched, value))
        for line in self._reports.new(ended):
            metrics, step = _metrics_of(line)
            if metrics and not 0 <= step < STEPS:
                self._left_out = f"; a report at step {str(step):.40} was left out, for steps go from 0 to 2^63 - 1"
                continue
            self.metrics.update(metrics)
            if metric in metrics and metric not in regexes:
                found.append((int(step), metrics[metric]))
        return found

    def _matches(self, regex, line):
        """The values in a line of rank 0; the other ranks say the same."""
        if self._options.nproc_per_node > 1:
            of_rank_0 = RANK_0.match(line)
            line = of_rank_0[1] if of_rank_0 else ""
        for match in regex.finditer(line):
            try:
                yield float(match[1])
            except (ValueError, TypeError):
                self._left_out = f"; a --regex has matched '{match[1] or match[0]}', which is no number"

    def value(self):
        """The last that it has reported; None where that is nothing."""
        return next(reversed(self.reported.values()), None)

    def succeeded(self):
        return self._process.returncode == 0

    def failure(self):
        """Why what it did is no result, with its last lines; None where it is one. After its end."""
        value, status = self.value(), self._process.returncode
        if status > 0:
            reason = f"it ended with status {status}"
        elif status < 0:
            reason = f"lockstep run was ended by signal {-status}"
        elif value is None:
            others = ", ".join(sorted(self.metrics)) or "nothing, neither to a --regex nor by lockstep::trial()"
            reason = f"it reported no '{self._options.metric}'; it reported {others}{self._left_out}"
        elif math.isnan(value):
            reason = f"its {self._options.metric} is NaN"
        else:
            return None
        return "\n".join([reason, *self._last_lines()])

    def _last_lines(self):
        with open(self.folder / "output.log", "rb") as output:
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - LAST_BYTES))
            return output.read().decode("utf-8", "replace").splitlines()[-LAST_LINES:]

    def out_of_memory(self):
        """Whether it failed for memory, and says so."""
        return not self.succeeded() and any(map(OUT_OF_MEMORY.search, self._last_lines()))
