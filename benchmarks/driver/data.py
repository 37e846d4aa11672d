"""The suite `data`: epochs of our DataLoader against torch.utils.data.DataLoader, from the same kind of source.

One process each, without and with workers (ours are threads, Python's are processes; both stay from epoch to epoch).
Another source is another entry of SOURCES, and an operation of that name in benchmarks/data.cc and peers/python_data.py.
"""

import statistics
from dataclasses import dataclass

from benchmarks.driver.collectives import present
from benchmarks.driver.interleave import Turn, run_rounds

CONTENDERS = {"lockstep": "data", "python": "python_data"}


@dataclass(frozen=True)
class Source:
    words: str
    samples: int  # in an epoch, which is one iteration
    seconds: float  # of a turn
    workers: tuple


SOURCES = {"memory": Source("tensors in memory", 16384, 0.5, (0, 2))}


def data(fleet, results, rounds, generator):
    """Time of an epoch from each source, by numbers of workers."""
    if len(present(fleet, results, list(CONTENDERS.values()))) < len(CONTENDERS):
        return
    for name, source in SOURCES.items():
        fleet.say(f"epochs of {source.words}, {source.samples} samples")
        turns = [Turn(f"data.{name}.{workers}.{who}", fleet.job(kind, 1), f"{name}:{workers}", source.samples,
                      source.seconds, most=200, least=1) for workers in source.workers for who, kind in CONTENDERS.items()]
        for series, bursts in run_rounds(turns, rounds, generator).items():
            results.add_series(series, "ns", [statistics.median(burst.wall[0]) for burst in bursts])
        for workers in source.workers:
            cell = f"data.{name}.{workers}"
            results.add_ratio(f"{cell}.vs_python", f"{cell}.python", f"{cell}.lockstep")
