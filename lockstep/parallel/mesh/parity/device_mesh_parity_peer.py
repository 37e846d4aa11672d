"""The same meshes as device_mesh_parity_driver.cc by torch.distributed.device_mesh with Gloo.

python device_mesh_parity_peer.py JOBS OUTPUT WORLD_SIZE; rank r's results go to OUTPUT.r.
"""

import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "testing"))
import gloo_peer  # noqa: E402


def text_of(numbers):
    return "".join(f"{number} " for number in numbers)


def facts(mesh):
    """What there is to know of a mesh, a line for each subject."""
    texts = [repr(mesh), "shape " + text_of(mesh.shape), "ranks " + text_of(mesh.mesh.flatten().tolist())]
    coordinate = mesh.get_coordinate()
    texts.append("coordinate " + ("none" if coordinate is None else text_of(coordinate)))
    if coordinate is None:
        return texts
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        texts.append(f"group {text_of(dist.get_process_group_ranks(group))}as {mesh.get_local_rank(dim)}")
        texts.append("default" if group is dist.group.WORLD else group.group_desc)
    return texts


def run(job):
    names = tuple(job["names"]) or None
    if job["mesh"]:
        mesh = DeviceMesh("cpu", torch.tensor(job["mesh"]).view(job["shape"]), mesh_dim_names=names)
    else:
        mesh = init_device_mesh("cpu", tuple(job["shape"]), mesh_dim_names=names)
    result = {"root": facts(mesh)}
    for parts, name in job["flatten"]:
        result[f"flat {name}"] = facts(mesh[tuple(parts)]._flatten(name))
    for parts in job["slices"]:
        try:
            found = facts(mesh[tuple(parts)])
        except (KeyError, RuntimeError) as error:
            found = [type(error).__name__]
        result["slice " + " ".join(parts)] = found
    return result


if __name__ == "__main__":
    gloo_peer.run(lambda jobs, rank, world_size: {name: run(job) for name, job in jobs.items()})
