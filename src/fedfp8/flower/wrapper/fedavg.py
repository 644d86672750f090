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
from fedfp8.fl.config import METHODS, ServerConfig
from fedfp8.fl.server_opt import server_optimize
from fedfp8.flower.wrapper.arrays import Wire, ranges_of
from fedfp8.flower.wrapper.strategy import FP8
from fedfp8.fp8 import E4M3, Format
from fedfp8.model.layout import Layout
from fedfp8.model.state import State
from fedfp8.rng import derive_seed

__all__ = ["FP8FedAvg"]

PAPER = ("fp32", "bq", "uq", "uq+")


class FP8FedAvg(FP8):
    """FedAvg in FP8. `server` holds ServerOptimize's settings (uq+); other arguments as in `FP8` and in FedAvg."""

    def __init__(
        self,
        method: str = "uq",
        *,
        format: Format = E4M3,
        coded: str | Iterable[str] = (),
        seed: int | None = None,
        client_cache: bool = True,
        history: int = 8,
        lossless: bool = True,
        server: ServerConfig | None = None,
        **fedavg: Any,
    ) -> None:
        if method not in PAPER:
            raise ConfigError(f"method {method!r}; FP8FedAvg knows {', '.join(PAPER)}; for dq use FP8(strategy)")
        rule = Wire(METHODS[method]["up.rounding"], format, (coded,) if isinstance(coded, str) else tuple(coded))
        inner = FedAvg(**fedavg)
        self._set_up(inner, rule, 1.0, 1.0, seed, client_cache, history, lossless, preserve=False)
        self.method, self.server = method, server or ServerConfig(optimize=True)
        self.gains: list[dict[str, float]] = []  # what ServerOptimize gained, round by round

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        accepted = self._incoming(replies)
        arrays, metrics = self.strategy.aggregate_train(server_round, [message for message, _ in accepted])
        if arrays is not None and self.method == "uq+":
            self._optimize(arrays, accepted)
        return arrays, metrics

    def _optimize(self, arrays: ArrayRecord, accepted: list[tuple[Message, dict[str, State]]]) -> None:
        """Replace the averaged FP8 weights and ranges in `arrays` by ServerOptimize's."""
        updates = [(message, state) for message, states in accepted for state in states.values()]
        mean: WeightedMean | None = None
        for message, state in updates:
            part = _fp8_part(state)
            mean = mean or WeightedMean(part.layout)
            key = self.strategy.weighted_by_key
            mean.add(part, float(next(iter(message.content.metric_records.values()))[key]))
        if mean is None or not len(mean.layout):
            return
        state, gain = server_optimize(mean, self.server, derive_seed(self.seed, "server", len(self.traffic)))
        self.gains.append(gain.to_dict())
        self.ranges = {}
        for name, (own, alpha) in ranges_of(state).items():
            values = state[name].numpy()
            arrays[name] = Array(values.astype(arrays[name].dtype, copy=False))
            if own:
                arrays[own] = Array(np.asarray(alpha, dtype=arrays[own].dtype))
            else:
                self.ranges[name] = alpha


def _fp8_part(state: State) -> State:
    """The FP8 weights of a state with their ranges."""
    used = {spec.range for spec in state.layout if spec.kind == "fp8"}
    specs = tuple(spec for spec in state.layout if spec.kind == "fp8" or spec.name in used)
    return State(Layout(specs), {spec.name: state[spec.name] for spec in specs})
