"""The models of the comparison, the same as in models.h: forward(x, branch) gives a list, the logits first.

`branch` says what an iteration uses, where a model has a choice.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

FEATURES = 64  # an image of 8x8
CLASSES = 10
TOKENS = 6  # a sequence
VOCABULARY = 20


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, 24)
        self.fc2 = nn.Linear(24, 24)
        self.fc3 = nn.Linear(24, CLASSES)

    def forward(self, x, branch):
        return [self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))]


class Recurrent(nn.Module):
    """An LSTM over the rows of an image, and a parameter that is frozen."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.fc = nn.Linear(6, CLASSES)
        self.scale = nn.Parameter(torch.full((6,), 1.5), requires_grad=False)

    def forward(self, x, branch):
        rows, _ = self.lstm(x.view(-1, 8, 8))
        return [self.fc(rows[:, -1] * self.scale)]


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 4 * 4, CLASSES)

    def forward(self, x, branch):
        y = torch.tanh(self.bn1(self.conv1(x.view(-1, 1, 8, 8))))
        y = torch.tanh(self.bn2(self.conv2(y)))
        return [self.fc(nn.functional.avg_pool2d(y, 2).flatten(1))]


class Transformer(nn.Module):
    """One block; the output layer's weight is the embedding's, registered under both names."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.tied = self.embedding.weight
        self.register_buffer("future", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))

    def forward(self, x, branch):
        y = self.embedding(x)
        batch, tokens, width = y.shape
        parts = self.qkv(self.norm1(y)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(parts[0], parts[1].transpose(-2, -1)) / 4
        weights = torch.softmax(scores.masked_fill(self.future, -1e9), -1)
        y = y + self.out(torch.matmul(weights, parts[2]).transpose(1, 2).reshape(batch, tokens, width))
        y = y + self.down(nn.functional.gelu(self.up(self.norm2(y))))
        return [nn.functional.linear(y, self.tied).flatten(0, 1)]


class Branches(nn.Module):
    """Bits 1 and 2 of `branch` choose layers; bit 4 says whether the loss uses the second output."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 16)
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.auxiliary = nn.Linear(16, CLASSES)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x, branch):
        y = torch.tanh(self.trunk(x))
        if branch & 1:
            y = y + torch.tanh(self.left(y))
        if branch & 2:
            y = y + torch.tanh(self.right(y))
        return [self.head(y), self.auxiliary(y)]


class SparseEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, sparse=True)
        self.fc = nn.Linear(8, VOCABULARY)

    def forward(self, x, branch):
        return [self.fc(torch.tanh(self.embedding(x))).flatten(0, 1)]


class Checkpointed(nn.Module):
    """`branch` times through one layer whose activations are computed again in backward, by a backward within
    backward."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, CLASSES)

    def forward(self, x, branch):
        y = torch.tanh(self.fc1(x))
        for _ in range(branch):
            y = torch.tanh(checkpoint(self.fc2, y, use_reentrant=True))
        return [self.fc3(y)]


# "cnn sync" is Lockstep's SyncBatchNorm; PyTorch's refuses CPU tensors, so its reference is one process.
MODELS = {
    "mlp": Mlp,
    "recurrent": Recurrent,
    "cnn": Cnn,
    "cnn sync": Cnn,
    "transformer": Transformer,
    "branches": Branches,
    "sparse": SparseEmbedding,
    "checkpointed": Checkpointed,
}
TOKEN_MODELS = ("transformer", "sparse")
