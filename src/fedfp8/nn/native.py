"""Products on FP8 hardware: `torch._scaled_mm` on float8_e4m3fn operands, scaled by alpha and beta.

The operands are those of quantization-aware training but for one code. The paper's E4M3 spends no code on NaN and ends
at 480; hardware's e4m3fn ends at 448. With the scale ``alpha / 480`` all other values are the same, and what would
round to alpha itself, |x| > 464/480 alpha, becomes 448/480 alpha, as everything beyond.

Gradients are straight-through, by the same functions as in emulation, on the operands the product has seen; backward
products are float32. For backward the operands are held in one byte each.
"""

import subprocess
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import E4M3
from fedfp8.fp8.grid import grid_for
from fedfp8.fp8.ste import gradients, like
from fedfp8.nn.operand import Operand

__all__ = ["check", "product"]

TOP = 448.0  # of float8_e4m3fn
MULTIPLE = 16  # of the inner and the last dimension of a product, on every device that has one
TRIAL = """
import torch
a = torch.ones(16, 16).to(torch.float8_e4m3fn)
one = torch.ones(())
out = torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
assert bool((out == 16).all())
"""


def check(device: torch.device) -> None:
    """Raise a `QuantizationError` that says why, if `device` has no FP8 products."""
    if reason := _problem(device.type, device.index):
        raise QuantizationError(
            f"no FP8 products on {device}: {reason}. Use compute='emulated' (the default): the same values but for the "
            "top code, computed in float32"
        )


@cache
def _problem(kind: str, index: int | None) -> str:
    if kind == "cuda":
        capability = torch.cuda.get_device_capability(index)
        name = ".".join(map(str, capability))
        return "" if capability >= (8, 9) else f"compute capability 8.9 or more is needed, this one has {name}"
    if kind != "cpu":
        return "torch._scaled_mm is known to work on cuda and cpu only"
    # In a process of its own, because a CPU may end the process with an illegal instruction.
    done = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return f"a trial was ended by signal {-done.returncode}"
    return "" if done.returncode == 0 else (done.stderr.strip() or "a trial failed").splitlines()[-1]


def product(x: Operand, weight: Operand) -> Tensor:
    """``Q(x) @ Q(weight).T`` for x of any leading dimensions and a weight (out, in); float32, or x's dtype."""
    check(x.source.device)
    rows = x.source.reshape(-1, x.source.shape[-1])
    out: Tensor = _Product.apply(rows, x.range, weight.source, weight.range)
    return out.view(*x.source.shape[:-1], -1).to(x.source.dtype)


def _encode(x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """x in float8_e4m3fn with its columns padded, and the scale that takes it back."""
    grid = grid_for(alpha, E4M3)
    standard = (x.float() * float(grid.scale_in)).clamp(-TOP, TOP)
    padded = F.pad(standard, (0, -x.shape[1] % MULTIPLE))
    return padded.to(torch.float8_e4m3fn), torch.tensor(float(grid.scale_out), device=x.device)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: Tensor, weight: Tensor, alpha: Tensor) -> Tensor:
        ctx.beta, ctx.alpha = beta.item(), alpha.item()
        x8, x_scale = _encode(x, ctx.beta)
        w8, w_scale = _encode(weight, ctx.alpha)
        ctx.save_for_backward(x, beta, weight, alpha, x8, x_scale, w8, w_scale)
        columns = F.pad(w8.view(torch.uint8), (0, 0, 0, -len(w8) % MULTIPLE)).view(w8.dtype).t()
        out = torch._scaled_mm(x8, columns, scale_a=x_scale, scale_b=w_scale, out_dtype=torch.float32)
        return out[:, : len(weight)]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, beta, weight, alpha, x8, x_scale, w8, w_scale = ctx.saved_tensors
        gx = gbeta = gw = galpha = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            w = w8.float()[:, : weight.shape[1]] * w_scale
            gx, total = gradients(x, (g @ w).to(x.dtype), ctx.beta, E4M3, "nearest", None)
            gbeta = like(beta, total)
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            rounded = x8.float()[:, : x.shape[1]] * x_scale
            gw, total = gradients(weight, g.t() @ rounded, ctx.alpha, E4M3, "nearest", None)
            galpha = like(alpha, total)
        return gx, gbeta, gw, galpha
