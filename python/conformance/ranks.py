"""How the ranks of one of PyTorch's multi-process tests are started and joined.

MultiProcessTestCase starts a fresh interpreter for each rank, which takes seconds. Here ranks are forked from the
process that runs the test, which was itself forked from a clean server: torch is imported, one thread, no process
group. The test code is PyTorch's, unchanged. Two things are stricter than there: a rank other than the first that
crashes or ends with a status of its own fails the test too (PyTorch looks only at the first), and no rank outlives its
test.

With LOCKSTEP_TEST_HOSTS=2 the ranks are as if on two hosts, in turns: 2 x 2 with four of them.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal

from conformance import processes


class RankFailed(AssertionError):
    """A rank ended in a way that PyTorch's own check does not see."""


def pretend_host(rank):
    """Puts this process on one of the hosts that LOCKSTEP_TEST_HOSTS asks for."""
    hosts = int(os.environ.get("LOCKSTEP_TEST_HOSTS", 1))
    if hosts > 1:
        os.environ["LOCKSTEP_TEST_HOST"] = f"host-{rank % hosts}"


class ForkedRank(multiprocessing.context.ForkProcess):
    """A rank, forked; it ends with the process that runs the test."""

    def run(self):
        processes.die_with_parent(self._parent_pid)
        pretend_host(self._args[0])
        super().run()


def spawned_rank(parent, configuration, name, *args, **kwargs):
    """A rank in a fresh interpreter: imports what the server has imported, then runs the class's part."""
    from conformance import suites  # imports torch

    processes.die_with_parent(parent)
    pretend_host(args[0])
    suites.load(configuration)[name].runnable_class()._run(*args, **kwargs)


class SpawnedRank(multiprocessing.context.SpawnProcess):
    """A rank in an interpreter of its own."""

    def __init__(self, target, name, args, kwargs, *, configuration, test):
        del target  # the class's _run, which a fresh interpreter finds under the test's name
        super().__init__(target=spawned_rank, name=name, args=(os.getpid(), configuration, test, *args), kwargs=kwargs)


def install(configuration):
    """Makes MultiProcessTestCase start and join ranks our way, in this process and those forked from it."""
    from torch.testing._internal import common_distributed

    case = common_distributed.MultiProcessTestCase
    join = case._join_processes

    def start(self):
        if configuration.start_method == "fork":
            self._start_processes(ForkedRank)
        else:
            self._start_processes(lambda **rest: SpawnedRank(
                **rest, configuration=configuration, test=self.conformance_name))

    def join_without_polling(self, fn):
        wait_for_ranks(self.processes, case.TEST_ERROR_EXIT_CODE)
        join(self, fn)
        if fn not in self.skip_return_code_checks:
            check_exits(self.processes, self.special_return_code_checks.get(fn, 0))

    case._spawn_processes = start
    case._join_processes = join_without_polling


def wait_for_ranks(ranks, error_status):
    """Returns when all ranks have ended, or one has failed: PyTorch's loop, which sleeps, then need not wait."""
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode == error_status:
                return


def check_exits(ranks, expected):
    """Fails if a rank ended neither as expected nor as the first did; one that a test terminates is its own affair."""
    for index, rank in enumerate(ranks):
        if rank.exitcode < 0 and -rank.exitcode != signal.SIGTERM:
            raise RankFailed(f"rank {index} was ended by {signal.Signals(-rank.exitcode).name}")
        if rank.exitcode >= 0 and rank.exitcode not in (expected, ranks[0].exitcode):
            raise RankFailed(f"rank {index} ended with status {rank.exitcode}, expected {expected}")
