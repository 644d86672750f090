"""Sampling, aggregation, ServerOptimize, evaluation and records, as configured in pyproject.toml."""

from fedfp8.flower import server_app

app = server_app()
