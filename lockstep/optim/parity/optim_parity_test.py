"""The sharded and averaging optimizers against PyTorch's with Gloo: same gradients, same parameters."""

import pathlib

import pytest
import torch

HERE = pathlib.Path(__file__).parent
STEPS = 10
SHAPES = [(7, 3), (5,), (30, 4), (2, 3, 4), (1,), (11,), (6, 6)]
KINDS = ["zero", "zero with buckets", "post-local SGD", "hierarchical"]


def make_jobs(world_size):
    jobs = {}
    for kind in KINDS:
        for optimizer in ("adam", "sgd"):
            generator = torch.Generator().manual_seed(5)

            def values(*sizes, each_rank):
                tensor = torch.randn(*sizes, dtype=torch.float64, generator=generator)
                # The sharded optimizers are used with DDP: all ranks have the same parameters and gradients.
                return tensor if each_rank else tensor.narrow(-len(shape) - 1, 0, 1).expand_as(tensor).contiguous()

            initial, gradients = [], []
            for shape in SHAPES:
                initial.append(values(world_size, *shape, each_rank=not kind.startswith("zero")))
                gradients.append(values(STEPS, world_size, *shape, each_rank=not kind.startswith("zero")))
            jobs[f"{kind}, {optimizer}"] = {"kind": kind, "optimizer": optimizer, "initial": initial, "gradients": gradients}
    return jobs


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)])
def trained(request, run_lockstep, run_pytorch, tmp_path_factory):
    """(jobs, our results by rank, PyTorch's by rank)"""
    world_size = request.param
    folder = tmp_path_factory.mktemp("parity")
    jobs = make_jobs(world_size)
    torch.save(jobs, folder / "jobs.pt")
    ours = run_lockstep("optim_parity_driver", folder / "jobs.pt", folder / "ours", output=folder / "ours",
                        world_size=world_size, OMP_NUM_THREADS="1")
    theirs = run_pytorch(HERE / "optim_parity_peer.py", folder / "jobs.pt", folder / "theirs", world_size,
                         output=folder / "theirs", world_size=world_size, OMP_NUM_THREADS="1")
    return jobs, ours, theirs


def test_parameters_equal_pytorchs_on_every_rank(trained):
    jobs, ours, theirs = trained
    for name, job in jobs.items():
        for rank, expected in enumerate(theirs):
            for index, initial in enumerate(job["initial"]):
                actual, wanted = ours[rank][name][str(index)], expected[name][str(index)]
                error = (actual - wanted).abs().max().item()
                assert error <= 1e-12 * max(1, wanted.abs().max().item()), f"{name}, rank {rank}, parameter {index}"
                assert not torch.equal(actual, initial[rank]), f"{name}: parameter {index} did not move"


def test_parameters_have_the_same_owners(trained):
    jobs, ours, theirs = trained
    for name in jobs:
        if name.startswith("zero"):
            for rank in range(len(theirs)):
                assert torch.equal(ours[rank][name]["owners"], theirs[rank][name]["owners"]), name
