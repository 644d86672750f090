"""The quantizer for devices and dtypes without a kernel: `eager`'s operations, fused into one by `torch.compile`.

Fused, a quantizer reads x once and writes its result once, as the CPU kernels do; operation by operation it makes a
dozen passes. Where `torch.compile` does not work (no compiler, a device it does not know) the operations run one by
one; that is said once. Both give the bits of the CPU kernels: every line is one IEEE operation, and the compiler is
told not to contract a product and a sum into one rounding.

The scales and the keys of the random bits are tensors here, so that a new range or seed is no new kernel.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fedfp8.fp8 import eager
from fedfp8.fp8.grid import Grid
from fedfp8.fp8.parallel import Keys
from fedfp8.fp8.strides import setting

__all__ = ["gradients", "quantize"]

OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True
}  # on GPUs: no contraction; see torch._inductor.codegen.triton


def quantize(x: torch.Tensor, grid: Grid, keys: Keys | None) -> torch.Tensor:
    """Grid values of a flat float32 tensor."""
    return _run(_quantize, (x,), grid, keys)


def gradients(x: torch.Tensor, g: torch.Tensor, grid: Grid, keys: Keys | None) -> tuple[torch.Tensor, torch.Tensor]:
    """dL/dx and, 0-d, dL/dalpha of flat x and upstream gradient g."""
    return _run(_gradients, (x, g), grid, keys)


def _quantize(x: torch.Tensor, grid: Grid, keys: Any) -> torch.Tensor:
    return eager.quantize(x, grid, keys)


def _gradients(x: torch.Tensor, g: torch.Tensor, grid: Grid, keys: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no float64
    q, alpha = eager.quantize(x.float(), grid, keys).to(x.dtype), torch.as_tensor(grid.alpha)
    inside, within = (x.abs() < alpha), (x.abs() <= alpha)
    keep = 0.5 * inside.to(g.dtype) + 0.5 * within.to(g.dtype)
    error = (q - torch.maximum(torch.minimum(x, alpha), -alpha)).to(wide)  # clipped: Inf is outside, NaN stays NaN
    rounded = (g.to(wide) * error * inside).sum() / alpha
    clipped = (g * (1 - keep) * x.sign()).to(wide).sum()
    return g * keep, rounded + clipped


def _run(function: Callable[..., Any], arrays: tuple[torch.Tensor, ...], grid: Grid, keys: Keys | None) -> Any:
    device = arrays[0].device
    scales = torch.tensor([grid.alpha, grid.scale_in, grid.scale_out], dtype=torch.float32, device=device)
    alpha, scale_in, scale_out = scales.unbind()
    grid = grid._replace(alpha=alpha, scale_in=scale_in, scale_out=scale_out)  # type: ignore[arg-type]
    words = None if keys is None else torch.tensor([int(k) for k in keys], device=device).unbind()
    if arrays[0].numel() > 1 and (device.type != "cpu" or setting() == "compiled"):
        if device.type not in _failed:
            try:
                return _compiled(function)(*arrays, grid, words)
            except Exception as error:  # whatever a compiler may raise; what the operations raise, they raise again
                _failed.add(device.type)
                warnings.warn(
                    f"torch.compile does not work for {device.type} here ({type(error).__name__}: {str(error)[:200]}); "
                    "FP8 rounding runs operation by operation, which is right but slow",
                    RuntimeWarning,
                    stacklevel=2,
                )
    return function(*arrays, grid, words)


_failed: set[str] = set()


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True, options=OPTIONS)
