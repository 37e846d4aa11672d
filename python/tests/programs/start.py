"""Starts in the given way, adds the ranks up, and tells it: one line from each rank.

    python start.py env|PORT|HOST:PORT|fork|spawn|tcp://…|file://… [BACKEND]

PORT: the program itself sets MASTER_ADDR and MASTER_PORT, as PyTorch's tutorials do. HOST:PORT: RANK and WORLD_SIZE, too.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist

PLACE = "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"


def main(rank, place, world_size, backend):
    if "lockstep" in backend:
        import lockstep  # noqa: F401  registers the backend
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=world_size)
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    engine = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
    # One call of write: lines of several ranks, which share the output, don't mix.
    os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()} by {engine}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    way, backend = sys.argv[1], (sys.argv[2:] or ["lockstep"])[0]
    if way in ("fork", "spawn"):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (f"file://{folder}/store", 2, backend)
            torch.multiprocessing.start_processes(main, arguments, nprocs=2, start_method=way)
    elif way == "env":
        main(-1, "env://", -1, backend)
    elif way.isdigit():
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=way)
        main(int(os.environ["RANK"]), "env://", int(os.environ["WORLD_SIZE"]), backend)
    elif "//" not in way:
        host, port = way.split(":")
        group, groups, local, locals_ = (int(os.environ[name]) for name in PLACE)
        rank, world_size = group * locals_ + local, groups * locals_
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world_size))
        main(-1, "env://", -1, backend)
    else:
        main(int(os.environ["RANK"]), way, int(os.environ["WORLD_SIZE"]), backend)
