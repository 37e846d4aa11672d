"""The largest model that trains in a given memory: the example large_model against PyTorch's fully_shard over Gloo.

Each job is in a control group of its own, with a limit for all its ranks together, caches of files included. The models are
blocks of one width, trained with AdamW, weights in bfloat16 and in full precision, and activation checkpoints; ours
has in files what memory has no room for. A model trains when a job makes two steps within a limit of time.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from benchmarks.driver.suites.collectives import leave_out

LIMIT = 8 << 30
RANKS, WIDTH, BATCH, STEPS = 2, 2048, 16, 2
SECONDS = 300  # for each try
FIRST = 4  # blocks to begin with, of 34 million parameters each
PRECISION = 1.1  # the answer may be so much too small
PEER = pathlib.Path(__file__).resolve().parents[2] / "peers" / "python_large_model.py"


class NotAllowed(Exception):
    """There can be no control group here; the message says why."""


def blocks_to_parameters(blocks):
    return blocks * (8 * WIDTH * WIDTH + 7 * WIDTH)


def folder_of_groups(root=pathlib.Path("/sys/fs/cgroup"), own=pathlib.Path("/proc/self/cgroup")):
    """(folder in which groups for memory may be made, name of the file with the limit)"""
    groups = dict(line.split(":", 2)[1:] for line in own.read_text().splitlines())
    for controllers, path in groups.items():
        if "memory" in controllers.split(","):
            for folder in (root / "memory" / path.lstrip("/"), root / "memory"):  # a container's root is its own group
                if folder.is_dir():
                    return folder, "memory.limit_in_bytes"
    if (root / "cgroup.controllers").exists() and "memory" in (root / "cgroup.subtree_control").read_text().split():
        return root, "memory.max"
    raise NotAllowed("there is no control group that limits memory")


@contextlib.contextmanager
def memory_group(limit):
    """A group whose processes take no more than `limit` bytes together: the beginning of the command that starts one in it."""
    folder, file = folder_of_groups()
    group = folder / f"lockstep-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise NotAllowed(f"no control group can be made in {folder}: {error.strerror}; that takes root") from None
    try:
        (group / file).write_text(str(limit))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        end_processes(group)
        group.rmdir()


def end_processes(group):
    """What a job has left in its group. The group can go when they are gone."""
    while left := (group / "cgroup.procs").read_text().split():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def runs(command, environment, limit=LIMIT, seconds=SECONDS):
    """Whether the command ends well in the memory and the time. All of its processes have ended then."""
    with memory_group(limit) as enter:
        process = subprocess.Popen([*enter, *command], env={**os.environ, **environment}, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            process.terminate()  # `lockstep run` and torchrun end their ranks
            process.wait()
            return False


def largest(trains, first=FIRST, precision=PRECISION):
    """The largest number for which trains(number), by doubling and halving; 0 if there is none."""
    good, bad = 0, None
    while bad is None or bad > max(good + 1, good * precision):
        candidate = (good + bad) // 2 if bad is not None else max(first, 2 * good)
        if trains(candidate):
            good = candidate
        else:
            bad = candidate
    return good


def largest_model(fleet, results, _rounds=None, _generator=None):
    """Measures both, unless groups or programs are missing here."""
    program = fleet.bin_dir / "large_model"
    if not program.exists():
        return leave_out(fleet, results, f"the largest model is left out: there is no {program}")
    threads = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        ours = [str(fleet.bin_dir / "lockstep"), "run", "--nproc-per-node", str(RANKS), str(program), "--offload", folder,
                "--width", str(WIDTH), "--batch-size", str(BATCH), "--steps", str(STEPS), "--layers"]
        python = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), str(PEER),
                  str(WIDTH), str(BATCH), str(STEPS)]
        for name, command in {"lockstep": ours, "python": python}.items():
            def trains(blocks, command=command, name=name):
                fleet.say(f"{name}: {blocks_to_parameters(blocks) / 1e6:.0f} million parameters in {LIMIT / 2**30:.0f} GiB")
                return runs([*command, str(blocks)], threads)
            try:
                blocks = largest(trains)
            except NotAllowed as reason:
                return leave_out(fleet, results, f"the largest model is left out: {reason}")
            results.add_series(f"sharding_largest.{RANKS}.{name}", "parameters", [blocks_to_parameters(blocks)])
    if min(results.median(f"sharding_largest.{RANKS}.{name}") for name in ("lockstep", "python")) > 0:
        results.add_ratio(f"sharding_largest.{RANKS}.vs_python", f"sharding_largest.{RANKS}.lockstep",
                          f"sharding_largest.{RANKS}.python")
