"""The FP8 numerics against copying memory, and against what others do for the same values.

Speeds are in units of ``y.copy_(x)`` over as many float32 elements, y allocated once. The public functions allocate
their result; ``clone()`` shows what that costs by itself. `from_codes` moves 5 bytes an element where `copy_` moves 8,
so it is compared to copying the same number of bytes.
"""

from collections.abc import Callable
from typing import Any

import torch

from fedfp8.bench.textbook import brevitas_quantizer, float8_round_trip, textbook_quantize
from fedfp8.bench.timing import Timings, interleave
from fedfp8.fp8 import dither, fake_quantize, from_codes, quantize, to_codes, undither
from fedfp8.rng import generator

__all__ = ["SIZES", "TRAINING_SIZE", "bench_numerics", "bench_size", "bench_training"]

Row = dict[str, Any]
SIZES = (1 << 16, 1 << 20, 1 << 24)
TRAINING_SIZE = 3 * 3 * 256 * 256  # 590k: a ResNet layer
BUDGET_SIZE = 1 << 20
BUDGETS = {"quantize": 0.9, "to_codes stochastic": 0.35, "dither": 0.35, "undither": 0.5, "from_codes": 0.9}
TRAINING_BUDGET = 10.0


def bench_numerics(sizes: tuple[int, ...] = SIZES, *, turns: int = 31) -> list[Row]:
    """All rows of the table in docs/benchmarks.md, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for n in sizes for row in bench_size(n, turns=turns)]
        return rows + bench_training(turns=turns)
    finally:
        torch.set_num_threads(threads)


def bench_size(n: int, *, turns: int = 31) -> list[Row]:
    """One row per function at n elements."""
    candidates = _candidates(n)
    few = max(5, turns * min(1, (1 << 21) / n) ** 0.5)  # large tensors: fewer, longer turns
    timings = interleave(candidates, turns=int(few))
    baselines = {"from_codes": "copy_ of the same bytes"}
    return [
        _row(name, n, timings, baselines.get(name, "copy_"), BUDGETS.get(name) if n == BUDGET_SIZE else None)
        for name in candidates
    ]


def _candidates(n: int) -> dict[str, Callable[[], object]]:
    x = torch.randn(n, generator=generator(0, "bench", n))
    alpha = float(x.abs().max())
    out, step, tensor_alpha = torch.empty_like(x), 0.01, torch.tensor(alpha)
    half = 5 * n // 8  # floats whose copy reads and writes as many bytes as from_codes
    codes, k = to_codes(x, alpha), dither(x, step, seed=1)
    calls: dict[str, Callable[[], object]] = {
        "copy_": lambda: out.copy_(x),
        "copy_ of the same bytes": lambda: out[:half].copy_(x[:half]),
        "clone": x.clone,
        "quantize": lambda: quantize(x, alpha),
        "quantize stochastic": lambda: quantize(x, alpha, rounding="stochastic", seed=1),
        "to_codes": lambda: to_codes(x, alpha),
        "to_codes stochastic": lambda: to_codes(x, alpha, rounding="stochastic", seed=1),
        "from_codes": lambda: from_codes(codes, alpha),
        "dither": lambda: dither(x, step, seed=1),
        "undither": lambda: undither(k, step, seed=1),
        "torch float8 round trip": lambda: float8_round_trip(x, alpha),
        "textbook formula": lambda: textbook_quantize(x, tensor_alpha),
    }
    brevitas = brevitas_quantizer(x) if n <= BUDGET_SIZE else None
    if brevitas is not None:
        calls["Brevitas"] = lambda: brevitas(x)
    return calls


def bench_training(n: int = TRAINING_SIZE, *, turns: int = 31) -> list[Row]:
    """Forward and backward of `fake_quantize`, against autograd through the textbook formula."""
    x = torch.randn(n, generator=generator(0, "bench", "training")).requires_grad_()
    alpha = x.detach().abs().max().requires_grad_()
    upstream = torch.randn(n, generator=generator(0, "bench", "upstream"))
    out = torch.empty(n)

    def both(forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(x, alpha), (x, alpha), upstream)

    ours, textbook = "fake_quantize forward+backward", "textbook forward+backward"
    calls = {"copy_": lambda: out.copy_(x.detach()), ours: both(fake_quantize), textbook: both(textbook_quantize)}
    timings = interleave(calls, turns=turns)
    return [
        _row(ours, n, timings, textbook, TRAINING_BUDGET),
        _row(textbook, n, timings, textbook, None),
        _row("copy_", n, timings, textbook, None),
    ]


def _row(name: str, n: int, timings: Timings, baseline: str, budget: float | None) -> Row:
    ratio = timings.speed(name, baseline)
    return {
        "name": name,
        "size": n,
        "microseconds": round(timings.median(name) * 1e6, 1),
        "ratio": round(ratio, 3),
        "baseline": baseline,
        "budget": budget,
        "ok": None if budget is None else ratio >= budget,
    }
