"""How each contender is started, and the fleet of those that are running.

Every rank has one thread. Ours and Gloo's ranks are started as a user's launcher would, each process by itself; Open MPI's
by mpirun, with its own placement.
"""

import importlib.util
import itertools
import os
import pathlib
import shutil
import sys
from dataclasses import dataclass

from benchmarks.driver.job import BenchmarkError, Job

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))  # at the end: nothing there hides a package
import hosts  # noqa: E402
import ports  # noqa: E402

PEERS = ROOT / "benchmarks" / "peers"
# Fashion-MNIST's four files: where the user says, or where Debian's package puts them.
DATA = pathlib.Path(os.environ.get("LOCKSTEP_DATA_DIR") or "/usr/share/datasets/fashion-mnist").absolute()
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# malloc that keeps pages it has once got: everything from the heap, and the heap never shrinks. Page faults, which cost a
# training step more than its communication, are then paid once.
KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}
# The user's shell may say something else for these; a contender has its own word for them, or none.
DEFAULT_ENVIRONMENT = ("LOCKSTEP_BENCH_BACKEND", "LOCKSTEP_BENCH_DEVICE", "LOCKSTEP_REPLACE_GLOO", "LOCKSTEP_SOCKET_IFNAME",
                       "LOCKSTEP_PORT_RANGE", hosts.TEST_HOST, "MASTER_ADDR", "GLIBC_TUNABLES", "MALLOC_MMAP_MAX_",
                       "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_ARENA_MAX",
                       "LD_PRELOAD")

# Name: (program, environment)
KINDS = {
    "lockstep": ("bench_collectives", {}),
    "bare": ("bench_flag_barrier", {}),
    "gloo": ("gloo_collectives.py", {}),
    "mpi": ("bench_mpi", {}),
    "wire": ("raw_wire.py", {}),  # one rank on each host
    "hooks": ("bench_comm_hooks", {"LOCKSTEP_DATA_DIR": str(DATA)}),
    "cpp": ("bench_ddp_step", {}),
    "cpp_keep": ("bench_ddp_step", KEEP_PAGES),
    "python": ("python_ddp_step.py", {}),
    "python_keep": ("python_ddp_step.py", KEEP_PAGES),
    "python_lockstep": ("python_ddp_step.py", {"LOCKSTEP_BENCH_BACKEND": "lockstep"}),
    "data": ("bench_data", {}),
    "python_data": ("python_data.py", {}),
    "checkpoint": ("bench_checkpoint", {}),
    "python_checkpoint": ("python_checkpoint.py", {}),
    "profiler": ("bench_profiler", {}),
    "python_profiler": ("python_profiler.py", {}),
    # Each in processes of its own.
    **{f"sharding_{mode}": ("bench_sharding", {}) for mode in ("fsdp", "gather", "grad_op", "hybrid", "ddp", "alone")},
    "python_sharding": ("python_sharding.py", {}),
    "python_sharding_hybrid": ("python_sharding.py", {}),
    "pipeline": ("bench_pipeline", {}),
    "python_pipeline": ("python_pipeline.py", {}),
    "python_pipeline_lockstep": ("python_pipeline.py", {"LOCKSTEP_BENCH_BACKEND": "lockstep"}),
    "python_groups": ("python_all_reduce.py", {}),  # ours and Gloo in the same processes
    # On the fleet's device.
    "gpu_nccl": ("bench_ddp_step", {"LOCKSTEP_BENCH_BACKEND": "nccl"}),
    "gpu_staged": ("bench_ddp_step", {"LOCKSTEP_BENCH_BACKEND": "lockstep"}),
    "gpu_staging": ("bench_staging", {"LOCKSTEP_BENCH_BACKEND": "lockstep"}),
    "gpu_python_nccl": ("python_ddp_step.py", {"LOCKSTEP_BENCH_BACKEND": "nccl"}),
    "gpu_python_gloo": ("python_ddp_step.py", {"LOCKSTEP_BENCH_BACKEND": "gloo"}),
}
# What takes the place of NCCL where the device is the CPU.
WITHOUT_NCCL = {"gpu_nccl": "gpu_staged", "gpu_python_nccl": "gpu_python_gloo"}
NEED_PACKAGE = ("python_lockstep", "python_groups", "python_pipeline_lockstep")


@dataclass(frozen=True)
class Place:
    """Where the ranks of a job over several hosts are: layout[h] of them on host h of `net` (tests/hosts.py)."""

    net: object
    layout: tuple


class Fleet:
    """Starts jobs when they are first asked for, and ends them all. Use it in a `with` statement."""

    def __init__(self, bin_dir, say, device="cuda:0"):
        self.bin_dir, self.say, self.device = pathlib.Path(bin_dir), say, device
        self.jobs = {}
        self.ports = itertools.count(hosts.PORT)

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, trace):
        self.stop(in_peace=error_type is None)

    def why_not(self, kind):
        """Why a contender cannot take part here, or None."""
        program = KINDS[kind][0]
        if kind == "mpi" and not shutil.which("mpirun"):
            return "Open MPI is left out: there is no mpirun (Debian: openmpi-bin)"
        if kind == "bare" and len(os.sched_getaffinity(0)) < 2:
            return "the bare barrier is left out: it needs two cores, one for each process"
        if kind in NEED_PACKAGE and not has_package():
            return f"{kind} is left out: {sys.executable} has no package lockstep (pip install ./python)"
        if not program.endswith(".py") and not (self.bin_dir / program).exists():
            hint = " (it needs libopenmpi-dev)" if kind == "mpi" else ""
            return f"{kind} is left out: there is no {self.bin_dir / program}{hint}"
        return None

    def why_no_component(self, component):
        """Why one of our optional libraries is not here, or None."""
        library = self.bin_dir.parent / "lib" / f"liblockstep_{component}.so"
        return None if library.exists() else f"it is left out: there is no {library} (docs/getting_started.md)"

    def hosts(self, count, rate):
        """Hosts as network namespaces, in a `with` statement; raises hosts.NotAllowed where there can be none."""
        return hosts.Hosts(count, rate)

    def job(self, kind, ranks, place=None):
        """One that runs, or is started: on this machine as it is, or over the hosts of a Place."""
        key = kind, ranks, place
        if key not in self.jobs:
            if reason := self.why_not(kind):
                raise BenchmarkError(f"{reason}; do: scripts/bench builds it")
            self.say(f"starting {kind} with {ranks} ranks")
            started = (processes_over_hosts(kind, place, self.bin_dir, next(self.ports)) if place else
                       processes(kind, ranks, self.bin_dir, self.device))
            self.jobs[key] = Job(f"{kind} with {ranks} ranks", ranks, started)
        return self.jobs[key]

    def stop(self, in_peace=True):
        while self.jobs:
            _, job = self.jobs.popitem()
            job.stop() if in_peace else job.kill()


def has_package():
    """Whether Python can import our package. A mere folder of that name, such as the library's, has no origin."""
    spec = importlib.util.find_spec("lockstep")
    return spec is not None and spec.origin is not None


def processes(kind, ranks, bin_dir, device="cuda:0"):
    """[(command, environment)] of the processes that make up a contender."""
    program, environment = KINDS[WITHOUT_NCCL.get(kind, kind) if device == "cpu" else kind]
    if kind.startswith("gpu_"):
        environment = {**environment, "LOCKSTEP_BENCH_DEVICE": device}
    clean = without_users_environment(environment)
    if kind == "bare":
        return [([*clean, str(bin_dir / program)], environment)]  # makes its second process itself
    if kind == "mpi":
        command = mpirun(ranks)
        if ranks > len(os.sched_getaffinity(0)):
            command += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
        return [([*clean, *command, str(bin_dir / program)], {**ONE_THREAD, **environment})]
    if program.endswith(".py"):
        command = [sys.executable, str(PEERS / program)]
        environment = {**environment, "GLOO_SOCKET_IFNAME": "lo"}  # as fast as Gloo gets on one host
    else:
        command = [str(bin_dir / program)]
    return [([*clean, *command],
             {**ONE_THREAD, **environment, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
              "LOCAL_WORLD_SIZE": str(ranks)}) for rank in range(ranks)]


def mpirun(ranks):
    return ["mpirun", "-n", str(ranks), *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


def without_users_environment(environment):
    """The system's env undoes what the user's shell may have set for malloc, or to put us where Gloo is measured."""
    return ["env", *(word for name in DEFAULT_ENVIRONMENT if name not in environment for word in ("-u", name))]


def processes_over_hosts(kind, place, bin_dir, port):
    """The same for ranks over several hosts, which meet at a port of the first one."""
    program, environment = KINDS[kind]
    net, layout = place.net, place.layout
    environment = {**ONE_THREAD, **environment, "GLOO_SOCKET_IFNAME": hosts.DEVICE}
    path = [sys.executable, str(PEERS / program)] if program.endswith(".py") else [str(bin_dir / program)]
    if kind == "mpi":
        slots = ",".join(f"{address}:{ranks}" for address, ranks in zip(net.addresses, layout))
        command = [*mpirun(sum(layout)), "--host", slots, "--bind-to", "none"]
        # Ranks of several hosts share this machine's cores, which Open MPI can't know. Shared memory inside a host, TCP between.
        for name, value in (("plm_rsh_agent", net.remote_shell()), ("btl_tcp_if_include", hosts.DEVICE),
                            ("oob_tcp_if_include", hosts.DEVICE), ("pml", "ob1"), ("btl", "tcp,vader,self"),
                            ("mpi_yield_when_idle", 1)):
            command += ["--mca", name, str(value)]
        return [([*without_users_environment(environment), *net.inside(0, *command, *path)], environment)]
    answer = []
    for host, rank in hosts.torchrun_environments(layout, net.addresses[0], port):
        mine = {**environment, **rank, "LOCKSTEP_BENCH_ADDRESS": net.addresses[host]}
        answer.append(([*without_users_environment(mine), *net.inside(host, *path)], mine))
    return answer
