"""MatchboxNet-3x1x64 (Majumdar and Ginsburg 2020): 1D time-channel separable convolutions on MFCC.

A separable convolution is a depthwise one along time, then a pointwise one across channels. Prologue
(kernel 11), three residual blocks of one separable convolution each (B=3, R=1, C=64; kernels 13, 15, 17),
an epilogue (kernel 29 with dilation 2, then pointwise), the mean over time, a linear classifier. 77,214
parameters at the 30 classes of Speech Commands v1 as in the original paper ("77K"), 77,859 at 35; the FP8
paper's "350K" fits no reading of 3x1x64.

GroupNorm stands where the original has BatchNorm, for the reason given in `resnet.py`; the number of
parameters is the same.
"""

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["MatchboxNet", "matchboxnet"]

GROUPS = 2


def _separable(inputs: int, outputs: int, size: int, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (size - 1) // 2
    return nn.Sequential(
        nn.Conv1d(inputs, inputs, size, padding=padding, dilation=dilation, groups=inputs, bias=False),
        *_pointwise(inputs, outputs),
    )


def _pointwise(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(inputs, outputs, 1, bias=False), nn.GroupNorm(GROUPS, outputs))


class Block(nn.Module):
    """A separable convolution beside a pointwise shortcut."""

    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self.main = _separable(inputs, outputs, size)
        self.shortcut = _pointwise(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.main(x) + self.shortcut(x), inplace=True)


class MatchboxNet(nn.Module):
    """(batch, features, time) -> (batch, num_classes); any number of frames, 128 in the original."""

    def __init__(self, num_classes: int = 35, features: int = 64) -> None:
        super().__init__()
        self.prologue = nn.Sequential(_separable(features, 128, 11), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Block(128, 64, 13), Block(64, 64, 15), Block(64, 64, 17))
        self.epilogue = nn.Sequential(
            _separable(64, 128, 29, dilation=2),
            nn.ReLU(inplace=True),
            _pointwise(128, 128),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Linear(128, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.epilogue(self.blocks(self.prologue(x))).mean(2))


def matchboxnet(num_classes: int = 35, features: int = 64) -> nn.Module:
    return MatchboxNet(num_classes, features)
