"""Statistics of the benchmarks: pure functions over lists of numbers."""

import math
import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """A figure over the rounds of a run."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    count: int


def percentile(values, percent):
    """The value below which `percent` of the sorted values lie, interpolated linearly (as numpy.percentile)."""
    if not values:
        raise ValueError("no values, so no percentile")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}; it must be between 0 and 100")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(rounds):
    return Summary(statistics.median(rounds), percentile(rounds, 25), percentile(rounds, 75), len(rounds))


def paired_ratios(numerators, denominators):
    """One ratio for each round: what disturbs the machine in a round disturbs both."""
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} rounds cannot be paired with {len(denominators)}")
    return [a / b for a, b in zip(numerators, denominators)]


def slowest_rank(ranks):
    """From a list of times for each rank, the time of each iteration: it ends when its last rank is done."""
    if len({len(times) for times in ranks}) != 1:
        raise ValueError(f"ranks disagree on the number of iterations: {[len(times) for times in ranks]}")
    return [max(times) for times in zip(*ranks)]


def log_median_error(rounds):
    """Standard error of the median of log(rounds), from their median absolute deviation, which outliers do not move.

    1.4826·MAD estimates a normal distribution's deviation; its median has π/2 times the variance of its mean.
    """
    logs = [math.log(value) for value in rounds]
    middle = statistics.median(logs)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in logs)
    return math.sqrt(math.pi / 2) * deviation / math.sqrt(len(logs))
