"""`FP8` around the strategies of old-style apps (flwr.server.strategy, ServerApp(server_fn=...), client_fn).

Their messages are made by Flower from FitIns and EvaluateIns, and sent by one thread a client through a Grid. So it is
enough to tell `FP8Grid` which clients a round is for, and to put it in front of the Grid of each ClientProxy.
"""

import copy
import time
from logging import INFO
from numbers import Real
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.server.strategy import Strategy
from flwr.serverapp.strategy import Result

from fedfp8.errors import ConfigError
from fedfp8.flower.releases import log, parameters_to_arrayrecord
from fedfp8.flower.wrapper.records import write_records
from fedfp8.flower.wrapper.strategy import FP8

__all__ = ["OldFP8"]

Instructions = list[tuple[Any, Any]]  # (ClientProxy, FitIns or EvaluateIns)


class OldFP8(FP8, Strategy):
    """An old-style strategy, with models as few bytes. Made by `FP8(strategy)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._result, self._began = Result(), time.monotonic()

    def start(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"{type(self.strategy).__name__} of flwr.server.strategy has no start(); use it as before, in "
            "ServerAppComponents(strategy=FP8(strategy), ...), or wrap the strategy of the same name in "
            "flwr.serverapp.strategy"
        )

    def initialize_parameters(self, client_manager: Any) -> Any:
        self._log_settings()
        self._result, self._began = Result(), time.monotonic()
        return self.strategy.initialize_parameters(client_manager)

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Instructions:
        return self._coded("train", "fitins", self.strategy.configure_fit(server_round, parameters, client_manager))

    def configure_evaluate(self, server_round: int, parameters: Any, client_manager: Any) -> Instructions:  # type: ignore[override]
        instructions = self.strategy.configure_evaluate(server_round, parameters, client_manager)
        return self._coded("evaluate", "evaluateins", instructions)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        parameters, metrics = self.strategy.aggregate_fit(server_round, results, failures)
        return parameters, (metrics or {}) | self.traffic.metrics()[self.traffic[-1].round]

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:  # type: ignore[override]
        found = self.strategy.aggregate_evaluate(server_round, results, failures)
        self._record(self._result.evaluate_metrics_clientapp, server_round, found)
        return found

    def evaluate(self, server_round: int, parameters: Any) -> Any:
        if self.traffic:
            log(INFO, "fedfp8: so far %s", self.traffic)
        found = self.strategy.evaluate(server_round, parameters)
        self._record(self._result.evaluate_metrics_serverapp, server_round, found)
        return found

    def _record(self, where: dict[int, MetricRecord], server_round: int, found: Any) -> None:
        """Keep (loss, metrics) and write the records anew: nobody says which round of an old-style run is the last."""
        if self.out is None:
            return
        loss, metrics = found or (None, {})
        numbers = {"loss": loss} | (metrics or {})
        where[server_round] = MetricRecord({k: float(v) for k, v in numbers.items() if isinstance(v, Real)})
        seconds = time.monotonic() - self._began
        write_records(self.out, self.traffic, self._result, self.method, self.seed, seconds)

    def _coded(self, phase: str, prefix: str, instructions: Instructions) -> Instructions:
        if not instructions:
            return instructions
        proxies = [copy.copy(proxy) for proxy, _ in instructions]
        for proxy in proxies:
            if not hasattr(proxy, "grid"):
                raise ConfigError(
                    f"clients are reached by a {type(proxy).__name__}, not through a Grid; run the app with `flwr run`"
                )
            proxy.grid = self.on(proxy.grid)
        records: dict[int, ArrayRecord] = {}  # by object; `instructions` keeps them all alive
        for _, ins in instructions:
            if id(ins.parameters) not in records:
                records[id(ins.parameters)] = parameters_to_arrayrecord(ins.parameters, keep_input=True)
        models = [
            (p.node_id, {f"{prefix}.parameters": records[id(i.parameters)]})
            for p, (_, i) in zip(proxies, instructions, strict=True)
        ]
        proxies[0].grid.announce(phase, models)
        return [(proxy, ins) for proxy, (_, ins) in zip(proxies, instructions, strict=True)]
