"""Starts programs for a test, watches what they write, and sees to it that none outlives the test."""

import contextlib
import dataclasses
import ipaddress
import os
import pathlib
import re
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
import uuid

import pytest
from hosts import torchrun_environments
from ports import free_port

HANG = 60  # seconds: nothing here takes that long unless it hangs
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH")
MARK = "LOCKSTEP_TEST_MARK"
LISTEN = "0A"  # a socket's state in /proc/net/tcp

takes_hangups = pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="programs ignore SIGHUP here, as under nohup"
)


@dataclasses.dataclass(frozen=True)
class Result:
    """How a program ended: exit status, or minus the signal's number, and what it wrote."""

    pid: int
    status: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return f"status {self.status}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def skip_without_openssl(self):
        if "built without OpenSSL" in self.stderr:
            pytest.skip("lockstep was built without OpenSSL")

    def skip_without_ucx(self):
        if "needs UCX" in self.stderr:
            pytest.skip("ranks on several hosts need UCX")


class Child:
    """A started program. Its output is read all the time, so that it never waits for us."""

    def __init__(self, command, environment, cwd):
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env=environment,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.pid = self.process.pid
        self._lines = {"stdout": [], "stderr": []}
        self._open = set(self._lines)
        self._changed = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._lines]
        for reader in self._readers:
            reader.start()

    def _read(self, name):
        for line in getattr(self.process, name):
            with self._changed:
                self._lines[name].append(line)
                self._changed.notify_all()
        with self._changed:
            self._open.discard(name)
            self._changed.notify_all()

    def _text(self, stream) -> str:
        """What was written by now, in whole lines. The caller holds the lock, or the stream has ended."""
        return "".join(self._lines[stream])

    def wait_for(self, pattern: str, stream: str = "stdout") -> re.Match:
        """The first place in the stream that matches; fails the test when the stream ends without one."""

        with self._changed:
            self._changed.wait_for(
                lambda: re.search(pattern, self._text(stream)) or stream not in self._open, timeout=HANG
            )
            match = re.search(pattern, self._text(stream))
        assert match, f"no '{pattern}' in {self._lines}"
        return match

    def count(self, pattern: str, stream: str = "stdout") -> int:
        """How often the pattern stands in the stream by now."""
        with self._changed:
            return len(re.findall(pattern, self._text(stream)))

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def finish(self, limit=HANG) -> Result:
        """Ends its standard input, waits for its end, for `limit` seconds at most, and returns what it wrote."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.process.args} hangs; so far {self._lines}") from None
        for reader in self._readers:
            reader.join(HANG)
            assert not reader.is_alive(), f"a process holds the output of {self.process.args} open"
        return Result(self.pid, status, self._text("stdout"), self._text("stderr"))


class Programs:
    """All programs of one test. They and their descendants carry a mark in their environment."""

    def __init__(self, bin_dir: pathlib.Path, folder: pathlib.Path):
        self.bin_dir = bin_dir
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._children = []

    def environment(self, **variables) -> dict:
        """Nothing of a launcher that may have started the tests themselves."""
        result = {name: os.environ[name] for name in INHERITED if name in os.environ}
        result.update({"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), MARK: self._mark})
        result.update({name: str(value) for name, value in variables.items()})
        return result

    def find(self, word) -> str:
        """A program of the build by its name; anything else stays as it is."""
        built = self.bin_dir / str(word)
        return str(built) if "/" not in str(word) and built.is_file() else str(word)

    def start(self, *command, **variables) -> Child:
        """Starts the command; words that name programs of the build become their paths, but not after
        `lockstep bench` and `lockstep sweep`, some of whose words are names of examples."""
        programs = next((command.index(word) for word in ("bench", "sweep") if word in command), len(command))
        words = [self.find(word) for word in command[:programs]] + [str(word) for word in command[programs:]]
        child = Child(words, self.environment(**variables), self.folder)
        self._children.append(child)
        return child

    def run(self, *command, **variables) -> Result:
        return self.start(*command, **variables).finish()

    def lockstep_run(self, nprocs: int, *command, **variables) -> Result:
        return self.run("lockstep", "run", "--nproc-per-node", nprocs, *command, **variables)

    def run_ranks(self, ranks, *command, **variables) -> list:
        """The command once for each of `ranks`, started by hand in a world as large as there are ranks."""
        place = {"WORLD_SIZE": len(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **variables}
        children = [self.start(*command, **{**place, "RANK": rank}) for rank in ranks]
        return [child.finish() for child in children]

    def start_on(self, net, layout, *command, **variables) -> list:
        """The command once for each rank of a job in which layout[h] ranks are on host h of `net` (hosts.py)."""
        ranks = torchrun_environments(layout, net.addresses[0], free_port())
        return [self.start(*net.inside(host, *command), **{**place, **variables}) for host, place in ranks]

    def survivors(self) -> list:
        """Pids of this test's processes, whichever process is their parent by now."""
        entry = f"{MARK}={self._mark}".encode()
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # ended, a zombie, or not ours
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def wait_until_gone(self):
        """Returns once no process of this test is left; fails the test when some stay."""
        deadline = time.monotonic() + HANG
        while pids := self.survivors():
            for pid in pids:
                assert wait_for_end(pid, deadline), "still there:\n" + "\n".join(map(describe, {pid, *self.survivors()}))

    def listening(self) -> set:
        """(address, port) of every TCP socket on which a process of this test listens."""
        found = set()
        for pid in self.survivors():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile: listens no more
                found |= listening_sockets(pid)
        return found

    def close(self):
        """Kills what is left, without a word: the test said what was wrong."""
        for turn in range(100):  # a process that is killed may just have started another
            pids = self.survivors()
            if not pids:
                break
            for pid in pids:
                if turn == 0 and is_guardian(pid):
                    continue  # it removes what its launcher has left, a cgroup, say, and ends
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in pids:
                wait_for_end(pid, time.monotonic() + HANG)
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(HANG)


def unshare(*options):
    """The words before a command that runs in a pid namespace of its own."""
    words = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", *options]
    if not shutil.which("unshare") or subprocess.run([*words, "true"], capture_output=True).returncode != 0:
        pytest.skip("namespaces can't be made here")
    return words


def is_guardian(pid: int) -> bool:
    """Whether it is the process that ends a launcher's workers after the launcher."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/comm").read_text() == "lockstep-guard\n"
    return False


def wait_for_end(pid: int, deadline: float) -> bool:
    """Whether the process ended by then; a zombie has."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(0, (deadline - time.monotonic()) * 1000)))
    finally:
        os.close(descriptor)


def listening_sockets(pid: int) -> set:
    """(address, port) of every TCP socket on which the process listens."""
    inodes = set()
    for descriptor in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(descriptor)))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                found.add(parse_address(fields[1]))
    return found


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} " + pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return str(pid)


def describe(pid: int) -> str:
    """Its command line, state, parent, group and session, and its pending and ignored signals."""
    lines = []
    with contextlib.suppress(OSError):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        lines = re.findall(r"^(?:State|PPid|NSpgid|NSsid|SigPnd|ShdPnd|SigIgn):.*$", status, re.M)
    return " ".join([command_line(pid), *lines])


def parse_address(text: str) -> tuple:
    """ "0100007F:1F90" of /proc/net/tcp (words of 32 bits in the machine's order, then the port) as ("127.0.0.1", 8080)."""
    host, port = text.split(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)


def write_idx(path: pathlib.Path, content: bytes, *sizes: int):
    """A file in the format of MNIST: bytes of the given sizes."""
    path.write_bytes(struct.pack(f">BBBB{len(sizes)}I", 0, 0, 8, len(sizes), *sizes) + content)
