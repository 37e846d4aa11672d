"""The suite that measures training steps: what DistributedDataParallel adds to the work, here and in Python.

A step's time is a turn's time divided by its steps, the mean over ranks: the rate at which the job advances. Without
communication ranks do not wait for each other, and the slower of two would not stand for what both get done.
"""

import statistics

from benchmarks.driver.interleave import Turn, run_rounds

RANKS = 2
KINDS = ("cpp", "cpp_keep", "python", "python_keep")
MODES = ("ddp", "alone")
BATCH = {"large": 128, "small": 64}
TURN_SECONDS = {"large": 0.5, "small": 0.3}


def ddp(fleet, results, rounds, generator):
    """Steps of a large and a small network: with DDP, without communication, and on one rank alone."""
    for network in BATCH:
        fleet.say(f"training steps of the {network} network, {RANKS} ranks")
        turns = [turn(fleet, network, kind, mode) for kind in KINDS for mode in MODES]
        turns += [turn(fleet, network, kind, "single") for kind in ("cpp", "cpp_keep")]
        for name, bursts in run_rounds(turns, rounds, generator).items():
            results.add_series(name, "ns", [mean_step(burst) for burst in bursts])
        add_figures(results, f"step.{RANKS}.{network}")


def turn(fleet, network, kind, mode):
    return Turn(f"step.{RANKS}.{network}.{kind}_{mode}", fleet.job(kind, RANKS), mode, network, TURN_SECONDS[network],
                most=200, ranks=(0,) if mode == "single" else None)


def mean_step(burst):
    return statistics.mean(statistics.mean(times) for times in burst.wall)


def add_figures(results, measure):
    """Both forms of malloc are measured; overhead is counted against the better of the two baselines."""
    baseline = min((f"{measure}.{kind}_alone" for kind in ("cpp", "cpp_keep")), key=results.median)
    for kind, python in (("cpp", "python"), ("cpp_keep", "python_keep")):
        ours = f"{measure}.{kind}_ddp"
        results.add_ratio(f"{ours}.over_baseline", ours, baseline, better="lower")
        results.add_ratio(f"{ours}.vs_{python}", f"{measure}.{python}_ddp", ours)
        # Two ranks do the work of two batches in a step's time; one process alone does one.
        results.add_ratio(f"{ours}.efficiency", f"{measure}.{kind}_single", ours)
