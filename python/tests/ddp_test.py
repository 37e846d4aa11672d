"""DistributedDataParallel: its options, comm hooks, averagers and Join, each against the same training on Gloo."""

import collections
import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, run_ranks
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.optim.utils import functional_optim_map
from torch.nn.parallel import DistributedDataParallel

BATCH = 4
STEPS = 5
SMALL_BUCKETS = dict(bucket_cap_mb=0.01)


class Net(torch.nn.Module):
    """A convolution, a batch norm's buffers, a tied weight, layers above and below a bucket's size, and a branch."""

    def __init__(self, sparse=False):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 16, sparse=sparse)
        self.convolution = torch.nn.Conv1d(1, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(4)
        self.wide = torch.nn.Linear(64, 200)
        self.middle = torch.nn.Linear(200, 200)
        self.head = torch.nn.Linear(200, 10, bias=False)
        self.branch = torch.nn.Linear(10, 10)
        self.tied = self.head

    def forward(self, inputs, use_branch=True):
        x = self.embedding(inputs).unsqueeze(1)
        x = self.norm(self.convolution(x)).flatten(1).relu()
        x = self.wide(x).relu()
        x = self.head(x) + self.tied(self.middle(x).relu())
        return self.branch(x) if use_branch else x


def make_net(**options):
    torch.manual_seed(0)
    return Net(**options)


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(10, (BATCH,), generator=generator), torch.randint(10, (BATCH,), generator=generator)


def loss_of(model, rank, step, **options):
    inputs, targets = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(inputs, **options), targets)


def train(rank, group, prepare=None, make=make_net, use_branch=lambda rank, step: True, **options):
    """The parameters after some steps."""
    model = DistributedDataParallel(make(), process_group=group, **options)
    if prepare:
        prepare(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, rank, step, use_branch=use_branch(rank, step)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(parameters, expected, what):
    for index, (parameter, like) in enumerate(zip(parameters, expected, strict=True)):
        torch.testing.assert_close(parameter, like, msg=lambda message: f"{what}, parameter {index}: {message}")


def assert_ranks_agree(parameters, what):
    """Bit for bit."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, parameters)
    assert all(torch.equal(a, b) for a, b in zip(everywhere[0], everywhere[-1])), what


def compare(rank, gloo, name, **options):
    parameters = train(rank, dist.group.WORLD, **options)
    assert_ranks_agree(parameters, name)
    assert_same(parameters, train(rank, gloo, **options), name)
    moved = [not torch.equal(a, b) for a, b in zip(parameters, make_net().parameters())]
    assert any(moved), f"{name}: nothing was learned"


OPTIONS = {
    "plain": {},
    "small buckets": SMALL_BUCKETS,
    "bucket views": dict(gradient_as_bucket_view=True, **SMALL_BUCKETS),
    "static graph": dict(static_graph=True, **SMALL_BUCKETS),
    "static graph, bucket views": dict(static_graph=True, gradient_as_bucket_view=True),
    "unused parameters": dict(
        find_unused_parameters=True, use_branch=lambda rank, step: step % 2 == 0, **SMALL_BUCKETS
    ),
    "used on one rank only": dict(find_unused_parameters=True, use_branch=lambda rank, step: (rank + step) % 2 == 0),
    "never used, bucket views": dict(
        find_unused_parameters=True, gradient_as_bucket_view=True, use_branch=lambda rank, step: False
    ),
    "buffers left alone": dict(broadcast_buffers=False),
}


def run_options(rank, world):
    gloo = dist.new_group(backend="gloo")
    for name, options in OPTIONS.items():
        compare(rank, gloo, name, **options)
    compare(rank, gloo, "sparse embedding", make=functools.partial(make_net, sparse=True), **SMALL_BUCKETS)


def run_whole_batch(rank, world):
    """Two ranks with half a batch each are one with all of it. Without batch norm, which sees halves."""
    nets = [make_net() for _ in range(2)]
    for net in nets:
        net.norm = torch.nn.Identity()
    parameters = train(rank, dist.group.WORLD, make=lambda: nets[0], **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(nets[1].parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(loss_of(nets[1], peer, step) / world for peer in range(world)).backward()
        optimizer.step()
    assert_same(parameters, list(nets[1].parameters()), "whole batch")


def run_no_sync(rank, world):
    """Gradients of three batches, reduced once, are those of all ranks' three batches."""
    for options in ({}, dict(gradient_as_bucket_view=True), dict(find_unused_parameters=True)):
        net = make_net().eval()
        plain = copy.deepcopy(net)
        model = DistributedDataParallel(net, **options, **SMALL_BUCKETS)
        for step in range(3):
            with model.no_sync() if step < 2 else contextlib.nullcontext():
                loss_of(model, rank, step).backward()
        for peer in range(world):
            for step in range(3):
                (loss_of(plain, peer, step) / world).backward()
        for (name, parameter), other in zip(net.named_parameters(), plain.parameters()):
            torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text: f"{options} {name}: {text}")


@pytest.mark.parametrize("run", [run_options, run_whole_batch, run_no_sync])
def test_ddp(run):
    run_ranks(run, 2)


def run_different_models(rank, world):
    DistributedDataParallel(torch.nn.Linear(2, 3 + rank))


def test_different_models_are_refused():
    texts = run_ranks(run_different_models, 2, expect={0: RuntimeError, 1: RuntimeError})
    assert "appears not to match" in texts[1]  # rank 0's are the ones to match


def by_type(kind, model, group):
    register_ddp_comm_hook(kind, model, group)


def by_function(hook, model, group):
    model.register_comm_hook(group, hook)


def by_engine(kind, model, group):
    model._register_builtin_comm_hook(kind)


def power_sgd(model, group):
    """Compressing from the second step on, which the batched hook cannot do on torch 2.13 (a wrong assertion)."""
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def post_local_sgd(model, group):
    """The subgroup of each rank is itself: local steps after the third."""
    subgroup, _ = dist.new_subgroups(dist.get_world_size())
    state = post_localSGD_hook.PostLocalSGDState(group, subgroup, start_localSGD_iter=3)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def overlapped(model, group):
    optimizer = functional_optim_map[torch.optim.SGD](list(model.parameters()), lr=0.01, _allow_empty_param_list=True)
    state = optimizer_overlap_hooks._OptimizerHookState(optimizer)
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    model.register_comm_hook(group, hook)


OTHER_HOOKS = ("NOOP", "QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL")  # have tests of their own
HOOKS = {kind.name: functools.partial(by_type, kind) for kind in DDPCommHookType if kind.name not in OTHER_HOOKS} | {
    "fp16 wrapper": functools.partial(by_function, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 wrapper": functools.partial(by_function, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "engine's all-reduce": functools.partial(by_engine, dist.BuiltinCommHookType.ALLREDUCE),
    "engine's fp16": functools.partial(by_engine, dist.BuiltinCommHookType.FP16_COMPRESS),
    "PowerSGD from the second step": power_sgd,
    "post-local SGD": post_local_sgd,
    "overlapped optimizer": overlapped,
}


def run_hooks(rank, world, names):
    gloo = dist.new_group(backend="gloo")
    for name in names:
        several = {} if HOOKS[name] is power_sgd else SMALL_BUCKETS  # on Gloo it hangs with several
        compare(rank, gloo, name, prepare=HOOKS[name], **several)


def run_quantization_hooks(rank, world):
    """Gloo cannot: they read NCCL's form of an all_gather's future. So: the mean, up to steps of 1/255 of the range."""
    for name in OTHER_HOOKS[1:]:
        net = make_net().eval()
        plain = copy.deepcopy(net)
        model = DistributedDataParallel(net)
        register_ddp_comm_hook(DDPCommHookType[name], model)
        loss_of(model, rank, 0).backward()
        for peer in range(world):
            (loss_of(plain, peer, 0) / world).backward()
        largest = max(parameter.grad.abs().max() for parameter in plain.parameters())
        for parameter, other in zip(net.parameters(), plain.parameters()):
            assert (parameter.grad - other.grad).abs().max() < largest * 3 / 255, name
        assert_ranks_agree([parameter.grad for parameter in net.parameters()], name)


def run_debugged(rank, world):
    """In Gloo's place torch's wrapper is around the engine, from torch 2.13 on. On Gloo itself DistributedDataParallel
    crashes then."""
    import lockstep

    lockstep.replace_gloo()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(backend="gloo")
    net = make_net().eval()
    plain = copy.deepcopy(net)
    model = DistributedDataParallel(net, process_group=group)
    wrapped = isinstance(group._get_backend(torch.device("cpu")), torch._C._distributed_c10d._ProcessGroupWrapper)
    assert wrapped == (torch.__version__ >= (2, 13))
    assert model._get_ddp_logging_data()["backend_name"] == "gloo"
    loss_of(model, rank, 0).backward()
    for peer in range(world):
        (loss_of(plain, peer, 0) / world).backward()
    for parameter, other in zip(net.parameters(), plain.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad)


def run_noop_hook(rank, world):
    """The gradients stay each rank's own."""
    net = make_net().eval()
    plain = copy.deepcopy(net)
    model = DistributedDataParallel(net)
    register_ddp_comm_hook(DDPCommHookType.NOOP, model)
    loss_of(model, rank, 0).backward()
    loss_of(plain, rank, 0).backward()
    assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()], "noop")


@pytest.mark.parametrize("part", range(3))
def test_comm_hooks(part):
    run_ranks(run_hooks, 2, sorted(HOOKS)[part::3])


@pytest.mark.skipif(BACKEND == "gloo", reason="these hooks need the form that NCCL gives an all_gather's future")
def test_quantization_hooks():
    run_ranks(run_quantization_hooks, 2)


def test_noop_hook():
    run_ranks(run_noop_hook, 2)


@pytest.mark.skipif(BACKEND == "gloo", reason="it crashes")
def test_debug_level_detail():
    run_ranks(run_debugged, 2)


def run_averagers(rank, world):
    """Each rank trains alone, then models are averaged: the mean of what they were."""
    net = torch.nn.Linear(3, 2)
    values = [torch.full_like(parameter, float(rank)) for parameter in net.parameters()]

    def reset():
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), values):
                parameter.copy_(value)
                parameter.grad = torch.zeros_like(value)  # what has none is left out

    periodic = averagers.PeriodicModelAverager(period=2, warmup_steps=1)
    seen = []
    for _ in range(4):
        reset()
        periodic.average_parameters(net.parameters())
        seen.append(net.weight[0, 0].item())
    alone, mean = float(rank), sum(range(world)) / world
    assert seen == [alone, mean, alone, mean]
    hierarchical = hierarchical_model_averager.HierarchicalModelAverager(collections.OrderedDict([(1, 2), (2, world)]))
    seen = []
    for _ in range(3):
        reset()
        hierarchical.average_parameters(net.parameters())
        seen.append(net.weight[0, 0].item())
    assert seen == [mean, rank // 2 * 2 + 0.5, mean]


def run_post_local_optimizer(rank, world):
    """Local steps, averaged every second: equal on all ranks exactly after these."""
    net = make_net().eval()
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), averager)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
        copies = [torch.zeros_like(net.wide.weight) for _ in range(world)]
        dist.all_gather(copies, net.wide.weight.detach())
        assert torch.equal(copies[0], copies[1]) == (step % 2 == 0), step
    assert optimizer.state_dict()["step"] == 4


def test_model_averaging():
    run_ranks(run_averagers, 4)
    run_ranks(run_post_local_optimizer, 2)


def run_join(rank, world, group=None):
    """Rank r has 2 + 2 r batches."""
    model = DistributedDataParallel(make_net().eval(), process_group=group, **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    return list(model.parameters())


def run_joins(rank, world):
    parameters = run_join(rank, world)
    assert_ranks_agree(parameters, "join")
    assert_same(parameters, run_join(rank, world, dist.new_group(backend="gloo")), "join")


def test_join():
    run_ranks(run_joins, 2)


def run_join_that_throws(rank, world):
    model = DistributedDataParallel(make_net().eval())
    with model.join(throw_on_early_termination=True):
        for step in range(2 + rank):
            loss_of(model, rank, step).backward()


def test_join_tells_the_others():
    for text in run_ranks(run_join_that_throws, 2, expect={0: RuntimeError, 1: RuntimeError}):
        assert "exhausted" in text
