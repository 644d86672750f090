"""Sums over a tensor in one fused pass: the rms that steps are made from, and the error of a quantized tensor."""

import math

import numpy as np
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import eager
from fedfp8.fp8.format import E4M3, Format
from fedfp8.fp8.grid import Grid, grid_for
from fedfp8.fp8.parallel import Keys, run
from fedfp8.fp8.quantizers import check_float, rounding_keys
from fedfp8.fp8.strides import has_kernel, memory_order

__all__ = ["largest", "rms", "squared_error"]


def rms(x: torch.Tensor) -> float:
    """Root mean square of a CPU tensor, the same on every machine and for every number of threads; 0.0 if empty."""
    from fedfp8.fp8 import kernels

    flat = _flat(x)
    partial = np.zeros(-(-flat.size // kernels.CHUNK))
    run(kernels.sum_of_squares, (flat,), (), None, partial, kernels.CHUNK)
    return math.sqrt(math.fsum(partial) / max(flat.size, 1))


def largest(x: torch.Tensor) -> float:
    """max|x|, 0.0 if empty; Inf or NaN if it holds one. On the CPU at the speed of memory, channels-last or not."""
    if not has_kernel(x) or not x.numel():
        return float(x.detach().abs().amax()) if x.numel() else 0.0
    from fedfp8.fp8 import kernels

    dense = x.detach().permute(memory_order(x))
    return float(np.uint32(max(run(kernels.largest_bits, (_flat(dense).view(np.uint32),), ()))).view(np.float32))


def _flat(x: torch.Tensor) -> np.ndarray:
    array: np.ndarray = x.detach().resolve_neg().float().contiguous().numpy().reshape(-1)
    return array


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

    rounding: "nearest", "stochastic" (one draw of the random bits), or "expected": the exact expectation over them.
    """
    if w.shape != target.shape:
        raise QuantizationError(f"w has shape {tuple(w.shape)} and target {tuple(target.shape)}; they must be equal")
    check_float(w, None)
    check_float(target, None)
    keys = None if rounding == "expected" else rounding_keys(rounding, seed, None)
    w, target = w.detach().reshape(-1).contiguous(), target.detach().reshape(-1).contiguous()
    grids = [grid_for(float(alpha), format) for alpha in alphas]
    if not (has_kernel(w) and has_kernel(target)):
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
