"""Times torch.save, torch.load and Python's safetensors; as benchmarks/checkpoint.cc.

By hand: LOCKSTEP_BENCH_CHECKPOINTS=/tmp/x torchrun --nproc-per-node 1 benchmarks/peers/python_checkpoint.py \
    torch_save:nosync 1024 3 1

The operations are torch_save and safetensors_save, :sync and :nosync, and torch_load:plain and safetensors_load:plain. Neither
library syncs by itself: with :sync the file and its directory are synced after the save, as a careful script would. Loading
reads a byte of each page afterwards, for safetensors maps the file and reads nothing by itself.
"""

import os
import pathlib
import time

import torch
from safetensors.torch import load_file, save_file

import command_loop

TENSORS = 64


def sync(path):
    for name, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY | os.O_DIRECTORY)):
        descriptor = os.open(name, flags)
        os.fsync(descriptor)
        os.close(descriptor)


class Measurements:
    def __init__(self):
        self.root = pathlib.Path(os.environ.get("LOCKSTEP_BENCH_CHECKPOINTS", "/tmp/lockstep-bench")) / "python"
        self.root.mkdir(parents=True, exist_ok=True)
        self.state, self.mebibytes = {}, 0

    def save(self, library, path):
        torch.save(self.state, path) if library == "torch" else save_file(self.state, path)

    def load(self, library, path):
        return torch.load(path, weights_only=True) if library == "torch" else load_file(path)

    def measure(self, operation, argument, iterations, warmup):
        what, _, how = operation.partition(":")
        library, _, verb = what.partition("_")
        if int(argument) != self.mebibytes:
            self.mebibytes = int(argument)
            count = self.mebibytes * (1 << 20) // 4 // TENSORS
            self.state = {f"layer{i}.weight": torch.rand(count) for i in range(TENSORS)}
        path = self.root / f"{verb}.{library}"
        if verb == "load":
            self.save(library, path)
            sync(path)
        wall, facts = [], {}
        for i in range(warmup + iterations):
            before = time.perf_counter_ns()
            if verb == "save":
                self.save(library, path)
                if how == "sync":
                    sync(path)
            else:
                loaded = self.load(library, path)
                total = sum(tensor[::1024].sum().item() for tensor in loaded.values())
            after = time.perf_counter_ns()
            if verb == "save":
                facts["bytes_over_data"] = path.stat().st_size / (self.mebibytes << 20)
                path.unlink()
            elif not total > 0:
                raise AssertionError("the file does not hold what was saved")
            if i >= warmup:
                wall.append(after - before)
            loaded = None
        return wall, [], facts


if __name__ == "__main__":
    command_loop.start("gloo")
    command_loop.serve(Measurements().measure)
