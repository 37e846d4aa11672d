"""N ranks as processes that sleep until they are commanded; see benchmarks/command_loop.h for what they speak.

Only this process holds the command pipes' ends for writing. So when it dies, however it dies, every rank reads the end
of its pipe and leaves: there are no orphans.
"""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time

CHANNEL = "LOCKSTEP_BENCH_CHANNEL"
START_SECONDS = 180
COMMAND_SECONDS = 120
QUIT_SECONDS = 60


class BenchmarkError(Exception):
    """A contender did not do its part; the message says which one, and its last words."""


class Job:
    """One contender's ranks. `processes` is a list of (command, environment), for one process each; `mpirun` is one, too."""

    def __init__(self, name, ranks, processes):
        self.name, self.ranks = name, ranks
        self.directory = tempfile.mkdtemp(prefix="lockstep-bench-")
        self.processes, self.commands, self.answers, self.received = [], [], [], {}
        self.selector = selectors.DefaultSelector()
        try:
            for rank in range(ranks):
                self.commands.append(self._pipe(f"{rank}.commands"))
                self.answers.append(self._pipe(f"{rank}.answers"))
                self.received[rank] = b""
                self.selector.register(self.answers[rank], selectors.EVENT_READ, rank)
            for command, environment in processes:
                self._start(command, environment)
            self._collect(range(ranks), "start", START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def measure(self, operation, argument, iterations, warmup, ranks=None):
        """[answer of each rank], from all ranks unless told. Raises BenchmarkError."""
        ranks = range(self.ranks) if ranks is None else ranks
        line = f"{operation} {argument} {iterations} {warmup}"
        for rank in ranks:
            os.write(self.commands[rank], f"{line}\n".encode())
        return self._collect(ranks, line, COMMAND_SECONDS)

    def memory(self):
        """Bytes that the processes hold now; what several of them share counts once."""
        return sum(proportional_set_size(process.pid) for process in self.processes)

    def stop(self):
        """Ends the ranks in peace, or else by force; then standard error tells where they stood."""
        for pipe in self.commands:
            os.write(pipe, b"quit\n")
        deadline = time.monotonic() + QUIT_SECONDS
        try:
            for process in self.processes:
                process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._signal()
            print(f"bench: {self.name} still ran {QUIT_SECONDS} s after 'quit' and was ended by force; {self._flush_at_exit()}",
                  file=sys.stderr)
        self.kill()

    def kill(self):
        """Ends whatever still runs. Closing the pipes ends the ranks that a launcher put into sessions of their own."""
        self.selector.close()
        for pipe in self.commands + self.answers:
            os.close(pipe)
        self.commands, self.answers = [], []
        self._signal()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _signal(self):
        for sign in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self.processes if process.poll() is None]
            for process in running:
                os.killpg(process.pid, sign)
            deadline = time.monotonic() + 5
            for process in running:
                try:
                    process.wait(max(0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    pass

    def _pipe(self, name):
        path = os.path.join(self.directory, name)
        os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)  # for both: opening does not wait for the rank

    def _start(self, command, environment):
        with open(os.path.join(self.directory, f"{len(self.processes)}.output"), "wb") as output:
            # A session of its own: Ctrl-C comes to us alone, and we end the ranks in order.
            self.processes.append(subprocess.Popen(
                command, env={**os.environ, **environment, CHANNEL: self.directory}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True))

    def _collect(self, ranks, what, seconds):
        """One answer from each of the ranks."""
        deadline = time.monotonic() + seconds
        answers = {}
        while len(answers) < len(ranks):
            for key, _ in self.selector.select(timeout=0.5):
                self.received[key.data] += os.read(key.fd, 1 << 16)
            for rank in ranks:
                if rank not in answers and b"\n" in self.received[rank]:
                    line, _, self.received[rank] = self.received[rank].partition(b"\n")
                    answers[rank] = json.loads(line)
            if len(answers) == len(ranks):
                break
            dead = [process for process in self.processes if process.poll() is not None]
            if dead:
                raise BenchmarkError(f"{self.name} ended with status {dead[0].returncode} at '{what}'; {self._flush_at_exit()}")
            if time.monotonic() > deadline:
                silent = [rank for rank in ranks if rank not in answers]
                raise BenchmarkError(
                    f"{self.name}: no answer from ranks {silent} to '{what}' in {seconds} s; {self._flush_at_exit()}")
        return [answers[rank] for rank in ranks]

    def _flush_at_exit(self, lines=15):
        words = []
        for number in range(len(self.processes)):
            with open(os.path.join(self.directory, f"{number}.output"), errors="replace") as output:
                tail = output.read().splitlines()[-lines:]
            words += [f"  [{number}] {line}" for line in tail]
        return "its last output:\n" + "\n".join(words) if words else "it printed nothing"


def proportional_set_size(pid):
    """Of each page the share that this process has of it; 0 where there is no such process any more. Without pages of files,
    which other jobs that run the same libraries share."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    except (FileNotFoundError, ProcessLookupError):
        return 0
