"""The communication hooks against PyTorch's: same gradients and seeds, same results."""

import pathlib

import pytest
import torch

np = pytest.importorskip("numpy")

HERE = pathlib.Path(__file__).parent
STEPS = 6

#: of the parameters, by bucket: same and different shapes, vectors, convolutions; nothing to compress
SHAPES = [
    [[20, 30], [20], [30, 20], [20, 30], [20, 30]],
    [[8, 3, 3, 3], [8], [16, 8, 3, 3], [1]],
    [[5], [2, 2]],
    [[40, 25]],
]

POWER_SGD = {
    "rank 1": {},
    "rank 2": {"matrix_approximation_rank": 2},
    "rank 3, by QR": {"matrix_approximation_rank": 3},
    "batches": {"matrix_approximation_rank": 2, "batch_tensors_with_same_shape": True},
    "batches by QR, cold": {"matrix_approximation_rank": 4, "batch_tensors_with_same_shape": True, "warm_start": False},
    "no error feedback": {"matrix_approximation_rank": 2, "use_error_feedback": False},
    "cold": {"warm_start": False, "random_seed": 123456789},
    "cold, no error feedback, at once": {
        "matrix_approximation_rank": 2,
        "warm_start": False,
        "use_error_feedback": False,
        "start_powerSGD_iter": 0,
    },
    "all compressed": {"min_compression_rate": 0.1, "orthogonalization_epsilon": 1e-8},
    "little compressed": {"min_compression_rate": 10},
    "late": {"start_powerSGD_iter": 4, "random_seed": 2147483647},
    "saved": {"matrix_approximation_rank": 2, "warm_start": False, "saved": True},
    "saved warm": {"saved": True},
}
BATCHED = ("rank 1", "rank 2", "rank 3, by QR", "no error feedback", "cold", "cold, no error feedback, at once", "saved")


def gradients(world_size, dtype, shapes=SHAPES):
    """For each bucket steps×ranks×numel, each matrix mostly of rank 3, as gradients are, and part of it common."""
    generator = torch.Generator().manual_seed(world_size)

    def randn(*sizes):
        return torch.randn(*sizes, dtype=torch.float64, generator=generator)

    def one(shape):
        rows, columns = shape[0], max(1, int(np.prod(shape[1:])))
        common = randn(rows, 3) @ torch.diag(torch.tensor([4.0, 2, 1], dtype=torch.float64)) @ randn(3, columns)
        return (common + randn(rows, 1) @ randn(1, columns) + 0.1 * randn(rows, columns)).flatten()

    return [
        torch.stack(
            [torch.stack([torch.cat([one(shape) for shape in bucket]) for _ in range(world_size)]) for _ in range(STEPS)]
        ).to(dtype)
        for bucket in shapes
    ]


def make_jobs(world_size):
    jobs = {}

    def add(name, hook, dtype, **settings):
        jobs[f"{name} {dtype}"] = {
            "hook": hook,
            "settings": settings,
            "shapes": SHAPES,
            "gradients": gradients(world_size, dtype),
        }

    for dtype in (torch.float32, torch.float64):
        for hook in ("allreduce", "fp16", "bf16", "fp16(allreduce)", "bf16(allreduce)", "noop", "pertensor"):
            add(hook, hook, dtype)
        for size in (512, 20, 7):
            add(f"perchannel {size}", "perchannel", dtype, bucket_size=size)
        for local in (True, False):
            add(
                f"post_localSGD {local}",
                "post_localSGD",
                dtype,
                start_localSGD_iter=3,
                post_local_gradient_allreduce=local,
            )
        for name, settings in POWER_SGD.items():
            add(f"powerSGD {name}", "powerSGD", dtype, **{"start_powerSGD_iter": 2, **settings})
        for name in BATCHED:
            add(f"batched_powerSGD {name}", "batched_powerSGD", dtype, **{"start_powerSGD_iter": 2, **POWER_SGD[name]})
        for short in ("fp16", "bf16"):
            add(f"{short}(powerSGD)", f"{short}(powerSGD)", dtype, start_powerSGD_iter=2, matrix_approximation_rank=2)
    return jobs


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long), 3])
def ran(request, run_lockstep, run_pytorch, tmp_path_factory):
    """(world size, jobs, our results by rank, PyTorch's)"""
    world_size = request.param
    folder = tmp_path_factory.mktemp("hooks")
    jobs = make_jobs(world_size)
    torch.save(jobs, folder / "jobs.pt")
    ours = run_lockstep("hooks_parity_driver", folder / "jobs.pt", folder / "ours", output=folder / "ours",
                        world_size=world_size, OMP_NUM_THREADS="1")
    theirs = run_pytorch(HERE / "hooks_parity_peer.py", folder / "jobs.pt", folder / "theirs", world_size,
                         output=folder / "theirs", world_size=world_size, OMP_NUM_THREADS="1")
    return world_size, jobs, ours, theirs


def bound(name, world_size):
    """What max|a−b| / max|b| may be: rounding. Sums of 16-bit numbers are rounded once here, and after each addend by
    Gloo, so those of three differ by an ulp (PowerSGD in 16 bits: by some more after six steps)."""
    if name.startswith(("fp16(powerSGD)", "bf16(powerSGD)")):
        return {"f": 2**-6, "b": 2**-3}[name[0]] if world_size > 2 else 1e-5
    if name.startswith(("fp16", "bf16")):
        return {"f": 2**-10, "b": 2**-7}[name[0]] if world_size > 2 else 0
    if "perchannel" in name or "pertensor" in name:
        return 1e-6  # aggregated in float32
    return 1e-10 if "float64" in name else 1e-5


def test_results_equal_pytorch(ran):
    world_size, jobs, ours, theirs = ran
    for name, job in jobs.items():
        for rank in range(world_size):
            for bucket, given in enumerate(job["gradients"]):
                result, expected = (side[rank][name]["results"][bucket] for side in (ours, theirs))
                assert result.dtype == expected.dtype == given.dtype
                for step in range(STEPS):
                    error = (result[step] - expected[step]).abs().max() / expected[step].abs().max()
                    assert error <= bound(name, world_size), f"{name}, bucket {bucket}, step {step}, rank {rank}"


def test_ranks_are_bit_identical(ran):
    world_size, jobs, ours, _ = ran
    for name in jobs:
        if "local" in name or "noop" in name:
            continue
        for bucket, result in enumerate(ours[0][name]["results"]):
            for rank in range(1, world_size):
                assert torch.equal(result, ours[rank][name]["results"][bucket]), f"{name}, bucket {bucket}"


def test_powersgd_state_equals_pytorch(ran):
    world_size, jobs, ours, theirs = ran
    for name in (name for name in jobs if "powerSGD" in name):
        for rank in range(world_size):
            mine, its = (dict(side[rank][name]["state"]) for side in (ours, theirs))
            assert ours[rank][name]["stats"] == theirs[rank][name]["stats"], name
            generator = np.random.RandomState()
            numbers = mine.pop("rng").numpy()
            generator.set_state(("MT19937", numbers[:624].astype(np.uint32), int(numbers[624])))
            assert generator.randint(1_000_000_000) == its.pop("next_random"), name
            for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
                saved, expected = mine.pop(memory), its.pop(memory)
                assert set(saved) == set(expected), f"{name}: {memory}"
                for bucket, tensor in saved.items():
                    assert tensor.shape == expected[bucket].flatten().shape, f"{name}: {memory}[{bucket}]"
                    if memory == "error_dict":
                        scale = jobs[name]["gradients"][bucket].abs().max()
                        error = (tensor - expected[bucket]).abs().max() / scale
                        assert error <= max(bound(name, world_size), 1e-12), f"{name}: {memory}[{bucket}]"
            assert mine == its, name


def test_pytorch_goes_on_from_a_saved_state(ran):
    """Python's __setstate__ takes our dictionary, once the generator is numpy's again."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    _, _, ours, theirs = ran
    name = "powerSGD saved torch.float32"
    saved = dict(ours[0][name]["state"])
    numbers = saved["rng"].numpy()
    saved["rng"] = np.random.RandomState()
    saved["rng"].set_state(("MT19937", numbers[:624].astype(np.uint32), int(numbers[624])))
    state = PowerSGDState(None)
    assert set(saved) == set(state.__getstate__())
    for slot, value in saved.items():
        setattr(state, slot, value)
    assert list(state.compression_stats()) == theirs[0][name]["stats"]
