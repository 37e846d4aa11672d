"""What Python's DistributedDataParallel gains on the engine: gradient buckets in shared memory, where all_reduce need not
copy them; and its logging data call the backend by its name.

torch's Reducer makes its buckets as ordinary tensors, in its constructor and when it rebuilds them after the first
iteration; both happen inside of a call from Python. A subclass directs this thread's CPU allocations to the group's
arena meanwhile. (Giving a bucket other storage afterwards would be wrong: the reducer keeps views into the first one.)
"""

import contextlib
import logging
import threading

import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed as dist

from lockstep import _C

_log = logging.getLogger("lockstep")
_told = False
_backend_kind_lock = threading.Lock()  # while a group's kind is CUSTOM for one call
Wrapper = getattr(_c10d, "_ProcessGroupWrapper", ())  # torch without Gloo has none


def engine_of(process_group):
    """The engine behind a group's CPU tensors, or None if another backend is; and whether TORCH_DISTRIBUTED_DEBUG=DETAIL
    has wrapped it."""
    try:
        backend = process_group._get_backend(torch.device("cpu"))
    except RuntimeError:  # the group has no backend for CPU tensors
        return None, False
    wrapped = isinstance(backend, Wrapper)
    engine = backend.wrapped_pg if wrapped else backend
    return (engine, wrapped) if isinstance(engine, _C.ProcessGroupLockstep) else (None, False)


def _tell_once():
    global _told
    if not _told:
        _log.warning("DistributedDataParallel's gradient buckets are not in shared memory: another library has replaced "
                     "torch's CPU allocator, or memory is short. They are staged, which is correct but slower.")
    _told = True


@contextlib.contextmanager
def _buckets_in_arena(engine):
    """CPU tensors that this thread makes lie in the engine's arena; a warning if none does."""
    if engine is None:
        yield
        return
    with _C.ArenaAllocation(engine) as allocation:
        yield
        if allocation.bytes == 0:
            _tell_once()


class Reducer(dist.Reducer):
    """torch.distributed.Reducer whose CPU buckets lie in the group's arena, if the group's engine is Lockstep's."""

    def __init__(self, params, bucket_indices, per_bucket_size_limits, process_group, *args, **kwargs):
        self.engine, wrapped = engine_of(process_group)
        self.wrapped_gloo = process_group if wrapped and process_group.name() == "gloo" else None
        self.backend_name = None
        with contextlib.suppress(ValueError):  # a group that torch.distributed does not know has no name
            self.backend_name = dist.get_backend(process_group)
        has_cpu_gradients = any(param.device.type == "cpu" and param.requires_grad for param in params)
        self._bucket_engine = self.engine if has_cpu_gradients else None
        with _buckets_in_arena(self._bucket_engine):
            super().__init__(params, bucket_indices, per_bucket_size_limits, process_group, *args, **kwargs)

    def _rebuild_buckets(self):
        # Once in a training; every other call finds nothing to do, and then nothing is allocated.
        if self._bucket_engine is None:
            return super()._rebuild_buckets()
        with _C.ArenaAllocation(self._bucket_engine):
            return super()._rebuild_buckets()


class Logger(dist.Logger):
    """torch.distributed.Logger that calls the backend by its name, where torch says "custom"."""

    def __init__(self, reducer):
        super().__init__(reducer)
        # Not the reducer itself, which would then live as long as the logger's Python object.
        self._backend_name = reducer.backend_name if getattr(reducer, "engine", None) is not None else None
        self._wrapped_gloo = getattr(reducer, "wrapped_gloo", None)

    def set_construction_data_and_log(self, *arguments):
        if self._wrapped_gloo is None:
            return super().set_construction_data_and_log(*arguments)
        # torch takes the backend of a group called "gloo" for a ProcessGroupGloo and reads its options, where a wrapper has
        # none (torch 2.13; with Gloo itself it crashes).
        kinds = _c10d.ProcessGroup.BackendType
        with _backend_kind_lock:
            self._wrapped_gloo._set_default_backend(kinds.CUSTOM)
            try:
                return super().set_construction_data_and_log(*arguments)
            finally:
                self._wrapped_gloo._set_default_backend(kinds.GLOO)

    def _get_ddp_logging_data(self):
        data = super()._get_ddp_logging_data()
        if self._backend_name:
            data.strs_map = {**data.strs_map, "backend_name": self._backend_name}  # reading it makes a copy
        return data


def install():
    """From now on new DistributedDataParallel modules use these classes. May be called again."""
    dist.Reducer = Reducer
    dist.Logger = Logger
