"""FP8 twins of torch's layers: the same parameters under the same names, plus a learnable range per operand.

``QuantLinear`` *is* an ``nn.Linear`` (and so on): only its forward differs,

    y = linear(Q(x; beta), Q(weight; alpha)) + bias

with Q the straight-through quantizer. `alpha` starts at max|weight|; `beta` is 0.0, "not set", until the
first training batch sets it to max|x|. Until then an input passes as it is.

An input that needs no gradient (the data itself, at the first layer) gets a fixed range: learning it would
cost a convolution with respect to the data in every step, for one number that the data transform fixes
anyway.

In eval mode rounding is always to nearest, so evaluation is deterministic whatever the training rounding is.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import E4M3, Format
from fedfp8.modules import MatMul
from fedfp8.nn.operand import ACTIVATION_FLOOR, WEIGHT_FLOOR, Operand, compute, usable, weight_floor
from fedfp8.rng import derive_seed

__all__ = [
    "FP8Layer",
    "QuantConv1d",
    "QuantConv2d",
    "QuantLinear",
    "QuantMatMul",
    "WeightedLayer",
    "initial_alpha",
]


class FP8Layer(nn.Module):
    """What the twins share. Made by `prepare`, which changes the class of an existing layer, never
    directly.
    """

    range_names: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    format: Format = E4M3
    rounding: str = "nearest"
    seed: int = 0
    calls: int = 0  # forward passes in training mode, so that stochastic rounding never reuses its dice
    path: str = ""  # the layer's name in the model: for messages and as part of the seed

    def initial_range(self, name: str) -> float:
        """What is known of an input range before any data; 0.0, not set, by default."""
        return 0.0

    def ranges(self) -> dict[str, nn.Parameter]:
        return {name: getattr(self, name) for name in self.range_names}

    def clamp_ranges(self) -> None:
        """Raise every range that is set to its floor."""
        for name, range_ in self.ranges().items():
            self._range(name, range_)

    def _range(self, name: str, range_: nn.Parameter) -> float:
        """The value of a range, raised to its floor; 0.0 for an input range that is not set yet."""
        if name == "alpha":
            return usable(range_, weight_floor(self.weight), self._name(name))  # type: ignore[arg-type]
        return 0.0 if range_.item() == 0.0 else usable(range_, ACTIVATION_FLOOR, self._name(name))

    def _name(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def _rounding(self, name: str) -> tuple[str, int | None]:
        if self.rounding != "stochastic" or not self.training:
            return "nearest", None
        return "stochastic", derive_seed(self.seed, "qat", self.path, name, self.calls)

    def _weight(self, weight: Tensor) -> Operand:
        alpha: nn.Parameter = self.alpha  # type: ignore[assignment]
        self._range("alpha", alpha)
        return Operand(weight, alpha, self.format, *self._rounding("alpha"))

    def _input(self, x: Tensor, name: str) -> Operand:
        beta: nn.Parameter = getattr(self, name)
        if self._range(name, beta) == 0.0 and not self._set_range(beta, x, name):
            return Operand(x, None, self.format, "nearest", None)
        range_ = beta if x.requires_grad else beta.detach()
        return Operand(x, range_, self.format, *self._rounding(name))

    def _set_range(self, beta: nn.Parameter, x: Tensor, name: str) -> bool:
        """Take max|x| of the first training batch as the range; a batch of zeros says nothing about it."""
        if not self.training or x.numel() == 0:
            return False
        largest = max(abs(v.item()) for v in torch.aminmax(x.detach()))
        if not math.isfinite(largest):
            raise QuantizationError(
                f"the first batch seen by {self._name(name)!r} holds NaN or Inf; its largest magnitude was "
                "to become the range. Look for the layer before it that diverged, or for bad data"
            )
        if largest == 0.0:
            return False
        beta.data.fill_(max(largest, ACTIVATION_FLOOR))
        return True

    def _off(self) -> bool:
        self.calls += self.training
        return self.rounding == "off"

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """A float checkpoint has no ranges: alpha then follows the loaded weight, the others stay as they
        are.
        """
        weight = state_dict.get(prefix + "weight")
        for name, range_ in self.ranges().items():
            if prefix + name in state_dict:
                continue
            if name == "alpha" and weight is not None:
                state_dict[prefix + name] = initial_alpha(weight, self.path)
            elif name != "alpha":
                state_dict[prefix + name] = range_.detach().clone()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"format={self.format.name}", f"rounding={self.rounding!r}"]
        return ", ".join(p for p in parts if p)


def initial_alpha(weight: Tensor, path: str) -> Tensor:
    """max|w| as a 0-d float32 tensor; 1/sqrt(fan-in) for a weight that starts at zero."""
    largest = weight.detach().abs().amax().float() if weight.numel() else torch.zeros((), device=weight.device)
    if not math.isfinite(largest.item()):
        raise QuantizationError(f"the weight of layer {path!r} holds NaN or Inf; FP8 has neither")
    floor = weight_floor(weight)
    return largest.clamp(min=floor) if largest > 0 else torch.full_like(largest, floor / WEIGHT_FLOOR)


class WeightedLayer(FP8Layer):
    """A layer of one input and one weight; `_operate` is the layer's own operation on rounded operands."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self._off():
            return super().forward(x)
        return compute(self._operate, self._input(x, "beta"), self._weight(self.weight))

    def _operate(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError


class QuantLinear(WeightedLayer, nn.Linear):
    def _operate(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.bias)


class QuantConv1d(WeightedLayer, nn.Conv1d):
    def _operate(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._conv_forward(x, weight, self.bias)


class QuantConv2d(WeightedLayer, nn.Conv2d):
    def _operate(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._conv_forward(x, weight, self.bias)


class QuantMatMul(FP8Layer, MatMul):
    """A product of two activations. A bound that the model states is the initial range of that operand.

    For attention this matters: the weights of a fresh network are all near 1 / tokens, so a range taken from the
    first batch would clip every weight that then grows, and an optimizer needs many steps to raise it to 1.
    """

    range_names: ClassVar[tuple[str, ...]] = ("beta_left", "beta_right")

    def initial_range(self, name: str) -> float:
        return (self.left_bound if name == "beta_left" else self.right_bound) or 0.0

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        if self._off():
            return super().forward(left, right)
        return compute(torch.matmul, self._input(left, "beta_left"), self._input(right, "beta_right"))
