"""ResNet18 (He et al. 2016) with GroupNorm in place of BatchNorm, as the paper does for skewed clients.

Two stems. `cifar`, the default, is a 3x3 convolution of stride 1 and no max-pool: 11,173,962 parameters at
10 classes. `imagenet` is the original 7x7 convolution of stride 2 and max-pool: 11,181,642. The paper does
not say which it used; its 92 % on CIFAR-10 is out of reach for the second, which leaves 8x8 pixels after
the stem.
"""

import torch
from torch import nn
from torch.nn import functional as F

from fedfp8.errors import ConfigError

__all__ = ["ResNet18", "resnet18"]


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the shortcut is 1x1 where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = _conv(outputs, outputs, 3)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.GroupNorm(groups, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class ResNet18(nn.Module):
    """(batch, in_channels, 32, 32) or larger -> (batch, num_classes)."""

    def __init__(self, num_classes: int = 10, stem: str = "cifar", groups: int = 2, in_channels: int = 3) -> None:
        super().__init__()
        if stem not in ("cifar", "imagenet"):
            raise ConfigError(
                f"resnet18 stem {stem!r}; choose 'cifar' (3x3, no max-pool) or 'imagenet' (7x7, max-pool)"
            )
        small = stem == "cifar"
        self.conv1 = _conv(in_channels, 64, 3) if small else _conv(in_channels, 64, 7, 2)
        self.norm1 = nn.GroupNorm(groups, 64)
        self.pool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.stages = nn.Sequential(
            *(nn.Sequential(Block(i, o, s, groups), Block(o, o, 1, groups)) for i, o, s in widths)
        )
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.pool(self.norm1(self.conv1(x))), inplace=True)  # pool first: they commute
        return self.fc(self.stages(x).mean((2, 3)))


def resnet18(num_classes: int = 10, stem: str = "cifar", groups: int = 2, in_channels: int = 3) -> nn.Module:
    return ResNet18(num_classes, stem, groups, in_channels)
