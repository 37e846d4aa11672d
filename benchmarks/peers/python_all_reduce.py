"""Times all_reduce from Python over several backends of torch.distributed, in turns within the same processes.

By hand: torchrun --nproc-per-node 2 benchmarks/peers/python_all_reduce.py lockstep:all_reduce 4096 100 10

A command is BACKEND:OPERATION with the size in bytes as its argument. Each backend has a group of its own, made when it
is first asked for, beside a default group that is not measured. Operations:
    all_reduce         a call that returns when the result is there
    all_reduce_async   async_op=True, then wait()
    all_reduce_train   sync calls in a row, under one clock: processor time means something only over many short calls
"""

import time

import torch
import torch.distributed as dist

import command_loop
from gloo_collectives import value


class Groups:
    """One group of all ranks for each backend, and the buffer that all of them reduce."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.groups = {}
        self.buffer = torch.empty(0)
        self.operations = {"all_reduce": self.all_reduce, "all_reduce_async": self.all_reduce_async,
                           "all_reduce_train": self.all_reduce_train}

    def measure(self, command, argument, iterations, warmup):
        backend, _, operation = command.partition(":")
        if operation not in self.operations:
            known = ", ".join(self.operations)
            raise ValueError(f"'{command}' is no command; do: BACKEND:OPERATION with one of {known}")
        size = int(argument)
        if size <= 0 or size % 4:
            raise ValueError(f"the size is {size} bytes; it must be a multiple of 4, of which there is at least one")
        return self.operations[operation](self.group(backend), self.first(size // 4), iterations, warmup)

    def group(self, backend):
        if backend not in self.groups:
            command_loop.register(backend)
            self.groups[backend] = dist.new_group(backend=backend)
        return self.groups[backend]

    def first(self, elements):
        if self.buffer.numel() < elements:
            self.buffer = torch.empty(0)  # give back before taking more
            self.buffer = torch.empty(elements)
        return self.buffer[:elements]

    def all_reduce(self, group, data, iterations, warmup):
        return self.one_by_one(lambda: dist.all_reduce(data, group=group), group, data, iterations, warmup)

    def all_reduce_async(self, group, data, iterations, warmup):
        return self.one_by_one(lambda: dist.all_reduce(data, group=group, async_op=True).wait(), group, data,
                               iterations, warmup)

    def one_by_one(self, call, group, data, iterations, warmup):
        def check(iteration):
            expected = sum(value(iteration, rank, 0) for rank in range(self.size))
            first, last = data[0].item(), data[-1].item()
            if first != expected or last != expected:
                raise AssertionError(f"all_reduce gave {first} … {last} instead of {expected}")

        return command_loop.timed(iterations, warmup, data.nbytes, lambda i: data.fill_(value(i, self.rank, 0)), call, check,
                                  lambda: dist.barrier(group))

    def all_reduce_train(self, group, data, iterations, warmup):
        """One entry: the mean over the iterations. The data are zeros, since sums of sums would not stay finite."""
        data.zero_()
        for _ in range(warmup):
            dist.all_reduce(data, group=group)
        dist.barrier(group)
        cpu_begin, begin = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(iterations):
            dist.all_reduce(data, group=group)
        end, cpu_end = time.perf_counter_ns(), time.process_time_ns()
        return [(end - begin) / iterations], [(cpu_end - cpu_begin) / iterations]


if __name__ == "__main__":
    command_loop.start("gloo")
    command_loop.serve(Groups().measure)
