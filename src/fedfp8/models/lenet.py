"""LeNet as used in federated learning on CIFAR (FedAvg, FedDyn): 797,962 parameters at 10 classes.

The max-pool comes before the ReLU. Both are monotone, so they commute exactly, and the ReLU (and whatever
follows it) then works on a quarter of the elements.
"""

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["LeNet", "lenet"]


class LeNet(nn.Module):
    """(batch, in_channels, 32, 32) -> (batch, num_classes)."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 5)
        self.conv2 = nn.Conv2d(64, 64, 5)
        self.fc1 = nn.Linear(64 * 5 * 5, 384)
        self.fc2 = nn.Linear(384, 192)
        self.fc3 = nn.Linear(192, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))  # 64 x 14 x 14
        x = F.relu(F.max_pool2d(self.conv2(x), 2))  # 64 x 5 x 5
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def lenet(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    return LeNet(num_classes, in_channels)
