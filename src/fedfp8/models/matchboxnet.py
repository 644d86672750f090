"""MatchboxNet-3x1x64 (Majumdar and Ginsburg 2020): 1D time-channel separable convolutions on MFCC.

A separable convolution is a depthwise one along time, then a pointwise one across channels. Prologue
(kernel 11), three residual blocks of one separable convolution each (B=3, R=1, C=64; kernels 13, 15, 17),
an epilogue (kernel 29 with dilation 2, then pointwise), the mean over time, a linear classifier. 77,214
parameters at the 30 classes of Speech Commands v1 as in the original paper ("77K"), 77,859 at 35; the FP8
paper's "350K" fits no reading of 3x1x64.

GroupNorm stands where the original has BatchNorm, for the reason given in `resnet.py`; the number of
parameters is the same.

Sounds are images of one column here, frames x 1, for speed: torch convolves images in channels-last memory three to
five times as fast as `Conv1d` does where every channel has its own kernel. For the same reason the dilated
convolution is a plain one: in two columns, even and odd frames, those two frames apart are neighbours.
"""

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["MatchboxNet", "matchboxnet"]

GROUPS = 2


def _separable(inputs: int, outputs: int, size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, (size, 1), padding=(size // 2, 0), groups=inputs, bias=False),
        *_pointwise(inputs, outputs),
    )


def _pointwise(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.GroupNorm(GROUPS, outputs))


class Block(nn.Module):
    """A separable convolution beside a pointwise shortcut."""

    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self.main = _separable(inputs, outputs, size)
        self.shortcut = _pointwise(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.main(x) + self.shortcut(x), inplace=True)


class MatchboxNet(nn.Module):
    """(batch, features, frames) -> (batch, num_classes); 128 frames in the original, an odd number gets one more."""

    def __init__(self, num_classes: int = 35, features: int = 64) -> None:
        super().__init__()
        self.prologue = nn.Sequential(_separable(features, 128, 11), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Block(128, 64, 13), Block(64, 64, 15), Block(64, 64, 17))
        self.epilogue = nn.Sequential(
            _separable(64, 128, 29),
            nn.ReLU(inplace=True),
            _pointwise(128, 128),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Linear(128, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, x.shape[2] % 2)).unsqueeze(3)  # (batch, features, frames, 1)
        x = self.blocks(self.prologue(x))
        x = x.reshape(*x.shape[:2], -1, 2)  # (batch, 64, frames / 2, 2)
        return self.classifier(self.epilogue(x).mean((2, 3)))


def matchboxnet(num_classes: int = 35, features: int = 64) -> nn.Module:
    return MatchboxNet(num_classes, features)
