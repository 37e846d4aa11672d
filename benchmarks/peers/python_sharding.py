"""Times training steps of a Python program with AdamW and PyTorch's fully_shard over Gloo; as benchmarks/sharding.cc.

The mode fsdp shards over all ranks, hybrid over those of each host, between which gradients are averaged (HYBRID_SHARD).

By hand: torchrun --nproc-per-node 2 benchmarks/peers/python_sharding.py fsdp huge 4 1
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import command_loop
from python_ddp_step import NETWORKS as MULTILAYER
from python_ddp_step import multilayer, timed_steps

VOCABULARY, LENGTH = 2048, 64
TRANSFORMERS = {"transformer": (256, 2, 8), "transformer_25m": (512, 7, 4)}  # width, layers, batch size


class Transformer(torch.nn.Module):
    """As in benchmarks/networks.h."""

    def __init__(self, width, layers):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        layer = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width)
        self.encoder = torch.nn.TransformerEncoder(layer, layers)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens).transpose(0, 1)).transpose(0, 1)).flatten(0, 1)


def mesh_of(mode):
    ranks = dist.get_world_size()
    if mode == "fsdp":
        return init_device_mesh("cpu", (ranks,))
    of_host = int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh("cpu", (ranks // of_host, of_host), mesh_dim_names=("replicate", "shard"))


class Trainer:
    def __init__(self, mode, network):
        if network in TRANSFORMERS:
            width, layers, self.batch_size = TRANSFORMERS[network]
            self.model = Transformer(width, layers)
            self.sample, self.classes = (LENGTH,), VOCABULARY
        else:
            widths, self.batch_size = MULTILAYER[network]
            self.model = multilayer(widths)
            self.sample, self.classes = (widths[0],), widths[-1]
        self.tokens = network in TRANSFORMERS
        mesh = mesh_of(mode)
        kind = torch.nn.TransformerEncoderLayer if self.tokens else torch.nn.Linear
        for module in list(self.model.modules()):
            if isinstance(module, kind):
                fully_shard(module, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.inputs = self.targets = torch.empty(0)

    def prepare_batches(self, count):
        if self.inputs.shape[0] < count:
            self.inputs = torch.empty(count, self.batch_size, *self.sample, dtype=torch.long if self.tokens else torch.float)
            self.targets = torch.empty(count, self.batch_size, *(self.sample if self.tokens else ()), dtype=torch.long)
        if self.tokens:
            self.inputs.random_(0, VOCABULARY)
        else:
            self.inputs.normal_()
        self.targets.random_(0, self.classes)

    def step(self, batch):
        self.optimizer.zero_grad()
        self.loss = torch.nn.functional.cross_entropy(self.model(self.inputs[batch]), self.targets[batch].flatten())
        self.loss.backward()
        self.optimizer.step()


class Trainers:
    """One, for its memory is measured, too."""

    def __init__(self):
        self.what = None

    def measure(self, mode, network, iterations, warmup):
        if self.what is None and mode in ("fsdp", "hybrid"):
            self.what, self.trainer = (mode, network), Trainer(mode, network)
        if (mode, network) != self.what:
            raise ValueError(f"this process has {self.what}, not {mode} of {network}; the modes are fsdp and hybrid")
        return timed_steps(self.trainer, iterations, warmup)


if __name__ == "__main__":
    command_loop.start("gloo")
    torch.manual_seed(dist.get_rank())  # each rank has its own data
    command_loop.serve(Trainers().measure)
