"""Training in shards, shared and gathered, against PyTorch's FullyShardedDataParallel and fully_shard with Gloo: 20 steps in
float64."""

import pathlib
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "ddp" / "parity"))
import parity_models  # noqa: E402

STEPS = 20
BATCH = 4  # a rank
BOUND = 1e-10


def make_job(model, world_size, optimizer="sgd", accumulate=1, max_norm=0.0, min_num_params=0, branches=None,
             nested=False):  # fmt: skip
    generator = torch.Generator().manual_seed(17)
    torch.manual_seed(5)
    net = parity_models.MODELS[model]().double()
    shape = (STEPS * accumulate, BATCH * world_size)
    if model == "transformer":
        tokens = torch.randint(parity_models.VOCABULARY, (*shape, parity_models.TOKENS + 1), generator=generator)
        inputs, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
    else:
        inputs = torch.randn(*shape, parity_models.FEATURES, dtype=torch.float64, generator=generator)
        targets = torch.randint(parity_models.CLASSES, shape, generator=generator)
    weights = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    return {"model": model, "optimizer": optimizer, "accumulate": accumulate, "max_norm": max_norm,
            "min_num_params": min_num_params, "nested": int(nested), "weights": weights, "inputs": inputs, "targets": targets,
            "branches": torch.tensor(branches or [0] * shape[0])}  # fmt: skip


def make_jobs(world_size):
    return {
        "mlp": make_job("mlp", world_size),
        "mlp in groups": make_job("mlp", world_size, min_num_params=300),
        "mlp adamw, clipped": make_job("mlp", world_size, "adamw", max_norm=0.3, min_num_params=300),
        "mlp accumulated": make_job("mlp", world_size, accumulate=3, min_num_params=300),
        "mlp nested": make_job("mlp", world_size, accumulate=2, nested=True),
        "cnn": make_job("cnn", world_size, "adamw", min_num_params=100),
        "lstm and a frozen parameter": make_job("recurrent", world_size, "adamw"),
        "transformer": make_job("transformer", world_size, max_norm=0.5),
        "transformer in groups": make_job("transformer", world_size, accumulate=2, min_num_params=500),
        "unused layers": make_job("branches", world_size, branches=[step % 4 for step in range(STEPS)]),
    }


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_weights_buffers_and_norms_are_pytorchs(world_size, run_lockstep, run_pytorch, tmp_path):
    jobs = make_jobs(world_size)
    torch.save(jobs, tmp_path / "jobs")
    ours = run_lockstep("fsdp_parity_driver", tmp_path / "jobs", tmp_path / "ours", output=tmp_path / "ours",
                        world_size=world_size, OMP_NUM_THREADS="1")
    theirs = run_pytorch(HERE / "fsdp_parity_peer.py", tmp_path / "jobs", tmp_path / "theirs", world_size,
                         output=tmp_path / "theirs", world_size=world_size, OMP_NUM_THREADS="1")
    for rank in range(world_size):
        groups = theirs[rank].pop("groups")
        assert groups["mlp nested"] == ours[rank]["mlp nested, groups"] and len(groups) == 1
    wrong = []
    for name, job in jobs.items():
        for rank in range(world_size):
            for kind in theirs[rank]:
                if name not in theirs[rank][kind]:
                    assert kind == "fsdp1"
                    continue
                expected = theirs[rank][kind][name]
                for form in (name, f"{name}, gathered"):
                    assert set(ours[rank][form]) == set(expected), f"{form}, {kind}"
                    for tensor, value in expected.items():
                        actual = ours[rank][form][tensor].double()
                        error = (actual - value.double()).abs().max().item() if value.numel() else 0.0
                        if not error <= BOUND:
                            wrong.append(f"{form}, {kind}: {tensor} of rank {rank}: {error:.1e}")
        moved = [not torch.equal(ours[0][name][tensor], value) for tensor, value in job["weights"].items()]
        assert sum(moved) >= 2, name
    assert not wrong, "\n".join(wrong)
