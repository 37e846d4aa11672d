"""Times torch.distributed's collectives with Gloo, as scripts/bench commands; the counterpart of benchmarks/all_reduce.cc.

By hand: torchrun --nproc-per-node 2 benchmarks/peers/gloo_collectives.py all_reduce 26214400 20 2
"""

import time

import torch
import torch.distributed as dist

import command_loop

CPU_TIME_FROM_BYTES = 1 << 20  # below it, reading the clock would disturb


def contribution(iteration, rank):
    return float(iteration % 5 + rank + 1)


class Collectives:
    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.buffers = {}

    def first(self, name, elements):
        """The beginning of a buffer that grows to the largest size asked for."""
        if name not in self.buffers or self.buffers[name].numel() < elements:
            self.buffers[name] = torch.empty(elements)
        return self.buffers[name][:elements]

    def measure(self, operation, argument, iterations, warmup):
        if operation == "barrier":
            return timed(iterations, warmup, 0, lambda i: None, dist.barrier, lambda i: None)
        size = int(argument)
        data = self.first("data", size // 4)
        everybody = range(self.size)
        if operation == "all_reduce":
            def call():
                dist.all_reduce(data)

            def check(i):
                check_ends(data, sum(contribution(i, rank) for rank in everybody), operation)
        elif operation == "broadcast":
            def call():
                dist.broadcast(data, 0)

            def check(i):
                check_ends(data, contribution(i, 0), operation)
        elif operation == "all_gather":
            outputs = list(self.first("gathered", size // 4 * self.size).chunk(self.size))

            def call():
                dist.all_gather(outputs, data)

            def check(i):
                for rank in everybody:
                    check_ends(outputs[rank], contribution(i, rank), operation)
        else:
            raise ValueError(f"there is no operation '{operation}'")
        return timed(iterations, warmup, size, lambda i: data.fill_(contribution(i, self.rank)), call, check)


def check_ends(tensor, expected, operation):
    if tensor[0].item() != expected or tensor[-1].item() != expected:
        raise AssertionError(f"{operation} gave {tensor[0].item()} … {tensor[-1].item()} instead of {expected}")


def timed(iterations, warmup, size, prepare, call, check):
    """Each iteration: fresh data, a barrier, the operation under the clock, a look at the result."""
    with_cpu = size >= CPU_TIME_FROM_BYTES
    wall, cpu = [], []
    for i in range(warmup + iterations):
        prepare(i)
        dist.barrier()
        cpu_begin = time.process_time_ns() if with_cpu else 0
        begin = time.perf_counter_ns()
        call()
        end = time.perf_counter_ns()
        if i >= warmup:
            wall.append(end - begin)
            if with_cpu:
                cpu.append(time.process_time_ns() - cpu_begin)
        check(i)
    return wall, cpu


if __name__ == "__main__":
    command_loop.start_gloo()
    command_loop.serve(Collectives().measure)
