"""What got slower or faster between two runs, beyond the noise.

Compared are figures, ratios to a peer measured in the same rounds: absolute times say more about the machine's day than
about the program. A change is real when the logarithm of the median moved by more than three standard errors of the two
runs together, and by more than FLOOR, since two runs differ by more (placement, temperature) than rounds of one run do.
"""

import math
from dataclasses import dataclass

from benchmarks.driver import stats

FLOOR = 0.05
ERRORS = 3


@dataclass(frozen=True)
class Change:
    name: str
    old: float
    new: float
    noise: float  # relative; a smaller change means nothing
    outcome: str  # slower, faster, same


def compare(old, new):
    """([Change], [note]) for the figures that both results have, and what makes the comparison doubtful."""
    changes = []
    for name, figure in new.figures.items():
        if name in old.figures:
            changes.append(change(name, old.figures[name]["rounds"], figure["rounds"], figure["better"]))
    return changes, notes(old, new)


def change(name, old, new, better):
    before, after = stats.summarize(old).median, stats.summarize(new).median
    error = math.hypot(stats.log_median_error(old), stats.log_median_error(new))
    noise = max(FLOOR, ERRORS * error)
    gain = math.log(after / before) * (1 if better == "higher" else -1)
    outcome = "slower" if gain < -noise else "faster" if gain > noise else "same"
    return Change(name, before, after, math.exp(noise) - 1, outcome)


def notes(old, new):
    answer = []
    for key in ("cpu", "cores", "kernel", "torch", "mpi"):
        before, after = old.machine.get(key), new.machine.get(key)
        if before != after:
            answer.append(f"{key} differs: {before} then, {after} now")
    missing = sorted(old.figures.keys() - new.figures.keys())
    if missing:
        answer.append(f"measured then, but not now: {', '.join(missing)}")
    return answer
