"""The suite `data`: epochs of our DataLoader against torch.utils.data.DataLoader, from the same kind of source.

One process each, without and with workers (ours are threads, Python's are processes; both stay from epoch to epoch).
Another source is another entry of SOURCES, and an operation of that name in benchmarks/data.cc and peers/python_data.py.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from benchmarks.driver.contenders import PEERS
from benchmarks.driver.interleave import Turn, run_rounds
from benchmarks.driver.job import BenchmarkError
from benchmarks.driver.suites.collectives import present

CONTENDERS = {"lockstep": "data", "python": "python_data"}


@dataclass(frozen=True)
class Source:
    words: str
    samples: int  # in an epoch, which is one iteration
    seconds: float  # of a turn
    workers: tuple
    component: str = ""  # of ours, which may not be built
    maker: str = ""  # peers/MAKER PATH SAMPLES makes what is loaded
    variable: str = ""  # the contenders find the path in it


SOURCES = {
    "memory": Source("tensors in memory", 16384, 0.5, (0, 2)),
    "jpeg": Source("JPEG folder", 384, 1, (0, 2), "image", "jpeg_folder.py", "LOCKSTEP_BENCH_JPEG_FOLDER"),
    "parquet": Source("Parquet file", 200_000, 1, (1,), "parquet", "parquet_file.py", "LOCKSTEP_BENCH_PARQUET_FILE"),
}


def data(fleet, results, rounds, generator):
    """Time of an epoch from each source, by numbers of workers."""
    if len(present(fleet, results, list(CONTENDERS.values()))) < len(CONTENDERS):
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        sources = {}
        for name, source in SOURCES.items():
            reason = source.component and fleet.why_no_component(source.component)
            if reason:
                results.skipped.append(f"{source.words}: {reason}")
            else:
                sources[name] = source
                make(fleet, source, os.path.join(folder, name))
        for name, source in sources.items():
            measure(fleet, results, name, source, rounds, generator)


def make(fleet, source, path):
    if not source.maker:
        return
    fleet.say(f"making a {source.words} of {source.samples} samples")
    done = subprocess.run([sys.executable, PEERS / source.maker, path, str(source.samples)], capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchmarkError(f"{source.maker} failed: {done.stderr.strip()[-1000:]}")
    os.environ[source.variable] = path  # the contenders, which start later, inherit it


def measure(fleet, results, name, source, rounds, generator):
    fleet.say(f"epochs of {source.words}, {source.samples} samples")
    turns = [Turn(f"data.{name}.{workers}.{who}", fleet.job(kind, 1), f"{name}:{workers}", source.samples,
                  source.seconds, most=200, least=1) for workers in source.workers for who, kind in CONTENDERS.items()]
    for series, bursts in run_rounds(turns, rounds, generator).items():
        results.add_series(series, "ns", [statistics.median(burst.wall[0]) for burst in bursts])
    for workers in source.workers:
        cell = f"data.{name}.{workers}"
        results.add_ratio(f"{cell}.vs_python", f"{cell}.python", f"{cell}.lockstep")
