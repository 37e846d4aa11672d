"""Puts the engine where programs ask for "gloo": those with a fixed list of backends then run on it unchanged."""

import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep import _C, _backend, _ddp

_Gloo = _c10d.ProcessGroupGloo if dist.is_gloo_available() else None
_KINDS = (_backend.ProcessGroupLockstep, _Gloo) if _Gloo else (_backend.ProcessGroupLockstep,)
_replaced = False

if _Gloo is not None:
    for _member in ("Device", "_Options", "create_default_device", "create_device"):
        setattr(_C.ProcessGroupGloo, _member, vars(_Gloo)[_member])
if _ddp.Wrapper:
    # torch's _set_pg_timeout() calls it on what is a ProcessGroupGloo.
    _ddp.Wrapper._set_default_timeout = lambda wrapper, timeout: wrapper.wrapped_pg._set_default_timeout(timeout)


class _StandIn(type):
    """isinstance(group, ProcessGroupGloo) holds for the engine, also in torch's wrapper around it
    (TORCH_DISTRIBUTED_DEBUG=DETAIL), and still for true Gloo groups of before."""

    def __instancecheck__(cls, instance):
        engine = instance.wrapped_pg if isinstance(instance, _ddp.Wrapper) else None
        return isinstance(instance, _KINDS) or isinstance(engine, _C.ProcessGroupGloo)

    def __subclasscheck__(cls, subclass):
        return issubclass(subclass, _KINDS)

    def __getattr__(cls, name):
        if _Gloo is None:
            raise AttributeError(name)
        return getattr(_Gloo, name)  # Options, create_device and the like


class ProcessGroupGloo(metaclass=_StandIn):
    """Called as torch's class of that name, ProcessGroupGloo(store, rank, size, timeout or options); gives the engine."""

    def __new__(cls, store, rank, size, timeout=distributed_c10d.default_pg_timeout, group_name="gloo"):
        timeout = getattr(timeout, "_timeout", timeout)  # of options
        return _backend.create(store, rank, size, timeout, group_name, stands_in_for_gloo=True)


ProcessGroupGloo.__module__ = "torch.distributed.distributed_c10d"


def replace_gloo():
    """From now on every process group that asks for "gloo" gets Lockstep's engine.

    Groups that exist already stay what they are. Tensors on other devices than the CPU keep what they have in
    "cpu:gloo,cuda:nccl"; a group "gloo" takes them too, as Gloo does, by way of the host's memory. May be called again.
    Call it in every process, before its first process group.
    """
    global _replaced
    if _replaced:
        return
    _replaced = True
    for module in (_c10d, distributed_c10d, dist):
        module.ProcessGroupGloo = ProcessGroupGloo
    distributed_c10d._ProcessGroupWrapper = _ddp.Wrapper  # for isinstance(), where a torch without Gloo has none
    distributed_c10d._GLOO_AVAILABLE = True


def gloo_is_replaced():
    """Whether "gloo" means Lockstep's engine in this process."""
    return _replaced
