"""Times what torch.profiler costs; as benchmarks/profiler.cc.

By hand: torchrun --nproc-per-node 1 benchmarks/peers/python_profiler.py add:plain 10000 5 1
"""

import contextlib
import pathlib
import tempfile
import time

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import command_loop

# What each level records, as profile() calls it.
LEVELS = {"plain": (), "shapes": ("record_shapes",), "memory": ("record_shapes", "profile_memory"),
          "stack": ("record_shapes", "profile_memory", "with_stack"), "flops": ("record_shapes", "with_flops")}
NUMBERS = torch.ones(4)


def add(count):
    for _ in range(count):
        torch.add(NUMBERS, NUMBERS)


def recorder(how):
    return profile(activities=[ProfilerActivity.CPU], **dict.fromkeys(LEVELS[how], True))


def time_additions(how, count):
    with contextlib.nullcontext() if how == "off" else recorder(how):
        before = time.perf_counter_ns()
        add(count)
        return time.perf_counter_ns() - before


def time_scopes(count):
    before = time.perf_counter_ns()
    for _ in range(count):
        with record_function("augment"):
            pass
    return time.perf_counter_ns() - before


def time_export(how, count):
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        recorded = recorder(how)
        recorded.start()
        add(count)
        before = time.perf_counter_ns()
        recorded.stop()
        recorded.export_chrome_trace(str(pathlib.Path(folder, "trace.json")))
        return time.perf_counter_ns() - before


OPERATIONS = {"add": time_additions, "scope": time_scopes, "export": time_export}


def measure(operation, argument, iterations, warmup):
    what, _, how = operation.partition(":")
    arguments = (how, int(argument)) if how else (int(argument),)
    wall = [OPERATIONS[what](*arguments) for _ in range(warmup + iterations)]
    return wall[warmup:], []


if __name__ == "__main__":
    command_loop.start("gloo")
    command_loop.serve(measure)
