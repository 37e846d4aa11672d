"""Device meshes against PyTorch's with Gloo: the same groups, slices, flattened dimensions, coordinates and errors."""

import itertools
import pathlib

import pytest
import torch

HERE = pathlib.Path(__file__).parent

SHAPES = {
    4: [((4,), ["dp"]), ((2, 2), ["dp", "tp"]), ((1, 4), ["dp", "tp"]), ((2, 1, 2), ["pp", "dp", "tp"])],
    8: [((2, 2, 2), ["pp", "dp", "tp"]), ((4, 2), ["dp", "tp"])],
}


def make_jobs(world_size):
    jobs = {}
    for shape, names in SHAPES[world_size]:
        parts = [list(part) for count in range(1, len(names) + 1) for part in itertools.permutations(names, count)]
        ordered = [list(part) for count in range(2, len(names) + 1) for part in itertools.combinations(names, count)]
        flat = [[part, "_".join(part)] for part in ordered]
        mixed = [[name, "_".join(part)] for name in names for part in ordered] + [["nothing"]]
        job = {"mesh": [], "shape": list(shape), "names": names, "slices": parts + mixed, "flatten": flat}
        jobs[f"{shape}"] = job
        ranks = torch.randperm(world_size, generator=torch.Generator().manual_seed(3)).tolist()
        jobs[f"{shape} of permuted ranks"] = job | {"mesh": ranks}
    jobs["without names"] = {"mesh": [], "shape": [2, world_size // 2], "names": [], "slices": [["dp"]], "flatten": []}
    jobs["of some ranks"] = {"mesh": [3, 1], "shape": [2], "names": ["dp"], "slices": [["dp"]], "flatten": []}
    return jobs


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.long)])
def test_meshes_are_pytorchs(world_size, run_lockstep, run_pytorch, tmp_path):
    jobs = make_jobs(world_size)
    torch.save(jobs, tmp_path / "jobs.pt")
    ours = run_lockstep("device_mesh_parity_driver", tmp_path / "jobs.pt", tmp_path / "ours", output=tmp_path / "ours",
                        world_size=world_size, OMP_NUM_THREADS="1")
    theirs = run_pytorch(HERE / "device_mesh_parity_peer.py", tmp_path / "jobs.pt", tmp_path / "theirs", world_size,
                         output=tmp_path / "theirs", world_size=world_size, OMP_NUM_THREADS="1")
    for rank, expected in enumerate(theirs):
        for name in jobs:
            assert {key: list(texts) for key, texts in ours[rank][name].items()} == expected[name], f"rank {rank}, {name}"
