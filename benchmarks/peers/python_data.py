"""Times epochs of torch.utils.data.DataLoader; as benchmarks/data.cc.

By hand: torchrun --nproc-per-node 1 benchmarks/peers/python_data.py memory:0 16384 20 2
"""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import command_loop

BATCH_SIZE = 64
FEATURES = 784


def memory(samples):
    """The label of sample i is i."""
    return TensorDataset(torch.rand(samples, FEATURES), torch.arange(samples))


SOURCES = {"memory": memory}


def load(loader):
    """One epoch; the sum of its labels."""
    total = 0
    for data, target in loader:
        total += target.sum().item()
        if not data[0, 0] < 1:
            raise AssertionError("no such number was put in")
    return total


class Measurements:
    def __init__(self):
        self.loaders = {}

    def loader_for(self, operation, samples):
        key = operation, samples
        if key not in self.loaders:
            source, workers = operation.split(":")
            if source not in SOURCES:
                raise ValueError(f"there is no source '{source}'")
            self.loaders[key] = DataLoader(SOURCES[source](samples), BATCH_SIZE, shuffle=True, num_workers=int(workers),
                                           persistent_workers=int(workers) > 0)
        return self.loaders[key]

    def measure(self, operation, argument, iterations, warmup):
        samples = int(argument)
        loader = self.loader_for(operation, samples)
        wall = []
        for i in range(warmup + iterations):
            before = time.perf_counter_ns()
            total = load(loader)
            after = time.perf_counter_ns()
            if total != samples * (samples - 1) // 2:
                raise AssertionError(f"the epoch's labels add up to {total}: it did not have each sample once")
            if i >= warmup:
                wall.append(after - before)
        return wall, []


if __name__ == "__main__":
    command_loop.start("gloo")
    command_loop.serve(Measurements().measure)
