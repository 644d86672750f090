"""One operand of a layer in FP8: a tensor, its learnable range, and how it is rounded.

A layer computes on fake-quantized operands, ``conv(Q(x; beta), Q(w; alpha))``. Two things happen here that a
reader of the layers need not know.

Ranges stay usable. An optimizer step can push a range to zero or below; :func:`usable` puts it back to a
floor, in place, when it is next used. The floor is a thousandth of the natural scale (of weights:
1/sqrt(fan-in); of activations: 1), not a "tiny epsilon". A layer whose range collapsed to 1e-12 would
multiply what passes through it by 1e-12; two such layers in a row would never see a gradient again. At a
thousandth the signal is small but alive, and the gradient of a range that clips everything, sum of g *
sign(x), brings it back. A grid reaches down to 4e-6 of its range, so small weights are still represented at
the floor.

Quantized copies are not kept. Autograd would hold Q(x) for the backward pass beside x, which whoever made x
(a ReLU, a norm) holds anyway: half as much memory again. Quantizing runs at the speed of a copy, so it is
done a second time in backward instead, through hooks on the tensors that the layer's operation saves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import Format, fake_quantize, quantize

__all__ = ["ACTIVATION_FLOOR", "Operand", "compute", "usable", "weight_floor"]

ACTIVATION_FLOOR = 2.0**-10


def weight_floor(weight: Tensor) -> float:
    """The smallest range of a weight tensor: a thousandth of 1/sqrt(fan-in)."""
    return 2.0**-10 / math.sqrt(max(1, weight[0].numel()))


def usable(range_: nn.Parameter, floor: float, name: str) -> float:
    """The value of a range after raising it, in place, to `floor`; 0.0 (not set) is left to the caller.

    `.data` on purpose: the same layer may be used twice in one graph, and only an optimizer step, never the
    graph, lies between two different values.
    """
    value = range_.item()
    if not math.isfinite(value):
        raise QuantizationError(
            f"range {name!r} is {value}; it must be finite. The training step before this one diverged: "
            "lower the learning rate, or give ranges their own with parameter_groups(range_lr=...)"
        )
    if value >= floor or value == 0.0:
        return value
    range_.data.fill_(floor)
    return floor


@dataclass(frozen=True)
class Operand:
    """A tensor to be rounded to the grid of `range`; `range` None leaves it as it is."""

    source: Tensor
    range: Tensor | None
    format: Format
    rounding: str
    seed: int | None

    def fake(self) -> Tensor:
        """The rounded tensor, differentiable in the source and the range."""
        if self.range is None:
            return self.source
        return fake_quantize(self.source, self.range, self.format, rounding=self.rounding, seed=self.seed)


def compute(operation: Callable[..., Tensor], *operands: Operand) -> Tensor:
    """``operation`` on the rounded operands; what it saves of them for backward is recomputed there."""
    rounded = [operand.fake() for operand in operands]
    if not torch.is_grad_enabled():
        return operation(*rounded)
    again = {
        q.untyped_storage().data_ptr(): _again(operand)
        for q, operand in zip(rounded, operands, strict=True)
        if operand.range is not None
    }

    def pack(saved: Tensor) -> Any:
        recompute = again.get(saved.untyped_storage().data_ptr())
        if recompute is None:
            return saved
        return recompute, saved.size(), saved.stride(), saved.storage_offset()

    with saved_tensors_hooks(pack, _unpack):
        return operation(*rounded)


def _again(operand: Operand) -> Callable[[], Tensor]:
    """A function that rounds the operand once more, with the range it had now."""
    assert operand.range is not None
    source, alpha, version = operand.source.detach(), operand.range.item(), operand.source._version
    format, rounding, seed = operand.format, operand.rounding, operand.seed

    def recompute() -> Tensor:
        if source._version != version:
            raise RuntimeError(
                "a tensor needed for the backward pass of an FP8 layer was modified in place after the "
                "forward pass; write to a copy instead"
            )
        return quantize(source, alpha, format, rounding=rounding, seed=seed)

    return recompute


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    recompute, size, stride, offset = packed
    with torch.no_grad():
        return recompute().as_strided(size, stride, offset)
