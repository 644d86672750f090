"""One operand of a layer in FP8: a tensor, its learnable range, and how it is rounded.

A layer computes on fake-quantized operands, ``conv(Q(x; beta), Q(w; alpha))``. Two things happen here that a
reader of the layers need not know.

Ranges stay usable. An optimizer step can push a range to zero or below; :func:`settle` says what it is to be when
it is next used, and the layer writes that back. The floor is a fraction of the natural scale (weights: a 64th of
1/sqrt(fan-in); activations: a 1024th, because attention weights are that small), not a tiny epsilon. The
gradient of a range that clips everything, the sum of g * sign(x), brings it back, but g and x are as small as
the other collapsed ranges on the way: with a floor of 1e-12, or 2**-10 for weights, three layers that a bad
step collapsed at once are still dead after 600 steps of SGD 0.1; with a 64th they learn again within 300.
A grid reaches down to 4e-6 of its range, so weights smaller than the floor are still represented.

Quantized copies are not kept. Autograd would hold Q(x) for the backward pass beside x, which whoever made x
(a ReLU, a norm) holds anyway: half as much memory again. Quantizing runs at the speed of a copy, so it is
done a second time in backward instead, through hooks on the tensors that the layer's operation saves.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import Format, fake_quantize, quantize
from fedfp8.fp8.measure import largest
from fedfp8.fp8.ste import in_graph

__all__ = ["ACTIVATION_FLOOR", "WEIGHT_FLOOR", "Operand", "compute", "in_graph", "settle", "weight_floor"]

WEIGHT_FLOOR = 2.0**-6  # times 1/sqrt(fan-in)
ACTIVATION_FLOOR = 2.0**-10
Result = TypeVar("Result")
KEEP = 1 << 18  # elements up to which holding a rounded operand costs less than rounding it again


def weight_floor(weight: Tensor) -> float:
    """The smallest range of a weight tensor: a 64th of 1/sqrt(fan-in)."""
    return WEIGHT_FLOOR / math.sqrt(max(1, math.prod(weight.shape[1:])))


def settle(value: float, x: Tensor | None, floor: float, is_input: bool, name: str) -> float:
    """What a range of this value is to be: raised to its floor, or, if it is an input range that is not set (0.0),
    the largest magnitude of x. Without x, or with an x that says nothing, such a range stays 0.0.
    """
    if is_input and value == 0.0:
        found = 0.0 if x is None or x.numel() == 0 else _largest(x, name)
        return max(found, floor) if found else 0.0
    if not math.isfinite(value):
        raise QuantizationError(
            f"range {name!r} is {value}; it must be finite. The training step before this one diverged: "
            "lower the learning rate, or give ranges their own with parameter_groups(range_lr=...)"
        )
    return max(value, floor)


def _largest(x: Tensor, name: str) -> float:
    """max|x| of a training batch; under DistributedDataParallel that of all processes' batches."""
    value = largest(x)
    if (ddp := DistributedDataParallel._get_active_ddp_module()) is not None:
        of_all = torch.tensor(value, device=x.device)
        torch.distributed.all_reduce(of_all, torch.distributed.ReduceOp.MAX, group=ddp.process_group)
        value = of_all.item()
    if not math.isfinite(value):
        raise QuantizationError(
            f"a training batch seen by {name!r} holds NaN or Inf; its largest magnitude was "
            "to become the range. Look for the layer before it that diverged, or for bad data"
        )
    return value


# `settle` as an operator of a graph: a new tensor, with the gradient of the identity.
torch.library.define(
    "fedfp8::settle",
    "(Tensor range, Tensor? x, float floor, bool is_input, str name) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("fedfp8::settle", "default")
def _settle(range: Tensor, x: Tensor | None, floor: float, is_input: bool, name: str) -> Tensor:
    return torch.full_like(range, settle(range.item(), x, floor, is_input, name))


torch.library.register_fake("fedfp8::settle", lambda range, *_: torch.empty_like(range))
torch.library.register_autograd("fedfp8::settle", lambda ctx, g: (g, None, None, None, None))


class Operand(NamedTuple):
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


def compute(operation: Callable[..., Result], *operands: Operand) -> Result:
    """``operation`` on the rounded operands; what it saves of them for backward is recomputed there.

    In a graph it is the compiler that decides what is kept and what is computed again.
    """
    rounded = [operand.fake() for operand in operands]
    if not torch.is_grad_enabled() or in_graph(rounded[0]):
        return operation(*rounded)
    by_storage = {_storage(q): operand for q, operand in zip(rounded, operands, strict=True)}

    def pack(saved: Tensor) -> "_Saved":
        operand = by_storage.get(_storage(saved))
        if operand is None or operand.range is None or saved.numel() <= KEEP:
            return _Kept(saved)
        return _Recomputed(saved, operand)

    with saved_tensors_hooks(pack, lambda packed: packed.tensor()):
        return operation(*rounded)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Saved:
    """A tensor held for backward, with the check that autograd makes for those it holds itself."""

    def __init__(self, source: Tensor) -> None:
        self.source, self.version = source.detach(), source._version

    def tensor(self) -> Tensor:
        if self.source._version != self.version:
            raise RuntimeError(
                "a tensor needed for the backward pass of an FP8 layer was modified in place after the "
                "forward pass; write to a copy instead"
            )
        return self.source


class _Kept(_Saved):
    """Something small, or not a rounded operand: kept as it is."""


class _Recomputed(_Saved):
    """A view of a rounded operand: only its source is held, and it is rounded once more when asked for."""

    def __init__(self, saved: Tensor, operand: Operand) -> None:
        super().__init__(operand.source)
        assert operand.range is not None
        self.alpha, self.operand = operand.range.item(), operand._replace(source=self.source, range=None)
        self.view = saved.size(), saved.stride(), saved.storage_offset()

    def tensor(self) -> Tensor:
        o = self.operand
        q = quantize(super().tensor(), self.alpha, o.format, rounding=o.rounding, seed=o.seed)
        return q.as_strided(*self.view)
