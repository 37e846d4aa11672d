"""The clean process that tests are forked from; one request and one answer a line, as JSON.

It imports torch and the tests once and does nothing else: one thread, no process group. For each request it forks a
process that runs the test, waits until the deadline, and then ends whatever is left of the test's processes.
"""

import json
import os
import pathlib
import platform
import resource
import shutil
import signal
import sys
import tempfile
import time

from conformance import case, processes, ranks, suites


class Server:
    """Runs the tests of one configuration, one at a time."""

    def __init__(self, configuration, folder):
        self.folder = folder
        ranks.install(configuration)
        self.tests = suites.load(configuration)
        self.check_clean()

    def check_clean(self):
        """Raises unless a fork of this process is a good place for a test."""
        import torch.distributed

        if processes.threads() != 1:
            raise suites.SuiteError(f"the server has {processes.threads()} threads after importing the tests, but a "
                                    "fork keeps only one; find which import starts them")
        if torch.distributed.is_initialized():
            raise suites.SuiteError("importing the tests made a process group, which forked ranks would share")

    def greeting(self, backend):
        """What the driver must know: versions, what does the work, and the tests."""
        import torch

        ours = sys.modules.get("lockstep")
        return {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "lockstep": getattr(ours, "__version__", None) if backend != "gloo" else None,
            "engine": in_child(suites.engine),
            "tests": [{"name": test.name, "skip": test.skip_reason} for test in self.tests.values()],
        }

    def run(self, name, deadline):
        """The result of one test."""
        test = self.tests[name]
        if test.skip_reason:
            return case.describe(name, {"status": "skipped", "text": test.skip_reason, "seconds": 0}, "")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        with tempfile.TemporaryFile() as output:
            outcome = self.run_forked(test, deadline, output.fileno())
            output.seek(0)
            text = output.read().decode(errors="replace")
        self.check_clean()
        return case.describe(name, outcome, text)

    def run_forked(self, test, deadline, output):
        reader, writer = os.pipe()
        parent, begin = os.getpid(), time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(reader)
            leave_after(case.run, test, parent, output, writer)
        os.close(writer)
        try:
            status = processes.wait_for_exit(child, deadline)
            if status is None:
                processes.show_tracebacks(parent, output)
        finally:
            processes.kill_descendants()
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        seconds = time.monotonic() - begin
        if status is None:
            return {"status": "timed out", "text": f"not done after {deadline:g} s", "seconds": seconds}
        if status != 0 or not answer:
            return {"status": "failed", "text": f"the test's process {ending(status)}", "seconds": seconds}
        return json.loads(answer)


def ending(status):
    """In words, how a process ended."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def leave_after(function, *arguments):
    """In a forked child: calls the function and ends the process without running anything of its parent's."""
    status = 1
    try:
        function(*arguments)
        status = 0
    except BaseException:  # whatever it is, the parent's code must not go on in this process
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def in_child(function):
    """The text that the function returns in a forked process, so that what it starts stays there."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        leave_after(lambda: os.write(writer, function().encode()))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        raise suites.SuiteError(f"a group of one rank could not be made: the process {ending(status)}; it said:")
    return answer


def terminate(*_):
    raise SystemExit(143)


def serve(configuration, folder, parent):
    """The server's life: a greeting, then an answer to each line of standard input, until that ends."""
    processes.become_subreaper()
    signal.signal(signal.SIGTERM, terminate)
    processes.die_with_parent(parent, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports and tests print is no answer
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def answer(message):
        print(json.dumps(message), file=answers, flush=True)

    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        server = Server(configuration, folder)
        answer(server.greeting(configuration.backend))
    except suites.SuiteError as error:
        answer({"error": str(error)})
        return
    try:
        for line in requests:
            request = json.loads(line)
            answer(server.run(request["test"], request["deadline"]))
    finally:
        processes.kill_descendants()
