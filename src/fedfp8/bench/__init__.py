"""Measurements behind docs/benchmarks.md, for `fedfp8 bench`: each file has a `run` that returns rows."""

from fedfp8.bench.timing import Timings, interleave, machine, table

__all__ = ["Timings", "interleave", "machine", "table"]
