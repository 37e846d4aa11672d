"""The same training as optim_parity_driver.cc by torch.distributed's optimizers with Gloo.

python optim_parity_peer.py JOBS OUTPUT WORLD_SIZE; rank r's results go to OUTPUT.r.
"""

import pathlib
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "testing"))
import gloo_peer  # noqa: E402

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


if __name__ == "__main__":
    gloo_peer.run(lambda jobs, rank, world_size: {name: train(job, rank) for name, job in jobs.items()})
