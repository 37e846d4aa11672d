"""The results of runs: as JSON, counted, and judged."""

import collections
import dataclasses
import json
import os

from conformance import suites

FORMAT = 1
FAILED = ("failed", "timed out")


class ResultsError(Exception):
    """A results file that cannot be used."""


@dataclasses.dataclass
class Run:
    """The tests of one backend at one world size."""

    backend: str
    world_size: int
    tests: dict = dataclasses.field(default_factory=dict)  # full name: entry
    about: dict = dataclasses.field(default_factory=dict)  # versions, engine, start method, subset, cores, seconds, date, commit

    def count(self, names=None):
        """{status: number}, of all tests or of those named."""
        entries = (self.tests[name] for name in (self.tests if names is None else names))
        return collections.Counter(entry["status"] for entry in entries)


def status(run, name):
    """A test's status, or "not run"."""
    return run.tests[name]["status"] if run and name in run.tests else "not run"


def save(runs, path):
    document = {"format": FORMAT, "runs": [
        {"backend": run.backend, "world_size": run.world_size, **run.about, "tests": list(run.tests.values())}
        for run in runs]}
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(partial, path)


def load(paths):
    """The runs of all files: {(backend, world size): Run}; of two runs of the same kind there must not be two."""
    runs = {}
    for path in paths:
        for run in load_file(path):
            key = run.backend, run.world_size
            if key in runs:
                raise ResultsError(f"{path} holds a second run of {run.backend} with {run.world_size} ranks; "
                                   "give one of each")
            runs[key] = run
    return runs


def load_file(path):
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            raise ResultsError(f"{path} has format {document['format']}, this program reads {FORMAT}; "
                               "run the tests again")
        found = []
        for entry in document["runs"]:
            tests = {test["name"]: test for test in entry.pop("tests")}
            found.append(Run(entry.pop("backend"), entry.pop("world_size"), tests, entry))
        return found
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} holds no results of `run --output`: {error!r}") from error


@dataclasses.dataclass(frozen=True)
class Violation:
    """A test that passes with gloo and does not with us."""

    name: str
    backend: str
    world_size: int
    status: str
    reason: str

    def __str__(self):
        return f"{self.name} with {self.backend}, {self.world_size} ranks: {self.status}: {self.reason}"


def judge(runs, left_out):
    """The violations of the rule: what passes with gloo passes with replace_gloo, and with lockstep where it runs.

    A test may be skipped with lockstep for the backend's name alone, hence only where replace_gloo passes it. Modules
    that ask for "gloo" by name have no lockstep run.
    """
    violations = []
    for world_size in sorted({size for backend, size in runs if backend == "gloo"}):
        gloo, ours, replaced = (runs.get((backend, world_size)) for backend in suites.BACKENDS)
        for name in gloo.tests:
            if status(gloo, name) != "passed" or name in left_out:
                continue
            accepted = {"replace_gloo": {"passed"}, "lockstep": {"passed", "skipped"}}
            for run, backend in ((replaced, "replace_gloo"), (ours, "lockstep")):
                if backend == "lockstep" and not has_backend_parameter(name):
                    continue
                seen = status(run, name)
                if seen not in accepted[backend]:
                    reason = run.tests[name]["reason"] if seen != "not run" else "the results have no such run of it"
                    violations.append(Violation(name, backend, world_size, seen, reason))
    return violations


def has_backend_parameter(name):
    """Whether the test's module lets the backend be chosen; the modules around RPC say "gloo" in their code."""
    module = suites.module_of(name)
    return module == suites.MAIN or module not in suites.TEST_MODULES


def idle_entries(runs, left_out):
    """The left-out tests that pass in gloo's place and fail nowhere among our runs: their entries are to be removed."""
    ours = [run for (backend, _), run in runs.items() if backend != "gloo"]
    return [name for name in left_out
            if any(run.backend == "replace_gloo" and status(run, name) == "passed" for run in ours)
            and not any(status(run, name) in FAILED for run in ours)]
