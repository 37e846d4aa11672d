"""The same meshes as device_mesh_parity_driver.cc by torch.distributed.device_mesh with Gloo.

python device_mesh_parity_peer.py JOBS OUTPUT WORLD_SIZE; rank r's results go to OUTPUT.r.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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


def work(rank, world_size, meeting, jobs_path, output):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    torch.save({name: run(job) for name, job in torch.load(jobs_path).items()}, f"{output}.{rank}")
    # Not destroy_process_group() and a return: now and then Gloo's threads abort the process on its way out.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    jobs_path, output, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (world_size, f"{folder}/meeting", jobs_path, output), nprocs=world_size)
