"""Registers the engine with torch.distributed as backend "lockstep", and sees to its end and to forked children."""

import atexit
import sys

import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep import _C, _ddp, _stores
from lockstep._C import DistTimeoutError, ProcessGroupLockstep

__all__ = ["NAME", "DistTimeoutError", "ProcessGroupLockstep", "create"]

NAME = "lockstep"

_excepthook = None  # ours, once there was a group
_ended_by_exception = False


def create(store, rank, size, timeout, group_name="", global_ranks=(), between_hosts="none", stands_in_for_gloo=False):
    """The engine of one process group of `size` ranks, which meet in `store`; collective. See _C.open_backend."""
    _watch_excepthook()
    backend = _C.open_backend(_stores.of_this_meeting(store), rank, size, timeout, group_name, list(global_ranks),
                              between_hosts, stands_in_for_gloo)
    _ddp.install()
    return backend


def _without_wrapper(make_wrapper):
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps each backend, to compare the ranks' calls over a group of Gloo's
    beside it. The engine compares them always, and says more. In Gloo's place the wrapper stays: users may look for its
    words there, and its group is still usable after a mismatch. Before torch 2.13 it passes on neither shutdown(),
    abort(), timeouts nor the coalesced calls of tensors; a torch without Gloo has none."""

    def make(wrapped_pg, *arguments, **named):
        is_engine = isinstance(wrapped_pg, ProcessGroupLockstep)
        keeps_wrapper = isinstance(wrapped_pg, _C.ProcessGroupGloo) and torch.__version__ >= (2, 13)
        if not _ddp.Wrapper or (is_engine and not keeps_wrapper):
            return wrapped_pg
        return make_wrapper(wrapped_pg, *arguments, **named)

    return make


def _create_from_options(options, backend_options):
    if not isinstance(backend_options, (_c10d.Backend.Options, type(None))):
        raise TypeError(f"pg_options is a {type(backend_options).__name__}; the backend lockstep takes "
                        "lockstep.ProcessGroupLockstep.Options")
    # Those of another backend come for a group that has several, such as "cpu:lockstep,cuda:nccl".
    own = isinstance(backend_options, ProcessGroupLockstep.Options)
    return create(options.store, options.group_rank, options.group_size, options.timeout, options.group_id,
                  options.global_ranks_in_group, backend_options.between_hosts if own else "none")


def _keep_handler_in_dataloader_workers():
    """torch's workers install a handler of SIGSEGV of their own, which would hide what ours has to say."""
    from torch.utils.data._utils import signal_handling

    original = signal_handling._set_worker_signal_handlers

    def set_handlers(*arguments):
        result = original(*arguments)
        _C.install_forked_memory_handler()
        return result

    signal_handling._set_worker_signal_handlers = set_handlers


def _watch_excepthook():
    """Notes when an exception ends the program: sys.excepthook is called then. At a prompt it is called, too, but the
    program goes on. Called for each group anew, for programs set a sys.excepthook of their own after their imports."""
    global _excepthook
    if sys.excepthook is _excepthook:
        return
    former = sys.excepthook

    def excepthook(*exception):
        global _ended_by_exception
        if not sys.flags.interactive and not hasattr(sys, "ps1"):
            _ended_by_exception = True
        former(*exception)

    sys.excepthook = _excepthook = excepthook


def _close_all():
    """Where an exception ends the program (it has been printed by now), the others hear of an abort, and whose."""
    _C.close_all_backends(by_exception=_ended_by_exception)


dist.Backend.register_backend(NAME, _create_from_options, extended_api=True, devices=["cpu", "cuda"])
distributed_c10d._create_process_group_wrapper = _without_wrapper(distributed_c10d._create_process_group_wrapper)
_keep_handler_in_dataloader_workers()
_stores.install()
# Before the interpreter takes its modules apart: no thread of ours may call Python then. Runs after the handlers that
# the program registers later than this import.
atexit.register(_close_all)
