"""CUDA tensors on the engine, by way of the host: two ranks on one card, and CPU tensors beside them."""

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, run_ranks
from torch.nn.parallel import DistributedDataParallel


def run_both_devices(rank, world):
    """Without a card, too: the group has the engine for both kinds of tensors, and prefers neither."""
    config = dist.distributed_c10d._world.pg_backend_config[dist.group.WORLD]
    assert config == "cpu:lockstep,cuda:lockstep", config
    engines = [dist.group.WORLD._get_backend(torch.device(device)) for device in ("cpu", "cuda")]
    assert engines[0] is engines[1] or type(engines[0]) is type(engines[1]), engines
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    return [each["rank"] for each in objects]


@pytest.mark.skipif(BACKEND != "lockstep", reason="tests our registration")
def test_group_takes_both_kinds_of_tensors():
    assert run_ranks(run_both_devices, 2) == [[0, 1], [0, 1]]


def run_cuda(rank, world):
    tensor = torch.full((100_000,), rank + 1.0, device="cuda")
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    doubled = tensor * 2  # ordered after the result without a synchronisation
    assert torch.equal(doubled.cpu(), torch.full((100_000,), 6.0))
    mixed = torch.tensor([rank + 1.0], device="cuda" if rank == 0 else "cpu")
    dist.all_reduce(mixed)
    assert mixed.item() == 3.0
    value = dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0] + 1).wait()
    assert torch.equal(value.cpu(), torch.full((100_000,), 7.0))
    received = torch.zeros(5, device="cuda")
    for operation in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((5,), float(rank), device="cuda"), 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]):
        operation.wait()
    assert torch.equal(received.cpu(), torch.full((5,), 1.0 - rank))
    dist.barrier()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(8, 4).cuda())
    model(torch.randn(3, 8, device="cuda")).sum().backward()
    gradients = [torch.zeros(4, 8, device="cuda") for _ in range(world)]
    dist.all_gather(gradients, model.module.weight.grad)
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors():
    run_ranks(run_cuda, 2)
