"""FP8 twins of torch's layers: the same parameters under the same names, plus a learnable range per operand.

``QuantLinear`` *is* an ``nn.Linear`` (and so on): only its forward differs,

    y = linear(Q(x; beta), Q(weight; alpha)) + bias

with Q the straight-through quantizer. `alpha` starts at max|weight|; `beta` is 0.0, "not set", until the first training
batch sets it to max|x|. Until then an input passes as it is. From there on both are learned, or stay the largest
magnitude, of the weight and of each batch (``ranges_are``).

An input that needs no gradient (the data itself, at the first layer) gets a fixed range: learning it would
cost a convolution with respect to the data in every step, for one number that the data transform fixes
anyway.

In eval mode rounding is always to nearest, so evaluation is deterministic whatever the training rounding is.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import E4M3, Format
from fedfp8.fp8.measure import largest
from fedfp8.modules import MatMul
from fedfp8.nn.native import product
from fedfp8.nn.operand import ACTIVATION_FLOOR, WEIGHT_FLOOR, Operand, compute, in_graph, settle, weight_floor
from fedfp8.rng import derive_seed

__all__ = [
    "FP8Layer",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantLinear",
    "QuantMatMul",
    "WeightedLayer",
    "initial_alpha",
]

NO_TORCHSCRIPT = (
    "a prepared model cannot become TorchScript: use torch.export or torch.compile, or script the plain model that "
    "fedfp8.restore(model, rounded=True) gives"
)

_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 has none


class FP8Layer(nn.Module):
    """What the twins share. Made by `prepare`, which changes the class of an existing layer, never
    directly.
    """

    range_names: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    weight_names: ClassVar[dict[str, str]] = {"alpha": "weight"}  # of those ranges that belong to a weight
    format: Format = E4M3
    rounding: str = "nearest"
    ranges_are: str = "learned"  # or "largest": max|w| at any time, max|x| of every training batch
    seed: int = 0
    calls: int = 0  # forward passes in training mode, so that stochastic rounding never draws the same bits twice
    path: str = ""  # the layer's name in the model: for messages and as part of the seed

    def initial_range(self, name: str) -> float:
        """What is known of an input range before any data; 0.0, not set, by default."""
        return 0.0

    def ranges(self) -> dict[str, nn.Parameter]:
        return {name: getattr(self, name) for name in self.range_names}

    def weights(self) -> dict[str, nn.Parameter]:
        """The rounded weights, each under the name of its range."""
        return {range_name: getattr(self, name) for range_name, name in self.weight_names.items()}

    def settle_ranges(self) -> None:
        """Raise every range that is set to its floor; ranges that follow their weights catch up."""
        for name in self.range_names:
            if name in self.weight_names and self.ranges_are == "largest":
                self._follow(name, getattr(self, self.weight_names[name]))
            else:
                self._settle(name, None)

    def _operand(self, x: Tensor, name: str) -> Operand:
        """x to be rounded with the range `name`, which is settled first."""
        range_: Tensor = getattr(self, name)
        is_weight = name in self.weight_names
        first_batch = x if self.training and not is_weight else None
        if self.training and self._follows(name, x):
            range_ = self._follow(name, x)
        elif in_graph(x):
            range_ = self._settle_in_graph(name, first_batch)
        elif self._settle(name, first_batch) == 0.0:
            return Operand(x, None, self.format, "nearest", None)
        return Operand(x, range_ if is_weight or x.requires_grad else range_.detach(), *self._rounding(name))

    def _follows(self, name: str, x: Tensor) -> bool:
        """Whether the range is the largest magnitude of x; that of data, which needs no gradient, is fixed."""
        return self.ranges_are == "largest" and (name in self.weight_names or x.requires_grad)

    def _follow(self, name: str, x: Tensor) -> Tensor:
        """The largest magnitude of x, which the range is from now on; it has no gradient. Zeros change no input's."""
        range_: nn.Parameter = getattr(self, name)
        graph = in_graph(x)
        if name in self.weight_names:
            value = _covering(x.detach()) if graph else initial_alpha(x, self.path)
        elif graph:
            found = torch.ops.fedfp8.settle(torch.zeros_like(range_), x.detach(), *self._settings(name))
            value = torch.where(found == 0, range_.detach(), found)
        else:
            found = settle(0.0, x, *self._settings(name))
            value = torch.full_like(range_.detach(), found or self._settle(name, None))
        if not graph:
            range_.data.copy_(value)  # `.data` as in `_settle`
        elif not _is_exporting():
            with torch.no_grad():
                range_.copy_(value)
        return value

    def _settle(self, name: str, x: Tensor | None) -> float:
        """`.data` on purpose: the same layer may be used twice in one graph, and only an optimizer step, never the
        graph, lies between two different values.
        """
        range_: nn.Parameter = getattr(self, name)
        value = range_.item()
        if self._floor(name) <= value < math.inf:  # nearly always
            return value
        settled = settle(value, x, *self._settings(name))
        range_.data.fill_(settled)
        return settled

    def _settle_in_graph(self, name: str, x: Tensor | None) -> Tensor:
        """The same as an operator. An exported program only reads its ranges; so does a compiled one in eval mode."""
        range_: nn.Parameter = getattr(self, name)
        settled: Tensor = torch.ops.fedfp8.settle(range_, x, *self._settings(name))
        if self.training and not _is_exporting():
            with torch.no_grad():
                range_.copy_(settled)
        return settled

    def _settings(self, name: str) -> tuple[float, bool, str]:
        """(floor, whether it is an input's range, full name), as `settle` takes them."""
        return self._floor(name), name not in self.weight_names, f"{self.path}.{name}" if self.path else name

    def _floor(self, name: str) -> float:
        weight = self.weight_names.get(name)
        return ACTIVATION_FLOOR if weight is None else weight_floor(getattr(self, weight))

    def _rounding(self, name: str) -> tuple[Format, str, int | None]:
        if self.rounding != "stochastic" or not self.training:
            return self.format, "nearest", None
        return self.format, "stochastic", derive_seed(self.seed, "qat", self.path, name, self.calls)

    def _off(self) -> bool:
        """Whether this forward pass is a float one; counts it, and refuses what cannot work."""
        if torch.jit.is_tracing():
            raise QuantizationError(NO_TORCHSCRIPT)
        if torch.compiler.is_compiling():  # a counter in Python would be a constant of the graph
            if self.training and self.rounding == "stochastic":
                raise QuantizationError(
                    "stochastic rounding in training mode cannot be compiled or exported: its random bits depend on a "
                    'counter. Use set_rounding(model, "nearest"), or train this model without torch.compile'
                )
        else:
            self.calls += self.training
        return self.rounding == "off"

    def __prepare_scriptable__(self) -> nn.Module:  # the first thing torch.jit.script asks for
        raise QuantizationError(NO_TORCHSCRIPT)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """A float checkpoint has no ranges: alpha then follows the loaded weight, the others stay as they
        are.
        """
        for name, range_ in self.ranges().items():
            if prefix + name in state_dict:
                continue
            if name not in self.weight_names:
                state_dict[prefix + name] = range_.detach().clone()
            elif (weight := state_dict.get(prefix + self.weight_names[name])) is not None:
                state_dict[prefix + name] = initial_alpha(weight, self.path)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"format={self.format.name}", f"rounding={self.rounding!r}"]
        parts += ["native"] * getattr(self, "native", False)
        return ", ".join(p for p in parts if p)


def initial_alpha(weight: Tensor, path: str) -> Tensor:
    """max|w| as a 0-d float32 tensor; 1/sqrt(fan-in) for a weight that is all zero."""
    found = largest(weight)
    if not math.isfinite(found):
        raise QuantizationError(f"the weight of layer {path!r} holds NaN or Inf; FP8 has neither")
    return _covering(weight, torch.tensor(found, dtype=torch.float32, device=weight.device))


def _covering(weight: Tensor, found: Tensor | None = None) -> Tensor:
    """The range of a weight whose largest magnitude was found to be this; without it also in graphs, which look at no
    value."""
    if found is None:
        found = weight.abs().amax().float() if weight.numel() else torch.zeros((), device=weight.device)
    floor = weight_floor(weight)
    return torch.where(found == 0, floor / WEIGHT_FLOOR, found.clamp(min=floor))


class WeightedLayer(FP8Layer):
    """A layer of one input and one weight; `_operate` is the layer's own operation on rounded operands."""

    weight: Tensor
    native: bool = False  # whether the product runs on FP8 hardware

    def forward(self, x: Tensor) -> Tensor:
        if self._off():
            return super().forward(x)
        operands = self._operand(x, "beta"), self._operand(self.weight, "alpha")
        if self.native and operands[0].range is not None:
            return self._native(*operands)
        return compute(self._operate, *operands)

    def _native(self, x: Operand, weight: Operand) -> Tensor:
        """The layer as one product of rows of x: a Linear, or a convolution of size 1 (`is_product`)."""
        if in_graph(x.source):
            raise QuantizationError('compute="native" cannot be compiled or exported yet; use compute="emulated"')
        at = (
            -1 if isinstance(self, nn.Linear) else 1 - self.weight.dim()
        )  # where the features are, counted from the end
        rows, matrix = x.source.movedim(at, -1), weight.source.flatten(1)
        out = product(x._replace(source=rows), weight._replace(source=matrix))
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        return (out if bias is None else out + bias).movedim(-1, at)

    def is_product(self) -> bool:
        """Whether the layer is a matrix product."""
        m: Any = self
        if not isinstance(self, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return isinstance(self, nn.Linear)
        ones = {*m.kernel_size, *m.stride, m.groups}
        return ones == {1} and m.padding in ("valid", "same", (0,) * len(m.kernel_size))

    def _operate(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError


class QuantLinear(WeightedLayer, nn.Linear):
    def _operate(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.bias)


class _Conv(WeightedLayer):
    def _operate(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._conv_forward(x, weight, self.bias)  # type: ignore[operator]


class QuantConv1d(_Conv, nn.Conv1d):
    pass


class QuantConv2d(_Conv, nn.Conv2d):
    pass


class QuantConv3d(_Conv, nn.Conv3d):
    pass


class _ConvTranspose(WeightedLayer):
    """``forward(x, output_size=None)``, as in torch."""

    operation: ClassVar[Callable[..., Tensor]]

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self._off():
            return super(WeightedLayer, self).forward(x, output_size)
        operate = partial(self._operate, output_size=output_size)
        return compute(operate, self._operand(x, "beta"), self._operand(self.weight, "alpha"))

    def _operate(self, x: Tensor, weight: Tensor, output_size: list[int] | None = None) -> Tensor:
        m: Any = self
        extra = m._output_padding(x, output_size, m.stride, m.padding, m.kernel_size, len(m.kernel_size), m.dilation)
        return self.operation(x, weight, m.bias, m.stride, m.padding, extra, m.groups, m.dilation)


class QuantConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    operation = staticmethod(F.conv_transpose1d)


class QuantConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    operation = staticmethod(F.conv_transpose2d)


class QuantConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    operation = staticmethod(F.conv_transpose3d)


class QuantMatMul(FP8Layer, MatMul):
    """A product of two activations. A bound that the model states is the initial range of that operand.

    For attention this matters: the weights of a fresh network are all near 1 / tokens, so a range taken from the
    first batch would clip every weight that then grows, and an optimizer needs many steps to raise it to 1.
    """

    range_names: ClassVar[tuple[str, ...]] = ("beta_left", "beta_right")
    weight_names: ClassVar[dict[str, str]] = {}

    def initial_range(self, name: str) -> float:
        return (self.left_bound if name == "beta_left" else self.right_bound) or 0.0

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        if self._off():
            return super().forward(left, right)
        return compute(torch.matmul, self._operand(left, "beta_left"), self._operand(right, "beta_right"))
