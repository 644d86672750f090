"""From (alpha, format) to the float32 constants that kernels and eager version share, with the checks on alpha."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8.format import Format

__all__ = ["ALPHA_MAX", "ALPHA_MIN", "Grid", "alpha_value", "grid_for"]

# Outside these bounds top / alpha or the smallest step would leave the normal float32 numbers.
ALPHA_MIN = 2.0**-80
ALPHA_MAX = 2.0**100


class Grid(NamedTuple):
    """Constants of one scaled grid; numpy scalars so that kernels are compiled once."""

    alpha: np.float32
    scale_in: np.float32  # top / alpha: to the standard grid
    scale_out: np.float32  # alpha / top: back
    top: np.float32
    lowest: np.float32  # smallest normal of the standard grid
    magic: np.float32  # times a binade: the constant that rounds there
    spread: np.float32  # times a binade: stochastic rounding's noise per unit of `centred`, a step less a hair in all
    per_level: np.float32  # times a binade: the step
    shift: np.uint32  # float32 mantissa bits that a code does not have
    offset: np.uint32  # first code of a binade = (float32 bits of the binade >> shift) - offset
    sign_shift: np.uint32
    half_unit: np.float32  # a code's fields placed as in a float16 (`intrinsics.value_of`), times this, are its value
    half_left: np.uint32
    half_right: np.uint32
    half_mask: np.uint32


def alpha_value(alpha: "float | torch.Tensor", name: str | None = None) -> np.float32:
    """alpha as float32; raises unless it is a single finite number in [2**-80, 2**100]."""
    what = "alpha" if name is None else f"alpha of {name!r}"
    if isinstance(alpha, torch.Tensor) and alpha.numel() != 1:
        raise QuantizationError(
            f"{what} has shape {tuple(alpha.shape)}; it must be one number per tensor (float or 0-d tensor)"
        )
    value = float(alpha.detach() if isinstance(alpha, torch.Tensor) else alpha)
    if not math.isfinite(value) or value <= 0:
        raise QuantizationError(
            f"{what} is {value}; it must be finite and > 0 (usually the largest magnitude of the tensor)"
        )
    if not ALPHA_MIN <= value <= ALPHA_MAX:
        raise QuantizationError(
            f"{what} is {value}; supported are {ALPHA_MIN:.3g} to {ALPHA_MAX:.3g}: rescale the tensor"
        )
    return np.float32(value)


@lru_cache(maxsize=4096)
def _grid(alpha: float, exponent_bits: int, mantissa_bits: int) -> Grid:
    e, m = exponent_bits, mantissa_bits
    format = Format(e, m)
    alpha = float(np.float32(alpha))
    f32, u32 = np.float32, np.uint32
    shift = 23 - m
    return Grid(
        alpha=f32(alpha),
        scale_in=f32(format.top / alpha),
        scale_out=f32(alpha / format.top),
        top=f32(format.top),
        lowest=f32(2.0 ** (1 - format.bias)),
        magic=f32(1.5 * 2.0**shift),
        # A grid value that went through float32 twice may be off by 2**(m-21) steps; keeping the noise 2**(m-20) short
        # of half a step makes stochastic rounding exact there, at a bias of at most 2**(m-20) steps elsewhere.
        spread=f32(2.0 ** (-m - 32) * (1 - 2.0 ** (m - 19))),
        per_level=f32(2.0**-m),
        shift=u32(shift),
        offset=u32((127 - format.bias + 1) << m),
        sign_shift=u32(format.bits - 1),
        half_unit=f32(f32(alpha / format.top) * 2.0 ** (15 - format.bias)),
        half_left=u32(16 - format.bits),
        half_right=u32(5 - e),
        half_mask=u32(0x8000 | ((1 << (10 + e)) - 1)),
    )


def grid_for(alpha: "float | torch.Tensor", format: Format, name: str | None = None) -> Grid:
    if isinstance(alpha, torch.Tensor) or not ALPHA_MIN <= alpha <= ALPHA_MAX:
        alpha = float(alpha_value(alpha, name))
    return _grid(alpha, format.exponent_bits, format.mantissa_bits)
