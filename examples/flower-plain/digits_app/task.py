"""Model, data and training, as in any PyTorch app: nothing here knows of Flower or of fedfp8."""

import functools

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@functools.cache
def load_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(train x, train y, test x, test y): 1,437 and 360 images of 8x8."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    y = torch.tensor(data.target)[order]
    return x[:1437], y[:1437], x[1437:], y[1437:]


def load_partition(partition: int, partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y, _, _ = load_data()
    return x[partition::partitions], y[partition::partitions]


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, lr: float) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    loss = torch.zeros(())
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(16):
            optimizer.zero_grad()
            loss = cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    _, _, x, y = load_data()
    model.eval()
    return float((model(x).argmax(1) == y).float().mean())
