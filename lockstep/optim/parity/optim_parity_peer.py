"""The same training as optim_parity_driver.cc by torch.distributed's optimizers with Gloo.

python optim_parity_peer.py JOBS OUTPUT WORLD_SIZE; rank r's results go to OUTPUT.r.
"""

import os
import sys
import tempfile
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

OPTIMIZERS = {"adam": (torch.optim.Adam, {"lr": 0.01}), "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})}


def train(job, rank):
    kind = job["kind"]
    parameters = [torch.nn.Parameter(initial[rank].clone()) for initial in job["initial"]]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    local, defaults = OPTIMIZERS[job["optimizer"]]
    averager = None
    result = {}
    if kind.startswith("zero"):
        buckets = kind == "zero with buckets"
        optimizer = ZeroRedundancyOptimizer(groups, local, parameters_as_bucket_view=buckets, **defaults)
        result["owners"] = torch.tensor([optimizer._param_to_rank[parameter] for parameter in parameters])
    elif kind == "post-local SGD":
        optimizer = PostLocalSGDOptimizer(local(groups, **defaults), PeriodicModelAverager(period=3, warmup_steps=2))
    else:
        optimizer = local(groups, **defaults)
        size = dist.get_world_size()
        levels = OrderedDict([(2, 2 if size % 2 == 0 else 1), (4, size)])
        averager = HierarchicalModelAverager(levels, warmup_steps=1)
    for step in range(job["gradients"][0].size(0)):
        for parameter, gradients in zip(parameters, job["gradients"]):
            parameter.grad = gradients[step][rank].clone()
        optimizer.step()
        if averager:
            averager.average_parameters(optimizer.param_groups)
    return result | {str(i): parameter.detach().clone() for i, parameter in enumerate(parameters)}


def work(rank, world_size, meeting, jobs_path, output):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    jobs = torch.load(jobs_path)
    torch.save({name: train(job, rank) for name, job in jobs.items()}, f"{output}.{rank}")
    # Not destroy_process_group() and a return: now and then Gloo's threads abort the process on its way out.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    jobs_path, output, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (world_size, f"{folder}/meeting", jobs_path, output), nprocs=world_size)
