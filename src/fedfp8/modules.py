"""Operations as modules, for tools that see a network as a tree of modules.

A product of two activations written as ``a @ b`` leaves no trace in the tree, so nothing that works on
modules can find it. Written as :class:`MatMul` it can be found, named, hooked, or replaced:
`fedfp8.nn.prepare` gives it a range per operand.
"""

import torch
from torch import nn

__all__ = ["MatMul"]


class MatMul(nn.Module):
    """``left @ right``; no parameters."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right
