"""Hands tests to servers and collects the results."""

import contextlib
import dataclasses
import datetime
import fnmatch
import json
import os
import pathlib
import selectors
import subprocess
import sys
import tempfile
import time

from conformance import lists, results, suites

HERE = pathlib.Path(__file__).resolve().parent
LOG_LINES = 20  # of a server that failed, shown
PLAIN_PROGRESS_EVERY = 25  # tests, where standard error is no terminal
STOP_SECONDS = 10


class DriverError(Exception):
    """The run cannot start or go on; no result."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is run, beside backend and world size."""

    only: str = ""
    subset: str = "all"
    jobs: int = 1
    deadline: float = 120
    start_method: str = "fork"
    tests_from: str = ""
    left_out: pathlib.Path = lists.LEFT_OUT


class ServerProcess:
    """A started server, as the driver sees it."""

    def __init__(self, configuration, folder):
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), "_serve", configuration.backend, str(configuration.world_size),
             configuration.start_method, configuration.tests_from, str(folder), str(os.getpid())],
            env=configuration.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            text=True, start_new_session=True)
        self.answers = self.process.stdout

    def receive(self):
        """The next answer; blocks until it is there."""
        line = self.answers.readline()
        if not line:
            raise DriverError(f"the server ended with status {self.process.wait()}:\n{self.log_tail()}")
        message = json.loads(line)
        if "error" in message:
            raise DriverError(message["error"] + ("\n" + self.log_tail()).rstrip())
        return message

    def send(self, test, deadline):
        try:
            print(json.dumps({"test": test, "deadline": deadline}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise DriverError(f"the server ended with status {self.process.wait()}:\n{self.log_tail()}") from None

    def log_tail(self):
        self.log.seek(0)
        return "\n".join(self.log.read().decode(errors="replace").splitlines()[-LOG_LINES:])

    def stop(self):
        """Ends the server and, through it, all processes of a running test."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.answers.close()
        self.log.close()


class Progress:
    """A line on standard error: rewritten on a terminal, else one now and then; each failure on a line of its own."""

    def __init__(self, run, total, stream=None):
        self.run, self.total, self.stream = run, total, stream or sys.stderr
        self.live = self.stream.isatty()

    def show(self, entry):
        if entry["status"] in results.FAILED:
            self._write(f"{entry['status']}: {entry['name']}: {entry['reason']}", keep=True)
        done = len(self.run.tests)
        if self.live or done % PLAIN_PROGRESS_EVERY == 0 or done == self.total:
            counts = ", ".join(f"{number} {status}" for status, number in sorted(self.run.count().items()))
            self._write(f"[{done}/{self.total}] {self.run.backend}, {self.run.world_size} ranks: {counts}",
                        keep=not self.live or done == self.total)

    def _write(self, text, keep):
        self.stream.write(("\r\033[K" if self.live else "") + text + ("\n" if keep else ""))
        self.stream.flush()


def run(backend, world_size, options):
    """Runs the chosen tests of a backend at a world size; answers with the Run."""
    configuration = suites.Configuration(backend, world_size, options.start_method, options.tests_from)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-conformance-") as folder, contextlib.ExitStack() as stack:
        servers = []

        def start():
            servers.append(ServerProcess(configuration, pathlib.Path(folder) / str(len(servers))))
            stack.callback(servers[-1].stop)

        start()
        greeting = servers[0].receive()
        check_engine(backend, greeting["engine"])
        names = choose([test["name"] for test in greeting["tests"]], options)
        for _ in range(min(options.jobs, len(names)) - 1):
            start()
        for server in servers[1:]:
            server.receive()
        outcome = results.Run(backend, world_size)
        found = distribute(servers, names, options.deadline, outcome)
    outcome.tests = {name: found[name] for name in names}
    outcome.about = {
        "torch": greeting["torch"], "lockstep": greeting["lockstep"], "python": greeting["python"],
        "engine": greeting["engine"], "start_method": options.start_method, "subset": options.subset,
        "only": options.only, "cores": len(os.sched_getaffinity(0)), "jobs": options.jobs,
        "seconds": round(time.monotonic() - begin, 1), "date": datetime.date.today().isoformat(), "commit": commit(),
    }
    return outcome


def commit():
    """The commit of this folder, with "-dirty" where files have changed since; "" outside of a clone or without git."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=HERE, text=True, capture_output=True)
    except OSError:
        return ""
    return done.stdout.strip()


def distribute(servers, names, deadline, outcome):
    """Gives each server its next test, in the given order, until all are done; {name: entry}."""
    progress = Progress(outcome, len(names))
    waiting = iter(names)
    with selectors.DefaultSelector() as selector:
        for server in servers:
            name = next(waiting, None)
            if name is not None:
                server.send(name, deadline)
                selector.register(server.answers, selectors.EVENT_READ, server)
        while selector.get_map():
            for key, _ in selector.select():
                entry = key.data.receive()
                outcome.tests[entry["name"]] = entry
                progress.show(entry)
                name = next(waiting, None)
                if name is None:
                    selector.unregister(key.fileobj)
                else:
                    key.data.send(name, deadline)
    return outcome.tests


def check_engine(backend, engine):
    """Refuses to judge the wrong thing."""
    ours = engine.startswith("lockstep.")
    if ours != (backend != "gloo"):
        raise DriverError(f"with backend {backend} the groups are made by {engine}: "
                          f"{'Gloo was expected' if backend == 'gloo' else 'lockstep was expected'}")


def choose(known, options):
    """The names of the tests to run, in their order."""
    lists.check_left_out(options.left_out, lists.read_left_out(options.left_out), known)
    names = lists.quick_subset(known) if options.subset == "quick" else known
    if options.only:
        names = [name for name in names if matches(name, options.only)]
    if not names and options.only:
        raise DriverError(f"no test's name matches '{options.only}'; --only takes a part of a full name such as "
                          f"{known[0] if known else 'MODULE.CLASS.METHOD'}, or a pattern with * for the whole")
    if not names:
        raise DriverError(f"of {len(known)} tests none is chosen by --subset {options.subset}")
    return names


def matches(name, pattern):
    """A pattern with *, ? or [ is a shell pattern for the whole name; any other, a part of it."""
    return fnmatch.fnmatchcase(name, pattern) if set(pattern) & set("*?[") else pattern in name
