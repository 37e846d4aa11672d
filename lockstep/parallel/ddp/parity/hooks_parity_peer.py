"""The same hooks as hooks_parity_driver.cc, by PyTorch with Gloo.

python hooks_parity_peer.py JOBS OUTPUT WORLD_SIZE; rank r writes {job name: {"results": ..., "state": ..., "stats": ...}}
to OUTPUT.r.
"""

import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "testing"))
import gloo_peer  # noqa: E402


class Bucket:
    """dist.GradBucket, which Python can't make."""

    def __init__(self, index, buffer, parameters, is_last):
        self._index, self._buffer, self._parameters, self._is_last = index, buffer, parameters, is_last

    def index(self):
        return self._index

    def buffer(self):
        return self._buffer

    def set_buffer(self, buffer):
        self._buffer = buffer

    def parameters(self):
        return self._parameters

    def is_last(self):
        return self._is_last

    def gradients(self):
        pieces = self._buffer.split([p.numel() for p in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters)]


class StackedAllGather:
    """torch.distributed for the quantization hooks: they want the future's value of NCCL's all_gather, which is
    one stacked tensor; Gloo's is a list."""

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_gather(self, outputs, tensor, group=None, async_op=False):
        dist.all_gather(outputs, tensor, group=group)
        self.value = [torch.stack(outputs)]
        return self

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(self.value)
        return future


def orthogonalize_any(matrices, epsilon=0):
    """batched_powerSGD_hook passes single matrices, which the original refuses."""
    original_orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


original_orthogonalize = powerSGD_hook._orthogonalize
powerSGD_hook._orthogonalize = orthogonalize_any
quantization_hooks.dist = StackedAllGather()


def make_hook(name, settings, world_size):
    """(state, hook) of a job."""
    if name == "perchannel":
        size = settings["bucket_size"]
        return None, lambda state, bucket: quantization_hooks.quantization_perchannel_hook(state, bucket, size)
    if name == "post_localSGD":
        ranks = [[0, 1], [2]] if world_size == 3 else [[rank] for rank in range(world_size)]
        subgroup, _ = dist.new_subgroups_by_enumeration(ranks)
        return post_localSGD_hook.PostLocalSGDState(None, subgroup, **settings), post_localSGD_hook.post_localSGD_hook
    if "powerSGD" in name:
        settings = {key: value for key, value in settings.items() if key != "saved"}
        hooks = {
            "powerSGD": powerSGD_hook.powerSGD_hook,
            "batched_powerSGD": powerSGD_hook.batched_powerSGD_hook,
            "fp16(powerSGD)": default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
            "bf16(powerSGD)": default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        }
        return powerSGD_hook.PowerSGDState(None, **settings), hooks[name]
    return None, {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "fp16(allreduce)": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        "bf16(allreduce)": default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
        "noop": debugging_hooks.noop_hook,
        "pertensor": quantization_hooks.quantization_pertensor_hook,
    }[name]


def run(job, rank, world_size):
    state, hook = make_hook(job["hook"], job["settings"], world_size)
    steps = job["gradients"][0].size(0)
    results = [torch.empty_like(gradients[:, 0]) for gradients in job["gradients"]]
    for step in range(steps):
        for index, gradients in enumerate(job["gradients"]):
            parameters = [torch.zeros(shape, dtype=gradients.dtype) for shape in job["shapes"][index]]
            bucket = Bucket(index, gradients[step, rank].clone(), parameters, index + 1 == len(results))
            # One after the other: the order of Gloo's operations is not the same on all ranks otherwise.
            results[index][step] = hook(state, bucket).wait()
    answer = {"results": results}
    if isinstance(state, powerSGD_hook.PowerSGDState):
        answer["stats"] = list(map(float, state.compression_stats()))
        answer["state"] = {**state.__getstate__(), "next_random": int(state.rng.randint(1_000_000_000))}
        del answer["state"]["rng"]
    return answer


if __name__ == "__main__":
    gloo_peer.run(lambda jobs, rank, world_size: {name: run(job, rank, world_size) for name, job in jobs.items()})
