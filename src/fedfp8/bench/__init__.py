"""Measurements behind docs/benchmarks.md, for `fedfp8 bench`: functions that return rows."""

from fedfp8.bench.numerics import bench_numerics
from fedfp8.bench.timing import interleave, machine

__all__ = ["bench_numerics", "interleave", "machine"]
