"""FP8 numerics: values to grid values, to codes and back, and the dithered uniform grid.

The grid of `format` is scaled so that its largest magnitude is `alpha` (one number per tensor). ``rounding="nearest"``
is the paper's Q_det (ties to even); ``"stochastic"`` is Q_rand: unbiased for |x| <= alpha, exact on grid points, with
dice that are a hash of (seed, flat index), the same for any thread count, device or memory format.

CPU float32 runs in Numba kernels at the speed of memory; other devices run the same arithmetic in torch operations and
give the same values. float16, bfloat16 and float64 inputs are converted to float32 first, and `quantize` converts its
result back to the input's dtype (exact from float32 to float64; a rounding more for the 16-bit types).

Special cases: -0 and small negative values become +0, so the code of -0 is never produced; Inf is clipped to alpha
and NaN stays NaN in `quantize`, both are refused by `to_codes` and `dither`; empty tensors work everywhere.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import eager
from fedfp8.fp8.format import E4M3, Format
from fedfp8.fp8.grid import Grid, grid_for
from fedfp8.fp8.parallel import Keys, dice_keys, run

__all__ = ["dither", "from_codes", "hash_uniform", "quantize", "to_codes", "undither"]

DITHER_LIMIT = 2.0**20  # |x| / step beyond which float32 has no room left for the dice
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
        flat, restore = _flat(x)
        return restore(eager.quantize(flat.float(), grid, keys).to(x.dtype))
    from fedfp8.fp8 import kernels

    constants = (grid.scale_in, grid.scale_out, grid.top, grid.lowest, grid.magic)
    if keys is None:
        return _through(kernels.quantize, x, x.dtype, constants)[0]
    return _through(kernels.quantize_stochastic, x, x.dtype, (*constants, grid.spread), keys)[0]


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
        flat, restore = _flat(x)
        bad = not bool(torch.isfinite(flat).all())  # before float32: a float64 beyond it is clipped like any other
        out = restore(eager.to_codes(flat.float(), grid, keys))
    if bad:
        raise _not_finite(x, name)
    return out


def _to_codes_kernel(x: torch.Tensor, g: Grid, keys: Keys | None) -> tuple[torch.Tensor, bool]:
    from fedfp8.fp8 import kernels

    places = (g.shift, g.offset, g.sign_shift)
    if keys is None:
        return _through(kernels.to_codes, x, torch.uint8, (g.scale_in, g.top, g.lowest, g.magic, *places))
    constants = (g.scale_in, g.top, g.lowest, g.magic, g.spread, *places)
    return _through(kernels.to_codes_stochastic, x, torch.uint8, constants, keys)


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
    if codes.device.type != "cpu":
        flat, restore = _flat(codes)
        return restore(eager.from_codes(flat, grid))
    from fedfp8.fp8 import kernels

    if format.exponent_bits == 5:
        wide = (grid.scale_out, grid.lowest, grid.shift, grid.offset, grid.sign_shift)
        return _through(kernels.from_codes_wide, codes, torch.float32, wide)[0]
    constants = (grid.half_unit, grid.half_left, grid.half_right, grid.half_mask)
    return _through(kernels.from_codes, codes, torch.float32, constants)[0]


def dither(x: torch.Tensor, step: float, *, seed: int, name: str | None = None) -> torch.Tensor:
    """int32 k = floor(x / step + u) on the uniform grid, u the dice of (seed, flat index).

    ``undither(k, step, seed=seed)`` then errs by a uniform variable in (-step/2, step/2) that does not depend on x, up
    to float32 rounding of 2**-21 * |x|. |x| / step above 2**20 is refused: the dice would be lost in float32.
    """
    check_float(x, name)
    step = _step_value(step, name)
    per_step, keys = np.float32(1.0 / step), dice_keys(seed)
    if has_kernel(x):
        from fedfp8.fp8 import kernels

        out, bad = _through(kernels.dither, x, torch.int32, (per_step, np.float32(DITHER_LIMIT)), keys)
    else:
        flat, restore = _flat(x)
        flat = flat.float()
        bad = not bool((flat * float(per_step)).abs().le(DITHER_LIMIT).all())
        out = restore(eager.dither(flat, float(per_step), keys))
    if bad:
        if not bool(torch.isfinite(x).all()):
            raise _not_finite(x, name)
        raise QuantizationError(
            f"{_called('tensor', name)} reaches {float(x.abs().max()):.4g} at a step of {step:.4g}; at most 2**20 "
            "steps are supported: use a larger step, or send it as float32"
        )
    return out


def undither(k: torch.Tensor, step: float, *, seed: int, name: str | None = None) -> torch.Tensor:
    """float32 step * (k + 1/2 - u) with the dice `dither` used."""
    if k.dtype != torch.int32:
        raise QuantizationError(
            f"{_called('tensor', name)} has dtype {k.dtype}; undither takes the int32 that dither returns"
        )
    step, keys = _step_value(step, name), dice_keys(seed)
    if k.device.type != "cpu":
        flat, restore = _flat(k)
        return restore(eager.undither(flat, step, keys))
    from fedfp8.fp8 import kernels

    return _through(kernels.undither, k, torch.float32, (np.float32(step),), keys)[0]


def hash_uniform(seed: int, n: int) -> torch.Tensor:
    """The dice of elements 0 .. n-1 as float32 in [0, 1)."""
    from fedfp8.fp8 import kernels

    out = torch.empty(n, dtype=torch.float32)
    run(kernels.dice, (out.numpy(),), (), dice_keys(seed))
    return out


# Checks and shapes


def _called(noun: str, name: str | None) -> str:
    return noun if name is None else f"{noun} of {name!r}" if noun == "codes" else f"{noun} {name!r}"


def _not_finite(x: torch.Tensor, name: str | None) -> QuantizationError:
    bad = x.numel() - int(torch.isfinite(x).sum())
    return QuantizationError(
        f"{_called('tensor', name)} holds {bad} NaN or Inf of {x.numel()} values; only finite values can be "
        "encoded: check the training step that made them"
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
    return dice_keys(seed)


def _step_value(step: float, name: str | None) -> float:
    value = float(step)
    if not (2.0**-100 <= value <= 2.0**100):
        raise QuantizationError(
            f"step{'' if name is None else f' of {name!r}'} is {value}; it must be between 2**-100 and 2**100"
        )
    return float(np.float32(value))


def has_kernel(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


def memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of x from the largest stride to the smallest."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: -strides[d])


def _flat(x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """x in logical order as a flat tensor, and the way back to its shape and strides."""
    x = x.detach()
    return x.reshape(-1), lambda out: torch.empty_like(x, dtype=out.dtype).copy_(out.view(x.shape))


def _through(
    kernel: Callable[..., Any],
    x: torch.Tensor,
    dtype: torch.dtype,
    constants: tuple[Any, ...],
    keys: Keys | None = None,
) -> tuple[torch.Tensor, bool]:
    """A kernel over x, into a new tensor with x's shape and strides; and whether any call returned non-zero.

    In memory order if x is dense and there are no dice, else in logical order.
    """
    source = x = x.detach().resolve_neg()
    if not x.is_contiguous() and not (keys is None and _is_dense(x)):
        source = x.contiguous()
    out = torch.empty_like(source, dtype=dtype)
    returned = run(kernel, (_memory(source), _memory(out)), constants, keys)
    if source is not x:
        out = torch.empty_like(x, dtype=dtype).copy_(out)
    return out, any(returned)


def _is_dense(x: torch.Tensor) -> bool:
    """Whether x fills its memory without gaps, in whatever order of dimensions (channels-last, transposed)."""
    return x.permute(memory_order(x)).is_contiguous()


def _memory(x: torch.Tensor) -> np.ndarray:
    """A dense tensor's elements as a flat array in memory order, no copy."""
    array: np.ndarray = x.numpy().reshape(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,)).numpy()
    return array
