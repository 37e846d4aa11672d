"""The suite `startup`: what a CPU program pays before and beside its work, for the libraries that it links.

Each program joins a group of one rank, does one all_reduce and ends. Its time is that from its start to its end, and its
memory the most that was resident, pages of libraries that others share included; both as the kernel tells its parent.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks.driver.contenders import DEFAULT_ENVIRONMENT, ONE_THREAD, PEERS
from benchmarks.driver.job import BenchmarkError
from benchmarks.driver.suites.collectives import leave_out

# Who: (program, what it is in words)
PROGRAMS = {"lockstep": ("bench_startup", "C++, links Lockstep::lockstep"),
            "lockstep_cuda": ("bench_startup_cuda", "C++, links Lockstep::cuda"),
            "python": ("python_startup.py", "Python, import torch, Gloo")}
WARMUP = 1  # start of each, which brings the libraries into the page cache
SECONDS = 60


def startup(fleet, results, rounds, generator):
    """Time and resident memory of a program of one rank, with CUDA and without, and of its Python original."""
    here = [who for who in PROGRAMS if present(fleet, results, who)]
    fleet.say("starting programs of one rank")
    seen = {who: [] for who in here}
    for number in range(WARMUP + rounds):
        for who in generator.sample(here, len(here)):
            answer = start(command(fleet, who))
            if number >= WARMUP:
                seen[who].append(answer)
    for who, answers in seen.items():
        results.add_series(f"startup.time.{who}", "ns", [nanoseconds for nanoseconds, _ in answers])
        results.add_series(f"startup.memory.{who}", "bytes", [size for _, size in answers])
    for who in here:
        if who != "lockstep" and "lockstep" in here:
            for what in ("time", "memory"):
                results.add_ratio(f"startup.{what}.vs_{who}", f"startup.{what}.{who}", f"startup.{what}.lockstep")


def present(fleet, results, who):
    program = path_of(fleet, who)
    if not program.exists():
        leave_out(fleet, results, f"{PROGRAMS[who][1]} is left out: there is no {program} (torch's build has no CUDA?)")
    return program.exists()


def path_of(fleet, who):
    program = PROGRAMS[who][0]
    return PEERS / program if program.endswith(".py") else fleet.bin_dir / program


def command(fleet, who):
    program = path_of(fleet, who)
    return [sys.executable, str(program)] if program.suffix == ".py" else [str(program)]


# A process's memory at most counts that of the process it was forked from, so a small one starts the program.
STARTER = """
import os, sys, time
before = time.perf_counter_ns()
child = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(child, 0)
took = time.perf_counter_ns() - before
with open(sys.argv[1], "w") as file:
    print(took, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status), file=file)
"""


def start(words):
    """(nanoseconds from its start to its end, bytes that were resident at most) of one run of the program."""
    environment = {name: value for name, value in os.environ.items() if name not in DEFAULT_ENVIRONMENT}
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        run = subprocess.run([sys.executable, "-S", "-E", "-c", STARTER, f"{folder}/usage", *words, f"{folder}/rendezvous"],
                             env={**environment, **ONE_THREAD}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, timeout=SECONDS, check=False)
        usage = pathlib.Path(folder, "usage")
        took, resident, status = map(int, usage.read_text().split()) if usage.exists() else (0, 0, run.returncode)
    if status != 0:
        raise BenchmarkError(f"{words[-1]} ended with status {status}; it printed:\n"
                             f"{run.stdout.decode(errors='replace')[-2000:]}")
    return took, resident
