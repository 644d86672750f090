"""Figure 3: what E4M3 does to two weight distributions, and why averaging wants stochastic rounding.

Uniform weights (a common initialisation of convolutions) and a normal distribution cut at two standard deviations
(Transformers' linear layers), alpha the largest magnitude. One quantization of each, its error, and the error of the
average of K = 10 quantizations of the same weights: nearest makes the same error ten times, stochastic errors cancel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedfp8.fp8 import E4M3, quantize
from fedfp8.rng import derive_seed, generator

__all__ = ["run_figure3"]

ROUNDINGS = ("nearest", "stochastic")


def uniform(count: int, rng: torch.Generator) -> Tensor:
    return 2 * torch.rand(count, generator=rng) - 1


def truncated_normal(count: int, rng: torch.Generator) -> Tensor:
    """Standard normal within two standard deviations, scaled to [-1, 1]."""
    return torch.nn.init.trunc_normal_(torch.empty(count), a=-2.0, b=2.0, generator=rng) / 2


def run_figure3(count: int = 200_000, clients: int = 10, seed: int = 0, bins: int = 81) -> dict[str, Any]:
    """Histograms and root mean square errors, ready for JSON."""
    draws: dict[str, Callable[[int, torch.Generator], Tensor]] = {
        "uniform": uniform,
        "truncated normal": truncated_normal,
    }
    cases = {}
    for name, draw in draws.items():
        cases[name] = _case(draw(count, generator(seed, "figure3", name)), name, clients, seed, bins)
    return {
        "experiment": "figure3", "format": E4M3.name, "count": count, "clients": clients, "seed": seed,
        "distributions": cases,
    }  # fmt: skip


def _case(w: Tensor, name: str, clients: int, seed: int, bins: int) -> dict[str, Any]:
    alpha = float(w.abs().max())
    once: dict[str, Tensor] = {}
    average: dict[str, Tensor] = {}
    for rounding in ROUNDINGS:
        models = [_quantized(w, alpha, rounding, derive_seed(seed, "figure3", name, k)) for k in range(clients)]
        once[rounding], average[rounding] = models[0], torch.stack(models).mean(0)
    return {
        "weights": {"fp32": _histogram(w, 1.0, bins)},
        "quantized": {r: _shares(once[r]) for r in ROUNDINGS},
        "error": _errors({r: once[r] - w for r in ROUNDINGS}, bins),
        "error_of_average": _errors({r: average[r] - w for r in ROUNDINGS}, bins),
    }


def _quantized(w: Tensor, alpha: float, rounding: str, seed: int) -> Tensor:
    return quantize(w, alpha, rounding=rounding, seed=seed if rounding == "stochastic" else None)


def _errors(errors: dict[str, Tensor], bins: int) -> dict[str, Any]:
    """Both histograms over the same bins, wide enough for 99.9 % of either."""
    reach = max(float(torch.quantile(e[:100_000].abs(), 0.999)) for e in errors.values())
    return {r: _histogram(e, reach, bins) | {"rms": float(e.square().mean().sqrt())} for r, e in errors.items()}


def _shares(values: Tensor) -> dict[str, list[float]]:
    """How many of the weights lie on each grid point."""
    found, counts = values.unique(return_counts=True)
    return {"values": found.tolist(), "share": (counts / len(values)).tolist()}


def _histogram(values: Tensor, reach: float, bins: int) -> dict[str, list[float]]:
    counts = torch.histc(values, bins, -reach, reach)
    width = 2 * reach / bins
    edges = [-reach + i * width for i in range(bins + 1)]
    return {"edges": edges, "density": (counts / (len(values) * width)).tolist()}
