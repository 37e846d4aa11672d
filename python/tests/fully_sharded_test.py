"""Sharded training: FSDP in both forms, ZeRO, pipelines and checkpoints, against one process that has it all."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import BACKEND, run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

WIDTH = 7  # divisible by nothing
STEPS = 4


def make_net():
    torch.manual_seed(0)
    def layer():
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, 50), torch.nn.Tanh(), torch.nn.Linear(50, WIDTH))

    return torch.nn.Sequential(layer(), layer(), layer())


def batch(rank, step):
    return torch.sin(torch.arange(4.0 * WIDTH) * (1 + rank) + step).view(4, WIDTH)


def loss_of(model, inputs):
    return (model(inputs) - inputs.flip(1)).pow(2).mean()


def train(model, optimizer, batches, clip=None):
    for inputs in batches:
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def train_alone(world, kind=torch.optim.Adam, steps=STEPS, clip=None, **options):
    """One process with every rank's batches."""
    model = make_net()
    optimizer = kind(model.parameters(), **{"lr": 0.01, **options})
    train(model, optimizer, [torch.cat([batch(rank, step) for rank in range(world)]) for step in range(steps)], clip)
    return model, optimizer


def batches(rank, steps=STEPS):
    return [batch(rank, step) for step in range(steps)]


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, value in state.items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(full, expected[name], msg=lambda message, name=name: f"{name}: {message}")


def sharded_net(mesh=None, **options):
    model = make_net()
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def run_fully_shard(rank, world):
    for reshard in (True, False):
        model = sharded_net(reshard_after_forward=reshard)
        assert model[0][0].weight.to_local().shape[0] < 50
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model, optimizer, batches(rank), clip=0.1)
        assert_same(model.state_dict(), train_alone(world, clip=0.1)[0].state_dict())


def run_hybrid_shard(rank, world):
    """Replicated across two pairs, sharded within each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded_net(mesh)
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), batches(rank))
    assert_same(model.state_dict(), train_alone(world)[0].state_dict())


def run_mixed_precision(rank, world):
    """Gathered and reduced in bfloat16: nearly the same, and not quite."""
    model = sharded_net(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), batches(rank))
    expected = train_alone(world, torch.optim.SGD, lr=0.05)[0].state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.full_tensor(), expected[name], atol=0.01, rtol=0)
    assert any(not torch.equal(value.full_tensor(), expected[name]) for name, value in model.state_dict().items())


def run_gradient_accumulation(rank, world):
    model, plain = sharded_net(), make_net()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        loss_of(model, batch(rank, step)).backward()
        for peer in range(world):
            (loss_of(plain, batch(peer, step)) / world).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same(gradients, {name: parameter.grad for name, parameter in plain.named_parameters()})


@pytest.mark.parametrize("run", [run_fully_shard, run_mixed_precision, run_gradient_accumulation])
def test_fully_shard(run):
    run_ranks(run, 2)


def test_fully_shard_on_a_2d_mesh():
    run_ranks(run_hybrid_shard, 4)


def run_fsdp1(rank, world):
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = FullyShardedDataParallel(
            make_net(), device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        )  # fmt: skip
        train(model, torch.optim.Adam(model.parameters(), lr=0.01), batches(rank))
        with FullyShardedDataParallel.summon_full_params(model):
            state = {name.replace("_fsdp_wrapped_module.", ""): p.clone() for name, p in model.named_parameters()}
        assert_same(state, dict(train_alone(world)[0].named_parameters()))


def test_fsdp1():
    run_ranks(run_fsdp1, 2)


def run_zero(rank, world):
    for overlap in (False, True):
        model = DistributedDataParallel(make_net(), gradient_as_bucket_view=overlap)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=overlap
        )
        train(model, optimizer, batches(rank))
        plain, plain_optimizer = train_alone(world)
        assert_same(model.module.state_dict(), plain.state_dict())
        owned = sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])
        assert 0 < owned < sum(p.numel() for p in model.parameters())
        optimizer.consolidate_state_dict(to=1)
        if rank != 1:
            continue
        state, plain_state = optimizer.state_dict(), plain_optimizer.state_dict()
        assert state["state"].keys() == plain_state["state"].keys()
        for index, values in plain_state["state"].items():
            assert_same(state["state"][index], values)


def test_zero():
    run_ranks(run_zero, 2)


def run_zero_in_backward(rank, world):
    """Steps taken by a hook of DDP; the first three iterations only learn the buckets, so there it takes none.

    Its sister hook_with_zero_step_interleaved broadcasts from callbacks; only CUDA streams give these one order.
    """
    model = DistributedDataParallel(make_net(), bucket_cap_mb=0.005, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    train(model, optimizer, [batch(rank, 0)] * 3 + batches(rank))
    assert_same(model.module.state_dict(), train_alone(world, torch.optim.SGD, lr=0.05)[0].state_dict())


@pytest.mark.skipif(BACKEND == "gloo", reason="the hook refuses it")
def test_zero_in_backward():
    run_ranks(run_zero_in_backward, 2)


def stage_of(net, first, count):
    return torch.nn.Sequential(*list(net)[first : first + count])


def run_pipeline(rank, world, schedule):
    """Two ranks hold a net of four parts; losses and gradients are those of the whole."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(4)])
    plain = copy.deepcopy(net)
    interleaved = schedule is ScheduleInterleaved1F1B
    count = 1 if interleaved else 2
    places = [rank, rank + 2] if interleaved else [rank]
    parts = [stage_of(net, place * count, count) for place in places]
    stages = [PipelineStage(part, place, 4 // count, torch.device("cpu")) for part, place in zip(parts, places)]
    target = torch.cos(torch.arange(8.0 * WIDTH)).view(8, WIDTH)
    inputs = torch.sin(torch.arange(8.0 * WIDTH)).view(8, WIDTH)
    run = schedule(stages if interleaved else stages[0], n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    losses = []
    if rank == 0:
        run.step(inputs)
    else:
        output = run.step(target=target, losses=losses)
        torch.testing.assert_close(output, plain(inputs))
    loss = torch.nn.functional.mse_loss(plain(inputs), target)
    loss.backward()
    if losses:
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
    for place, part in zip(places, parts):
        for parameter, other in zip(part.parameters(), stage_of(plain, place * count, count).parameters()):
            torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_pipeline(schedule):
    run_ranks(run_pipeline, 2, schedule)


class Whole(dcp.stateful.Stateful):
    """Model and optimizer as one thing to save."""

    def __init__(self):
        self.model = sharded_net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def run_save(rank, world, folder, asynchronous):
    whole = Whole()
    train(whole.model, whole.optimizer, batches(rank, 2))
    state = {"whole": whole, "step": 2, "tensor": torch.arange(5)}
    if not asynchronous:
        dcp.save(state, checkpoint_id=folder)
    else:
        saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend=dist.get_backend()))
        dist.all_reduce(torch.ones(1000))  # meanwhile training goes on
        saving.result()


def run_load(rank, world, folder):
    """Goes on where others stopped: the model is what it would be had all been here from the start."""
    whole = Whole()
    state = {"whole": whole, "step": 0, "tensor": torch.zeros(5, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=folder)
    assert state["step"] == 2 and state["tensor"].tolist() == [0, 1, 2, 3, 4]
    every = [torch.cat([batch(peer, step) for peer in range(2)]) for step in (2, 3)]
    train(whole.model, whole.optimizer, every)  # each rank with the whole batch: their mean is that of one
    assert_same(whole.model.state_dict(), train_alone(2)[0].state_dict())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_checkpoint_of_two_ranks_continues_on_three(asynchronous, tmp_path):
    run_ranks(run_save, 2, str(tmp_path / "checkpoint"), asynchronous)
    run_ranks(run_load, 3, str(tmp_path / "checkpoint"))


def run_load_nothing(rank, world, folder):
    dcp.load({"tensor": torch.zeros(1)}, checkpoint_id=folder)


def test_a_missing_checkpoint_is_told_on_every_rank(tmp_path):
    failure = dcp.api.CheckpointException
    for text in run_ranks(run_load_nothing, 2, str(tmp_path / "none"), expect={0: failure, 1: failure}):
        assert "No such file" in text or "not found" in text
