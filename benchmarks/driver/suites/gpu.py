"""The suite `gpu`: training steps on a card, and all_reduce between two ranks that share it.

With one rank: DistributedDataParallel over NCCL, the same program without it, and Python's over NCCL. With two ranks on
the one card, which NCCL refuses: ours staged through pinned memory, and Python's over Gloo. What staging reaches is told as
a share of what the bus allows, which is measured by copies of as many bytes by as many ranks at the same time.

The device cpu takes the place of a card (and staging, Gloo that of NCCL) where the suite itself is tested.
"""

import pathlib

from benchmarks.driver.interleave import Turn, run_rounds
from benchmarks.driver.suites.collectives import MIB, add_times, leave_out
from benchmarks.driver.suites.training import NETWORKS, add_steps

# Of NVIDIA's driver, on Linux, WSL and Tegra.
DEVICE_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu")
RANKS = (1, 2)
# Ranks: {who: (kind, mode)}; ours with and without DDP, and Python's.
STEPS = {1: {"ddp": ("gpu_nccl", "ddp"), "alone": ("gpu_nccl", "alone"), "python": ("gpu_python_nccl", "ddp")},
         2: {"ddp": ("gpu_staged", "ddp"), "alone": ("gpu_staged", "alone"), "python": ("gpu_python_gloo", "ddp")}}
SIZES = {"1MiB": MIB, "64MiB": 64 * MIB}
TURN_SECONDS = 0.5


class NoGpu(Exception):
    """The suite was asked for by name where it can't run."""


def why_not(device):
    """Why there is nothing to measure, or None."""
    if not device.startswith("cuda") or any(pathlib.Path(node).exists() for node in DEVICE_NODES):
        return None
    return "the suite gpu needs a GPU: this machine has no device of NVIDIA's driver"


def gpu(fleet, results, rounds, generator):
    """Steps with DDP, without and in Python, on one card by one rank and by two; staged all_reduce against the bus."""
    if reason := why_not(fleet.device):
        leave_out(fleet, results, reason)
        return
    for ranks in RANKS:
        for name in NETWORKS:
            step(fleet, results, ranks, name, rounds, generator)
        fleet.stop()
    for size, length in SIZES.items():
        staging(fleet, results, size, length, rounds, generator)


def step(fleet, results, ranks, network, rounds, generator):
    fleet.say(f"training steps of the {network} network on {fleet.device}, {ranks} rank{'s' * (ranks > 1)}")
    cell = f"gpu_step.{ranks}.{network}"
    turns = [Turn(f"{cell}.{who}", fleet.job(kind, ranks), mode, network, TURN_SECONDS, most=200)
             for who, (kind, mode) in STEPS[ranks].items()]
    add_steps(results, run_rounds(turns, rounds, generator))
    results.add_ratio(f"{cell}.over_alone", f"{cell}.ddp", f"{cell}.alone", better="lower")
    results.add_ratio(f"{cell}.vs_python", f"{cell}.python", f"{cell}.ddp")


def staging(fleet, results, size, length, rounds, generator):
    fleet.say(f"all_reduce of {size} on {fleet.device}, 2 ranks")
    cell = f"gpu_staging.2.{size}"
    job = fleet.job("gpu_staging", 2)
    turns = [Turn(f"{cell}.{operation}", job, operation, length, TURN_SECONDS) for operation in ("all_reduce", "copies")]
    add_times(results, run_rounds(turns, rounds, generator))
    results.add_ratio(f"{cell}.of_bus", f"{cell}.copies", f"{cell}.all_reduce")
