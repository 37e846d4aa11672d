"""What stands on the collectives: functional collectives, torch.distributed.nn, groups, meshes, DTensor, profiler."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from ranks import BACKEND, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def rows(rank, count=4):
    return torch.arange(2.0 * count).view(count, 2) + 100 * rank


def run_functional(rank, world):
    group = dist.group.WORLD
    total = sum(rows(peer) for peer in range(world))
    assert torch.equal(functional.all_reduce(rows(rank), "sum", group), total)
    assert torch.equal(functional.all_reduce(rows(rank), "avg", group), total / world)
    gathered = functional.all_gather_tensor(rows(rank), 1, group)
    assert torch.equal(gathered, torch.cat([rows(peer) for peer in range(world)], 1))
    scattered = functional.reduce_scatter_tensor(rows(rank), "sum", 0, group)
    assert torch.equal(scattered, total.chunk(world)[rank])
    parts = functional.all_to_all_single(rows(rank), None, None, group)
    assert torch.equal(parts, torch.cat([rows(peer).chunk(world)[rank] for peer in range(world)]))
    assert torch.equal(functional.broadcast(rows(rank), 1, group), rows(1))
    many = functional.all_reduce_coalesced([rows(rank), rows(rank, 3)], "sum", group)
    assert torch.equal(many[1], sum(rows(peer, 3) for peer in range(world)))
    many = functional.all_gather_into_tensor_coalesced([rows(rank)], group)
    assert torch.equal(many[0], torch.cat([rows(peer) for peer in range(world)]))


def run_functional_gradients(rank, world):
    """The adjoint of each collective: <A x, y> = <x, A' y> summed over the ranks."""
    group = dist.group.WORLD
    calls = [
        lambda x: functional.all_gather_tensor_autograd(x, 0, group),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
        lambda x: functional.all_to_all_single_autograd(x, None, None, group),
        lambda x: differentiable.all_reduce(x.clone()),
        lambda x: torch.cat(differentiable.all_gather(x)),
        lambda x: differentiable.broadcast(x.clone(), 1),
        lambda x: differentiable.reduce_scatter(torch.empty(x.shape[0] // world, 2), list(x.chunk(world))),
        lambda x: differentiable.all_to_all_single(torch.empty_like(x), x),
        lambda x: torch.cat(differentiable.all_to_all([torch.empty(2, 2) for _ in range(world)], list(x.chunk(world)))),
        lambda x: differentiable.reduce(x.clone(), 1) * (rank == 1),
        lambda x: torch.cat(differentiable.gather(x, 1)) * (rank == 1),
        lambda x: differentiable.scatter(list(x.chunk(world)), 0),
    ]
    for index, call in enumerate(calls):
        x = rows(rank).requires_grad_()
        output = call(x)
        weight = torch.arange(float(output.numel())).view_as(output) + 7 * rank
        (output * weight).sum().backward()
        sides = torch.stack([(output.detach() * weight).sum(), (x.detach() * x.grad).sum()]).double()
        dist.all_reduce(sides)
        assert sides[0] != 0
        torch.testing.assert_close(sides[0], sides[1], msg=lambda message, i=index: f"call {i}: {message}")


def run_compiled(rank, world):
    def step(x):
        y = functional.all_reduce(x.sin(), "sum", dist.group.WORLD)
        return functional.all_gather_tensor(y + 1, 0, dist.group.WORLD)

    expected = step(rows(rank))
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        assert torch.equal(compiled(rows(rank)), expected), backend
        assert torch.equal(compiled(rows(rank)), expected), backend


def run_compiled_collectives(rank, world):
    """Ordinary calls are rewritten into functional ones by the compiler."""

    def step(x):
        x = x * 2
        dist.all_reduce(x)
        return x + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(rows(rank)), sum(2 * rows(peer) for peer in range(world)) + 1)


@pytest.mark.parametrize("run", [run_functional, run_functional_gradients, run_compiled, run_compiled_collectives])
def test_functional(run):
    run_ranks(run, 2)


def run_groups(rank, world):
    """Overlapping groups, groups without this rank, subgroups by size and by list, of another backend too."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([3, 0])]
    for group, members in zip(pairs, ([0, 1], [1, 2], [0, 3])):
        if rank in members:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)
            assert dist.get_process_group_ranks(group) == sorted(members)
        else:
            assert dist.get_rank(group) == -1
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == 2
    gathered = [None, None]
    dist.all_gather_object(gathered, rank, group=mine)
    assert gathered == [rank // 2 * 2, rank // 2 * 2 + 1]
    odd, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    tensor = torch.tensor([rank])
    dist.broadcast(tensor, group=odd, group_src=1)
    assert tensor.item() == (2 if rank % 2 == 0 else 3)
    for group in (*groups, odd):
        if dist.get_rank(group) >= 0:
            dist.barrier(group)
            dist.destroy_process_group(group)
    if rank < 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 1
    for backend in ("gloo", BACKEND, f"cpu:{BACKEND}"):
        group = dist.new_group(backend=backend)
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 6, backend
    assert BACKEND in dist.get_backend_config(group)


@pytest.mark.parametrize("default", [BACKEND, "gloo", f"cpu:{BACKEND}"])
def test_groups(default):
    """Groups of both engines under a default group of either."""
    run_ranks(run_groups if default != "gloo" else run_groups_under_gloo, 4, backend=default)


def run_groups_under_gloo(rank, world):
    if BACKEND == "lockstep":
        import lockstep  # noqa: F401
    run_groups(rank, world)


def run_mesh(rank, world):
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    assert line.size() == 4 and line.get_local_rank() == rank
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    assert list(square.get_coordinate()) == [rank // 2, rank % 2]
    for name, members in (("row", (rank % 2, rank % 2 + 2)), ("column", (rank // 2 * 2, rank // 2 * 2 + 1))):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=square[name].get_group())
        assert tensor.item() == sum(members), name
        assert dist.get_process_group_ranks(square.get_group(name)) == list(members)
    flat = square["row", "column"]._flatten("flat")
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=flat.get_group())
    assert tensor.item() == 6


def run_dtensor(rank, world):
    """Every change of placement on a 2 x 2 mesh gives the tensor back."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(30.0).view(6, 5)  # 5 and, by four, 6 are not divisible
    placements = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Replicate()],
                  [Shard(1), Replicate()]]  # fmt: skip
    for source in placements:
        tensor = distribute_tensor(full, mesh, source)
        for target in placements:
            assert torch.equal(tensor.redistribute(mesh, target).full_tensor(), full), (source, target)
    for operation, result in (("sum", 4 * full), ("avg", full), ("max", full)):
        partial = DTensor.from_local(full, mesh, [Partial(operation), Partial(operation)])
        assert torch.equal(partial.full_tensor(), result), operation
    partial = DTensor.from_local(full, mesh, [Partial(), Replicate()])
    assert torch.equal(partial.redistribute(mesh, [Shard(0), Replicate()]).full_tensor(), 2 * full)
    left = distribute_tensor(full, mesh, [Shard(1), Replicate()])
    right = distribute_tensor(full.T.contiguous(), mesh, [Shard(0), Replicate()])
    torch.testing.assert_close((left @ right).full_tensor(), full @ full.T)


def run_tensor_parallel(rank, world):
    torch.manual_seed(0)
    sizes = (6, 8, 4)
    plain = torch.nn.Sequential(torch.nn.Linear(*sizes[:2]), torch.nn.ReLU(), torch.nn.Linear(*sizes[1:]))
    split = torch.nn.Sequential(torch.nn.Linear(*sizes[:2]), torch.nn.ReLU(), torch.nn.Linear(*sizes[1:]))
    split.load_state_dict(plain.state_dict())
    parallelize_module(split, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert split[0].weight.to_local().shape[0] == 8 // world
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, split)]
    for step in range(3):
        inputs = torch.sin(torch.arange(18.0) + step).view(3, 6)
        for model, optimizer in zip((plain, split), optimizers):
            optimizer.zero_grad()
            model(inputs).pow(2).sum().backward()
            optimizer.step()
    for parameter, other in zip(plain.parameters(), split.parameters()):
        torch.testing.assert_close(other.full_tensor(), parameter)


def test_device_mesh():
    run_ranks(run_mesh, 4)


def test_dtensor():
    run_ranks(run_dtensor, 4)


def test_tensor_parallel():
    run_ranks(run_tensor_parallel, 2)


def run_profiled(rank, world, path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(1000))
        dist.all_reduce(torch.ones(10), async_op=True).wait()
        dist.broadcast(torch.ones(10), 0)
    profiler.export_chrome_trace(f"{path}/{rank}.json")
    with open(f"{path}/{rank}.json") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]


def test_profiler_shows_collectives(tmp_path):
    """Of the call (c10d::) and of its work, whichever thread does it."""
    for names in run_ranks(run_profiled, 2, str(tmp_path)):
        assert names.count("c10d::allreduce_") == 2 and names.count("c10d::broadcast_") == 1
        assert names.count(f"{BACKEND}:all_reduce") == 2 and names.count(f"{BACKEND}:broadcast") == 1
