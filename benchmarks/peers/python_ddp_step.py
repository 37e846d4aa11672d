"""Times training steps of a Python program, with DistributedDataParallel and without; as benchmarks/ddp_step.cc.

By hand: torchrun --nproc-per-node 2 benchmarks/peers/python_ddp_step.py ddp large 20 2

LOCKSTEP_BENCH_BACKEND names the backend of torch.distributed, gloo unless told; nothing else differs between backends.
LOCKSTEP_BENCH_DEVICE is where the networks are: cpu unless told, or cuda:0.
"""

import math
import os
import time

import torch
import torch.distributed as dist

import command_loop

DEVICE = torch.device(os.environ.get("LOCKSTEP_BENCH_DEVICE") or "cpu")
NETWORKS = {"small": ((784, 256, 10), 64), "large": ((1024, 2048, 2048, 10), 128),
            "huge": ((*[4096] * 7, 10), 32), "sleeping": ((10, 10), 32)}  # widths, batch size


class SleepingLayer(torch.autograd.Function):
    """As in benchmarks/networks.h: sleeps instead of computing."""

    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(weight)
        time.sleep(0.015)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.045)
        return gradient, torch.full_like(context.saved_tensors[0], 1e-3)


class Sleeping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros((25 << 20) // 4 // 8) for _ in range(8))

    def forward(self, x):
        for weight in self.weights:
            x = SleepingLayer.apply(x, weight)
        return x


def multilayer(widths):
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class Trainer:
    """A model with its optimizer and fresh batches."""

    def __init__(self, network, distributed):
        self.widths, self.batch_size = NETWORKS[network]
        self.model = (Sleeping() if network == "sleeping" else multilayer(self.widths)).to(DEVICE)
        if distributed:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.inputs = self.targets = torch.empty(0)

    def prepare_batches(self, count):
        if self.inputs.shape[0] < count:
            self.inputs = torch.empty(count, self.batch_size, self.widths[0], device=DEVICE)
            self.targets = torch.empty(count, self.batch_size, dtype=torch.long, device=DEVICE)
        self.inputs.normal_()
        self.targets.random_(0, self.widths[-1])

    def step(self, batch):
        self.optimizer.zero_grad()
        self.loss = torch.nn.functional.cross_entropy(self.model(self.inputs[batch]), self.targets[batch])
        self.loss.backward()
        self.optimizer.step()

    def logging_data(self):
        """The numbers that DistributedDataParallel tells about itself."""
        if not isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            return {}
        return {name: value for name, value in self.model._get_ddp_logging_data().items() if isinstance(value, int)}


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed_steps(trainer, iterations, warmup, together=True):
    """Nanoseconds of each step, and the processor's of all; with `together` the ranks begin at once."""
    trainer.prepare_batches(warmup + iterations)
    for i in range(warmup):
        trainer.step(i)
    synchronize()
    if together:
        dist.barrier()
    cpu_before = time.process_time_ns()
    wall, before = [], time.perf_counter_ns()
    for i in range(iterations):
        trainer.step(warmup + i)
        now = time.perf_counter_ns()
        wall.append(now - before)
        before = now
    if DEVICE.type == "cuda":  # the program runs ahead of the device: only all of them together have a time
        synchronize()
        wall = [(sum(wall) + time.perf_counter_ns() - before) // iterations] * iterations
    cpu = (time.process_time_ns() - cpu_before) / iterations
    if not math.isfinite(trainer.loss.item()):
        raise AssertionError(f"the loss is {trainer.loss.item()}: these steps computed nothing of use")
    trainer.optimizer.zero_grad()  # others have their turn meanwhile, and memory is short
    return wall, [cpu]


class Trainers:
    def __init__(self):
        self.trainers = {}

    def measure(self, mode, network, iterations, warmup):
        if mode not in ("ddp", "alone", "single"):
            raise ValueError(f"there is no mode '{mode}'")
        key = network, mode == "ddp"
        if key not in self.trainers:
            self.trainers[key] = Trainer(*key)
        trainer = self.trainers[key]
        return *timed_steps(trainer, iterations, warmup, together=mode != "single"), trainer.logging_data()


if __name__ == "__main__":
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    command_loop.start(os.environ.get(command_loop.BACKEND) or "gloo")
    torch.manual_seed(dist.get_rank())  # each rank has its own data
    command_loop.serve(Trainers().measure)
