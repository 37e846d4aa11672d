"""Trains a model of a given size with PyTorch's fully_shard over Gloo; as examples/large_model.cc, but without files.

By hand: torchrun --nproc-per-node 2 benchmarks/peers/python_large_model.py WIDTH BATCH STEPS BLOCKS
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def main(width, batch, steps, blocks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    with torch.device("meta"):
        net = Net(width, blocks)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(net, mesh=mesh, mp_policy=precision)
    net.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.to_local().normal_(std=width ** -0.5)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(batch // ranks, width)
        loss = torch.nn.functional.mse_loss(net(x).float(), 2 * x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    if not loss.isfinite():
        sys.exit("the loss is not finite: these steps computed nothing of use")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
