"""`FP8`: the server's line of the two. Any strategy, unchanged, on a Grid that codes models.

    strategy = FP8(FedAvg(...))

What the inner strategy sends is coded on its way out, and what comes back is decoded before it is seen, so
`evaluate_fn`, metrics and `result.arrays` are ordinary. The central model is preserved: a client's result is handed on
as the server's model plus the client's change, so that the noise of the downlink, which the server knows exactly, does
not enter any aggregate. FP8 must be the outermost wrapper: the others compute with arrays.
"""

import secrets
import time
from collections.abc import Iterable
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedfp8.flower.releases import log
from fedfp8.flower.wrapper.grid import FP8Grid
from fedfp8.flower.wrapper.inner import Inner, is_old
from fedfp8.flower.wrapper.mod import arrays_of
from fedfp8.flower.wrapper.records import write_records
from fedfp8.flower.wrapper.traffic import Traffic
from fedfp8.fp8 import Format
from fedfp8.link import ServerLink, Wire
from fedfp8.link.arrays import Frame
from fedfp8.link.wire import WIRES, wire_named
from fedfp8.model.state import State
from fedfp8.rng import derive_seed

__all__ = ["FP8"]

FINE = 1.0  # kappa_up where the inner strategy works with single updates


class FP8(Strategy):
    """Any strategy, with models as few bytes. What is not listed here is the inner strategy's.

    wire: "dq" (dithered, the default: needs no ranges and serves any float arrays), "fp8" (the paper's: one code a
    weight, stochastic rounding), "bq", "fp32", or a `fedfp8.Wire`. coded: name patterns of the arrays to code; default:
    two or more dimensions, and long vectors. kappa_up, kappa_down: dq's steps, as multiples of the rms of a client's
    change and of the weights; None: chosen by the inner strategy. seed: of all random bits; None draws one. start: a
    model that every client has too (a state dict, an ArrayRecord, or a function that makes one; see `fp8_mod_with`).
    client_cache=False: nodes keep nothing between rounds. history: of how many rounds the server remembers its model.
    out: a folder for the records of a run, for `fedfp8 report`.
    """

    needs_states = False  # whether `states_of` is asked for

    def __new__(cls, strategy: Any = None, *args: Any, **kwargs: Any) -> "FP8":
        if cls is FP8 and is_old(strategy):
            from fedfp8.flower.wrapper.old import OldFP8

            return super().__new__(OldFP8)
        return super().__new__(cls)

    def __init__(
        self,
        strategy: Any,
        wire: str | Wire = "dq",
        *,
        format: Format | None = None,
        coded: str | Iterable[str] = (),
        kappa_up: float | None = None,
        kappa_down: float | None = None,
        seed: int | None = None,
        start: Any = None,
        client_cache: bool = True,
        history: int = 16,
        out: "str | Path | None" = None,
        **settings: Any,
    ) -> None:
        self.inner = Inner(strategy)
        if kappa_up is None and self.inner.wants_fine_steps and isinstance(wire, str):
            kappa_up = FINE
            settings = {"frequencies": False} | settings  # an update's error is the same in all weights
        chosen = {"kappa_up": kappa_up, "kappa_down": kappa_down, "format_down": format, "format_up": format}
        if isinstance(wire, str):
            settings = {"preserve": wire != "fp32"} | settings
        self.wire = wire_named(wire, **{name: value for name, value in chosen.items() if value is not None} | settings)
        self.coded = (coded,) if isinstance(coded, str) else tuple(coded)
        self.seed = secrets.randbits(62) if seed is None else seed
        self.start_model, self.client_cache, self.history = arrays_of(start), client_cache, history
        self.ranges: dict[str, float] = {}  # of FP8 codes, where a strategy chose them
        self.traffic = Traffic()
        self.out = None if out is None else Path(out)
        self._grid: FP8Grid | None = None
        self.strategy = strategy  # last: from here on new attributes are the inner strategy's

    def on(self, grid: Grid) -> FP8Grid:
        """The Grid that codes, in front of `grid`; for loops of your own."""
        if isinstance(grid, FP8Grid):  # it is one already
            return grid
        if self._grid is None or self._grid.grid is not grid:
            self._grid = FP8Grid(grid, self._link, self.inner, self.traffic, self.coded)
            self._grid.keeps_states = self.needs_states
        return self._grid

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Any:
        """The inner strategy's own `start`, on a Grid that codes."""
        before, began = len(self.traffic), time.monotonic()
        self._log_settings()
        result = self.strategy.start(self.on(grid), *args, **kwargs)
        log(INFO, "fedfp8: %s", self.traffic)
        if isinstance(result, Result):
            for round, values in self.traffic.metrics(before).items():
                result.train_metrics_clientapp.setdefault(round, MetricRecord()).update(values)
            if self.out is not None:
                write_records(self.out, self.traffic, result, self.method, self.seed, time.monotonic() - began)
        return result

    def _log_settings(self) -> None:
        wire = self.wire
        reason = self.inner.wants_fine_steps if wire.kappa_up == FINE else "right where updates are averaged"
        step = f", kappa_up {wire.kappa_up:g} ({reason})" if wire.up == "dithered" else ""
        log(INFO, "fedfp8: wire %s%s, seed %d", self.method, step, self.seed)

    @property
    def method(self) -> str:
        """The wire's name."""
        named = (name for name, one in WIRES.items() if (one.down, one.up) == (self.wire.down, self.wire.up))
        return next(named, f"{self.wire.down}/{self.wire.up}")

    def _link(self, name: str, arrays: dict[str, np.ndarray]) -> ServerLink:
        """A link for one record; name: for random bits of its own."""
        start = self.start_model
        if start is not None and not Frame(start).fits(Frame(arrays)):
            log(INFO, "fedfp8: start has other tensors than the model; it is not used")
            start = None
        seed = derive_seed(self.seed, "link", name)
        cache = self.client_cache
        link = ServerLink(self.wire, seed=seed, start=start, history=self.history, cache=cache, coded=self.coded)
        link.ranges = self.ranges
        return link

    def states_of(self, reply: Message) -> dict[str, State]:
        """What a reply of the last round brought, by record, with the ranges of its codes."""
        return {} if self._grid is None else self._grid.states.get(reply.metadata.reply_to_message_id, {})

    def _decoded(self, replies: Iterable[Message]) -> list[Message]:
        return list(replies) if self._grid is None else self._grid.decode(replies)

    # For loops that call a strategy's methods one by one

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.on(grid).encode(self.strategy.configure_train(server_round, arrays, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(server_round, self._decoded(replies))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.on(grid).encode(self.strategy.configure_evaluate(server_round, arrays, config, grid))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, self._decoded(replies))

    def summary(self) -> None:
        self._log_settings()
        self.strategy.summary()

    def __getattr__(self, name: str) -> Any:
        """Attributes and methods of the inner strategy."""
        if "strategy" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What an app sets on its strategy is for the inner one; ours is what __init__ set."""
        ours = name in self.__dict__ or "strategy" not in self.__dict__
        super().__setattr__(name, value) if ours else setattr(self.strategy, name, value)
