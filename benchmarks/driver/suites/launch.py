"""The suite `launch`: `lockstep run` against torchrun, on one host and on two, which are network namespaces.

Programs note when their first collective was done (benchmarks/launch.cc, peers/python_launch.py). Measured are the times

- start: from the launchers' start to the last rank's first collective; also that of the same processes, started by this
  driver without a launcher, which is what the program itself takes;
- worker: from the end of a worker by SIGKILL to the first collective of all ranks after the restart;
- agent: from the end of a host's launcher by SIGKILL to that of its last worker. Under torchrun these live on;
- cut: from the cut of the second host's cable to the first collective of the other one, which goes on alone. Under torchrun
  nothing has happened after 75 s.

Then a hundred jobs in a row on two hosts, whose launchers meet at one port: how many failed, and what they left behind. And the
memory and the processor time of a launcher whose workers are idle.
"""

import contextlib
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from benchmarks.driver.contenders import ONE_THREAD, PEERS, hosts, ports, without_users_environment
from benchmarks.driver.job import BenchmarkError
from benchmarks.driver.suites.collectives import leave_out

PROGRAMS = {"cpp": "C++", "python": "Python over Gloo"}
STARTS = {"1x2": (2,), "1x8": (8,), "2x1": (1, 1), "2x4": (4, 4)}  # workers on each host
FAILURES = "2x1"
CUTS = 3  # rounds at most: a lost host is noticed after 10 s
MANY = 7  # rounds at most of 8 workers, which in Python take some 20 s for each start
TRIES = 3
IN_A_ROW = 100
IDLE_WORKERS = 64
IDLE_SECONDS = 10
SECONDS = 120
NO_LAUNCHER = "alone"
SECRET = {"LOCKSTEP_JOB_SECRET": "0123456789abcdef" * 4}


@dataclass(frozen=True)
class Launch:
    """One way to start a job."""

    launcher: str  # lockstep, torchrun or NO_LAUNCHER
    program: str  # of PROGRAMS
    layout: tuple
    net: object = None  # the hosts, where there are several
    port: int = None  # where their launchers meet; None: a free one

    def commands(self, fleet, folder, options=(), arguments=()):
        """Of each host's launcher, or of each rank."""
        program = [str(fleet.bin_dir / "bench_launch")]
        if self.program == "python":
            program = [sys.executable, str(PEERS / "python_launch.py")]
        if self.launcher == NO_LAUNCHER:
            return self.ranks([*program, folder, *arguments])
        launcher = [str(fleet.bin_dir / "lockstep"), "run"] if self.launcher == "lockstep" else [torchrun()]
        many = len(self.layout) > 1
        meeting = ["--standalone"]
        if many:
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.net.addresses[0]}:{self.port or ports.free_port()}"]
        answer = []
        for host, workers in enumerate(self.layout):
            words = [*launcher, "--no-python", "--nproc-per-node", workers, "--nnodes", len(self.layout), *meeting]
            if many and self.launcher == "torchrun":
                words += ["--local-addr", self.net.addresses[host]]
            words += [*options, *program, folder, *arguments]
            answer.append(self.net.inside(host, *words) if many else list(map(str, words)))
        return answer

    def ranks(self, words):
        """The command of each rank, which is told what a launcher would tell it."""
        many = len(self.layout) > 1
        address = self.net.addresses[0] if many else "127.0.0.1"
        answer = []
        for host, own in hosts.torchrun_environments(self.layout, address, self.port or ports.free_port()):
            command = ["env", *(f"{name}={value}" for name, value in own.items()), *words]
            answer.append(self.net.inside(host, *command) if many else list(map(str, command)))
        return answer


def torchrun():
    return shutil.which("torchrun", path=pathlib.Path(sys.executable).parent)


class Running:
    """A job's launchers, or its ranks where it has none; whatever is left of them at the end is killed."""

    def __init__(self, fleet, launch, options=(), arguments=(), **variables):
        self.folder = tempfile.TemporaryDirectory(prefix="lockstep-bench-")
        self.output = tempfile.TemporaryFile()
        self.ranks = sum(launch.layout)
        environment = {**os.environ, **ONE_THREAD, **SECRET, **variables}
        environment |= {"GLOO_SOCKET_IFNAME": hosts.DEVICE if launch.net else "lo"}
        self.begin = time.monotonic_ns()
        self.agents = [subprocess.Popen([*without_users_environment(environment), *command], env=environment,
                                        stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.output)
                       for command in launch.commands(fleet, self.folder.name, options, arguments)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for agent in self.agents:
            agent.kill()
            agent.wait()
        self.folder.cleanup()

    def first_collectives(self, since=0, ranks=None):
        """{rank: (when, pid)} of those that were after that moment, once all ranks, or so many, have had theirs."""
        ranks = ranks or self.ranks
        deadline = time.monotonic() + SECONDS
        while True:
            ended = all(agent.poll() is not None for agent in self.agents)  # before the look at what they have left
            found = {}
            for file in pathlib.Path(self.folder.name).glob("*.*[0-9]"):
                rank, pid = map(int, file.name.split("."))
                when = int(file.read_text())
                if when > since:
                    found[rank] = when, pid
            if len(found) == ranks:
                return found
            if time.monotonic() > deadline or ended:
                self.output.seek(0)
                raise BenchmarkError(f"{self.agents[0].args} did not get {ranks} ranks to a collective; they printed:\n"
                                     f"{self.output.read().decode(errors='replace')[-2000:]}")
            time.sleep(0.005)

    def finish(self):
        statuses = [agent.wait(SECONDS) for agent in self.agents]
        if any(statuses):
            raise BenchmarkError(f"{self.agents[0].args} ended with {statuses}")


def last(collectives):
    return max(when for when, _ in collectives.values())


def start(fleet, launch):
    """Nanoseconds to the first collective."""
    with Running(fleet, launch) as job:
        took = last(job.first_collectives()) - job.begin
        job.finish()
        return took


def kill_worker(fleet, launch):
    """Nanoseconds from a worker's end to the next first collective."""
    with Running(fleet, launch, ["--max-restarts", 1], ["--stay"]) as job:
        _, victim = job.first_collectives()[1]
        begin = time.monotonic_ns()
        os.kill(victim, signal.SIGKILL)
        took = last(job.first_collectives(since=begin)) - begin
        end(job)
        return took


def kill_agent(fleet, launch):
    """Nanoseconds from the end of the second host's launcher to that of its worker."""
    with Running(fleet, launch, [], ["--stay"]) as job:
        _, orphan = job.first_collectives()[1]
        descriptor = os.pidfd_open(orphan)
        begin = time.monotonic_ns()
        os.kill(job.agents[1].pid, signal.SIGKILL)
        gone = select.select([descriptor], [], [], SECONDS)[0]
        took = time.monotonic_ns() - begin
        os.close(descriptor)
        end(job)
        if not gone:
            raise BenchmarkError(f"the worker of {job.agents[1].args} outlived its launcher")
        return took


def cut_host(fleet, launch):
    """Nanoseconds from the cut to the other host's next first collective."""
    with Running(fleet, launch, ["--nnodes", "1:2"], ["--stay"]) as job:
        job.first_collectives()
        try:
            begin = time.monotonic_ns()
            launch.net.cut(1)
            took = last(job.first_collectives(since=begin, ranks=1)) - begin
        finally:
            launch.net.heal(1)
        end(job)
        return took


def in_a_row(fleet, launch):
    """(nanoseconds of each job, how many failed, the files and processes that are left after them all)."""
    times, failed = [], 0
    hosts = range(len(launch.net.names))
    before = set(launch.net.processes())  # torchrun may have left some
    for host in hosts:  # that of the machine has files of other programs, too
        launch.net.run(host, "mount", "-t", "tmpfs", "none", "/dev/shm")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        for _ in range(IN_A_ROW):
            with Running(fleet, launch, TMPDIR=folder) as job:
                try:
                    took = last(job.first_collectives()) - job.begin
                    job.finish()
                    times.append(took)
                except BenchmarkError as error:
                    failed += 1
                    fleet.say(str(error))
        shared = [name for host in hosts for name in launch.net.run(host, "ls", "-A", "/dev/shm").stdout.split()]
        left = [*os.listdir(folder), *shared, *(set(launch.net.processes()) - before)]
    return times, failed, left


def idle(fleet, launcher):
    """(bytes, nanoseconds of processor time a second) of a launcher and its helpers, whose workers sleep."""
    command = [str(fleet.bin_dir / "lockstep"), "run"] if launcher == "lockstep" else [torchrun()]
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        script = f"echo > {folder}/$RANK; exec sleep 1000"
        command += ["--no-python", "--nproc-per-node", str(IDLE_WORKERS), "--standalone", "--max-restarts", "1", "sh", "-c", script]
        process = subprocess.Popen([*without_users_environment(os.environ), *command], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + SECONDS
            while len(os.listdir(folder)) < IDLE_WORKERS:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise BenchmarkError(f"{command} did not start {IDLE_WORKERS} workers")
                time.sleep(0.01)
            time.sleep(1)  # what it does after the last start
            pids = [process.pid, *helpers(process.pid)]
            begin, used = time.monotonic_ns(), sum(map(processor_time, pids))
            time.sleep(IDLE_SECONDS)
            used = sum(map(processor_time, pids)) - used
            return sum(map(memory, pids)), used * 1e9 / (time.monotonic_ns() - begin)
        finally:
            process.terminate()
            process.wait(SECONDS)


def helpers(pid):
    """A launcher's children that are no workers."""
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in children if pathlib.Path(f"/proc/{child}/comm").read_text() not in ("sleep\n", "sh\n")]


def processor_time(pid):
    """Nanoseconds, of all threads."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in pathlib.Path(f"/proc/{pid}/task").iterdir())


def memory(pid):
    """Bytes; of what several processes share its part."""
    rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:"))


def end(job):
    for agent in job.agents:
        with contextlib.suppress(ProcessLookupError):
            agent.terminate()
    for agent in job.agents:
        agent.wait(SECONDS)


def launch(fleet, results, rounds, generator):
    """Starts and failures under `lockstep run` and torchrun, in turns."""
    launchers = ["lockstep", *(["torchrun"] if torchrun() else [])]
    if "torchrun" not in launchers:
        leave_out(fleet, results, "torchrun is left out: it is not beside this Python")
    with contextlib.ExitStack() as stack:
        net = None
        try:
            net = stack.enter_context(fleet.hosts(2, None))
        except hosts.NotAllowed as error:
            leave_out(fleet, results, str(error))
        for name, layout in STARTS.items():
            if net or len(layout) == 1:
                turns = min(rounds, MANY) if sum(layout) > 2 else rounds
                measure(fleet, results, turns, generator, f"launch.start.{name}", start, [*launchers, NO_LAUNCHER], layout, net)
        if net:
            measure(fleet, results, rounds, generator, f"launch.worker.{FAILURES}", kill_worker, launchers,
                    STARTS[FAILURES], net)
            measure(fleet, results, rounds, generator, f"launch.agent.{FAILURES}", kill_agent, ["lockstep"],
                    STARTS[FAILURES], net)
            measure(fleet, results, min(rounds, CUTS), generator, f"launch.cut.{FAILURES}", cut_host, ["lockstep"],
                    STARTS[FAILURES], net)
            fleet.say(f"launch.row: {IN_A_ROW} jobs in a row under lockstep")
            times, failed, left = in_a_row(fleet, Launch("lockstep", "cpp", STARTS[FAILURES], net, ports.free_port()))
            if times:
                results.add_series("launch.row.start", "ns", times)
            results.add_series("launch.row.failed", "count", [failed])
            results.add_series("launch.row.left", "count", [len(left)])
            if left:
                fleet.say(f"left behind: {left}")
        for launcher in launchers:
            fleet.say(f"launch.idle under {launcher}")
            used = [idle(fleet, launcher) for _ in range(min(rounds, CUTS))]
            results.add_series(f"launch.idle.memory.{launcher}", "bytes", [each[0] for each in used])
            results.add_series(f"launch.idle.cpu.{launcher}", "ns", [each[1] for each in used])


def take_turn(fleet, what, turn):
    """torchrun, whose hosts may count restarts differently, has another turn where it does not get the ranks together."""
    for _ in range(TRIES if turn.launcher == "torchrun" else 0):
        try:
            return what(fleet, turn)
        except BenchmarkError as error:
            fleet.say(f"torchrun failed, and has another turn: {error}")
    return what(fleet, turn)


def measure(fleet, results, rounds, generator, cell, what, launchers, layout, net):
    fleet.say(f"{cell} under {' and '.join(launchers)}")
    turns = [Launch(launcher, program, layout, net if len(layout) > 1 else None)
             for launcher in launchers for program in PROGRAMS]
    times = {turn: [] for turn in turns}
    for _ in range(rounds):
        for turn in generator.sample(turns, len(turns)):
            times[turn].append(take_turn(fleet, what, turn))
    for turn, rounds_of_turn in times.items():
        results.add_series(f"{cell}.{turn.program}.{turn.launcher}", "ns", rounds_of_turn)
    for program in PROGRAMS:
        if "torchrun" in launchers:
            results.add_ratio(f"{cell}.{program}.vs_torchrun", f"{cell}.{program}.torchrun", f"{cell}.{program}.lockstep")
