"""The roundings, one object each: which tensors it codes, how a tensor becomes codes and codes a tensor.

    none        everything as it is (the FP32 baseline)
    nearest     FP8 codes of the weights, Q_det; the rest as it is
    stochastic  FP8 codes of the weights, Q_rand with the message's random bits
    dithered    int32 on a uniform grid for every float tensor, one step each (DQ); ranges as they are

A new one is an object here, a recipe in `fl/config.py` and, if its codes are of another kind, a coder in `wire`:
docs/guides/new-method.md walks through it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fedfp8.fp8 import dither, from_codes, to_codes, undither
from fedfp8.fp8.many import dither_many, undither_many
from fedfp8.fp8.parallel import dither_keys
from fedfp8.fp8.quantizers import dither_and_back
from fedfp8.fp8.strides import has_kernel
from fedfp8.model.layout import TensorSpec

__all__ = ["ROUNDINGS", "Draw", "Rounding", "rounding_of"]


@dataclass(frozen=True)
class Draw:
    """The random bits of one tensor of a message: a seed, and the sender's place among those that share it."""

    seed: int
    place: int = 0
    strata: int = 1


Item = tuple[TensorSpec, torch.Tensor, torch.Tensor | None, float, Draw]  # a tensor: what its (de)quantizing takes


@dataclass(frozen=True)
class Rounding:
    """What all roundings have; this one, "none", codes nothing."""

    name: str
    number: int  # in a payload's header
    kinds: tuple[str, ...] = ()  # which tensors travel as codes
    codes: torch.dtype | None = None
    has_ranges: bool = False  # FP8 codes: scaled by the tensor's range
    has_steps: bool = False  # a uniform grid: a step a tensor, places in a cohort, changes
    is_random: bool = False

    def quantize(
        self, spec: TensorSpec, values: torch.Tensor, alpha: torch.Tensor | None, step: float, draw: Draw
    ) -> torch.Tensor:
        """Flat codes of one tensor."""
        raise NotImplementedError(f"rounding {self.name!r} codes nothing")

    def dequantize(
        self, spec: TensorSpec, codes: torch.Tensor, alpha: torch.Tensor | None, step: float, draw: Draw
    ) -> torch.Tensor:
        """The values that the receiver works with, flat."""
        raise NotImplementedError(f"rounding {self.name!r} codes nothing")

    def quantize_batch(self, batch: Sequence[Item]) -> list[torch.Tensor]:
        """The same for some tensors; a rounding may be faster at it."""
        return [self.quantize(*item) for item in batch]

    def dequantize_batch(self, batch: Sequence[Item]) -> list[torch.Tensor]:
        return [self.dequantize(*item) for item in batch]

    def receive_batch(self, batch: Sequence[Item]) -> list[torch.Tensor]:
        """What becomes of some tensors on the way: dequantized as soon as they are quantized."""
        codes = self.quantize_batch(batch)
        return self.dequantize_batch([(s, k, a, step, d) for (s, _, a, step, d), k in zip(batch, codes, strict=True)])


class Float8(Rounding):
    """To the FP8 grid of the tensor's format and range; as many bits a weight as the format has."""

    def quantize(
        self, spec: TensorSpec, values: torch.Tensor, alpha: torch.Tensor | None, step: float, draw: Draw
    ) -> torch.Tensor:
        assert spec.format is not None and alpha is not None
        return to_codes(values, alpha, spec.format, rounding=self.name, seed=draw.seed, name=spec.name)

    def dequantize(
        self, spec: TensorSpec, codes: torch.Tensor, alpha: torch.Tensor | None, step: float, draw: Draw
    ) -> torch.Tensor:
        assert spec.format is not None and alpha is not None
        return from_codes(codes, alpha, spec.format, name=spec.name)


class Dithered(Rounding):
    """To a uniform grid shifted by known random bits; a step of 0 stands for a tensor that is all zero."""

    def quantize(
        self, spec: TensorSpec, values: torch.Tensor, alpha: torch.Tensor | None, step: float, draw: Draw
    ) -> torch.Tensor:
        if not step:
            return torch.zeros(spec.size, dtype=torch.int32)
        return dither(values, step, seed=draw.seed, place=draw.place, strata=draw.strata, name=spec.name)

    def dequantize(
        self, spec: TensorSpec, codes: torch.Tensor, alpha: torch.Tensor | None, step: float, draw: Draw
    ) -> torch.Tensor:
        if not step:
            return torch.zeros(spec.size)
        return undither(codes, step, seed=draw.seed, place=draw.place, strata=draw.strata, name=spec.name)

    def quantize_batch(self, batch: Sequence[Item]) -> list[torch.Tensor]:
        return _together(self.quantize, dither_many, batch)

    def dequantize_batch(self, batch: Sequence[Item]) -> list[torch.Tensor]:
        return _together(self.dequantize, undither_many, batch)

    def receive_batch(self, batch: Sequence[Item]) -> list[torch.Tensor]:
        """A large tensor, which is a batch of its own, in one pass."""
        spec, values, _, step, draw = batch[0]
        if len(batch) > 1 or not step or not has_kernel(values):
            return super().receive_batch(batch)
        return [dither_and_back(values, step, seed=draw.seed, place=draw.place, strata=draw.strata, name=spec.name)]


def _together(
    one: Callable[..., torch.Tensor], many: Callable[..., list[torch.Tensor]], batch: Sequence[Item]
) -> list[torch.Tensor]:
    """Tensors with a step in one call; one by one where that gains nothing, or to say which cannot be quantized."""
    live = [(tensor, step, draw) for _, tensor, _, step, draw in batch if step]
    found: list[torch.Tensor] = []
    if len(live) > 1 and all(has_kernel(tensor, tensor.dtype) for tensor, _, _ in live):
        tensors, steps, draws = zip(*live, strict=True)
        found = many(tensors, steps, [dither_keys(draw.seed, draw.place, draw.strata) for draw in draws])
    done = iter(found)
    return [next(done) if found and item[3] else one(*item) for item in batch]


ROUNDINGS: dict[str, Rounding] = {
    rounding.name: rounding
    for rounding in (
        Rounding("none", 0),
        Float8("nearest", 1, ("fp8",), torch.uint8, has_ranges=True),
        Float8("stochastic", 2, ("fp8",), torch.uint8, has_ranges=True, is_random=True),
        Dithered("dithered", 3, ("fp8", "float"), torch.int32, has_steps=True, is_random=True),
    )
}
_BY_NUMBER = {rounding.number: rounding for rounding in ROUNDINGS.values()}


def rounding_of(name: "str | int") -> Rounding:
    """A rounding by its name, or by the number that stands for it in a payload; KeyError if there is none."""
    return ROUNDINGS[name] if isinstance(name, str) else _BY_NUMBER[name]
