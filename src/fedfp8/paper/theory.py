"""Theorem 1 on a convex problem: what the mantissa costs, and why communication must be unbiased.

FedAvg-UQ (the paper's algorithm, weights only as in its proof) on L2-regularised softmax regression on scikit-learn's
handwritten digits: d = 650 weights, K clients with an equal, shuffled share of the examples, U minibatch steps a round,

    v <- Q_rand(w);   U times: v <- v - eta * grad F_k(Q_det(v); minibatch);   w <- mean over clients of Q_rand(v)

in the formats E2M1 .. E2M5, whose range holds every weight, so nothing is clipped. F is convex and smooth and its
minimum is found to 1e-10, so the gap F(Q_rand(w_t)) - F* is exact.

Why the floor falls about like 2^-m and not like 4^-m: a received weight lies on the grid, so rounding it again after a
small step y costs s|y|, not s^2 (the paper's Lemma "quantization error decomposition"): linear in the step s of the
grid as long as a round moves weights by less than s. Theorem 1 says so as S sqrt(d) G, S the largest step, S ~ 2^-m.
Rounds that move weights by more than s leave that regime, and the floor falls faster (up to 4^-m). With nearest
rounding on the links (BQ) a weight that moves by less than half a step moves not at all: the run gets stuck.
"""

import math
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from fedfp8.fp8 import Format, quantize
from fedfp8.rng import derive_seed, generator

__all__ = ["Problem", "Settings", "Trace", "digits_problem", "exponent", "federate", "run_theory"]


@dataclass(frozen=True)
class Settings:
    clients: int = 10  # K, all of them in every round
    steps: int = 5  # U
    batch: int = 16
    rate: float = 0.02  # eta
    rounds: int = 1500  # T
    penalty: float = 0.01
    every: int = 10  # rounds between evaluations of F
    seed: int = 0


@dataclass(frozen=True)
class Problem:
    x: Tensor  # [K, n, 65], last column 1
    y: Tensor  # [K, n, 10], one-hot
    penalty: float
    minimum: float  # F*
    alpha: float  # range of the formats

    @property
    def dimension(self) -> int:
        return self.x.shape[2] * self.y.shape[2]

    def value(self, w: Tensor) -> float:
        """F(w), in float64."""
        return float(_objective(w.double(), self.x.double().flatten(0, 1), self.y.double().flatten(0, 1), self.penalty))


@dataclass
class Trace:
    """One run: gaps at the evaluated rounds, the largest drift V_t and what Lemma 1 allows it to be."""

    mantissa_bits: int | None  # None: no quantization at all
    communication: str  # stochastic | nearest | none
    step: float  # S
    rounds: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)  # V_t at the evaluated rounds
    drift_max: float = 0.0
    gradient_max: float = 0.0  # G: the largest norm of a stochastic gradient that was met
    bound: float = 0.0

    @property
    def floor(self) -> float:
        """Mean gap of the last third."""
        tail = self.gaps[-max(1, len(self.gaps) // 3) :]
        return sum(tail) / len(tail)


def _objective(w: Tensor, x: Tensor, y: Tensor, penalty: float) -> Tensor:
    return -(y * torch.log_softmax(x @ w, 1)).sum(1).mean() + penalty / 2 * (w * w).sum()


def digits_problem(settings: Settings) -> Problem:
    """Real digits, shuffled and dealt out equally (as the proof assumes), and the minimum of F."""
    from fedfp8.data import load

    data = load("digits")
    x = torch.cat([data.train_x, data.test_x]).flatten(1).float() / 16
    labels = torch.cat([data.train_y, data.test_y])
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    count = len(labels) // settings.clients
    order = torch.randperm(len(labels), generator=generator(settings.seed, "theory", "deal"))
    order = order[: count * settings.clients]
    y = torch.nn.functional.one_hot(labels, 10).float()
    minimum, best = _minimize(x[order].double(), y[order].double(), settings.penalty)
    shape = (settings.clients, count, -1)
    return Problem(
        x[order].reshape(shape), y[order].reshape(shape), settings.penalty, minimum, 1.25 * float(best.abs().max())
    )


def _minimize(x: Tensor, y: Tensor, penalty: float) -> tuple[float, Tensor]:
    w = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [w], max_iter=2000, tolerance_grad=1e-10, tolerance_change=1e-15, history_size=50, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = _objective(w, x, y, penalty)
        loss.backward()
        return loss

    solver.step(closure)
    return float(closure().detach()), w.detach()


def largest_step(alpha: float, format: Format) -> float:
    """S: distance of the two largest grid points."""
    grid = format.grid().max() - format.grid().sort().values[-2]
    return alpha / format.top * float(grid)


def federate(problem: Problem, settings: Settings, format: Format | None, communication: str = "stochastic") -> Trace:
    """FedAvg with weights quantized in `format` during training and on both links; None: plain FedAvg."""
    step = largest_step(problem.alpha, format) if format else 0.0
    trace = Trace(format.mantissa_bits if format else None, communication if format else "none", step)
    clients, count = problem.x.shape[:2]
    rng = generator(settings.seed, "theory", "batches")
    w = torch.zeros(problem.x.shape[2], problem.y.shape[2])

    def link(value: Tensor, *path: str | int) -> Tensor:
        if format is None:
            return value
        seed = derive_seed(settings.seed, "theory", *path) if communication == "stochastic" else None
        return quantize(value, problem.alpha, format, rounding=communication, seed=seed)

    for t in range(settings.rounds):
        received = link(w, "down", t)
        v, drift = received.expand(clients, *w.shape).clone(), 0.0
        for _ in range(settings.steps):
            seen = v if format is None else quantize(v, problem.alpha, format)
            drift += float((seen - received).square().sum()) / (clients * settings.steps)
            batch = torch.randint(count, (clients, settings.batch), generator=rng)
            gradient = _gradient(problem, seen, batch)
            trace.gradient_max = max(trace.gradient_max, float(gradient.flatten(1).norm(dim=1).max()))
            v -= settings.rate * gradient
        trace.drift_max = max(trace.drift_max, drift)
        if t % settings.every == 0:
            trace.rounds.append(t)
            trace.gaps.append(problem.value(received) - problem.minimum)
            trace.drift.append(drift)
        w = link(v, "up", t).mean(0)  # every client its own random bits: they follow the flat index
    trace.bound = drift_bound(settings, step, problem.dimension, trace.gradient_max)
    return trace


def _gradient(problem: Problem, w: Tensor, batch: Tensor) -> Tensor:
    """Stochastic gradients of all clients at their own weights: [K, 65, 10]."""
    rows = torch.arange(len(batch))[:, None]
    x, y = problem.x[rows, batch], problem.y[rows, batch]
    return x.transpose(1, 2) @ (torch.softmax(x @ w, 2) - y) / batch.shape[1] + problem.penalty * w


def drift_bound(settings: Settings, step: float, dimension: int, gradient: float) -> float:
    """Lemma 1: V_t <= 18 U^3 S sqrt(d) G eta + 9 U^2 eta^2 G^2."""
    u, eta = settings.steps, settings.rate
    return 18 * u**3 * step * math.sqrt(dimension) * gradient * eta + 9 * u**2 * eta**2 * gradient**2


def exponent(traces: list[Trace]) -> float:
    """p of the least-squares fit floor ~ S^p: 1 is Theorem 1's rate (2^-m), 2 would be 4^-m."""
    xs, ys = ([math.log(v) for v in values] for values in zip(*((t.step, t.floor) for t in traces), strict=True))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def run_theory(settings: Settings | None = None, mantissas: tuple[int, ...] = (1, 2, 3, 4, 5)) -> dict[str, object]:
    """All runs of the experiment as one JSON-ready dict."""
    settings = settings or Settings()
    problem = digits_problem(settings)
    plain = federate(problem, settings, None)
    runs = {
        rounding: [federate(problem, settings, Format(2, m), rounding) for m in mantissas]
        for rounding in ("stochastic", "nearest")
    }
    traces = [plain, *runs["stochastic"], *runs["nearest"]]
    return {
        "experiment": "theory",
        "settings": asdict(settings),
        "dimension": problem.dimension,
        "minimum": problem.minimum,
        "alpha": problem.alpha,
        "exponent": exponent(runs["stochastic"]),
        "runs": [asdict(trace) | {"floor": trace.floor} for trace in traces],
    }
