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

import math
from collections.abc import Callable

import numpy as np
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import eager
from fedfp8.fp8.format import E4M3, Format
from fedfp8.fp8.grid import Grid, grid_for
from fedfp8.fp8.parallel import Keys, dice_keys, run

__all__ = ["dither", "from_codes", "hash_uniform", "quantize", "rms", "squared_error", "to_codes", "undither"]

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
    _check_float(x, name)
    grid, keys = grid_for(alpha, format, name), _keys(rounding, seed, name)
    flat, restore = _flat(x, ordered=keys is not None)
    if not _has_kernel(flat):
        return restore(eager.quantize(flat.float(), grid, keys).to(x.dtype))
    from fedfp8.fp8 import kernels

    out = torch.empty_like(flat)
    arrays = (flat.numpy(), out.numpy())
    if keys is None:
        run(kernels.quantize, arrays, (grid.scale_in, grid.scale_out, grid.top, grid.lowest, grid.magic))
    else:
        constants = (grid.scale_in, grid.scale_out, grid.top, grid.lowest, grid.magic, grid.spread)
        run(kernels.quantize_stochastic, arrays, constants, keys)
    return restore(out)


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
    _check_float(x, name)
    grid, keys = grid_for(alpha, format, name), _keys(rounding, seed, name)
    flat, restore = _flat(x, ordered=keys is not None)
    if not _has_kernel(flat):
        bad = not bool(torch.isfinite(flat).all())  # before float32: a float64 beyond it is clipped like any other
        out = eager.to_codes(flat.float(), grid, keys)
    else:
        out = torch.empty(flat.shape, dtype=torch.uint8)
        bad = any(_to_codes_kernel(flat.numpy(), out.numpy(), grid, keys))
    if bad:
        raise _not_finite(x, name)
    return restore(out)


def _to_codes_kernel(x: np.ndarray, out: np.ndarray, g: Grid, keys: Keys | None) -> list[int]:
    from fedfp8.fp8 import kernels

    if keys is None:
        return run(
            kernels.to_codes,
            (x, out),
            (g.scale_in, g.top, g.lowest, g.magic, g.shift, g.offset, g.sign_shift),
        )
    constants = (g.scale_in, g.top, g.lowest, g.magic, g.spread, g.shift, g.offset, g.sign_shift)
    return run(kernels.to_codes_stochastic, (x, out), constants, keys)


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
    flat, restore = _flat(codes, ordered=False)
    if codes.device.type != "cpu":
        return restore(eager.from_codes(flat, grid))
    from fedfp8.fp8 import kernels

    out = torch.empty(flat.shape, dtype=torch.float32)
    constants = (grid.scale_out, grid.lowest, grid.shift, grid.offset, grid.sign_shift)
    run(kernels.from_codes, (flat.numpy(), out.numpy()), constants)
    return restore(out)


def dither(x: torch.Tensor, step: float, *, seed: int, name: str | None = None) -> torch.Tensor:
    """int32 k = floor(x / step + u) on the uniform grid, u the dice of (seed, flat index).

    ``undither(k, step, seed=seed)`` then errs by a uniform variable in (-step/2, step/2) that does not depend on x, up
    to float32 rounding of 2**-22 * |x|. |x| / step above 2**20 is refused: the dice would be lost in float32.
    """
    _check_float(x, name)
    step = _step_value(step, name)
    flat, restore = _flat(x, ordered=True)
    per_step, keys = np.float32(1.0 / step), dice_keys(seed)
    if not _has_kernel(flat):
        flat = flat.float()
        bad = not bool((flat * float(per_step)).abs().le(DITHER_LIMIT).all())
        out = eager.dither(flat, float(per_step), keys)
    else:
        from fedfp8.fp8 import kernels

        out = torch.empty(flat.shape, dtype=torch.int32)
        bad = any(run(kernels.dither, (flat.numpy(), out.numpy()), (per_step, np.float32(DITHER_LIMIT)), keys))
    if bad:
        if not bool(torch.isfinite(x).all()):
            raise _not_finite(x, name)
        raise QuantizationError(
            f"{_called('tensor', name)} reaches {float(x.abs().max()):.4g} at a step of {step:.4g}; at most 2**20 "
            "steps are supported: use a larger step, or send it as float32"
        )
    return restore(out)


def undither(k: torch.Tensor, step: float, *, seed: int, name: str | None = None) -> torch.Tensor:
    """float32 step * (k + 1/2 - u) with the dice `dither` used."""
    if k.dtype != torch.int32:
        raise QuantizationError(
            f"{_called('tensor', name)} has dtype {k.dtype}; undither takes the int32 that dither returns"
        )
    step, keys = _step_value(step, name), dice_keys(seed)
    flat, restore = _flat(k, ordered=True)
    if k.device.type != "cpu":
        return restore(eager.undither(flat, step, keys))
    from fedfp8.fp8 import kernels

    out = torch.empty(flat.shape, dtype=torch.float32)
    run(kernels.undither, (flat.numpy(), out.numpy()), (np.float32(step),), keys)
    return restore(out)


def hash_uniform(seed: int, n: int) -> torch.Tensor:
    """The dice of elements 0 .. n-1 as float32 in the open interval (0, 1)."""
    from fedfp8.fp8 import kernels

    out = torch.empty(n, dtype=torch.float32)
    run(kernels.dice, (out.numpy(),), (), dice_keys(seed))
    return out


def rms(x: torch.Tensor) -> float:
    """Root mean square of a CPU tensor, the same on every machine and for every number of threads; 0.0 if empty."""
    from fedfp8.fp8 import kernels

    flat = x.detach().float().reshape(-1).contiguous()
    partial = np.zeros(-(-flat.numel() // kernels.CHUNK))
    run(kernels.sum_of_squares, (flat.numpy(),), (), None, partial, kernels.CHUNK)
    return math.sqrt(math.fsum(partial) / max(flat.numel(), 1))


def squared_error(
    w: torch.Tensor,
    target: torch.Tensor,
    alphas: "list[float] | torch.Tensor",
    format: Format = E4M3,
    *,
    rounding: str = "nearest",
    seed: int | None = None,
) -> torch.Tensor:
    """||Q(w; alpha) - target||**2 for each alpha, float64: one pass per alpha, no temporaries.

    rounding: "nearest", "stochastic" (one draw of the dice), or "expected": the exact expectation over the dice.
    """
    if w.shape != target.shape:
        raise QuantizationError(f"w has shape {tuple(w.shape)} and target {tuple(target.shape)}; they must be equal")
    keys = None if rounding == "expected" else _keys(rounding, seed, None)
    w, target = w.detach().reshape(-1).contiguous(), target.detach().reshape(-1).contiguous()
    grids = [grid_for(float(alpha), format) for alpha in alphas]
    if not (_has_kernel(w) and _has_kernel(target)):
        return torch.tensor(
            [eager.squared_error(w.float(), target.float(), g, rounding, keys) for g in grids],
            dtype=torch.float64,
        )
    return torch.tensor(
        [_squared_error_kernel(w.numpy(), target.numpy(), g, rounding, keys) for g in grids],
        dtype=torch.float64,
    )


def _squared_error_kernel(w: np.ndarray, target: np.ndarray, g: Grid, rounding: str, keys: Keys | None) -> float:
    from fedfp8.fp8 import kernels

    constants = (g.scale_in, g.scale_out, g.top, g.lowest, g.magic)
    name, extra = {
        "nearest": (kernels.error_nearest, ()),
        "expected": (kernels.error_expected, (g.per_level,)),
        "stochastic": (kernels.error_stochastic, (g.spread,)),
    }[rounding]
    partial = np.zeros(-(-w.size // kernels.CHUNK))
    run(name, (w, target), constants + extra, keys, partial, kernels.CHUNK)
    return math.fsum(partial)


# Checks and shapes


def _called(noun: str, name: str | None) -> str:
    return noun if name is None else f"{noun} of {name!r}" if noun == "codes" else f"{noun} {name!r}"


def _not_finite(x: torch.Tensor, name: str | None) -> QuantizationError:
    bad = x.numel() - int(torch.isfinite(x).sum())
    return QuantizationError(
        f"{_called('tensor', name)} holds {bad} NaN or Inf of {x.numel()} values; only finite values can be "
        "encoded: check the training step that made them"
    )


def _check_float(x: torch.Tensor, name: str | None) -> None:
    if not x.is_floating_point():
        raise QuantizationError(
            f"{_called('tensor', name)} has dtype {x.dtype}; a floating-point tensor is needed (float32, 16 or 64)"
        )


def _keys(rounding: str, seed: int | None, name: str | None) -> Keys | None:
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


def _has_kernel(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


def memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of x from the largest stride to the smallest."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: -strides[d])


def _flat(x: torch.Tensor, *, ordered: bool) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """x as a flat tensor, and the way back to its shape and strides.

    In memory order (no copy) if x is dense and no dice care for the order, else in logical order.
    """
    x = x.detach().resolve_neg()
    if x.is_contiguous():
        return x.view(-1), lambda out: out.view(x.shape)
    by_stride = memory_order(x)
    dense = x.permute(by_stride)
    if not ordered and dense.is_contiguous():
        inverse = [by_stride.index(d) for d in range(x.dim())]
        return dense.view(-1), lambda out: out.view(dense.shape).permute(inverse)
    return x.reshape(-1), lambda out: torch.empty_like(x, dtype=out.dtype).copy_(out.view(x.shape))
