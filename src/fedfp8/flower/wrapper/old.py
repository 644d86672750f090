"""`FP8` around the strategies of old-style apps (flwr.server.strategy, ServerApp(server_fn=...), client_fn).

Their messages are made by Flower from FitIns and EvaluateIns, and sent by one thread a client through a Grid. So it is
enough to tell `FP8Grid` which clients a round is for, and to put it in front of the Grid of each ClientProxy.
"""

import copy
import time
from logging import INFO, WARNING
from numbers import Real
from typing import Any

from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.server.strategy import Strategy
from flwr.serverapp.strategy import Result

from fedfp8.errors import ConfigError, WireFormatError
from fedfp8.flower.releases import log, parameters_to_arrayrecord
from fedfp8.flower.wrapper.inner import shapes
from fedfp8.flower.wrapper.records import write_records
from fedfp8.flower.wrapper.strategy import FP8

__all__ = ["OldFP8"]

Instructions = list[tuple[Any, Any]]  # (ClientProxy, FitIns or EvaluateIns)
BYPASSED = (
    "nothing was saved, the models were not sent by the clients' proxies; a workflow needs the Grid that codes: "
    "workflow(strategy.on(grid), context); one with secure aggregation cannot be coded"
)


class OldFP8(FP8, Strategy):
    """An old-style strategy, with models as few bytes. Made by `FP8(strategy)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._result, self._began = Result(), time.monotonic()
        self._told = 0  # phases that the line of the log was about
        super().__init__(*args, **kwargs)

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
        results, failures = self._usable(results, failures)
        parameters, metrics = self.strategy.aggregate_fit(server_round, results, failures)
        return parameters, (metrics or {}) | self._bytes()

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:  # type: ignore[override]
        results, failures = self._usable(results, failures)
        found = self.strategy.aggregate_evaluate(server_round, results, failures)
        self._tell()
        self._record(self._result.evaluate_metrics_clientapp, server_round, found)
        return found

    def evaluate(self, server_round: int, parameters: Any) -> Any:
        self._tell()
        found = self.strategy.evaluate(server_round, parameters)
        self._record(self._result.evaluate_metrics_serverapp, server_round, found)
        return found

    def _usable(self, results: list[tuple[Any, Any]], failures: list[Any]) -> tuple[list[Any], list[Any]]:
        """Results that cannot be averaged with the others count as failures, which says whose they are."""
        odd = dict(self.inner.odd([(n, _shapes(res), res.num_examples) for n, (_, res) in enumerate(results)]))
        refused = [self._refused(results[n][0].node_id, reason) for n, reason in odd.items()]
        return [one for n, one in enumerate(results) if n not in odd], [*failures, *refused]

    def _refused(self, node: int, reason: str) -> WireFormatError:
        log(WARNING, "fedfp8: the update of node %d is rejected: %s", node, reason)
        if self.traffic:
            self.traffic[-1].rejected.append({"client": node, "reason": reason})
        return WireFormatError(f"fedfp8 rejected the update of node {node}: {reason}")

    def _bytes(self) -> dict[str, int]:
        """Metrics of the round; none, and a warning, if its models were sent by another Grid than ours."""
        last = self.traffic[-1] if self.traffic else None
        if last is None or not last.messages:
            log(WARNING, "fedfp8: %s", BYPASSED)
            return {}
        return self.traffic.metrics()[last.round]

    def _tell(self) -> None:
        """What it cost so far, after every phase: nobody says which one is the last."""
        if any(one.messages for one in self.traffic[self._told :]):
            log(INFO, "fedfp8: so far %s", str(self.traffic))
        self._told = len(self.traffic)

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


def _shapes(result: Any) -> Any:
    """Of the arrays of a FitRes; an EvaluateRes has none."""
    parameters = getattr(result, "parameters", None)
    if parameters is None:
        return None
    kind = parameters.tensor_type
    return tuple(shapes({str(n): Array("", (), kind, data) for n, data in enumerate(parameters.tensors)}))
