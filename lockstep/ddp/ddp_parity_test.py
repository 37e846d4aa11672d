"""DistributedDataParallel against PyTorch's with Gloo: same weights, same batches, same result."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import parity_peer  # noqa: E402
STEPS = 20
BATCH = 8  # a rank


def make_jobs(world_size):
    jobs = {}
    for model in ("mlp", "cnn"):
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(11)
            net = parity_peer.MODELS[model]().to(dtype)
            jobs[f"{model} {dtype}"] = {
                "model": model,
                "weights": dict(net.state_dict()),
                "inputs": torch.randn(STEPS, world_size * BATCH, 64, dtype=dtype),
                "targets": torch.randint(10, (STEPS, world_size * BATCH)),
            }
    return jobs


def run_lockstep(bin_dir, jobs, output, world_size):
    command = [bin_dir / "lockstep", "run", "--nproc-per-node", str(world_size), bin_dir / "ddp_parity_driver", jobs, output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [torch.load(f"{output}.{rank}", weights_only=False) for rank in range(world_size)]


def largest_error(ours, theirs):
    """max|a−b| / max|b| over the tensors of a model, and the tensor's name."""
    assert set(ours) == set(theirs)
    errors = []
    for name, expected in theirs.items():
        scale = expected.abs().max().item() or 1.0
        errors.append(((ours[name] - expected).abs().max().item() / scale, name))
    return max(errors)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def trained(request, bin_dir, tmp_path_factory):
    """(world size, jobs, our results by rank, our results of a second run, PyTorch's)"""
    world_size = request.param
    folder = tmp_path_factory.mktemp("parity")
    jobs = make_jobs(world_size)
    torch.save(jobs, folder / "jobs.pt")
    ours = run_lockstep(bin_dir, folder / "jobs.pt", folder / "ours", world_size)
    again = run_lockstep(bin_dir, folder / "jobs.pt", folder / "again", world_size)
    peer = [sys.executable, HERE / "parity_peer.py", folder / "jobs.pt", folder / "theirs", str(world_size)]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(peer, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return world_size, jobs, ours, again, torch.load(folder / "theirs")


def test_weights_equal_pytorch(trained):
    _, jobs, ours, _, theirs = trained
    for name in jobs:
        bound = 1e-10 if "float64" in name else 1e-5
        error, tensor = largest_error(ours[0][name], theirs[name])
        assert error <= bound, f"{name}: {tensor}"


def test_ranks_and_runs_are_bit_identical(trained):
    world_size, jobs, ours, again, _ = trained
    for name, job in jobs.items():
        for tensor, value in ours[0][name].items():
            assert not torch.equal(value, job["weights"][tensor]), f"{name}: {tensor} did not train"
            assert torch.equal(value, again[0][name][tensor])
            if "running" in tensor or "num_batches" in tensor:
                continue  # each rank's own between broadcasts
            for rank in range(1, world_size):
                assert torch.equal(value, ours[rank][name][tensor]), f"{name}: {tensor} of rank {rank}"


def test_ranks_with_small_batches_equal_one_process_with_the_large_one(trained):
    world_size, jobs, ours, _, _ = trained
    name = "mlp torch.float64"
    alone = parity_peer.train(jobs[name], 0, 1)
    error, tensor = largest_error(ours[0][name], alone)
    assert error <= 1e-10, tensor
