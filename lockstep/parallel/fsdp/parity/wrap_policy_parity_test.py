"""The groups that policies make of a model against those of PyTorch's FullyShardedDataParallel, by name."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, lambda_auto_wrap_policy, size_based_auto_wrap_policy

PREFIX = "_fsdp_wrapped_module."


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Transformer(nn.Module):
    def __init__(self, width=8, layers=3, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Digits(nn.Module):
    """The articles' model, of which size_based_auto_wrap_policy(100_000) wraps fc1 and not fc2."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 256), nn.Linear(256, 10)


MODELS = {"digits": Digits, "transformer": Transformer, "tied": lambda: Transformer(tied=True)}


def sized(count):
    return functools.partial(size_based_auto_wrap_policy, min_num_params=count)


POLICIES = {
    "none": None,
    "size 100000": sized(100_000),
    "size 1000": sized(1000),
    "size 300": sized(300),
    "size 1": sized(1),
    "blocks": ModuleWrapPolicy({Block}),
    "linear and embedding": CustomPolicy(lambda module: isinstance(module, (nn.Linear, nn.Embedding))),
    "norms by lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)),
}


@pytest.fixture(scope="module")
def ours(run_driver, tmp_path_factory):
    output = tmp_path_factory.mktemp("parity") / "ours.pt"
    run_driver("wrap_policy_parity_driver", output)
    return torch.load(output, weights_only=False)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('store')}/file", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def groups_of(model, policy):
    """{module: its group's parameters}, of the wrapped modules that have any."""
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    answer = {}
    for name, module in wrapped.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            clean = (name + ".").replace(PREFIX, "").removesuffix(".")
            prefix = clean + "." if clean else ""
            found = [prefix + info.param_name if info.module_name == "" else prefix + info.module_name + "." + info.param_name
                     for info in module._handle.flat_param._param_infos]  # fmt: skip
            answer[clean] = sorted(each.replace(PREFIX, "") for each in found)
    return answer


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_groups_are_pytorchs(model, policy, ours):
    if model == "tied" and policy in ("size 300", "size 1", "linear and embedding"):
        pytest.skip("PyTorch can't tie parameters over several groups")
    assert ours[f"{model}, {policy}"] == groups_of(MODELS[model](), POLICIES[policy])
