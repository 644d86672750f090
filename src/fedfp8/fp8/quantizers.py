"""FP8 numerics: values to grid values, to codes and back, and the dithered uniform grid.

The grid of `format` is scaled so that its largest magnitude is `alpha` (one number per tensor). ``rounding="nearest"``
is the paper's Q_det (ties to even); ``"stochastic"`` is Q_rand: unbiased for |x| <= alpha, exact on grid points, with
random bits that are a hash of (seed, flat index), the same for any thread count, device or memory format.

CPU float32 runs in Numba kernels at the speed of memory; other devices run the same arithmetic in torch operations and
give the same values. float16, bfloat16 and float64 inputs are converted to float32 first, and `quantize` converts its
result back to the input's dtype (exact from float32 to float64; a rounding more for the 16-bit types).

Special cases: -0 and small negative values become +0, so the code of -0 is never produced; Inf is clipped to alpha
and NaN stays NaN in `quantize`, both are refused by `to_codes` and `dither`; empty tensors work everywhere.
"""

import numpy as np
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import anydevice, eager
from fedfp8.fp8.format import E4M3, Format
from fedfp8.fp8.grid import Grid, grid_for
from fedfp8.fp8.parallel import Keys, dither_keys, random_keys, run
from fedfp8.fp8.strides import flat, has_kernel, through

__all__ = ["dither", "from_codes", "hash_uniform", "quantize", "to_codes", "undither"]

STEP_MIN, STEP_MAX = 2.0**-100, 2.0**100  # the steps of `dither` and `undither`: far from float32's ends
MOST_STEPS = 2**19  # to the largest value of a tensor, as steps are chosen
DITHER_LIMIT = 2.0**20  # |x| / step beyond which float32 has no room left for the random bits
DITHERED = torch.int32, torch.int16, torch.int8
Alpha = float | torch.Tensor


def quantize(
    x: torch.Tensor,
    alpha: Alpha,
    format: Format = E4M3,
    *,
    rounding: str = "nearest",
    seed: int | None = None,
    name: str | None = None,
) -> torch.Tensor:
    """Grid values nearest to x, or stochastically rounded; same shape, strides and dtype as x."""
    check_float(x, name)
    grid, keys = grid_for(alpha, format, name), rounding_keys(rounding, seed, name)
    if not has_kernel(x):
        ordered, restore = flat(x)
        return restore(anydevice.quantize(ordered.float(), grid, keys).to(x.dtype))
    from fedfp8.fp8 import kernels

    constants = (grid.scale_in, grid.scale_out, grid.top, grid.lowest, grid.magic)
    if keys is None:
        return through(kernels.quantize, x, x.dtype, constants)[0]
    return through(kernels.quantize_stochastic, x, x.dtype, (*constants, grid.spread), keys)[0]


def to_codes(
    x: torch.Tensor,
    alpha: Alpha,
    format: Format = E4M3,
    *,
    rounding: str = "nearest",
    seed: int | None = None,
    name: str | None = None,
) -> torch.Tensor:
    """uint8 codes of ``quantize(x, ...)``: sign | exponent | mantissa in the low `format.bits` bits; shape of x."""
    check_float(x, name)
    grid, keys = grid_for(alpha, format, name), rounding_keys(rounding, seed, name)
    if has_kernel(x):
        out, bad = _to_codes_kernel(x, grid, keys)
    else:
        ordered, restore = flat(x)
        bad = not bool(torch.isfinite(ordered).all())  # before float32: a float64 beyond it is clipped like any other
        out = restore(eager.to_codes(ordered.float(), grid, keys))
    if bad:
        raise _not_finite(x, name)
    return out


def _to_codes_kernel(x: torch.Tensor, g: Grid, keys: Keys | None) -> tuple[torch.Tensor, bool]:
    from fedfp8.fp8 import kernels

    places = (g.shift, g.offset, g.sign_shift)
    if keys is None:
        return through(kernels.to_codes, x, torch.uint8, (g.scale_in, g.top, g.lowest, g.magic, *places))
    constants = (g.scale_in, g.top, g.lowest, g.magic, g.spread, *places)
    return through(kernels.to_codes_stochastic, x, torch.uint8, constants, keys)


def from_codes(codes: torch.Tensor, alpha: Alpha, format: Format = E4M3, *, name: str | None = None) -> torch.Tensor:
    """float32 values of uint8 codes; ``from_codes(to_codes(x, a), a) == quantize(x, a)`` bit for bit."""
    if codes.dtype != torch.uint8:
        raise QuantizationError(
            f"{_called('codes', name)} have dtype {codes.dtype}; codes are torch.uint8, as to_codes returns them"
        )
    grid = grid_for(alpha, format, name)
    if format.bits < 8 and codes.numel() and int(codes.max()) >= 2**format.bits:
        raise QuantizationError(
            f"{_called('codes', name)} hold {int(codes.max())}; codes of {format.name} go from 0 to "
            f"{2**format.bits - 1}: was another format used?"
        )
    if not has_kernel(codes, torch.uint8):
        ordered, restore = flat(codes)
        return restore(eager.from_codes(ordered, grid))
    from fedfp8.fp8 import kernels

    if format.exponent_bits == 5:
        wide = (grid.scale_out, grid.lowest, grid.shift, grid.offset, grid.sign_shift)
        return through(kernels.from_codes_wide, codes, torch.float32, wide)[0]
    constants = (grid.half_unit, grid.half_left, grid.half_right, grid.half_mask)
    return through(kernels.from_codes, codes, torch.float32, constants)[0]


def dither(
    x: torch.Tensor, step: float, *, seed: int, place: int = 0, strata: int = 1, name: str | None = None
) -> torch.Tensor:
    """int32 k = floor(x / step + u) on the uniform grid, u random by (seed, flat index), turned by place / strata.

    ``undither(k, step, seed=seed)`` then errs by a uniform variable in (-step/2, step/2) that does not depend on x, up
    to float32 rounding of 2**-21 * |x|. |x| / step above 2**20 is refused: the random bits would be lost in float32.

    Senders of the same seed with a place each (0 <= place < strata <= 256) have errors that are evenly spaced: each
    alone is as uniform as ever, and the mean of all places lies within step / (2 * strata) of x.
    """
    check_float(x, name)
    step = _step_value(step, name)
    per_step, keys = np.float32(1.0 / step), dither_keys(seed, place, strata)
    if has_kernel(x):
        from fedfp8.fp8 import kernels

        out, bad = through(kernels.dither, x, torch.int32, (per_step, np.float32(DITHER_LIMIT)), keys)
    else:
        ordered, restore = flat(x)
        ordered = ordered.float()
        bad = not bool((ordered * float(per_step)).abs().le(DITHER_LIMIT).all())
        out = restore(eager.dither(ordered, float(per_step), keys))
    if bad:
        raise _not_dithered(x, step, name)
    return out


def dither_and_back(
    x: torch.Tensor, step: float, *, seed: int, place: int = 0, strata: int = 1, name: str | None = None
) -> torch.Tensor:
    """``undither(dither(x, ...), ...)`` of a tensor that has a kernel, in one pass."""
    from fedfp8.fp8 import kernels

    step = _step_value(step, name)
    constants = np.float32(1.0 / step), np.float32(DITHER_LIMIT), np.float32(step)
    out, bad = through(kernels.dither_and_back, x, torch.float32, constants, dither_keys(seed, place, strata))
    if bad:
        raise _not_dithered(x, step, name)
    return out


def undither(
    k: torch.Tensor, step: float, *, seed: int, place: int = 0, strata: int = 1, name: str | None = None
) -> torch.Tensor:
    """float32 step * (k + 1/2 - u) with the random bits `dither` used: the same seed, place and strata."""
    if k.dtype not in DITHERED:
        raise QuantizationError(
            f"{_called('tensor', name)} has dtype {k.dtype}; undither takes the int32 that dither returns, or the same "
            "numbers as int8 or int16"
        )
    step, keys = _step_value(step, name), dither_keys(seed, place, strata)
    if not has_kernel(k, k.dtype):
        ordered, restore = flat(k)
        return restore(eager.undither(ordered, step, keys))
    from fedfp8.fp8 import kernels

    return through(kernels.undither, k, torch.float32, (np.float32(step),), keys)[0]


def hash_uniform(seed: int, n: int, *, place: int = 0, strata: int = 1) -> torch.Tensor:
    """The random bits of elements 0 .. n-1 as float32 in [0, 1)."""
    from fedfp8.fp8 import kernels

    out = torch.empty(n, dtype=torch.float32)
    run(kernels.uniforms, (out.numpy(),), (), dither_keys(seed, place, strata))
    return out


# Checks


def _called(noun: str, name: str | None) -> str:
    return noun if name is None else f"{noun} of {name!r}" if noun == "codes" else f"{noun} {name!r}"


def _not_finite(x: torch.Tensor, name: str | None) -> QuantizationError:
    bad = x.numel() - int(torch.isfinite(x).sum())
    return QuantizationError(
        f"{_called('tensor', name)} holds {bad} NaN or Inf of {x.numel()} values; only finite values can be "
        "encoded: check the training step that made them"
    )


def _not_dithered(x: torch.Tensor, step: float, name: str | None) -> QuantizationError:
    if not bool(torch.isfinite(x).all()):
        return _not_finite(x, name)
    return QuantizationError(
        f"{_called('tensor', name)} reaches {float(x.abs().max()):.4g} at a step of {step:.4g}; at most 2**20 "
        "steps are supported: use a larger step, or send it as float32"
    )


def check_float(x: torch.Tensor, name: str | None) -> None:
    if not x.is_floating_point():
        raise QuantizationError(
            f"{_called('tensor', name)} has dtype {x.dtype}; a floating-point tensor is needed (float32, 16 or 64)"
        )


def rounding_keys(rounding: str, seed: int | None, name: str | None) -> Keys | None:
    if rounding == "nearest":
        return None
    if rounding != "stochastic":
        raise QuantizationError(f"rounding is {rounding!r}; it must be 'nearest' or 'stochastic'")
    if seed is None:
        raise QuantizationError(
            f"stochastic rounding{'' if name is None else f' of {name!r}'} needs a seed: pass seed=<int>; "
            "equal seeds give equal results"
        )
    return random_keys(seed)


def _step_value(step: float, name: str | None) -> float:
    value = float(step)
    if not (STEP_MIN <= value <= STEP_MAX):
        raise QuantizationError(
            f"step{'' if name is None else f' of {name!r}'} is {value}; it must be between 2**-100 and 2**100"
        )
    return float(np.float32(value))
