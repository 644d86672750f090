"""The FP8 numerics against copying memory, and against what others do for the same values.

Times are processor time on one thread. Speeds are in units of ``y.copy_(x)`` over as many float32 elements, y allocated
once. The public functions allocate their result: ``clone()`` shows what that costs by itself, and the rows "(kernel)"
what is left without it and without Python. `from_codes` moves 5 bytes an element where `copy_` moves 8, so it is
compared to copying as many bytes.
"""

from collections.abc import Callable
from time import thread_time
from typing import Any

import torch

from fedfp8.bench.textbook import brevitas_quantizer, float8_round_trip, textbook_quantize
from fedfp8.bench.timing import Timings, interleave
from fedfp8.fl.repeatable import one_thread
from fedfp8.fp8 import E4M3, dither, fake_quantize, from_codes, quantize, to_codes, undither
from fedfp8.fp8.grid import grid_for
from fedfp8.rng import generator

__all__ = ["SIZES", "TRAINING_SIZE", "by_size", "run", "run_size", "run_training"]

Row = dict[str, Any]
Calls = dict[str, Callable[[], object]]
SIZES = (1 << 16, 1 << 20, 1 << 24)
TRAINING_SIZE = 3 * 3 * 256 * 256  # 590k: a ResNet layer
BUDGET_SIZE = 1 << 20
BUDGETS = {"quantize": 0.9, "to_codes stochastic": 0.35, "dither": 0.35, "undither": 0.5, "from_codes": 0.9}
BASELINES = {"from_codes": "copy_ of 5/8", "from_codes (kernel)": "copy_ of 5/8"}
TRAINING_BUDGET = 10.0


def run(sizes: tuple[int, ...] = SIZES, *, turns: int = 31) -> list[Row]:
    """All rows: `run_size` for every size, then `run_training`."""
    return [row for n in sizes for row in run_size(n, turns=turns)] + run_training(turns=turns)


def by_size(rows: list[Row]) -> list[Row]:
    """A row a function with a column a size, as docs/benchmarks.md has them; time and budget are of the middle size."""
    sizes = sorted({row["size"] for row in rows})
    found: dict[str, Row] = {}
    for row in rows:
        line = found.setdefault(row["name"], {"function": row["name"]})
        line[f"{row['size']:,}"] = row["ratio"]
        if row["size"] == sizes[len(sizes) // 2]:
            line |= {
                "in units of": row["baseline"],
                "µs": row["microseconds"],
                "budget": row["budget"],
                "ok": row["ok"],
            }
    order = ["function", *(f"{n:,}" for n in sizes), "in units of", "µs", "budget", "ok"]
    return [{key: line[key] for key in order} for line in found.values()]


def run_size(n: int, *, turns: int = 31) -> list[Row]:
    """One row per function at n elements; large tensors take fewer turns."""
    x = torch.randn(n, generator=generator(0, "bench", n))
    calls = {**_copies(x), **_ours(x), **_kernels(x), **_others(x)}
    with one_thread():
        timings = interleave(calls, turns=max(9, int(turns * min(1.0, (1 << 21) / n))), clock=thread_time)
    return [
        _row(name, n, timings, BASELINES.get(name, "copy_"), BUDGETS.get(name) if n == BUDGET_SIZE else None)
        for name in calls
    ]


def _copies(x: torch.Tensor) -> Calls:
    out, part = torch.empty_like(x), 5 * x.numel() // 8
    return {
        "copy_": lambda: out.copy_(x),
        "copy_ of 5/8": lambda: out[:part].copy_(x[:part]),
        "clone": x.clone,
    }


def _ours(x: torch.Tensor) -> Calls:
    alpha, step = float(x.abs().max()), 0.01
    codes, k = to_codes(x, alpha), dither(x, step, seed=1)
    return {
        "quantize": lambda: quantize(x, alpha),
        "quantize stochastic": lambda: quantize(x, alpha, rounding="stochastic", seed=1),
        "to_codes": lambda: to_codes(x, alpha),
        "to_codes stochastic": lambda: to_codes(x, alpha, rounding="stochastic", seed=1),
        "from_codes": lambda: from_codes(codes, alpha),
        "dither": lambda: dither(x, step, seed=1),
        "undither": lambda: undither(k, step, seed=1),
    }


def _kernels(x: torch.Tensor) -> Calls:
    from fedfp8.fp8 import kernels

    alpha = float(x.abs().max())
    g, codes = grid_for(alpha, E4M3), to_codes(x, alpha)
    arrays, out = x.numpy(), torch.empty_like(x).numpy()
    there, back = (
        (g.scale_in, g.scale_out, g.top, g.lowest, g.magic),
        (g.half_unit, g.half_left, g.half_right, g.half_mask),
    )
    return {
        "quantize (kernel)": lambda: kernels.quantize(arrays, out, *there),
        "from_codes (kernel)": lambda: kernels.from_codes(codes.numpy(), out, *back),
    }


def _others(x: torch.Tensor) -> Calls:
    alpha = x.abs().max()
    calls: Calls = {
        "torch float8 round trip": lambda: float8_round_trip(x, float(alpha)),
        "textbook formula": lambda: textbook_quantize(x, alpha),
    }
    brevitas = brevitas_quantizer(x)
    return calls if brevitas is None else {**calls, "Brevitas": brevitas}


def run_training(n: int = TRAINING_SIZE, *, turns: int = 31) -> list[Row]:
    """Forward and backward of `fake_quantize`, against autograd through the textbook formula."""
    x = torch.randn(n, generator=generator(0, "bench", "training")).requires_grad_()
    alpha = x.detach().abs().max().requires_grad_()
    upstream = torch.randn(n, generator=generator(0, "bench", "upstream"))

    def both(forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(x, alpha), (x, alpha), upstream)

    ours, textbook = "fake_quantize forward+backward", "textbook forward+backward"
    calls = {ours: both(fake_quantize), textbook: both(textbook_quantize)}
    with one_thread():
        timings = interleave(calls, turns=turns)  # wall time: autograd's backward pass may run on a thread of its own
    return [_row(ours, n, timings, textbook, TRAINING_BUDGET), _row(textbook, n, timings, textbook, None)]


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
