"""KWT-1, the Keyword Transformer (Berg, O'Connor and Cruz 2021): attention over time on MFCC.

Every frame of 40 coefficients is a token of width 64; a class token is put in front, positions are learned;
12 post-norm blocks of one-head attention and a 256-wide MLP; the class token is classified. 607,308
parameters at the 12 classes of the original ("607K"), 608,803 at 35; the FP8 paper says "450K".

The products of attention are :class:`~fedfp8.modules.MatMul` modules, so that they can be found and
quantized. The softmax stays between them in FP32. The last block computes the class token only: nothing
reads the other 98, so the output is the same and a block of twelve nearly free.
"""

import torch
from torch import nn
from torch.nn import functional as F

from fedfp8.modules import MatMul

__all__ = ["KeywordTransformer", "kwt1"]

WIDTH, DEPTH, HIDDEN = 64, 12, 256


class Attention(nn.Module):
    """One head, answering for the first `tokens`: (batch, all tokens, width) -> (batch, tokens, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = width**-0.5
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.scores = MatMul()
        self.mix = MatMul(left_bound=1.0)  # the softmax
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = self.scores(query[:, :tokens], key.transpose(1, 2)) * self.scale
        return self.out(self.mix(scores.softmax(-1), value))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        x = self.norm1(x[:, :tokens] + self.attention(x, tokens))
        return self.norm2(x + self.contract(F.gelu(self.expand(x))))


class KeywordTransformer(nn.Module):
    """(batch, features, frames) -> (batch, num_classes)."""

    def __init__(self, num_classes: int = 35, features: int = 40, frames: int = 98) -> None:
        super().__init__()
        self.embed = nn.Linear(features, WIDTH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position = nn.Parameter(torch.zeros(1, frames + 1, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH, HIDDEN) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, num_classes)
        self._initialise()

    def _initialise(self) -> None:
        """The original's: normal of deviation 0.02 cut at two deviations, biases zero."""
        for name, p in self.named_parameters():
            if "norm" in name:
                continue
            if name.endswith("bias"):
                nn.init.zeros_(p)
            else:
                nn.init.trunc_normal_(p, std=0.02, a=-0.04, b=0.04)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.transpose(1, 2))  # (batch, frames, width)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        for block in self.blocks[:-1]:
            x = block(x, x.shape[1])
        x = self.blocks[-1](x, 1)
        return self.head(x[:, 0])


def kwt1(num_classes: int = 35, features: int = 40, frames: int = 98) -> nn.Module:
    return KeywordTransformer(num_classes, features, frames)
