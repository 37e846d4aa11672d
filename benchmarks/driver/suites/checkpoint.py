"""The suite `checkpoint`: saving and loading 1 GB against torch.save, torch.load and Python's safetensors.

All write to the same disk, below $TMPDIR. What is not synced measures the library and the page cache; what is synced, the
disk too. torch.save and safetensors never sync by themselves, so :nosync is how they are, and :sync how a careful script
uses them.
"""

import os
import statistics
import tempfile

from benchmarks.driver.interleave import Turn, run_rounds
from benchmarks.driver.suites.collectives import present
from benchmarks.driver.suites.training import add_facts

MEBIBYTES = 1024
SECONDS = 2
# Operation of ours: those of Python's to which it is compared, by the library's name.
SAVES = {f"save:{how}": {"torch": f"torch_save:{how}", "safetensors": f"safetensors_save:{how}"} for how in ("nosync", "sync")}
LOADS = {f"load:{how}": {"torch": "torch_load:plain", "safetensors": "safetensors_load:plain"} for how in ("verify", "plain")}
OPERATIONS = {**SAVES, **LOADS}
ASYNC = "async:later"


def series(who, operation):
    return f"checkpoint.{operation.replace(':', '.')}.{who}"


def checkpoint(fleet, results, rounds, generator):
    """Time to save and to load, what an asynchronous save adds, and the bytes that are written."""
    if len(present(fleet, results, ["checkpoint", "python_checkpoint"])) < 2:
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        os.environ["LOCKSTEP_BENCH_CHECKPOINTS"] = folder  # the contenders, which start later, inherit it
        fleet.say(f"checkpoints of {MEBIBYTES} MiB")
        ours = [*OPERATIONS, ASYNC]
        theirs = sorted({operation for peers in OPERATIONS.values() for operation in peers.values()})
        turns = [Turn(series(who, operation), fleet.job(kind, 1), operation, MEBIBYTES, SECONDS, most=3, least=1)
                 for who, kind, operations in (("lockstep", "checkpoint", ours), ("python", "python_checkpoint", theirs))
                 for operation in operations]
        for name, bursts in run_rounds(turns, rounds, generator).items():
            results.add_series(name, "ns", [statistics.median(burst.wall[0]) for burst in bursts])
            if name == series("lockstep", "save:nosync"):
                add_facts(results, "checkpoint.bytes_over_data", "share", bursts, "bytes_over_data")
    for operation, peers in OPERATIONS.items():
        for library, peer in peers.items():
            results.add_ratio(f"checkpoint.{operation.replace(':', '.')}.vs_{library}", series("python", peer), series("lockstep", operation))
    results.add_ratio("checkpoint.async.of_sync", series("lockstep", ASYNC), series("lockstep", "save:sync"), better="lower")
