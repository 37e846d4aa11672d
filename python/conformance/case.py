"""One test, in the process that the server forked for it."""

import contextlib
import faulthandler
import json
import logging
import os
import re
import signal
import sys
import time
import unittest

from conformance import processes

OUTPUT_LINES = 40  # of a failed test, kept in the results
HANG_LINES = 400  # of one that hung: every rank has written the stacks of its threads
LINE_LENGTH = 400
# What common_distributed logs when a rank skips; the process that joins it only learns that there was a reason.
SKIPPING = re.compile(r"^Process \d+ skipping test \w+ for following reason: (.*)$", re.MULTILINE)
PLACE = re.compile(r'File ".*/torch/testing/_internal/distributed/(\S+)", line (\d+)')  # in a traceback
GENERIC_SKIP = "look at subprocess log for skip reason"


class Outcome(unittest.TestResult):
    """Remembers how the one test ended."""

    def __init__(self):
        super().__init__()
        self.status, self.text = "failed", "the test ended without a result"

    def _set(self, status, text=""):
        self.status, self.text = status, text

    def addSuccess(self, test):
        super().addSuccess(test)
        if self.wasSuccessful():
            self._set("passed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._set("skipped", reason or "no reason given")

    def addError(self, test, err):
        super().addError(test, err)
        self._set("failed", self.errors[-1][1])

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._set("failed", self.failures[-1][1])

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._set("failed", (self.failures + self.errors)[-1][1])

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self._set("passed")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self._set("failed", "passed, but the test is marked as an expected failure")


def run(test, parent, output, answer):
    """Runs the test in this process and ends it; the result goes to the descriptor `answer`, all output to `output`."""
    processes.die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.register(processes.TRACEBACK_SIGNAL, all_threads=True)
    show_skip_reasons()
    case = test.runnable_class()(test.method)
    case.conformance_name = test.name
    outcome = Outcome()
    begin = time.monotonic()
    case(outcome)
    result = {"status": outcome.status, "text": outcome.text, "seconds": time.monotonic() - begin}
    with os.fdopen(answer, "w") as pipe:
        json.dump(result, pipe)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def show_skip_reasons():
    """Lets the logger that knows why a rank skips write it into the test's output."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: SKIPPING.match(record.getMessage()) is not None)
    logging.getLogger("torch.testing._internal.common_distributed").addHandler(handler)


def describe(name, outcome, output):
    """The entry in the results: status, the reason in one line, and for a failure the last lines."""
    entry = {"name": name, "status": outcome["status"], "reason": "", "seconds": round(outcome["seconds"], 3)}
    if outcome["status"] == "skipped":
        found = SKIPPING.search(output) if GENERIC_SKIP in outcome["text"] else None
        entry["reason"] = one_line(found[1] if found else outcome["text"])
    elif outcome["status"] != "passed":
        entry["reason"] = reason_of(outcome["text"])
        entry["detail"] = tail(outcome["text"])
        entry["output"] = tail(output, HANG_LINES if outcome["status"] == "timed out" else OUTPUT_LINES)
    return entry


def reason_of(text):
    """What went wrong, in a line: a traceback's last one that begins with an exception's name, and the test's place."""
    lines = [line for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Failed|Exit|Interrupt)\b.*", line)
             and not line.startswith("RuntimeError: Process ")]
    places = PLACE.findall(text)
    return one_line((named or lines or ["no text"])[-1]) + (f" ({places[-1][0]}:{places[-1][1]})" if places else "")


def one_line(text):
    return " ".join(text.split())[:LINE_LENGTH]


def tail(text, lines=OUTPUT_LINES):
    return "\n".join(line[:LINE_LENGTH] for line in text.splitlines()[-lines:])
