"""The same training as parity_driver.cc by torch.nn.parallel.DistributedDataParallel with Gloo.

python parity_peer.py JOBS OUTPUT WORLD_SIZE; rank 0's weights go to OUTPUT.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 48)
        self.fc2 = nn.Linear(48, 10)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x.view(-1, 1, 8, 8))))
        y = torch.relu(self.bn2(self.conv2(y)))
        return self.fc(torch.max_pool2d(y, 2).flatten(1))


MODELS = {"mlp": Mlp, "cnn": Cnn}


def train(job, rank, world_size):
    inputs, targets = job["inputs"], job["targets"]
    net = MODELS[job["model"]]().to(inputs.dtype)
    net.load_state_dict(job["weights"])
    model = nn.parallel.DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    batch = inputs.size(1) // world_size
    for x, y in zip(inputs, targets):
        optimizer.zero_grad()
        part = slice(rank * batch, (rank + 1) * batch)
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return net.state_dict()


def work(rank, world_size, meeting, jobs_path, output):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    jobs = torch.load(jobs_path)
    results = {name: train(job, rank, world_size) for name, job in jobs.items()}
    if rank == 0:
        torch.save(results, output)
    # Not destroy_process_group() and a return: now and then Gloo's threads abort the process on its way out.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    jobs_path, output, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (world_size, f"{folder}/meeting", jobs_path, output), nprocs=world_size)
