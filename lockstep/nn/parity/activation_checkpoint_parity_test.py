"""activation_checkpoint() against torch.utils.checkpoint: the same gradients, bit for bit, and the same parts run again."""


import pytest
import torch
from torch.utils.checkpoint import checkpoint

CASES = ["chain", "nested", "frozen input", "to the end", "other random numbers", "twice", "kept graph", "one block's gradient"]


def numbers(count, start):
    return torch.arange(count, dtype=torch.float64).div(count).add(start).sin()


class Block:
    """Two layers, with dropout between them, that say how far they come."""

    def __init__(self, events, index):
        self.events, self.name = events, str(index)
        self.first = numbers(24, index).view(4, 6).requires_grad_()
        self.second = numbers(24, 7 + index).view(6, 4).requires_grad_()

    def __call__(self, x):
        self.events.append(self.name + " begins")
        middle = torch.dropout(x.matmul(self.first).tanh(), 0.5, True)
        self.events.append(self.name + " goes on")
        y = middle.matmul(self.second).sigmoid() + x
        self.events.append(self.name + " ends")
        return y


def run(name):
    torch.manual_seed(11)
    events = []
    blocks = [Block(events, index) for index in range(3)]
    input_ = numbers(12, 3).view(3, 4).requires_grad_(name != "frozen input")
    options = {"use_reentrant": False, "preserve_rng_state": name != "other random numbers", "early_stop": name != "to the end"}
    if name == "nested":
        y = checkpoint(lambda x: checkpoint(blocks[1], checkpoint(blocks[0], x, **options), **options), input_, **options)
        y = blocks[2](y)
    else:
        y = input_
        for block in blocks:
            y = checkpoint(block, y, **options)
    sources = [input_] * input_.requires_grad + [part for block in blocks for part in (block.first, block.second)]
    loss = y.square().sum()
    if name == "twice":
        first = torch.autograd.grad(loss, sources, create_graph=True)
        gradients = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), sources)
    elif name == "kept graph":
        torch.autograd.grad(loss, sources, retain_graph=True)
        gradients = torch.autograd.grad(loss, sources)
    elif name == "one block's gradient":
        gradients = torch.autograd.grad(loss, [blocks[2].second])
    else:
        gradients = torch.autograd.grad(loss, sources)
    return [*gradients, torch.rand(4, dtype=torch.float64)], events


@pytest.fixture(scope="module")
def ours(run_driver, tmp_path_factory):
    output = tmp_path_factory.mktemp("parity") / "ours.pt"
    run_driver("activation_checkpoint_parity_driver", output, OMP_NUM_THREADS="1")
    return torch.load(output, weights_only=False)


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_events_are_pytorchs(name, ours):
    gradients, events = run(name)
    our_gradients, our_events = ours
    assert list(our_events[name]) == events
    for actual, expected in zip(our_gradients[name], gradients, strict=True):
        assert torch.equal(actual, expected.detach())
