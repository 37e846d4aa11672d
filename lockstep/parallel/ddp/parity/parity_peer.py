"""PyTorch's side of the comparison: the jobs by torch.nn.parallel.DistributedDataParallel with Gloo.

python parity_peer.py JOBS OUTPUT WORLD_SIZE; rank r's results go to OUTPUT.r. The same as train.cc.
"""

import contextlib
import pathlib
import sys
import warnings

import torch
import torch._dynamo  # which DDP imports later, in each rank
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks  # noqa: F401 (before its streams are replaced)
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "testing")]
import gloo_peer  # noqa: E402
import parity_jobs  # noqa: E402
import parity_models  # noqa: E402


# ---- what PyTorch lacks on CPUs ----


class NoStream:
    """A CPU computes in order: PyTorch's mixed precision and optimizer in backward ask for streams all the same."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_stream(self, _):
        pass

    def record(self):
        pass

    def wait(self, stream=None):
        pass


class Done:
    """A work that has ended; its future holds a list of `value`."""

    def __init__(self, value):
        self.future = torch.futures.Future()
        self.future.set_result([value])

    def get_future(self):
        return self.future

    def wait(self):
        return True


class SynchronousGloo:
    """torch.distributed, as those modules see it whose collectives do not work with Gloo as they are."""

    def __getattr__(self, name):
        return getattr(dist, name)

    # Never asynchronous: nothing in PyTorch waits for the delayed all-reduce, and PowerSGD waits for one reduction
    # in the callback of another, where two buckets stop both of Gloo's threads.
    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            # Gloo rounds a sum of 16-bit numbers after each addition; Lockstep adds in float32 and rounds once.
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, tensor, group)
            tensor.copy_(sum(part.float() for part in parts))
        else:
            dist.all_reduce(tensor, op, group)
        return Done(tensor)

    def all_gather(self, tensors, tensor, group=None, async_op=False):
        """As with NCCL, the future holds one tensor of all ranks', which the quantization hooks count on."""
        dist.all_gather(tensors, tensor, group)
        return Done(torch.stack(tensors))


gloo = SynchronousGloo()
orthogonalize = powerSGD_hook._orthogonalize


def complete_pytorch():
    torch.Stream = torch.Event = NoStream
    torch.accelerator.current_stream = NoStream
    for module in (ddp_module, default_hooks, powerSGD_hook, quantization_hooks):
        module.dist = gloo
    dist.Reducer._run_allreduce_hook = lambda reducer, bucket: gloo.all_reduce(bucket.buffer()).get_future()
    # batched_powerSGD_hook passes one matrix where a batch of them is asserted.
    powerSGD_hook._orthogonalize = lambda matrices, epsilon=0: orthogonalize(
        matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon
    )


# ---- hooks ----


def bf16_hook(state, bucket):  # under its own name DDP refuses it without NCCL
    return default_hooks._compress_hook(torch.bfloat16, state, bucket)


def bf16_wrapper(hook):
    inner = default_hooks.bf16_compress_wrapper(hook)
    return lambda state, bucket: inner(state, bucket)


def doubling_hook(state, bucket):
    """A user's own: twice the average, without an average."""
    buffer = bucket.buffer()
    future = gloo.all_reduce(buffer).get_future()
    return future.then(lambda done: done.value()[0].mul_(2.0 / dist.get_world_size()))


HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": bf16_hook,
    "fp16 wrapper": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "bf16 wrapper": bf16_wrapper(default_hooks.allreduce_hook),
    "int8 per tensor": quantization_hooks.quantization_pertensor_hook,
    "int8 per channel": quantization_hooks.quantization_perchannel_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
    "batched powersgd": powerSGD_hook.batched_powerSGD_hook,
    "fp16 wrapper powersgd": default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    "post_local_sgd": post_localSGD_hook.post_localSGD_hook,
    "noop": debugging_hooks.noop_hook,
    "doubling": doubling_hook,
}


def hook_state(job, pairs):
    options = job["hook_options"]
    if "powersgd" in job["hook"]:
        return powerSGD_hook.PowerSGDState(None, **options)
    if job["hook"] == "post_local_sgd":
        period = {"start_localSGD_iter", "post_local_gradient_allreduce"}
        return post_localSGD_hook.PostLocalSGDState(None, pairs, **{key: options[key] for key in period})
    return None


def averaging_buffer_hook(_, buffers):
    total = torch.cat([buffer.double().flatten() for buffer in buffers.values()])
    dist.all_reduce(total)
    parts = (total / dist.get_world_size()).split([buffer.numel() for buffer in buffers.values()])
    for buffer, part in zip(buffers.values(), parts):
        buffer.copy_(part.view(buffer.shape))


# ---- training ----


def warm_up(job, model):
    """An iteration without a step: PyTorch converts the buckets that it begins with to the lower precision, but
    not the views through which gradients get there, so that it reduces uninitialised memory until the buckets
    are built again."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    loss_of(job, model, job["inputs"][0][: parity_jobs.BATCH], job["targets"][0][: parity_jobs.BATCH], 0).backward()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers):
        buffer.copy_(before)


def wrap(job, net, pairs):
    options = dict(job["options"])
    named = dict(net.named_parameters())
    if "parameters_to_ignore" in options:
        ignored = options.pop("parameters_to_ignore")
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    if "delay_all_reduce_named_params" in options:
        names = options["delay_all_reduce_named_params"]
        options["delay_all_reduce_named_params"] = [(name, named[name]) for name in names]
        options["param_to_hook_all_reduce"] = named[options["param_to_hook_all_reduce"]]
    if "process_group" in options:
        options["process_group"] = pairs
    if "mixed_precision" in options:
        dtypes = {key: getattr(torch, value) for key, value in options["mixed_precision"].items()}
        options["mixed_precision"] = ddp_module._MixedPrecision(**dtypes)
    model = DistributedDataParallel(net, **options)
    if "mixed_precision" in options:
        warm_up(job, model)
    if job["hook"]:
        model.register_comm_hook(hook_state(job, pairs), HOOKS[job["hook"]])
    if job["buffer_hook"]:
        location = ddp_module._BufferCommHookLocation
        where = location.PRE_FORWARD if job["buffer_hook"] == "average before" else location.POST_FORWARD
        model._register_buffer_comm_hook(None, averaging_buffer_hook, where)
    return model


def optimizer_of(job):
    if job["optimizer"] == "adam":
        return torch.optim.Adam, {"lr": 1e-3}
    return torch.optim.SGD, {"lr": 0.05, "momentum": 0.9 if job["optimizer"] == "sgd" else 0}


def loss_of(job, model, x, y, branch):
    if job["gradient_penalty"]:
        x = x.detach().clone().requires_grad_()
    outputs = model(x, branch)
    logits = outputs[0].to(getattr(torch, job["dtype"]))
    loss = torch.nn.functional.cross_entropy(logits, y.flatten())
    if branch & 4:
        loss = loss + 0.1 * outputs[1].square().mean()
    if job["gradient_penalty"]:
        (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        loss = loss + 0.01 * gradient.square().sum(1).mean()
    return loss


def perturb(net, rank):
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.add_(rank * 0.01 if tensor.is_floating_point() else rank)


def bucket_sizes(model):
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return torch.tensor([int(size) for size in sizes.split(",")])


def train(job, rank, world_size, pairs=None):
    """This rank's part of the job; without a process group, all batches in this process."""
    alone = not dist.is_initialized()
    net = parity_models.MODELS[job["model"]]().to(getattr(torch, job["dtype"]))
    net.load_state_dict(job["weights"])
    if job["perturb"]:
        perturb(net, rank)
    kind, arguments = optimizer_of(job)
    if job["in_backward"] and not alone:
        _apply_optimizer_in_backward(kind, net.parameters(), arguments)
    model = net if alone else wrap(job, net, pairs)
    optimizer = kind(net.parameters(), **arguments)
    averager = None
    if job["hook"] == "post_local_sgd":
        averager = PeriodicModelAverager(job["hook_options"]["period"], job["hook_options"]["start_localSGD_iter"])
    batch = job["inputs"].size(1) // world_size
    part = slice(rank * batch, (rank + 1) * batch)
    join = contextlib.nullcontext()
    if job["join"]:
        join = model.join(divide_by_initial_world_size=job["join"] == "initial")
    losses = []
    with join:
        for step in range(job["steps"][rank]):
            for index in range(step * job["accumulate"], (step + 1) * job["accumulate"]):
                last = index + 1 == (step + 1) * job["accumulate"]
                with contextlib.nullcontext() if last or alone else model.no_sync():
                    x, y = job["inputs"][index][part], job["targets"][index][part]
                    loss = loss_of(job, model, x, y, int(job["branches"][index][rank]))
                    (loss / job["accumulate"]).backward()
            losses.append(loss.item())
            optimizer.step()
            if averager:
                averager.average_parameters(net.parameters())
            optimizer.zero_grad(set_to_none=job["set_to_none"])
    result = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    result["losses"] = torch.tensor(losses, dtype=torch.float64)
    if job["buckets"] and not alone:
        result["buckets"] = bucket_sizes(model)
    return result


def results_of(jobs, rank, world_size):
    firsts = range(0, world_size, 2)
    pairs, _ = dist.new_subgroups_by_enumeration([parity_jobs.pair_of(first, world_size) for first in firsts])
    results = {}
    for name, job in jobs.items():
        if job["model"] == "cnn sync":
            continue
        try:
            results[name] = train(job, rank, world_size, pairs)
        except BaseException as error:
            raise RuntimeError(f"job '{name}'") from error
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    complete_pytorch()
    gloo_peer.run(results_of)
