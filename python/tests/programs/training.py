"""A small training: its data, its model, and how it goes in one process. Nothing here knows of lockstep."""

import torch
import torch.distributed as dist

SAMPLES, BATCH, EPOCHS, RATE = 48, 8, 4, 0.05


def data():
    inputs = torch.sin(torch.arange(6.0 * SAMPLES) ** 1.5).view(SAMPLES, 6)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :2].tanh() + inputs[:, 2:4])


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)


def loss_of(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def loader(batch=BATCH):
    return torch.utils.data.DataLoader(data(), batch)


def outcome(model):
    """What ranks are compared by: the parameters, the final loss, and the backend that carried the gradients."""
    result = {
        "parameters": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist(),
        "loss": loss_of(model, data()[:]).item(),
    }
    if dist.is_initialized():
        result["backend"] = dist.get_backend()
        result["engine"] = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__module__
    return result


def train_plainly(world=2):
    """One process with the batches of all ranks."""
    model = make_model()
    optimizer = make_optimizer(model)
    for _ in range(EPOCHS):
        for batch in loader(world * BATCH):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return outcome(model)
