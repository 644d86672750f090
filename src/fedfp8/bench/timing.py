"""Timing on a machine that does other things too: candidates take turns, and only ratios within a turn are compared.

A minute of somebody else's load slows every candidate of the same turn alike, so the median over turns of
``time(baseline) / time(candidate)`` moves far less than either time. Absolute medians are kept for orientation only.
"""

import gc
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedfp8.machine import cores, processor
from fedfp8.text import markdown_table

__all__ = ["Timings", "interleave", "machine", "table"]

SHORTEST = 1e-3  # seconds; shorter calls are repeated inside a turn


@dataclass(frozen=True)
class Timings:
    """Seconds per call, one number a turn for every candidate."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def speed(self, name: str, baseline: str) -> float:
        """How fast `name` is in units of `baseline`: the median over turns of time(baseline) / time(name)."""
        pairs = zip(self.seconds[name], self.seconds[baseline], strict=True)
        return statistics.median(base / own for own, base in pairs)


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    turns: int = 31,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Call every candidate once a turn, starting one place further each turn; the first `warmup` turns are not kept.

    ``clock=time.thread_time`` counts processor time of this thread only: right for code that runs on one thread, on a
    machine where others take it off the processor.
    """
    names = list(candidates)
    repeats = {name: _repeats(candidates[name], clock) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(warmup + turns):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                elapsed = _time(candidates[name], repeats[name], clock)
                if turn >= warmup:
                    seconds[name].append(elapsed)
    finally:
        if collecting:
            gc.enable()
    return Timings(seconds)


def _time(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    call()  # not timed: brings caches and the allocator from the previous candidate's state into this one's
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def _repeats(call: Callable[[], object], clock: Callable[[], float]) -> int:
    call()  # compiles
    return max(1, round(SHORTEST / max(_time(call, 3, clock), 1e-7)))


def machine() -> dict[str, str]:
    """What a reader needs to judge a number: processor, system, versions, date."""
    import numba
    import torch

    return {
        "processor": processor(),
        "cores": str(cores()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "threads": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a markdown table; the columns are the keys of the first row."""

    def cell(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "" if value is None else value if isinstance(value, str) else f"{value:,}"

    return markdown_table(list(rows[0]), [[cell(v) for v in row.values()] for row in rows])
