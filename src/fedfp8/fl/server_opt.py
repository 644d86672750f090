"""ServerOptimize (algorithm 2): the model whose quantized version is nearest to the clients' quantized models.

With q the weighted mean of the clients' models, sum_k n_k/m ||Q(w) - q_k||^2 = ||Q(w) - q||^2 + constant, so both
halves are fitted against q alone and cost the same for 10 or 1,000 clients:

- w (equation 7): gradient steps through Q_rand with straight-through gradients, at the mean alpha;
- alpha (equation 8): the best of a grid of points between the smallest and the largest client alpha.

"Nearest" is measured by the expected error over the random bits, (clip(w) - q)^2 + s^2 f (1 - f) per element, exact
where one draw a point (the paper's way, ``server.choose = "draw"``) is noisy. Whatever the halves propose, a tensor
never ends with a larger expected error than plain averaging has.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedfp8.fl.aggregate import WeightedMean
from fedfp8.fl.config import ServerConfig
from fedfp8.fp8 import Format, squared_error
from fedfp8.fp8.grid import grid_for
from fedfp8.fp8.parallel import random_keys, run
from fedfp8.model.quantized import tensor_seed
from fedfp8.model.state import State
from fedfp8.rng import derive_seed

__all__ = ["Gain", "server_optimize", "straight_through_step"]


@dataclass(frozen=True)
class Gain:
    """Expected squared error, summed over tensors: of plain averaging, after the w-step, after the alpha-step."""

    average: float = 0.0
    weights: float = 0.0
    alpha: float = 0.0

    def to_dict(self) -> dict[str, float]:
        scale = self.average or 1.0
        return {
            "error_average": self.average,
            "gain_weights_step": 1 - self.weights / scale,
            "gain_alpha_step": (self.weights - self.alpha) / scale,
        }


def server_optimize(mean: WeightedMean, config: ServerConfig, seed: int) -> tuple[State, Gain]:
    """w and alpha of every FP8 weight fitted to the mean model; everything else as averaged."""
    state = mean.result()
    tensors = dict(state.tensors)
    total = Gain()
    for index, spec in enumerate(state.layout):
        if spec.kind != "fp8":
            continue
        assert spec.range is not None and spec.format is not None
        bounds = mean.range_low[spec.range], mean.range_high[spec.range]
        own = tensor_seed(seed, index)
        w, alpha, gain = _fit(state[spec.name], float(state[spec.range]), bounds, spec.format, config, own)
        tensors[spec.name], tensors[spec.range] = w, torch.tensor(alpha)
        total = Gain(total.average + gain.average, total.weights + gain.weights, total.alpha + gain.alpha)
    return State(state.layout, tensors), total


def _fit(
    target: torch.Tensor, alpha: float, bounds: tuple[float, float], format: Format, config: ServerConfig, seed: int
) -> tuple[torch.Tensor, float, Gain]:
    def expected(w: torch.Tensor, alphas: list[float]) -> torch.Tensor:
        return squared_error(w, target, alphas, format, rounding="expected")

    average = after_weights = float(expected(target, [alpha]))
    w = target
    if config.weights_step:
        moved = target
        for step in range(config.steps):
            bits = derive_seed(seed, "w", step)
            moved = straight_through_step(moved, target, alpha, format, rate=config.rate, seed=bits)
        if (error := float(expected(moved, [alpha]))) < average:
            w, after_weights = moved, error
    best = after_weights
    if config.alpha_step and bounds[1] > bounds[0]:
        points = [float(np.float32(p)) for p in np.linspace(*bounds, config.points)]
        if config.choose == "expected":
            errors = expected(w, points)
        else:
            draws = [squared_error(w, target, [p], format, rounding="stochastic", seed=derive_seed(seed, "alpha", i))
                     for i, p in enumerate(points)]  # fmt: skip
            errors = torch.cat(draws)
        candidate = points[int(errors.argmin())]
        if (error := float(expected(w, [candidate]))) < best:
            alpha, best = candidate, error
    return w, alpha, Gain(average, after_weights, best)


def straight_through_step(
    w: torch.Tensor, target: torch.Tensor, alpha: float, format: Format, *, rate: float, seed: int
) -> torch.Tensor:
    """w - rate * gradient of ||Q_rand(w; alpha) - target||^2 with dQ/dw = 1 inside the range and 0 outside."""
    from fedfp8.fp8 import kernels

    g = grid_for(alpha, format)
    out = torch.empty_like(w)
    arrays = tuple(t.reshape(-1).numpy() for t in (w, target, out))
    constants = (g.alpha, np.float32(rate), g.scale_in, g.scale_out, g.top, g.lowest, g.magic, g.spread)
    run(kernels.server_step, arrays, constants, random_keys(seed))
    return out
