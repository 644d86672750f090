"""`fake_quantize`: quantization with the straight-through gradients of Kuzmin et al., fused.

    dq/dx     = 1 for |x| < alpha, 0 for |x| > alpha, 1/2 on the tie |x| = alpha
    dq/dalpha = (q - x) / alpha inside, sign(x) outside, sign(x) / 2 on the tie

The tie is no corner case: alpha starts at max|w|, so every tensor has such an element at step 0. The backward pass is
one pass over (x, upstream gradient) that recomputes q; nothing but x is saved.
"""

import math
from typing import Any

import numpy as np
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8.format import E4M3, Format
from fedfp8.fp8.grid import alpha_value, grid_for
from fedfp8.fp8.parallel import dice_keys, run
from fedfp8.fp8.quantize import Alpha, quantize
from fedfp8.fp8.strides import memory_order

__all__ = ["fake_quantize"]


def fake_quantize(
    x: torch.Tensor,
    alpha: Alpha,
    format: Format = E4M3,
    *,
    rounding: str = "nearest",
    seed: int | None = None,
) -> torch.Tensor:
    """``quantize(x, alpha, ...)``, differentiable in x and (if it is a tensor) in alpha."""
    if not torch.is_grad_enabled() or not (
        x.requires_grad or (isinstance(alpha, torch.Tensor) and alpha.requires_grad)
    ):
        return quantize(x, alpha, format, rounding=rounding, seed=seed)
    out: torch.Tensor = _FakeQuantize.apply(x, alpha, format, rounding, seed)
    return out


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, alpha: Alpha, format: Format, rounding: str, seed: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, alpha if isinstance(alpha, torch.Tensor) else None)
        ctx.alpha, ctx.format, ctx.rounding, ctx.seed = float(alpha_value(alpha)), format, rounding, seed
        return quantize(x, ctx.alpha, format, rounding=rounding, seed=seed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, alpha = ctx.saved_tensors
        gx, galpha = _gradients(x, g, ctx.alpha, ctx.format, ctx.rounding, ctx.seed)
        if alpha is not None:
            return gx, torch.full_like(alpha, galpha), None, None, None
        return gx, None, None, None, None


def _gradients(
    x: torch.Tensor, g: torch.Tensor, alpha: float, format: Format, rounding: str, seed: int | None
) -> tuple[torch.Tensor, float]:
    """dL/dx and dL/dalpha from the upstream gradient g."""
    fused = x.device.type == "cpu" and x.dtype == torch.float32 and g.dtype == torch.float32
    if not fused or (rounding == "stochastic" and not x.is_contiguous()):
        return _gradients_eager(x, g, alpha, format, rounding, seed)
    from fedfp8.fp8 import kernels

    by_stride = memory_order(x)
    xs, gs = x.permute(by_stride).contiguous(), g.permute(by_stride).contiguous()
    gx = torch.empty_like(xs)
    partial = np.zeros(-(-xs.numel() // kernels.CHUNK))
    arrays = (xs.detach().view(-1).numpy(), gs.view(-1).numpy(), gx.view(-1).numpy())
    c = grid_for(alpha, format)
    constants = (c.alpha, c.scale_in, c.scale_out, c.top, c.lowest, c.magic)
    if rounding == "nearest":
        run(kernels.fake_quantize_backward, arrays, constants, None, partial, kernels.CHUNK)
    elif seed is not None:
        keys = dice_keys(seed)
        run(
            kernels.fake_quantize_backward_stochastic,
            arrays,
            (*constants, c.spread),
            keys,
            partial,
            kernels.CHUNK,
        )
    else:
        raise QuantizationError("stochastic rounding needs a seed")
    inverse = [by_stride.index(d) for d in range(x.dim())]
    return gx.permute(inverse), math.fsum(partial)


def _gradients_eager(
    x: torch.Tensor, g: torch.Tensor, alpha: float, format: Format, rounding: str, seed: int | None
) -> tuple[torch.Tensor, float]:
    q = quantize(x, alpha, format, rounding=rounding, seed=seed)
    keep = 0.5 * (x.abs() < alpha).to(g.dtype) + 0.5 * (x.abs() <= alpha).to(g.dtype)
    error = (q - x.clamp(-alpha, alpha)).double()  # clipped: Inf counts as outside, NaN stays NaN
    inside = (g.double() * error * (x.abs() < alpha)).sum() / alpha
    outside = (g * (1 - keep) * x.sign()).double().sum()
    return g * keep, float(inside + outside)
