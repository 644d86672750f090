"""What others do, to measure against: the textbook formula, the torch float8 cast and Brevitas."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from fedfp8.fp8 import E4M3, Format

__all__ = ["brevitas_quantizer", "float8_round_trip", "textbook_quantize"]


def textbook_quantize(x: torch.Tensor, alpha: torch.Tensor, format: Format = E4M3) -> torch.Tensor:
    """The paper's formula as Kuzmin et al. released it: log2, pow, and autograd through straight-through rounding."""
    e, m = format.exponent_bits, format.mantissa_bits
    bias = 2**e - torch.log2(alpha) + torch.log2(torch.tensor(2 - 2.0**-m)) - 1
    clipped = torch.min(torch.max(x, -alpha), alpha)
    binade = torch.clamp(torch.floor(torch.log2(torch.abs(clipped)) + bias).detach(), min=1.0)
    step = 2.0 ** (binade - m - bias)
    ratio = clipped / step
    return (ratio + (torch.round(ratio) - ratio).detach()) * step


def float8_round_trip(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """torch's own cast with a scale: a grid that ends at 448."""
    return (x * (448.0 / alpha)).to(torch.float8_e4m3fn).to(torch.float32) * (alpha / 448.0)


def brevitas_quantizer(x: torch.Tensor) -> Callable[[], Any] | None:
    """Brevitas' per-tensor E4M3 weight quantizer around x, or None where Brevitas is not installed."""
    try:
        layers = import_module("brevitas.nn")
        quantizers = import_module("brevitas.quant.experimental.float")
    except ImportError:
        return None
    layer = layers.QuantLinear(x.numel(), 1, bias=False, weight_quant=quantizers.Fp8e4m3WeightPerTensorFloat)
    layer.weight.data.copy_(x.view(1, -1))
    return lambda: layer.quant_weight().value
