"""`FP8FedAvg`: the paper's strategy as a Flower strategy, with FedAvg's constructor arguments.

    fp32  FedAvg, float32 both ways
    bq    FP8 both ways, rounded to nearest (biased)
    uq    FP8 both ways, stochastic rounding (unbiased)
    uq+   uq, and the server fits weights and ranges to the mean (ServerOptimize)

As in the paper the next model is the mean of the clients' quantized models; it is not corrected for the downlink. Train
a model that went through `fedfp8.prepare` for the whole method: its learned ranges are then the ranges of the codes.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from fedfp8.errors import ConfigError
from fedfp8.fl.aggregate import WeightedMean
from fedfp8.fl.config import ServerConfig
from fedfp8.fl.server_opt import server_optimize
from fedfp8.flower.wrapper.strategy import FP8
from fedfp8.link.arrays import fp8_part, ranges_of
from fedfp8.rng import derive_seed

__all__ = ["FP8FedAvg"]

WIRE_OF = {"fp32": "fp32", "bq": "bq", "uq": "fp8", "uq+": "fp8"}
OURS = ("format", "coded", "seed", "start", "client_cache", "history", "lossless", "out")


class FP8FedAvg(FP8):
    """FedAvg in FP8. `server` holds ServerOptimize's settings (uq+); other arguments as in `FP8` and in FedAvg."""

    def __init__(self, method: str = "uq", *, server: ServerConfig | None = None, **arguments: Any) -> None:
        if method not in WIRE_OF:
            raise ConfigError(f"method {method!r}; FP8FedAvg knows {', '.join(WIRE_OF)}; for dq use FP8(strategy)")
        ours = {name: arguments.pop(name) for name in OURS if name in arguments}
        inner = _Optimized(**arguments) if method == "uq+" else FedAvg(**arguments)
        self.name, self.server = method, server or ServerConfig(optimize=True)
        self.gains: list[dict[str, float]] = []  # what ServerOptimize gained, round by round
        self.needs_states = isinstance(inner, _Optimized)
        super().__init__(inner, WIRE_OF[method], preserve=False, **ours)
        if isinstance(inner, _Optimized):
            inner.wrapper = self

    @property
    def method(self) -> str:
        return self.name

    def optimize(self, arrays: ArrayRecord, replies: list[Message]) -> None:
        """Replace the averaged FP8 weights and ranges in `arrays` by ServerOptimize's."""
        mean: WeightedMean | None = None
        for reply in replies:
            for state in self.states_of(reply).values():
                part = fp8_part(state)
                mean = mean or WeightedMean(part.layout)
                weight = next(iter(reply.content.metric_records.values()))[self.strategy.weighted_by_key]
                mean.add(part, float(weight))
        if mean is None or not len(mean.layout):
            return
        state, gain = server_optimize(mean, self.server, derive_seed(self.seed, "server", len(self.traffic)))
        self.gains.append(gain.to_dict())
        self.ranges.clear()
        for name, (own, alpha) in ranges_of(state).items():
            arrays[name] = Array(state[name].numpy().astype(arrays[name].dtype, copy=False))
            if own:
                arrays[own] = Array(np.asarray(alpha, dtype=arrays[own].dtype))
            else:
                self.ranges[name] = alpha


class _Optimized(FedAvg):
    """FedAvg, and ServerOptimize after it."""

    wrapper: FP8FedAvg

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        given = list(replies)
        arrays, metrics = super().aggregate_train(server_round, given)
        if arrays is not None:
            self.wrapper.optimize(arrays, [reply for reply in given if reply.has_content()])
        return arrays, metrics
