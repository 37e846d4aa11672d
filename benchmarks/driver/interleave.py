"""Rounds in which every contender has a turn, in random order.

A round is short, so what disturbs the machine for longer than a round disturbs all contenders alike, and the ratio of two
of them within a round does not see it.
"""

from dataclasses import dataclass

from benchmarks.driver import stats

QUICK_ROUNDS = 3  # of scripts/bench --quick


@dataclass(frozen=True)
class Turn:
    """What one contender does in each round."""

    name: str  # of its series
    job: object
    operation: str
    argument: object
    seconds: float  # about as long as a turn may take
    most: int = 400  # iterations
    least: int = 4
    ranks: tuple = None  # all
    settle: int = 1  # iterations of the first turn where their number is given: until the contender is as it stays


@dataclass(frozen=True)
class Burst:
    """What the ranks answered in one turn: for each rank, nanoseconds of each iteration, and other facts by name."""

    wall: list
    cpu: list
    facts: list


def run_rounds(turns, rounds, generator):
    """{turn's name: [Burst of each round]}. The first, unmeasured turn of each finds out how many iterations fit."""
    iterations = {turn.name: calibrate(turn) for turn in turns}
    bursts = {turn.name: [] for turn in turns}
    for _ in range(rounds):
        for turn in generator.sample(turns, len(turns)):
            count = iterations[turn.name]
            # The others have had the caches meanwhile: some iterations to win them back.
            bursts[turn.name].append(measure(turn, count, warmup=max(1, min(20, count // 4))))
    return bursts


def calibrate(turn):
    if turn.least == turn.most:
        measure(turn, turn.settle, warmup=0)
        return turn.least
    first = measure(turn, 1, warmup=1)  # first touch of memory, connections
    if stats.slowest_rank(first.wall)[0] >= turn.seconds * 1e9:
        return turn.least
    wall = stats.slowest_rank(measure(turn, turn.least, warmup=1).wall)
    return max(turn.least, min(turn.most, int(turn.seconds * 1e9 / max(1, stats.summarize(wall).median))))


def measure(turn, iterations, warmup):
    answers = turn.job.measure(turn.operation, turn.argument, iterations, warmup, turn.ranks)
    return Burst([answer["wall"] for answer in answers], [answer["cpu"] for answer in answers],
                 [answer.get("facts", {}) for answer in answers])
