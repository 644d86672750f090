"""`fake_quantize`: quantization with the straight-through gradients of Kuzmin et al., fused.

    dq/dx     = 1 for |x| < alpha, 0 for |x| > alpha, 1/2 on the tie |x| = alpha
    dq/dalpha = (q - x) / alpha inside, sign(x) outside, sign(x) / 2 on the tie

The tie is no corner case: alpha starts at max|w|, so every tensor has such an element at step 0. The backward pass is
one pass over (x, upstream gradient) that recomputes q; nothing but x is saved.

Two ways lead here, to the same functions. Plain eager code takes an `autograd.Function`, which costs the least per
call. A graph (`torch.compile`, `torch.export`, the meta device) holds the operators ``torch.ops.fedfp8.fake_quantize``
and ``fake_quantize_backward``: alpha is a tensor there, read when the graph runs.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fedfp8.fp8 import anydevice
from fedfp8.fp8.format import E4M3, Format
from fedfp8.fp8.grid import alpha_value, grid_for
from fedfp8.fp8.parallel import run
from fedfp8.fp8.quantizers import Alpha, quantize, rounding_keys
from fedfp8.fp8.strides import flat, has_kernel, memory_order

__all__ = ["fake_quantize", "gradients", "in_graph", "like"]


def fake_quantize(
    x: torch.Tensor,
    alpha: Alpha,
    format: Format = E4M3,
    *,
    rounding: str = "nearest",
    seed: int | None = None,
) -> torch.Tensor:
    """``quantize(x, alpha, ...)``, differentiable in x and (if it is a tensor) in alpha."""
    if in_graph(x):
        rounding_keys(rounding, seed, None)
        alpha = alpha if isinstance(alpha, torch.Tensor) else x.new_full((), alpha, dtype=torch.float32)
        seed = None if rounding == "nearest" else seed
        node: torch.Tensor = torch.ops.fedfp8.fake_quantize(x, alpha, format.exponent_bits, format.mantissa_bits, seed)
        return node
    if not torch.is_grad_enabled() or not (
        x.requires_grad or (isinstance(alpha, torch.Tensor) and alpha.requires_grad)
    ):
        return quantize(x, alpha, format, rounding=rounding, seed=seed)
    out: torch.Tensor = _FakeQuantize.apply(x, alpha, format, rounding, seed)
    return out


def in_graph(x: torch.Tensor) -> bool:
    """Whether x is, or may be, without values: while `torch.compile` or `torch.export` trace, or on the meta device."""
    return torch.compiler.is_compiling() or x.is_meta


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
        gx, galpha = gradients(x, g, ctx.alpha, ctx.format, ctx.rounding, ctx.seed)
        return gx, None if alpha is None else like(alpha, galpha), None, None, None


# Defined with a schema and not with `custom_op`, whose wrapper costs three times as much per call.
_TAG = (torch.Tag.pt2_compliant_tag,)
_CONSTANTS = "int exponent_bits, int mantissa_bits, int? seed"
torch.library.define("fedfp8::fake_quantize", f"(Tensor x, Tensor alpha, {_CONSTANTS}) -> Tensor", tags=_TAG)
torch.library.define(
    "fedfp8::fake_quantize_backward", f"(Tensor g, Tensor x, Tensor alpha, {_CONSTANTS}) -> (Tensor, Tensor)", tags=_TAG
)


@torch.library.impl("fedfp8::fake_quantize", "default")
def _operator(
    x: torch.Tensor, alpha: torch.Tensor, exponent_bits: int, mantissa_bits: int, seed: int | None
) -> torch.Tensor:
    """Nearest rounding, or stochastic with a seed. An alpha of 0.0 is a range that is not set: x as it is."""
    value = alpha.item()
    if value == 0.0:
        return x.clone()
    return quantize(x, value, _format(exponent_bits, mantissa_bits), rounding=_rounding(seed), seed=seed)


@torch.library.impl("fedfp8::fake_quantize_backward", "default")
def _operator_backward(
    g: torch.Tensor, x: torch.Tensor, alpha: torch.Tensor, exponent_bits: int, mantissa_bits: int, seed: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    value = alpha.item()
    if value == 0.0:
        return torch.empty_like(x).copy_(g), torch.zeros_like(alpha)
    gx, galpha = gradients(x, g, value, _format(exponent_bits, mantissa_bits), _rounding(seed), seed)
    if gx.stride() != x.stride():  # x has gaps or overlaps, and a result like it has not
        gx = torch.empty_like(x).copy_(gx)
    return gx, like(alpha, galpha)


_format = lru_cache(Format)


def _rounding(seed: int | None) -> str:
    return "nearest" if seed is None else "stochastic"


@torch.library.register_fake("fedfp8::fake_quantize")
def _(x: torch.Tensor, alpha: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("fedfp8::fake_quantize_backward")
def _(g: torch.Tensor, x: torch.Tensor, alpha: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(alpha)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, alpha, *ctx.rest = inputs
    ctx.save_for_backward(x, alpha)


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    gx, galpha = torch.ops.fedfp8.fake_quantize_backward(g, *ctx.saved_tensors, *ctx.rest)
    return gx, galpha, None, None, None


torch.library.register_autograd("fedfp8::fake_quantize", _backward, setup_context=_save)


def gradients(
    x: torch.Tensor, g: torch.Tensor, alpha: float, format: Format, rounding: str, seed: int | None
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """dL/dx and dL/dalpha from the upstream gradient g."""
    c, keys = grid_for(alpha, format), rounding_keys(rounding, seed, None)
    if not (has_kernel(x) and has_kernel(g)):
        ordered, restore = flat(x)
        gx, galpha = anydevice.gradients(ordered, g.reshape(-1), c, keys)
        return restore(gx), galpha
    from fedfp8.fp8 import kernels

    # Random bits go by an element's place in logical order; without them the order is free, and memory's the fastest
    order = memory_order(x) if keys is None else list(range(x.dim()))
    xs, gs = x.permute(order).contiguous(), g.permute(order).contiguous()
    gx = torch.empty_like(xs)
    partial = np.zeros(-(-xs.numel() // kernels.CHUNK))
    arrays = (xs.detach().view(-1).numpy(), gs.view(-1).numpy(), gx.view(-1).numpy())
    constants = (c.alpha, c.scale_in, c.scale_out, c.top, c.lowest, c.magic)
    if keys is None:
        run(kernels.fake_quantize_backward, arrays, constants, None, partial, kernels.CHUNK)
    else:
        kernel = kernels.fake_quantize_backward_stochastic
        run(kernel, arrays, (*constants, c.spread), keys, partial, kernels.CHUNK)
    gx = gx.permute([order.index(d) for d in range(x.dim())])
    same = keys is None or x.is_contiguous()
    return gx if same else torch.empty_like(x).copy_(gx), math.fsum(partial)


def like(alpha: torch.Tensor, g: float | torch.Tensor) -> torch.Tensor:
    """A gradient of alpha's shape, dtype and device."""
    return g.to(alpha).view(alpha.shape) if isinstance(g, torch.Tensor) else torch.full_like(alpha, g)
