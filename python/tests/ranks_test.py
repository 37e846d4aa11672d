"""The harness: what ranks return, and how their failures are told."""

import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import RanksFailed, run_ranks


def sums(rank, world_size, addend):
    tensor = torch.tensor([rank + addend])
    dist.all_reduce(tensor)
    return tensor


def threads_and_group(rank, world_size):
    return len(os.listdir("/proc/self/task")), dist.is_initialized(), os.environ["LOCKSTEP_TEST_VARIABLE"]


def one_raises(rank, world_size):
    if rank == 1:
        raise KeyError("no such thing")
    threading.Event().wait()


def one_is_killed(rank, world_size):
    if rank == 1:
        print("now")
        os.kill(os.getpid(), signal.SIGSEGV)
    return rank


def one_hangs(rank, world_size):
    while rank == 0:
        time.sleep(0.01)


def leaves_a_child(rank, world_size):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, b"%d" % os.getpid())
        threading.Event().wait()
    return int(os.read(reading, 100))


def reports_and_hangs(rank, world_size, fifo):
    with open(fifo, "a") as file:
        file.write(f"{os.getpid()}\n")
    threading.Event().wait()


def test_returns_what_each_rank_returned():
    assert run_ranks(sums, 3, 0.5) == [torch.tensor([4.5])] * 3


def test_ranks_start_clean():
    values = run_ranks(threads_and_group, 2, backend=None, environment={"LOCKSTEP_TEST_VARIABLE": 7})
    assert values == [(1, False, "7")] * 2


def test_tells_the_exception():
    with pytest.raises(RanksFailed, match="(?s)rank 1 failed: KeyError: 'no such thing'.*in one_raises"):
        run_ranks(one_raises, 2, backend=None)


def test_tells_the_signal_and_the_output():
    with pytest.raises(RanksFailed, match="(?s)rank 1 was ended by SIGSEGV.*output of rank 1\nnow.*one_is_killed"):
        run_ranks(one_is_killed, 2, backend=None)


def test_tells_where_a_rank_hangs():
    with pytest.raises(RanksFailed, match="(?s)it hangs: 1 s are over.*in one_hangs"):
        run_ranks(one_hangs, 2, backend=None, timeout=1)


def test_expects_failures():
    values = run_ranks(one_is_killed, 2, backend=None, expect={1: signal.SIGSEGV})
    assert values[0] == 0 and "SIGSEGV" in values[1]
    with pytest.raises(RanksFailed, match="rank 0 ended well, but should have failed"):
        run_ranks(one_is_killed, 2, backend=None, expect={0: LookupError, 1: signal.SIGSEGV})
    with pytest.raises(RanksFailed, match="SIGSEGV, but should have failed with .*LookupError"):
        run_ranks(one_is_killed, 2, backend=None, expect={1: LookupError})


def test_leaves_nothing():
    for pid in run_ranks(leaves_a_child, 2, backend=None):
        assert ends(pid)


def test_dies_with_the_tests(tmp_path):
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    script = f"import ranks, ranks_test; ranks.run_ranks(ranks_test.reports_and_hangs, 2, {str(fifo)!r}, backend=None)"
    folder = os.path.dirname(__file__)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a rank that is killed leaves files
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True) as client:
        pids = [int(line) for line in lines_of(fifo, 2)]
        client.kill()
    assert len(pids) == 2 and all(ends(pid) for pid in pids)


def test_refuses_what_it_cannot_send():
    with pytest.raises(ValueError, match="<lambda> is not a function of a module"):
        run_ranks(lambda rank, world_size: None, 2)


def lines_of(fifo, count) -> list:
    """That many lines, from any rank, or fewer when they don't come."""
    descriptor, text = os.open(fifo, os.O_RDWR), b""
    try:
        while text.count(b"\n") < count and select.select([descriptor], [], [], ranks.TIMEOUT)[0]:
            text += os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    return text.splitlines()


def ends(pid) -> bool:
    """Whether the process has ended or does so soon; a zombie has."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], ranks.TIMEOUT)[0])
    finally:
        os.close(descriptor)
