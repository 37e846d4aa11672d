"""Runs a function on several ranks and hands back what each of them returned.

    def sums(rank, world_size):
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(sums, 2) == [3.0, 3.0]

Importing torch costs seconds, so the ranks are forked: not from pytest, whose threads and tensors are unknown, but from
a server, a child of pytest that has imported torch and the tests' modules, has one thread, and never made a process
group. It forks the ranks of one test, watches them until all have ended or the deadline is over, and kills what is
left, grandchildren too. All of them die with pytest.

What is called must be a function of a test module, by itself (no lambda, no closure): the server imports that module by
its path. Arguments and results are pickled.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import importlib.util
import os
import pickle
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, Pipe

BACKEND = os.environ.get("LOCKSTEP_TEST_BACKEND", "lockstep")  # "gloo": does a test of ours hold for PyTorch's own?
HOSTS = int(os.environ.get("LOCKSTEP_TEST_HOSTS", 1))  # pretended ones, over which the ranks are spread
TIMEOUT = float(os.environ.get("LOCKSTEP_TEST_TIMEOUT", 60))  # seconds: no test's ranks take that long unless they hang
LAST_WORDS = 5  # seconds that a hanging rank has to write where it hangs
SERVER_START = 120  # seconds for the imports on a busy machine
PR_SET_PDEATHSIG = 1


class RanksFailed(AssertionError):
    """Ranks failed, or did not fail as expected; the message holds the first one's traceback and output."""


@dataclasses.dataclass
class Task:
    """What a client asks of the server."""

    search: list  # sys.path
    path: str  # of the module
    module: str
    function: str
    world_size: int
    arguments: bytes  # pickled: only the ranks need what they are made of
    backend: str | None  # None: the function makes its process group itself, if any
    timeout: float
    environment: dict
    hosts: int
    tolerant: bool  # some ranks shall fail: the first failure is no reason to end the others


@dataclasses.dataclass
class Outcome:
    """How a rank ended."""

    rank: int
    value: bytes | None = None  # pickled; None: there is none
    error: str | None = None  # a traceback, or what else is known
    types: tuple = ()  # names of the exception's class and of its bases
    status: int | None = None  # exit status, or minus a signal's number; None: killed by the server
    output: str = ""  # stdout and stderr
    hangs: bool = False
    order: int = 0  # among the ranks that ended


# The test's side.


def run_ranks(
    function, world_size, *args, backend=BACKEND, timeout=TIMEOUT, expect=None, environment=None, hosts=HOSTS
):
    """[function(rank, world_size, *args) for each rank], each in a process of its own.

    The default process group has the given backend and is destroyed afterwards; with backend=None there is none.
    `environment` holds variables that all ranks get. With `hosts` the ranks are as if on so many hosts, the first ones on
    the first. `expect` says how ranks must fail: by an exception of a class, or
    by a signal ({1: signal.SIGKILL, 0: DistBackendError}); the result of such a rank is its traceback or last output.
    Fails the test with the first failing rank's traceback, or with all stacks when the deadline is over.
    """
    __tracebackhide__ = True
    expect = dict(expect or {})
    task = Task(
        search=sys.path,
        path=sys.modules[function.__module__].__file__,
        module=function.__module__,
        function=function.__qualname__,
        world_size=world_size,
        arguments=pickle.dumps(args),
        backend=backend,
        timeout=timeout,
        environment={name: str(value) for name, value in (environment or {}).items()},
        hosts=min(hosts, world_size),
        tolerant=bool(expect),
    )
    if not task.function.isidentifier():
        raise ValueError(f"{task.function} is not a function of a module by itself; only those can be run on ranks")
    outcomes = _server().request(task)
    _check(task, outcomes, expect)
    return [outcome.error if outcome.rank in expect else pickle.loads(outcome.value) for outcome in outcomes]


def _check(task, outcomes, expect):
    __tracebackhide__ = True
    unexpected = [outcome for outcome in outcomes if not _as_expected(outcome, expect.get(outcome.rank))]
    if not unexpected:
        return
    unexpected.sort(key=_urgency)
    worst = unexpected[0]
    wanted = f", but should have failed with {expect[worst.rank]}" if worst.rank in expect else ""
    others = ", ".join(f"rank {outcome.rank} {_brief(outcome)}" for outcome in outcomes if outcome is not worst)
    parts = [f"{task.function} on {task.world_size} ranks: rank {worst.rank} {_brief(worst)}{wanted}", worst.error]
    parts += [f"--- output of rank {outcome.rank}\n{outcome.output}" for outcome in outcomes if outcome.output]
    raise RanksFailed("\n".join([part for part in parts if part] + [f"--- others: {others}"]))


def _urgency(outcome):
    """Crashes first, for they make other ranks fail; then the first failure; what was killed for it last."""
    return outcome.status is None, outcome.hangs or (outcome.status or 0) >= 0, outcome.order


def _as_expected(outcome, failure) -> bool:
    if failure is None:
        return outcome.error is None and outcome.status == 0
    if isinstance(failure, int):  # a signal
        return outcome.status == -failure
    return f"{failure.__module__}.{failure.__qualname__}" in outcome.types


def _brief(outcome) -> str:
    if outcome.hangs:
        return "hangs"
    if outcome.status is None:
        return "had not ended and was killed"
    if outcome.status < 0:
        return f"was ended by {signal.Signals(-outcome.status).name}"
    if outcome.error:
        return f"failed: {outcome.error.strip().splitlines()[-1]}"
    return "ended well" if outcome.status == 0 else f"ended with status {outcome.status}"


class _Server:
    """The client's handle on the process that forks ranks."""

    def __init__(self):
        self._connection, theirs = Pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-ranks-", ignore_cleanup_errors=True)
        environment = {name: value for name, value in os.environ.items() if not _of_a_launcher(name)}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        environment["TMPDIR"] = self._folder.name
        environment.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # torch's about names that are to change
        command = [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._expect_answer(SERVER_START)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def request(self, task: Task) -> list:
        try:
            self._connection.send_bytes(pickle.dumps(task))
            answer = self._expect_answer(SERVER_START + task.timeout + 2 * LAST_WORDS)
        except BaseException:  # Ctrl-C too: no rank outlives its test
            self.close()
            raise
        if isinstance(answer, str):
            raise RanksFailed(answer)
        return answer

    def _expect_answer(self, seconds):
        if not self._connection.poll(seconds):
            raise RanksFailed(f"the server that forks the ranks said nothing for {seconds} s")
        try:
            return pickle.loads(self._connection.recv_bytes())
        except EOFError:
            raise RanksFailed(f"the server that forks the ranks ended with {self._process.wait()}") from None

    def close(self):
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


_running: list = []


def _server() -> _Server:
    if not _running or not _running[0].alive:
        _running[:] = [_Server()]
    return _running[0]


@atexit.register
def _stop():
    while _running:
        _running.pop().close()


def _of_a_launcher(name) -> bool:
    """Variables that torchrun sets for the ranks and that a test must not inherit."""
    return name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_AGENT_STORE") or name.startswith(
        ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PET_")
    )


# The server's side.


def serve(connection):
    """Answers requests until the client is gone."""
    import torch  # noqa: F401  once, for all ranks
    import torch.distributed

    connection.send_bytes(pickle.dumps("ready"))
    with contextlib.suppress(EOFError):
        while True:
            task = pickle.loads(connection.recv_bytes())
            try:
                function = _load(task)
                answer = _Ranks(task, function).run()
            except Exception:
                answer = f"the ranks of {task.function} could not be started\n{traceback.format_exc()}"
            connection.send_bytes(pickle.dumps(answer))


def _load(task):
    """The function to run. Its module keeps its name, so that what it pickles can be read by the client."""
    sys.path[:] = task.search
    if task.module not in sys.modules:
        spec = importlib.util.spec_from_file_location(task.module, task.path)
        module = sys.modules[task.module] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[task.module]
            raise
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(f"importing {task.path} started {len(threads) - 1} threads; forked ranks would miss them")
    return getattr(sys.modules[task.module], task.function)


class _Ranks:
    """The processes of one task."""

    def __init__(self, task, function):
        self._task, self._function = task, function
        self._folder = tempfile.mkdtemp()
        self._outcomes = [Outcome(rank) for rank in range(task.world_size)]
        self._pids, self._pidfds, self._pipes, self._logs = [], [], [], []
        self._results = [b""] * task.world_size
        self._ended = 0

    def run(self) -> list:
        try:
            for rank in range(self._task.world_size):
                self._fork(rank)
            self._watch()
        finally:
            for rank, pidfd in enumerate(self._pidfds):
                if pidfd is not None:
                    self._end(rank)
                os.close(self._pipes[rank])
                self._logs[rank].close()
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._outcomes

    def _fork(self, rank):
        log = tempfile.TemporaryFile(dir=self._folder)
        reading, writing = os.pipe()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _rank_main(self._task, self._function, rank, self._folder, log, writing, server)  # never returns
        os.close(writing)
        os.set_blocking(reading, False)
        with contextlib.suppress(PermissionError, ProcessLookupError):  # the child does it too, and either may be first
            os.setpgid(pid, pid)
        self._pids.append(pid)
        self._pidfds.append(os.pidfd_open(pid))
        self._pipes.append(reading)
        self._logs.append(log)

    def _watch(self):
        """Until all have ended, one has failed, or the time is over."""
        deadline = time.monotonic() + self._task.timeout
        aborted = False
        while any(descriptor is not None for descriptor in self._pidfds):
            if not self._collect(max(0, deadline - time.monotonic())):
                if aborted:
                    return
                aborted = True
                self._ask_for_stacks()
                deadline = time.monotonic() + LAST_WORDS
            elif not aborted and not self._task.tolerant and any(o.error or o.status for o in self._outcomes):
                return

    def _collect(self, seconds) -> bool:
        """Waits for bytes of results and for ends; whether there were any in time."""
        poll = select.poll()
        for rank, descriptor in enumerate(self._pidfds):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
                poll.register(self._pipes[rank], select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        for rank, descriptor in enumerate(self._pidfds):
            if self._pipes[rank] in ready:
                self._read(rank)
            if descriptor in ready:
                self._bury(rank)
        return bool(ready)

    def _read(self, rank) -> bool:
        try:
            chunk = os.read(self._pipes[rank], 1 << 20)
        except BlockingIOError:
            return False
        self._results[rank] += chunk
        return bool(chunk)

    def _bury(self, rank):
        while self._read(rank):
            pass
        outcome = self._outcomes[rank]
        if self._results[rank]:
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # cut off: it died while it wrote
                outcome.value, outcome.error, outcome.types = pickle.loads(self._results[rank])
        outcome.status = self._end(rank)
        if not self._results[rank] and not outcome.error:
            outcome.error = f"it ended without a result ({_brief(outcome)})"
        self._logs[rank].seek(0)
        outcome.output = self._logs[rank].read().decode(errors="replace")
        outcome.order, self._ended = self._ended, self._ended + 1

    def _end(self, rank) -> int:
        """Kills what is left of the rank and of its own children, which are in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pids[rank], signal.SIGKILL)  # a rank that ended is a zombie still: its number is not reused
        _, status = os.waitpid(self._pids[rank], 0)
        os.close(self._pidfds[rank])
        self._pidfds[rank] = None
        return os.waitstatus_to_exitcode(status)

    def _ask_for_stacks(self):
        for rank, descriptor in enumerate(self._pidfds):
            if descriptor is not None:
                self._outcomes[rank].hangs = True
                self._outcomes[rank].error = f"it hangs: {self._task.timeout} s are over"
                signal.pidfd_send_signal(descriptor, signal.SIGABRT)  # faulthandler writes the stacks


def _rank_main(task, function, rank, folder, log, pipe, server):
    """The life of one rank."""
    error, value, types = None, None, ()
    try:
        os.setpgid(0, 0)
        _die_with(server)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.enable(file=2, all_threads=True)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if task.hosts > 1:
            os.environ["LOCKSTEP_TEST_HOST"] = f"host-{rank * task.hosts // task.world_size}"
        os.environ.update(task.environment)
        value = pickle.dumps(_call(task, function, rank, folder))
    except BaseException as problem:
        error = traceback.format_exc()
        types = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(problem).__mro__)
    with open(pipe, "wb") as result:
        result.write(pickle.dumps((value, error, types)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the end of a whole interpreter is other tests' subject


def _call(task, function, rank, folder):
    arguments = pickle.loads(task.arguments)
    if task.backend is None:
        return function(rank, task.world_size, *arguments)
    import torch.distributed as dist

    if "lockstep" in task.backend:
        import lockstep  # noqa: F401  registers the backend
    place = f"file://{folder}/store"
    dist.init_process_group(task.backend, init_method=place, rank=rank, world_size=task.world_size)
    value = function(rank, task.world_size, *arguments)
    dist.destroy_process_group()
    return value


def _die_with(parent):
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was too late
        os._exit(1)


if __name__ == "__main__":
    sys.modules["ranks"] = sys.modules["__main__"]  # the tests import this very module
    for kind in (Task, Outcome):
        kind.__module__ = "ranks"
    _die_with(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
