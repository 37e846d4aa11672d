"""The same training as in fsdp_parity_driver.cc by PyTorch's FullyShardedDataParallel and fully_shard with Gloo.

python fsdp_parity_peer.py JOBS OUTPUT WORLD_SIZE; rank r's results, {"fsdp1" or "fsdp2": {job: …}}, go to OUTPUT.r.

Of nested jobs also, under "JOB, groups", the number of each parameter's group, in the order in which they are used.
"""

import contextlib
import copy
import functools
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

LOCKSTEP = pathlib.Path(__file__).parents[3]
sys.path[:0] = [str(LOCKSTEP / "parallel" / "ddp" / "parity"), str(LOCKSTEP / "testing")]
import gloo_peer  # noqa: E402
import parity_models  # noqa: E402


class Fsdp1:
    def __init__(self, net, job):
        policy = None
        if job["min_num_params"]:
            policy = functools.partial(size_based_auto_wrap_policy, min_num_params=job["min_num_params"])
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        if job["nested"]:
            net.fc1, net.fc2 = (FullyShardedDataParallel(layer, **options) for layer in (net.fc1, net.fc2))
        self.model = FullyShardedDataParallel(net, auto_wrap_policy=policy, **options)

    def without_sync(self):
        return self.model.no_sync()

    def groups(self):
        """Each parameter's, of the mlp: the outermost wrapper's, of what is left, is used last."""
        wrapped = [(name, module) for name, module in self.model.named_modules() if isinstance(module, FullyShardedDataParallel)]
        found = {}
        for number, (name, module) in enumerate([*wrapped[1:], wrapped[0]]):
            for info in module._handle.flat_param._param_infos:
                path = ".".join(part for part in (name, info.module_name, info.param_name) if part)
                found[path.replace("_fsdp_wrapped_module.", "").replace("._fsdp_wrapped_module", "")] = torch.tensor(number)
        return found

    def state(self):
        # Not state_dict(), whose hooks read freed storages on the CPU.
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
            return {name.replace("_fsdp_wrapped_module.", ""): tensor.detach().clone() for name, tensor in named}


class Fsdp2:
    def __init__(self, net, job):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in net.modules():
            if isinstance(module, nn.Linear) and (job["min_num_params"] or (job["nested"] and module is not net.fc3)):
                fully_shard(module, mesh=mesh)
        self.model = fully_shard(net, mesh=mesh)

    @contextlib.contextmanager
    def without_sync(self):
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def clip(self, max_norm):
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).full_tensor()

    def state(self):
        return {name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
                for name, tensor in self.model.state_dict().items()}  # fmt: skip


def train(sharded, job, rank, world_size):
    net = parity_models.MODELS[job["model"]]().double()
    net.load_state_dict(job["weights"])
    wrapper = sharded(net, job)
    if job["optimizer"] == "adamw":
        optimizer = torch.optim.AdamW(wrapper.model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(wrapper.model.parameters(), lr=0.05, momentum=0.9)
    batch = job["inputs"].size(1) // world_size
    part = slice(rank * batch, (rank + 1) * batch)
    norms, losses = [], []
    for index, (x, y) in enumerate(zip(job["inputs"], job["targets"])):
        last = (index + 1) % job["accumulate"] == 0
        with contextlib.nullcontext() if last else wrapper.without_sync():
            logits = wrapper.model(x[part], int(job["branches"][index]))[0]
            loss = nn.functional.cross_entropy(logits, y[part].flatten())
            loss.backward()
            losses.append(loss.item())
        if not last:
            continue
        if job["max_norm"]:
            norms.append(wrapper.clip(job["max_norm"]).item())
        optimizer.step()
        optimizer.zero_grad()
    result = {name: tensor.detach().clone() for name, tensor in wrapper.state().items()}
    return result | {"norms": torch.tensor(norms, dtype=torch.float64), "losses": torch.tensor(losses, dtype=torch.float64)}


def results_of(all_jobs, rank, world_size):
    results = {}
    for kind, sharded in {"fsdp1": Fsdp1, "fsdp2": Fsdp2}.items():
        jobs = copy.deepcopy(all_jobs)
        if kind == "fsdp1":
            # It can't clip in float64, for it asks for norms in float32; and where a parameter has no gradient, while others of
            # its group have one, it makes zeros of it, which momentum turns into a step.
            jobs = {name: job for name, job in jobs.items() if not job["max_norm"] and name != "unused layers"}
        results[kind] = {name: train(sharded, job, rank, world_size) for name, job in jobs.items()}
        if kind == "fsdp1":
            results["groups"] = {name: Fsdp1(parity_models.MODELS[job["model"]](), job).groups()
                                 for name, job in jobs.items() if job["nested"]}  # fmt: skip
    return results


if __name__ == "__main__":
    gloo_peer.run(results_of)
