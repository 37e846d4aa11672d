"""Large reductions in fewer bytes between hosts: for those that a program starts, and for DistributedDataParallel's."""

import contextlib

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep import _C, _ddp
from lockstep._C import ErrorFeedback

__all__ = ["BetweenHostsState", "ErrorFeedback", "between_hosts", "between_hosts_hook"]


@contextlib.contextmanager
def between_hosts(compression, feedback=None):
    """How the reductions travel between hosts that this thread starts in here: "none", "bf16" or "int8", whatever their
    group's options say. On all ranks the same.

    feedback: an ErrorFeedback, one for each tensor that is reduced again and again. What rounding to "int8" loses is kept
    there and added the next time; without it, it is lost.
    """
    _C.enter_between_hosts(compression, feedback)
    try:
        yield
    finally:
        _C.leave_between_hosts()


class BetweenHostsState:
    """What between_hosts_hook needs: how gradients travel ("bf16", "int8"), the group (the default one unless given), and for
    "int8" what the rounding has lost of each bucket. A copy, also from a pickle, has the default group and begins at zero.
    """

    def __init__(self, compression, process_group=None):
        with between_hosts(compression):
            pass  # raises ValueError for what is none
        self.compression = compression
        self.process_group = process_group or distributed_c10d._get_default_group()
        engine, _ = _ddp.engine_of(self.process_group)
        if engine is None:
            raise ValueError("BetweenHostsState: the process group's backend for CPU tensors is not Lockstep's")
        self._feedback = {}

    def __reduce__(self):
        return BetweenHostsState, (self.compression,)

    def feedback_of(self, bucket):
        """At zero where the bucket has other parameters than before: the first step's buckets are not the later ones'."""
        parameters = [parameter.data_ptr() for parameter in bucket.parameters()]
        before, feedback = self._feedback.get(bucket.index(), (None, None))
        if before != parameters:
            feedback = ErrorFeedback()
            self._feedback[bucket.index()] = parameters, feedback
        return feedback


def between_hosts_hook(state, bucket):
    """A communication hook of DistributedDataParallel that averages gradients as it does without one, but in fewer bytes
    between hosts.

        model.register_comm_hook(lockstep.BetweenHostsState("int8"), lockstep.between_hosts_hook)
    """
    gradients = bucket.buffer().div_(state.process_group.size())
    with between_hosts(state.compression, state.feedback_of(bucket)):
        work = dist.all_reduce(gradients, group=state.process_group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
