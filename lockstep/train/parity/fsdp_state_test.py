"""Whole states of a FullyShardedDataParallel and its optimizer, from Python and back: three parts of one training."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict as dcp

STEPS = 4  # of each part
BATCH = 12  # of all ranks
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.99)),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.last = torch.nn.Linear(7, 2)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x):
        return self.scale * self.last(torch.tanh(self.first(x)))


def train(net, optimizer, x):
    for batch in x:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()


def states(net, optimizer):
    return {"model": copy.deepcopy(net.state_dict()), "optimizer": copy.deepcopy(dcp.get_optimizer_state_dict(net, optimizer))}


def expect_close(actual, expected, place):
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape, place
        assert (actual.double() - expected.double()).abs().max().item() <= 1e-10, place
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), place
        for key, value in expected.items():
            expect_close(actual[key], value, f"{place}.{key}")
    elif isinstance(expected, list) and place.endswith(".params"):
        assert sorted(actual) == sorted(expected), place
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), place
        for number, value in enumerate(expected):
            expect_close(actual[number], value, f"{place}.{number}")
    else:
        assert actual == pytest.approx(expected), place


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_python_began_goes_on_in_shards_and_back_in_python(world_size, run_lockstep, tmp_path):
    torch.manual_seed(7)
    x = torch.randn(3 * STEPS, BATCH, 5, dtype=torch.float64)
    whole, begun = {}, {}
    for name, make in OPTIMIZERS.items():
        net = Net()
        optimizer = make(net.parameters())
        train(net, optimizer, x[:STEPS])
        begun[name] = {**states(net, optimizer), "x": x[STEPS : 2 * STEPS].clone()}
        train(net, optimizer, x[STEPS : 2 * STEPS])
        whole[name] = (net, optimizer, states(net, optimizer))
    torch.save(begun, tmp_path / "begun")
    output = tmp_path / "ours"
    run_lockstep("fsdp_state_driver", tmp_path / "begun", output, output=output, world_size=world_size, OMP_NUM_THREADS="1")
    ours = torch.load(f"{output}.0", weights_only=True)
    for name, (net, optimizer, expected) in whole.items():
        expect_close(ours[name], expected, name)
        expect_close(load_file(f"{output}.{name}.safetensors"), expected["model"], name)
        back = Net()
        back.load_state_dict(ours[name]["model"])
        resumed = OPTIMIZERS[name](back.parameters())
        dcp.set_optimizer_state_dict(back, resumed, ours[name]["optimizer"])
        for each, its_optimizer in ((net, optimizer), (back, resumed)):
            train(each, its_optimizer, x[2 * STEPS :])
        expect_close(back.state_dict(), dict(net.state_dict()), name)
