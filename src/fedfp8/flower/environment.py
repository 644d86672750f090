"""Variables that keep Flower and Ray to themselves: no telemetry, no update checks, no package installation.

A federation that holds private data has no business talking to anyone else, and one without internet should not wait
for time-outs. `fedfp8 flower run` sets these for every process it starts; docs/flower.md explains each.
"""

import os

__all__ = ["QUIET", "keep_quiet"]

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",  # else: usage events to telemetry.flower.ai, up to 4 s at every exit
    "FLWR_DISABLE_UPDATE_CHECK": "1",  # else: a request to api.flower.ai at every start
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # else: the SuperLink runs `uv sync` for every run
    "RAY_USAGE_STATS_ENABLED": "0",  # else: Ray reports usage statistics
    "HF_HUB_OFFLINE": "1",  # data sets come from local files
}


def keep_quiet() -> None:
    """Set them for this process and those it starts; a value that the user set stays."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
