"""Forked children of a process that has groups: what they may not use, what they are told, what they may make."""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, run_ranks
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(BACKEND != "lockstep", reason="tests what Lockstep adds")


def in_child(action):
    """(exit status, stderr) of a forked child that does it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 2)
        status = 3
        try:
            action()
            status = 0
        except BaseException as error:
            os.write(2, f"{type(error).__module__}.{type(error).__qualname__}: {error}".encode())
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def child_uses_group(rank, world_size):
    group = dist.group.WORLD
    answers = [
        in_child(lambda: dist.all_reduce(torch.ones(2))),
        in_child(lambda: dist.send(torch.ones(2), 1 - rank)),
        in_child(lambda: group._get_backend(CPU).allocate_tensor(10, dtype=torch.float, device=CPU)),
        in_child(dist.destroy_process_group),
    ]
    dist.barrier()  # the parent's goes on
    return answers


def test_a_forked_child_cannot_use_the_group():
    for answers in run_ranks(child_uses_group, 2):
        for status, said in answers[:3]:
            assert status == 3
            assert "DistBackendError: process group '0' belongs to the parent of this forked process" in said
        assert answers[3] == (0, "")


def child_touches_memory(rank, world_size):
    backend = dist.group.WORLD._get_backend(CPU)
    shared = backend.allocate_tensor(1000, dtype=torch.float, device=CPU)
    model = DistributedDataParallel(torch.nn.Linear(30, 30), gradient_as_bucket_view=True)
    for _ in range(3):  # the buckets are rebuilt after the first
        model(torch.ones(2, 30)).sum().backward()
    parameter = model.module.weight
    answers = {
        "shared": in_child(lambda: shared.sum()),
        "bucket": in_child(lambda: parameter.grad.fill_(1)),
        "parameter": in_child(lambda: parameter.sum()),
        "copy": in_child(lambda copy=shared.clone(): copy.sum()),
        "freed": in_child(lambda: setattr(parameter, "grad", None)),
    }
    shared.fill_(1)
    parameter.grad.sum()
    return answers


def test_a_forked_child_that_touches_shared_memory_is_told_so():
    """Which also shows that DDP's buckets lie there."""
    for answers in run_ranks(child_touches_memory, 2):
        for name in ("shared", "bucket"):
            status, said = answers[name]
            assert status == 1 and said.startswith("lockstep: this forked process touched shared memory"), (name, said)
        for name in ("parameter", "copy", "freed"):
            assert answers[name] == (0, "")


class SharedDataset(torch.utils.data.Dataset):
    def __init__(self, tensor):
        self.tensor = tensor

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.tensor[index]


def loader_of_shared_memory(rank, world_size):
    shared = dist.group.WORLD._get_backend(CPU).allocate_tensor(4, dtype=torch.float, device=CPU)
    own = torch.utils.data.DataLoader(SharedDataset(shared.clone().fill_(2)), num_workers=1)
    assert [batch.item() for batch in own] == [2.0] * 4
    try:
        list(torch.utils.data.DataLoader(SharedDataset(shared), num_workers=1))
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


def test_a_worker_of_a_data_loader_that_touches_shared_memory_is_no_crash():
    for said in run_ranks(loader_of_shared_memory, 2):
        assert "exited unexpectedly with exit code 1" in said or "exited unexpectedly" in said
        assert "Segmentation fault" not in said


def children_with_groups(rank, world_size, folder):
    """Every rank's child makes a group of its own beside its parent's."""
    def own_group():
        dist.destroy_process_group()
        dist.init_process_group("lockstep", init_method=f"file://{folder}/children", rank=rank, world_size=world_size)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [world_size] * 3
        dist.destroy_process_group()

    answer = in_child(own_group)
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    return answer, tensor[0].item()


def test_a_forked_child_may_make_groups_of_its_own(tmp_path):
    assert run_ranks(children_with_groups, 2, str(tmp_path), hosts=1) == [((0, ""), 2.0)] * 2
