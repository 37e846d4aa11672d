"""Flight records of Python ranks: when they are written, and the lines of the program that they name."""

import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, run_ranks
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(BACKEND != "lockstep", reason="tests what Lockstep adds")


def record_on_signal(rank, world_size, folder):
    """Rank 0 asks itself for a record, and goes on."""
    os.environ["LOCKSTEP_FLIGHT_DIR"] = folder
    import lockstep  # noqa: F401

    dist.init_process_group("lockstep", init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
                            timeout=timedelta(seconds=30))
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 30
        while not list(pathlib.Path(folder).rglob("*.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
    dist.all_reduce(total)
    dist.destroy_process_group()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGUSR1)  # one that comes late does not end the process
    return total.item()


def test_sigusr1_writes_a_flight_record_and_the_program_goes_on(tmp_path):
    assert run_ranks(record_on_signal, 2, str(tmp_path), backend=None) == [4.0, 4.0]
    record, = (json.loads(path.read_text()) for path in tmp_path.rglob("*.json"))
    assert (record["rank"], record["world_size"], record["reason"]) == (0, 2, "SIGUSR1")


def train_and_diverge(rank, world_size):
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.broadcast(torch.ones(3), 0)


def test_flight_records_name_the_lines_of_the_calls(tmp_path):
    run_ranks(train_and_diverge, 2, expect={0: dist.DistBackendError, 1: dist.DistBackendError},
              environment={"LOCKSTEP_FLIGHT_DIR": tmp_path}, hosts=1)
    lines, first = inspect.getsourcelines(train_and_diverge)

    def frame_of(call):
        [line] = [first + index for index, line in enumerate(lines) if call in line]
        return {"name": "train_and_diverge", "filename": __file__, "line": line}

    for path, call in zip(sorted(tmp_path.rglob("rank_*.json")), ("all_reduce", "broadcast"), strict=True):
        *construction, backward, diverging = (entry["frames"][0] for entry in json.loads(path.read_text())["entries"])
        assert construction and all(frame == frame_of("DistributedDataParallel") for frame in construction)
        assert backward == frame_of("backward") and diverging == frame_of(call)
    told = subprocess.run([pathlib.Path(sys.executable).parent / "lockstep", "inspect", "flight", tmp_path], text=True,
                          stdout=subprocess.PIPE, timeout=60, check=False).stdout
    assert f"rank 0 called all_reduce(SUM, Float [3]) at {__file__}:{frame_of('all_reduce')['line']}" in told
    assert f"rank 1 called broadcast(Float [3], src rank 0) at {__file__}:{frame_of('broadcast')['line']}" in told
