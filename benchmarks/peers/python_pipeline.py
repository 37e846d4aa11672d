"""Times steps of torch.distributed.pipelining, over Gloo or over Lockstep's backend; as benchmarks/pipeline.cc.

By hand: torchrun --nproc-per-node 2 benchmarks/peers/python_pipeline.py 1F1B sleep 4 1
"""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

import command_loop

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B,
             "InterleavedZeroBubble": ScheduleInterleavedZeroBubble}
MICRO_BATCHES, NAP = 8, 0.01
LAYERS, WIDTH, LENGTH, ROWS = 12, 256, 64, 2
FEATURES = {"wide": 128 << 10}  # of the layers that sleep or do next to nothing


class SleepyInput(torch.autograd.Function):
    """Its forward and its backward sleep."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class SleepyWeight(torch.autograd.Function):
    """Its backward sleeps."""

    @staticmethod
    def forward(ctx, weight, seconds):
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Sleepy(torch.nn.Module):
    def __init__(self, parts, features):
        super().__init__()
        self.seconds = NAP / parts
        self.weight = torch.nn.Parameter(torch.ones(features))

    def forward(self, x):
        return SleepyInput.apply(x, self.seconds) * SleepyWeight.apply(self.weight, self.seconds)


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        return x * self.weight


class Work:
    def __init__(self, name, what):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        per_rank = 2 if name.startswith("Interleaved") else 1
        count, self.modules, stages = ranks * per_rank, [], []
        for index in range(rank, count, ranks):
            torch.manual_seed(index)
            if what == "transformer":
                module = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0)
                                               for _ in range(LAYERS // count)))
            else:
                module = Scale() if what == "empty" else Sleepy(per_rank, FEATURES.get(what, 64))
            self.modules.append(module)
            stages.append(PipelineStage(module, index, count, torch.device("cpu")))
        self.schedule = SCHEDULES[name](stages if per_rank > 1 else stages[0], MICRO_BATCHES,
                                        loss_fn=lambda output, target: (output - target).square().mean())
        shape = (MICRO_BATCHES * ROWS, LENGTH, WIDTH) if what == "transformer" else (MICRO_BATCHES, FEATURES.get(what, 64))
        self.first, self.last = rank == 0, rank == ranks - 1
        self.input, self.target = torch.randn(shape), torch.zeros(shape)
        self.input.requires_grad_(what in ("sleep", "wide"))  # or the first stage's backward would be shorter than the others'

    def step(self):
        for module in self.modules:
            module.zero_grad()
        self.schedule.step(*([self.input] if self.first else []), return_outputs=False,
                           **({"target": self.target} if self.last else {}))


works = {}


def measure(name, what, iterations, warmup):
    if (name, what) not in works:
        works[name, what] = Work(name, what)
    work = works[name, what]
    for _ in range(warmup):
        work.step()
    dist.barrier()
    cpu, wall = time.process_time_ns(), []
    for _ in range(iterations):
        dist.barrier()
        before = time.perf_counter_ns()
        work.step()
        dist.barrier()
        wall.append(time.perf_counter_ns() - before)
    return wall, [(time.process_time_ns() - cpu) // iterations]


if __name__ == "__main__":
    command_loop.start(os.environ.get(command_loop.BACKEND, "gloo"))
    command_loop.serve(measure)
