"""The least that a launcher can start, in Python over Gloo; as benchmarks/launch.cc."""

import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
numbers = torch.ones(16)
dist.all_reduce(numbers)
now = time.monotonic_ns()
file = pathlib.Path(sys.argv[1], f"{dist.get_rank()}.{os.getpid()}")
new = pathlib.Path(f"{file}.new")
new.write_text(str(now))
new.rename(file)
while "--stay" in sys.argv:
    dist.all_reduce(numbers.fill_(1))
    time.sleep(0.005)
dist.destroy_process_group()
