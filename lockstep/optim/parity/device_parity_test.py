"""DistributedDataParallel on a device against PyTorch's: same weights, batches and optimizer, same numbers.

On a card (marker gpu): over NCCL with one rank, and with two ranks on the one card, ours staged and PyTorch's over Gloo.
On the CPU the same once, so that the test itself is tested everywhere.
"""

import pathlib

import pytest
import torch

HERE = pathlib.Path(__file__).parent
STEPS, SAMPLES = 8, 12
CARD = "cuda:0"


def make_job(half):
    torch.manual_seed(5)
    return {"weights": [torch.randn(shape) / 4 for shape in ((64, 6), (64,), (3, 64), (3,))],
            "inputs": torch.randn(STEPS, SAMPLES, 6), "targets": torch.randn(STEPS, SAMPLES, 3), "half": half}


def needs_card():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def compare(run_lockstep, run_pytorch, folder, world_size, device, backends, half):
    job = make_job(half)
    torch.save(job, folder / "job")
    ours = run_lockstep("device_parity_driver", folder / "job", folder / "ours", device, backends[0],
                        output=folder / "ours", world_size=world_size)
    theirs = run_pytorch(HERE / "device_parity_peer.py", folder / "job", folder / "theirs", world_size, device, backends[1],
                         output=folder / "theirs", world_size=world_size)
    bound = 2e-3 if half else 1e-5
    for rank in range(world_size):
        for i, before in enumerate(job["weights"]):
            a, b = ours[rank]["weights"][i], theirs[rank]["weights"][i]
            assert not torch.equal(a, before), "it has not trained"
            assert (a - b).abs().max() <= bound * b.abs().max()
            assert torch.equal(a, ours[0]["weights"][i]), "ranks differ"
        assert ours[rank]["losses"] == pytest.approx(theirs[rank]["losses"], rel=bound * 10)


def test_on_the_cpu(run_lockstep, run_pytorch, tmp_path):
    compare(run_lockstep, run_pytorch, tmp_path, 2, "cpu", ("lockstep", "gloo"), half=False)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16 with GradScaler"])
@pytest.mark.parametrize("world_size, backends", [(1, ("nccl", "nccl")), (2, ("lockstep", "gloo"))],
                         ids=["nccl", "two ranks on one card"])
def test_on_a_card(run_lockstep, run_pytorch, tmp_path, world_size, backends, half):
    needs_card()
    compare(run_lockstep, run_pytorch, tmp_path, world_size, CARD, backends, half)


@pytest.mark.gpu
def test_two_cards_over_nccl(run_lockstep, run_pytorch, tmp_path):
    needs_card()
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    compare(run_lockstep, run_pytorch, tmp_path, 2, "cuda", ("nccl", "nccl"), half=False)
