"""Initialises and destroys the default group three times, each time with a group of two other ranks; started by a launcher.

    python start_again.py BACKEND
"""

import os
import sys

import torch
import torch.distributed as dist

import lockstep  # noqa: F401  registers the backend

for turn in range(3):
    dist.init_process_group(sys.argv[1])
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = [turn % size, (turn + 1) % size]
    group = dist.new_group(sorted(pair))
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    if rank in pair:
        dist.all_reduce(total, group=group)
    os.write(1, f"turn {turn}, rank {rank}: {total.item()}\n".encode())
    dist.destroy_process_group()
