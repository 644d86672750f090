"""fedfp8 on Flower: the whole method as a Flower app, and FP8 for any app in two lines.

fp8_mod, FP8      client mod and strategy wrapper around an existing app (`wrapper/`: start with `strategy.py`)
FP8FedAvg         the paper's strategy with FedAvg's arguments (`wrapper/fedavg.py`)
LocalGrid         a Grid in this process, to try and test apps on (`testing/`)
client_app, server_app, run   what `fedfp8 run` does, on a Grid, to the same bytes (`method/`)
"""

from fedfp8.errors import extra

with extra("flower"):
    import flwr  # noqa: F401

from fedfp8.flower.method.app import client_app, server_app
from fedfp8.flower.method.launch import run
from fedfp8.flower.testing.localgrid import LocalGrid
from fedfp8.flower.wrapper.fedavg import FP8FedAvg
from fedfp8.flower.wrapper.mod import fp8_mod, fp8_mod_with
from fedfp8.flower.wrapper.strategy import FP8

__all__ = ["FP8", "FP8FedAvg", "LocalGrid", "client_app", "fp8_mod", "fp8_mod_with", "run", "server_app"]
