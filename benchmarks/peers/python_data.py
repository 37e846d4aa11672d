"""Times epochs of torch.utils.data.DataLoader; as benchmarks/data.cc.

By hand: torchrun --nproc-per-node 1 benchmarks/peers/python_data.py memory:0 16384 20 2
"""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import command_loop

BATCH_SIZE = 64
FEATURES = 784


# A source makes a function that loads one epoch and answers with the sum of its labels; that of sample i is i.


def of_pairs(dataset, workers, largest):
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=workers > 0)

    def load():
        total = 0
        for data, target in loader:
            total += target.sum().item()
            if not data.flatten()[0] < largest:
                raise AssertionError("no such number was put in")
        return total

    return load


def memory(samples, workers):
    return of_pairs(TensorDataset(torch.rand(samples, FEATURES), torch.arange(samples)), workers, 1)


def jpeg(_samples, workers):
    import jpeg_folder

    return of_pairs(jpeg_folder.jpeg_folder(), workers, 3)


def parquet(_samples, workers):
    import parquet_file

    loader = DataLoader(parquet_file.row_groups(), None, shuffle=True, num_workers=workers, persistent_workers=workers > 0)

    def load():
        total = 0
        for batch in (batch for group in loader for batch in parquet_file.cut(group)):
            total += batch["label"].sum().item()
            if not (batch["x0"][0] < 1 and len(batch["words"])):
                raise AssertionError("no such row was written")
        return total

    return load


SOURCES = {"memory": memory, "jpeg": jpeg, "parquet": parquet}


class Measurements:
    def __init__(self):
        self.epochs = {}

    def epoch_of(self, operation, samples):
        key = operation, samples
        if key not in self.epochs:
            source, workers = operation.split(":")
            if source not in SOURCES:
                raise ValueError(f"there is no source '{source}'")
            self.epochs[key] = SOURCES[source](samples, int(workers))
        return self.epochs[key]

    def measure(self, operation, argument, iterations, warmup):
        samples = int(argument)
        load = self.epoch_of(operation, samples)
        wall = []
        for i in range(warmup + iterations):
            before = time.perf_counter_ns()
            total = load()
            after = time.perf_counter_ns()
            if total != samples * (samples - 1) // 2:
                raise AssertionError(f"the epoch's labels add up to {total}: it did not have each sample once")
            if i >= warmup:
                wall.append(after - before)
        return wall, []


if __name__ == "__main__":
    command_loop.start("gloo")
    command_loop.serve(Measurements().measure)
