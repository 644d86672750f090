"""Operations as modules, for tools that see a network as a tree of modules.

A product of two activations written as ``a @ b`` leaves no trace in the tree, so nothing that works on modules
can find it. Written as :class:`MatMul` it can be found, named, hooked, or replaced: `fedfp8.nn.prepare` gives it
a range per operand.
"""

import torch
from torch import nn

__all__ = ["MatMul"]


class MatMul(nn.Module):
    """``left @ right``; no parameters.

    A bound is what the author knows about an operand: the output of a softmax never exceeds 1. It is a remark
    for such tools; the product itself does not look at it.
    """

    def __init__(self, left_bound: float | None = None, right_bound: float | None = None) -> None:
        super().__init__()
        self.left_bound, self.right_bound = left_bound, right_bound

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right
