"""Times torch.distributed's collectives with Gloo, as scripts/bench commands; the counterpart of benchmarks/collectives.cc.

By hand: torchrun --nproc-per-node 2 benchmarks/peers/gloo_collectives.py all_reduce 26214400 20 2

Gloo has every operation that we measure, so nothing is put together here from others. Tensors are plain ones, as its users
have them. The argument is the number of bytes on the larger side of a rank, as there.
"""

import os
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.distributed as dist

import command_loop

ROOT = 0
# The names of torch 2.13, which warns at each call by the names from before.
all_gather_into_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def value(iteration, source, part):
    """What rank `source` holds for rank or place `part` in an iteration: small whole numbers, whose sums are exact."""
    return float(iteration % 5 + source + 1 + 8 * part)


@dataclass
class Case:
    """inputs[p] receives value(i, rank, p), then run() is called, then outputs[p] must hold expected(i, p)."""

    run: Callable
    expected: Callable = None
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)

    def prepare(self, iteration, rank):
        for part, tensor in enumerate(self.inputs):
            tensor.fill_(value(iteration, rank, part))

    def check(self, iteration, operation):
        for part, tensor in enumerate(self.outputs):
            first, last, expected = tensor[0].item(), tensor[-1].item(), self.expected(iteration, part)
            if first != expected or last != expected:
                raise AssertionError(f"{operation} gave {first} … {last} instead of {expected} in part {part} of its output")


class Collectives:
    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.buffers = {}
        self.operations = {
            "barrier": lambda elements: Case(dist.barrier), "all_reduce": self.all_reduce, "reduce": self.reduce,
            "broadcast": self.broadcast, "all_gather": self.all_gather,
            "all_gather_into_tensor": self.all_gather_into_tensor, "gather": self.gather, "scatter": self.scatter,
            "reduce_scatter": self.reduce_scatter, "reduce_scatter_tensor": self.reduce_scatter_tensor,
            "all_to_all": self.all_to_all, "all_to_all_single": self.all_to_all_single, "send_recv": self.send_recv,
            "slices": self.all_reduce_slices}
        self.slice_group = None

    def measure(self, operation, argument, iterations, warmup):
        if operation not in self.operations:
            raise ValueError(f"there is no operation '{operation}'")
        size = int(argument)
        if size < 0 or size % (4 * self.size):
            raise ValueError(f"the size is {size} bytes; it must be a multiple of {4 * self.size}, one number for each rank")
        case = self.operations[operation](size // 4)
        return command_loop.timed(iterations, warmup, size, lambda i: case.prepare(i, self.rank), case.run,
                                  lambda i: case.check(i, operation), dist.barrier)

    def first(self, name, elements):
        """The beginning of a buffer that grows to the largest size asked for."""
        if name not in self.buffers or self.buffers[name].numel() < elements:
            self.buffers.pop(name, None)  # give back before taking more
            self.buffers[name] = torch.empty(elements)
        return self.buffers[name][:elements]

    def parts(self, tensor):
        return list(tensor.chunk(self.size))

    def sum_of_values(self, iteration, part):
        return sum(value(iteration, rank, part) for rank in range(self.size))

    def all_reduce(self, elements):
        data = self.first("input", elements)
        return Case(lambda: dist.all_reduce(data), lambda i, part: self.sum_of_values(i, 0), [data], [data])

    def all_reduce_slices(self, elements):
        """What passes between hosts in a hierarchical all_reduce, and nothing else: of as many ranks on each host, each reduces
        its slice with those of the same place on the other hosts, in a group of their own."""
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        if self.slice_group is None:
            groups = [dist.new_group(list(range(place, self.size, local))) for place in range(local)]
            self.slice_group = groups[self.rank % local]
        data, members = self.first("input", elements // local), range(self.rank % local, self.size, local)
        return Case(lambda: dist.all_reduce(data, group=self.slice_group),
                    lambda i, part: sum(value(i, rank, 0) for rank in members), [data], [data])

    def reduce(self, elements):
        data = self.first("input", elements)
        return Case(lambda: dist.reduce(data, ROOT), lambda i, part: self.sum_of_values(i, 0), [data],
                    [data] if self.rank == ROOT else [])

    def broadcast(self, elements):
        data = self.first("input", elements)
        return Case(lambda: dist.broadcast(data, ROOT), lambda i, part: value(i, ROOT, 0), [data], [data])

    def all_gather(self, elements):
        data, outputs = self.first("input", elements // self.size), self.parts(self.first("output", elements))
        return Case(lambda: dist.all_gather(outputs, data), lambda i, part: value(i, part, 0), [data], outputs)

    def all_gather_into_tensor(self, elements):
        data, output = self.first("input", elements // self.size), self.first("output", elements)
        return Case(lambda: all_gather_into_tensor(output, data), lambda i, part: value(i, part, 0), [data],
                    self.parts(output))

    def gather(self, elements):
        data = self.first("input", elements // self.size)
        outputs = self.parts(self.first("output", elements)) if self.rank == ROOT else []
        return Case(lambda: dist.gather(data, outputs or None, ROOT), lambda i, part: value(i, part, 0), [data], outputs)

    def scatter(self, elements):
        inputs = self.parts(self.first("input", elements)) if self.rank == ROOT else []
        output = self.first("output", elements // self.size)
        return Case(lambda: dist.scatter(output, inputs or None, ROOT), lambda i, part: value(i, ROOT, self.rank), inputs,
                    [output])

    def reduce_scatter(self, elements):
        inputs, output = self.parts(self.first("input", elements)), self.first("output", elements // self.size)
        return Case(lambda: dist.reduce_scatter(output, inputs), lambda i, part: self.sum_of_values(i, self.rank), inputs,
                    [output])

    def reduce_scatter_tensor(self, elements):
        data, output = self.first("input", elements), self.first("output", elements // self.size)
        return Case(lambda: reduce_scatter_tensor(output, data), lambda i, part: self.sum_of_values(i, self.rank),
                    self.parts(data), [output])

    def all_to_all(self, elements):
        inputs, outputs = self.parts(self.first("input", elements)), self.parts(self.first("output", elements))
        return Case(lambda: dist.all_to_all(outputs, inputs), lambda i, part: value(i, part, self.rank), inputs, outputs)

    def all_to_all_single(self, elements):
        data, output = self.first("input", elements), self.first("output", elements)
        return Case(lambda: dist.all_to_all_single(output, data), lambda i, part: value(i, part, self.rank),
                    self.parts(data), self.parts(output))

    def send_recv(self, elements):
        """A round trip of two messages between ranks 2k and 2k+1."""
        if self.size % 2:
            raise ValueError(f"send_recv goes between pairs of ranks, and there are {self.size}; start an even number")
        data, output, peer = self.first("input", elements), self.first("output", elements), self.rank ^ 1

        def send_first():
            dist.send(data, peer)
            dist.recv(output, peer)

        def receive_first():
            dist.recv(output, peer)
            dist.send(data, peer)

        return Case(send_first if self.rank < peer else receive_first, lambda i, part: value(i, peer, 0), [data], [output])


if __name__ == "__main__":
    command_loop.start("gloo")
    command_loop.serve(Collectives().measure)
