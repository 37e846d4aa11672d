"""The smallest Python program that communicates, as benchmarks/startup.cc: one rank, one all_reduce over Gloo."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
numbers = torch.ones(16)
dist.all_reduce(numbers)
dist.destroy_process_group()
sys.exit(0 if numbers.sum().item() == 16 else 1)
