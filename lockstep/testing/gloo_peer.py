"""What scripts have in common that do a driver's work by PyTorch with Gloo, for the tests that compare the two.

python SCRIPT JOBS OUTPUT WORLD_SIZE; rank r's results go to OUTPUT.r.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, world_size, meeting, results_of, jobs_path, output):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    torch.save(results_of(torch.load(jobs_path), rank, world_size), f"{output}.{rank}")
    # Not destroy_process_group() and a return: now and then Gloo's threads abort the process on its way out.
    dist.barrier()
    os._exit(0)


def run(results_of):
    """Starts the ranks, each of which saves results_of(jobs, rank, world_size)."""
    jobs_path, output, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        # Forked, so that torch is imported once.
        arguments = world_size, f"{folder}/meeting", results_of, jobs_path, output
        mp.start_processes(work, arguments, nprocs=world_size, start_method="fork")
