"""A process's life with the engine: signals while it waits, threads, failures, and its end."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from ranks import BACKEND, run_ranks

DEADLINE = 60  # seconds for a program of two processes; they need about five
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(BACKEND != "lockstep", reason="tests what Lockstep adds")


class Program:
    """A Python program as two ranks of its own, started as users start them; killed at the end of the `with` block."""

    def __init__(self, source):
        # Each rank has the end of a socket pair, over which it says how far it is and waits for what it is told.
        port = free_port()
        self.ranks, self.lines = [], []
        prelude = "import os, sys, socket\nline = socket.socket(fileno=int(os.environ['LINE']))\nrank = int(os.environ['RANK'])\n"
        for rank in range(2):
            ours, theirs = socket.socketpair()
            variables = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                         "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "LINE": str(theirs.fileno())}
            self.ranks.append(subprocess.Popen(
                [sys.executable, "-c", prelude + textwrap.dedent(source)],
                env=variables, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            theirs.close()
            self.lines.append(ours)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process, line in zip(self.ranks, self.lines):
            process.kill()
            process.communicate()
            line.close()

    def hear(self, rank):
        """What the rank says next."""
        ready, _, _ = select.select([self.lines[rank]], [], [], DEADLINE)
        said = self.lines[rank].recv(100) if ready else b""
        if not said:
            self.ranks[rank].kill()
            pytest.fail(f"rank {rank} said nothing\n{self.ranks[rank].communicate()[1]}")
        return said.decode()

    def end(self, rank):
        """(exit status, stdout, stderr) of the rank, which must end by itself."""
        try:
            out, err = self.ranks[rank].communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            self.ranks[rank].kill()
            pytest.fail(f"rank {rank} has not ended\n{self.ranks[rank].communicate()[1]}")
        return self.ranks[rank].returncode, out, err


def wait_until_asleep(pid):
    """Returns once the process's main thread sleeps in the kernel: what it waits for has begun."""
    while open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "S":
        os.sched_yield()


# The end


def test_a_program_may_end_without_destroying_its_group():
    source = """
        import torch, torch.distributed as dist, lockstep
        dist.init_process_group("lockstep")
        group = dist.new_group([0, 1])
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.get_future().then(lambda future: future.value()).wait()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        print(tensor[0].item())
    """
    with Program(source) as program:
        for rank in range(2):
            assert program.end(rank) == (0, "4.0\n", "")


def test_what_is_not_done_at_the_end_keeps_no_rank():
    source = """
        import torch, torch.distributed as dist, lockstep
        dist.init_process_group("lockstep")
        dist.barrier()
        if rank == 0:
            work = dist.all_reduce(torch.ones(1000), async_op=True)
            kept = dist.irecv(torch.ones(4), 1)
        else:
            line.recv(1)
            dist.all_reduce(torch.ones(1000))
    """
    with Program(source) as program:
        status, _, err = program.end(0)
        assert status == 0
        assert "the process ends while operations of group '0' are not done" in err
        program.lines[1].send(b"x")
        status, _, err = program.end(1)
        assert status == 1
        assert "DistBackendError" in err and "rank 0" in err


def test_an_exception_on_one_rank_is_not_waited_for():
    source = """
        import torch, torch.distributed as dist, lockstep
        dist.init_process_group("lockstep")
        dist.barrier()
        if rank == 1:
            raise RuntimeError("no such data")
        dist.all_reduce(torch.ones(1))
    """
    with Program(source) as program:
        status, _, err = program.end(1)
        assert status == 1 and "RuntimeError: no such data" in err
        status, _, err = program.end(0)
        assert status == 1
        assert "torch.distributed.DistBackendError: all_reduce" in err
        assert "aborted by rank 1" in err and "by an exception there" in err  # it has not "left in good order"


def test_an_exception_ends_a_program_with_a_hook_of_its_own():
    source = """
        import torch, torch.distributed as dist, lockstep
        sys.excepthook = lambda *exception: print("the program's hook:", exception[1])
        dist.init_process_group("lockstep")
        dist.barrier()
        if rank == 1:
            raise RuntimeError("no such data")
        dist.all_reduce(torch.ones(1))
    """
    with Program(source) as program:
        status, out, _ = program.end(1)
        assert status == 1 and out == "the program's hook: no such data\n"
        status, out, _ = program.end(0)
        assert status == 1 and "aborted by rank 1" in out and "by an exception there" in out


@pytest.mark.parametrize("prompt", [True, False])
def test_an_exception_that_did_not_end_the_program_is_no_abort(prompt):
    """Prompts and test runners leave what was raised last in sys.last_value; and a prompt calls sys.excepthook."""
    source = f"""
        import torch, torch.distributed as dist, lockstep
        dist.init_process_group("lockstep")
        dist.barrier()
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        sys.last_value = RuntimeError("shown")
        if {prompt}:
            sys.ps1 = ">>> "
            sys.excepthook(RuntimeError, sys.last_value, None)
    """
    with Program(source) as program:
        status, _, _ = program.end(1)
        assert status == 0
        status, _, err = program.end(0)
        assert status == 1
        assert "rank 1" in err and "has left the group" in err and "by an exception there" not in err


def test_lockstep_run_names_the_rank_that_failed_though_its_interpreter_ends_last(bin_dir):
    source = """
        import atexit, os, select

        def wait_for_rank_0():  # after Lockstep's own handler: those that are registered first run last
            if peer is not None:
                poll = select.poll()
                poll.register(peer, select.POLLIN)
                poll.poll()
                os._exit(1)  # at once: the launcher does not wait for long, and a busy machine is slow to end an interpreter

        peer = None
        atexit.register(wait_for_rank_0)
        import torch, torch.distributed as dist, lockstep
        dist.init_process_group("lockstep")
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if dist.get_rank() == 1:
            peer = os.pidfd_open(pids[0])
            raise RuntimeError("no such data")
        dist.all_reduce(torch.ones(1))
    """
    command = [bin_dir / "lockstep", "run", "--nproc-per-node", "2", sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1, done.stderr
    report = done.stderr[done.stderr.index("lockstep run: "):]
    assert re.match(r"lockstep run: rank 1 \(pid \d+\) failed first: exited with status 1\n", report), done.stderr
    assert "RuntimeError: no such data\n" in report, done.stderr
    assert re.search(r"^lockstep run: then rank 0 ", report, re.M), done.stderr


# Signals


@pytest.mark.parametrize("call", [
    "dist.all_reduce(tensor)",
    "dist.recv(tensor, 1)",
    "dist.all_reduce(tensor, async_op=True).wait()",
    "dist.monitored_barrier(group)",
])
def test_ctrl_c_ends_a_wait(call):
    source = f"""
        import torch, torch.distributed as dist, lockstep
        lockstep.replace_gloo()
        dist.init_process_group("gloo")
        tensor, group = torch.ones(4), dist.group.WORLD
        dist.barrier()
        line.send(b"waits")
        if rank == 1:
            line.recv(1)
            dist.all_reduce(tensor)
        {call}
    """
    with Program(source) as program:
        assert program.hear(0) == program.hear(1) == "waits"
        wait_until_asleep(program.ranks[0].pid)
        program.ranks[0].send_signal(signal.SIGINT)
        status, _, err = program.end(0)
        assert status == -signal.SIGINT, err
        assert "KeyboardInterrupt" in err
        program.lines[1].send(b"x")
        status, _, err = program.end(1)
        assert status == 1
        assert "DistBackendError" in err and "rank 0" in err


def test_ctrl_c_ends_the_wait_for_missing_ranks():
    source = """
        import torch.distributed as dist, lockstep
        if rank == 1:
            line.recv(1)
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True)
        line.send(b"waits")
        dist.init_process_group("lockstep", store=store, rank=0, world_size=2)
    """
    with Program(source) as program:
        assert program.hear(0) == "waits"
        wait_until_asleep(program.ranks[0].pid)
        program.ranks[0].send_signal(signal.SIGINT)
        status, _, err = program.end(0)
        assert status == -signal.SIGINT and "KeyboardInterrupt" in err


def signal_handler_while_waiting(rank, world_size):
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        signal.signal(signal.SIGUSR2, lambda *_: store.set("handled", "yes"))
        store.set("pid", str(os.getpid()))
        dist.recv(tensor, 1)  # goes on after the handler
    else:
        pid = int(store.get("pid"))
        wait_until_asleep(pid)
        os.kill(pid, signal.SIGUSR2)
        store.wait(["handled"], timedelta(seconds=30))
        dist.send(tensor, 0)
    return tensor.tolist()


def test_signal_handlers_run_during_a_wait():
    assert run_ranks(signal_handler_while_waiting, 2) == [[1.0] * 3] * 2


# Threads


def other_thread_while_waiting(rank, world_size):
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        thread = threading.Thread(target=lambda: store.set("runs", "yes"))
        interval = sys.getswitchinterval()
        sys.setswitchinterval(100)  # the thread runs when the wait gives the GIL away, and not before
        thread.start()
        dist.recv(tensor, 1)
        sys.setswitchinterval(interval)
        thread.join()
    else:
        store.wait(["runs"], timedelta(seconds=30))
        dist.send(tensor, 0)
    return tensor.tolist()


def test_the_gil_is_free_during_a_wait():
    assert run_ranks(other_thread_while_waiting, 2) == [[1.0] * 3] * 2


def groups_in_threads(rank, world_size):
    groups = [dist.new_group(range(world_size)) for _ in range(3)]
    sums = [torch.zeros(100) for _ in groups]

    def reduce(group, total):
        for step in range(200):
            tensor = torch.full((100,), float(rank + step))
            dist.all_reduce(tensor, group=group)
            total += tensor

    threads = [threading.Thread(target=reduce, args=pair) for pair in zip(groups, sums)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [total.unique().tolist() for total in sums]


def test_each_thread_may_use_its_group():
    expected = sum(sum(rank + step for rank in range(3)) for step in range(200))
    assert run_ranks(groups_in_threads, 3) == [[[expected]] * 3] * 3


# Failures


def peer_killed(rank, world_size):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def test_a_killed_rank_is_named():
    said = run_ranks(peer_killed, 3, expect={1: signal.SIGKILL, 0: dist.DistBackendError, 2: dist.DistBackendError})
    for rank in (0, 2):
        assert "rank 1 (pid" in said[rank] and "all_reduce" in said[rank]


def peer_late(rank, world_size):
    import lockstep

    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    if rank == 1:
        store.wait(["late"], timedelta(seconds=30))
        return "late"
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except lockstep.DistTimeoutError as error:
        assert isinstance(error, dist.DistBackendError) and isinstance(error, RuntimeError)
        return str(error)
    finally:
        store.set("late", "")
    return "nothing was said"


def test_a_timeout_is_an_exception_of_its_own():
    said, _ = run_ranks(peer_late, 2)
    assert "timed out after 300 ms waiting for rank 1 (pid" in said


def mismatch(rank, world_size):
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.broadcast(torch.ones(3), 0)


def test_different_operations_are_told_apart():
    said = run_ranks(mismatch, 2, expect={0: dist.DistBackendError, 1: dist.DistBackendError})
    for text in said:
        assert "all_reduce(SUM, Float [3])" in text and "broadcast(Float [3], src 0)" in text


def bad_arguments(rank, world_size):
    def refused(error, call):
        try:
            call()
        except error as problem:
            return str(problem)
        return "nothing was said"

    allocate = dist.group.WORLD._get_backend(CPU).allocate_tensor
    return [
        refused(ValueError, lambda: dist.broadcast(torch.ones(2), 7)),
        refused(ValueError, lambda: allocate(-1, dtype=torch.float, device=CPU)),
        refused(ValueError, lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2))),
    ]


def test_misuse_is_refused_at_once():
    for rooted, size, gathered in run_ranks(bad_arguments, 2):
        assert "7" in rooted
        assert "-1" in size
        assert "[3]" in gathered and "[2]" in gathered


# Again and again


def again(rank, world_size, folder):
    import lockstep  # noqa: F401  registers the backend

    sums = []
    for turn in range(4):
        dist.init_process_group("lockstep", init_method=f"file://{folder}/{turn}", rank=rank, world_size=world_size,
                                timeout=timedelta(seconds=30))
        groups = [dist.new_group([0, 1], backend="lockstep") for _ in range(3)]
        tensor = torch.ones(2)
        for group in groups:
            dist.all_reduce(tensor, group=group)
        sums.append(tensor[0].item())
        if turn % 2:
            dist.destroy_process_group(groups[1])
        dist.destroy_process_group()
    return sums, len(os.listdir("/proc/self/fd"))


def test_groups_may_be_made_and_destroyed_again_and_again(tmp_path):
    (sums, descriptors), _ = run_ranks(again, 2, str(tmp_path), backend=None)
    assert sums == [8.0] * 4
    assert descriptors < 40


def subgroup_under_gloo(rank, world_size):
    """The default group is Gloo's; only ranks 1 and 2 have a group of the engine."""
    import lockstep  # noqa: F401

    group = dist.new_group([1, 2], backend="lockstep")
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def test_messages_name_ranks_of_the_job():
    said = run_ranks(subgroup_under_gloo, 3, backend="cpu:gloo,cuda:gloo",
                     expect={2: signal.SIGKILL, 1: dist.DistBackendError}, environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert "failed on rank 1 of group" in said[1] and "rank 2 (pid" in said[1]
