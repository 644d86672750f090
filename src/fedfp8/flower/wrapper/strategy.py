"""`FP8`: the server's line of the two. Wraps any strategy the way Flower's privacy wrappers do.

    strategy = FP8(FedAvg(...))

What the inner strategy sends is coded on its way out, and what comes back is decoded before it is aggregated, so
`evaluate_fn`, metrics and `result.arrays` are ordinary. The central model is preserved: a client's result is handed on
as

    server's model + (decoded uplink - decoded downlink)

so that the noise of the downlink, which the server knows exactly, does not enter any aggregate. FP8 must be the
outermost wrapper: the others compute with arrays.
"""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from fedfp8.errors import ConfigError, Fedfp8Error
from fedfp8.fl.config import DqConfig
from fedfp8.flower.blob import is_blob, record_of
from fedfp8.flower.wrapper.arrays import Wire
from fedfp8.flower.wrapper.downlink import Downlink, Sent
from fedfp8.flower.wrapper.orders import RECORD, Orders
from fedfp8.flower.wrapper.uplink import receive
from fedfp8.fp8 import E4M3, Format
from fedfp8.model.state import State
from fedfp8.rng import derive_seed

__all__ = ["FP8"]

WIRES = {"dq": "dithered", "fp8": "stochastic"}
REJECTED = 0  # the code of Flower's "unknown" errors: none of its own says that a payload is bad


@dataclass(frozen=True)
class Open:
    """A message that was sent and waits for its reply."""

    message: Message
    models: dict[str, Sent]
    orders: Orders


class FP8(Strategy):
    """Any strategy, with models as few bytes.

    wire: "dq" (dithered, the default: needs no ranges and serves any float arrays) or "fp8" (the paper's: one code a
    weight, stochastic rounding). coded: name patterns of the arrays to code; default: two or more dimensions. kappa_up,
    kappa_down: dq's steps, as multiples of the rms of a client's change and of the weights. seed: of all dice; None
    draws one. client_cache: nodes keep the model they received, and the next one is coded given it; history: how many
    sent models the server remembers for that. lossless=False: no entropy coding, a byte a weight.
    """

    def __init__(
        self,
        strategy: Strategy,
        wire: str = "dq",
        *,
        format: Format = E4M3,
        coded: str | Iterable[str] = (),
        kappa_up: float = DqConfig.kappa_up,
        kappa_down: float = DqConfig.kappa_down,
        seed: int | None = None,
        client_cache: bool = True,
        history: int = 8,
        lossless: bool = True,
    ) -> None:
        if wire not in WIRES:
            raise ConfigError(f"wire is {wire!r}; choose 'dq' or 'fp8'")
        DqConfig(kappa_up, kappa_down)  # checks both
        rule = Wire(WIRES[wire], format, (coded,) if isinstance(coded, str) else tuple(coded))
        self._set_up(strategy, rule, kappa_up, kappa_down, seed, client_cache, history, lossless)

    def _set_up(
        self, strategy: Strategy, wire: Wire, up: float, down: float, seed: int | None, cache: bool, history: int,
        lossless: bool, preserve: bool = True,
    ) -> None:  # fmt: skip
        self.strategy, self.wire, self.kappa_up, self.preserve = strategy, wire, up, preserve
        self.seed = secrets.randbits(62) if seed is None else seed
        self.downlink = Downlink(wire, down, self.seed, cache=cache, history=history, lossless=lossless)
        self.traffic: list[dict[str, Any]] = []  # one line a phase of a round: messages and payload bytes, each way
        self.ranges: dict[str, float] = {}  # of the next downlink, where a strategy chose them
        self._open: list[Open] = []
        self._grid: Grid | None = None
        self._timeout = 3600.0

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        self._timeout = timeout
        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = self.strategy.configure_train(server_round, arrays, config, grid)
        return self._outgoing("train", server_round, messages, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(server_round, [message for message, _ in self._incoming(replies)])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = self.strategy.configure_evaluate(server_round, arrays, config, grid)
        return self._outgoing("evaluate", server_round, messages, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, [message for message, _ in self._incoming(replies)])

    def summary(self) -> None:
        log(INFO, "\t├──> fedfp8: %s, seed %d", self.wire.rounding, self.seed)
        self.strategy.summary()

    # On the way out

    def _outgoing(self, phase: str, round: int, messages: Iterable[Message], grid: Grid) -> list[Message]:
        self._grid, self._open = grid, []
        self.traffic.append({"round": round, "phase": phase, "down": 0, "up": 0, "messages": 0, "resent": 0})
        seen: dict[int, Sent] = {}  # by object: strategies give one record to all nodes
        for message in messages:
            self._open.append(self._prepared(message, seen))
        return [entry.message for entry in self._open]

    def _prepared(self, message: Message, seen: dict[int, Sent]) -> Open:
        node = message.metadata.dst_node_id
        models: dict[str, Sent] = {}
        for key, record in message.content.array_records.items():
            if id(record) not in seen:
                seen[id(record)] = self.downlink.send(record, self.ranges)
            models[key] = seen[id(record)]
        seeds = {key: self._up_seed(node, key, sent) for key, sent in models.items()}
        number = max((sent.number for sent in models.values()), default=0)
        orders = Orders(self.wire, self.kappa_up, self.downlink.lossless, self.downlink.cache, number, seeds)
        payloads = {key: self.downlink.payload(sent, node, key) for key, sent in models.items()}
        message.content = self._content(message.content, payloads, orders)
        return Open(message, models, orders)

    def _up_seed(self, node: int, key: str, sent: Sent) -> int:
        line = self.traffic[-1]
        return derive_seed(self.seed, "up", len(self.traffic), line["phase"], sent.number, node, key)

    def _content(self, content: RecordDict, payloads: dict[str, bytes], orders: Orders) -> RecordDict:
        records: dict[str, Any] = dict(content.items())
        records |= {key: record_of(payload) for key, payload in payloads.items()}
        self.traffic[-1]["down"] += sum(map(len, payloads.values()))
        self.traffic[-1]["messages"] += 1
        return RecordDict(records | {RECORD: orders.to_record()})

    # On the way in

    def _incoming(self, replies: Iterable[Message]) -> list[tuple[Message, dict[str, State]]]:
        """Replies as the inner strategy expects them, each with the decoded models it brought."""
        entries = {entry.message.metadata.message_id: entry for entry in self._open}
        received = [(reply, entries.get(reply.metadata.reply_to_message_id)) for reply in replies]
        lost = [entry for reply, entry in received if entry is not None and _is_lost(reply)]
        received = [(reply, entry) for reply, entry in received if entry is None or not _is_lost(reply)]
        received += self._again(lost)
        place = {id(entry.models): number for number, entry in enumerate(self._open)}
        received.sort(key=lambda pair: -1 if pair[1] is None else place[id(pair[1].models)])  # as sent: sums stay equal
        results = [(reply, {}) if entry is None else self._accepted(reply, entry) for reply, entry in received]
        line = self.traffic[-1]
        log(INFO, "fedfp8: %(messages)d messages, %(down)d bytes of models down, %(up)d up", line)
        return results

    def _again(self, lost: list[Open]) -> list[tuple[Message, Open | None]]:
        """Nodes that lost their reference get the model without one, within the same round."""
        if not lost or self._grid is None:
            return []
        log(INFO, "fedfp8: %d nodes had lost their reference and are sent the whole model", len(lost))
        again = []
        for entry in lost:
            old, node = entry.message, entry.message.metadata.dst_node_id
            self.downlink.forget(node)
            self.traffic[-1]["resent"] += 1
            content = RecordDict({key: value for key, value in old.content.items() if key != RECORD})
            content = self._content(content, {key: sent.plain for key, sent in entry.models.items()}, entry.orders)
            message = Message(content, node, old.metadata.message_type, group_id=old.metadata.group_id)
            again.append(Open(message, entry.models, entry.orders))
        replies = list(self._grid.send_and_receive([entry.message for entry in again], timeout=self._timeout))
        entries = {entry.message.metadata.message_id: entry for entry in again}
        return [(reply, entries.get(reply.metadata.reply_to_message_id)) for reply in replies]

    def _accepted(self, reply: Message, entry: Open) -> tuple[Message, dict[str, State]]:
        """A reply with arrays in place of blobs; one whose payload cannot be used becomes an error that says why."""
        if reply.has_error():
            return reply, {}
        node = entry.message.metadata.dst_node_id
        told = reply.content.config_records.get(RECORD, ConfigRecord())
        records: dict[str, Any] = {key: value for key, value in reply.content.items() if key != RECORD}
        states: dict[str, State] = {}
        try:
            for key, record in reply.content.array_records.items():
                source = key if key in entry.models else next(iter(entry.models), None)
                if is_blob(record) and source is not None:
                    states[key], records[key] = self._update(record, entry, source)
        except Fedfp8Error as error:
            log(WARNING, "fedfp8: the update of node %d is rejected: %s", node, error)
            reason = f"fedfp8 rejected the update of node {node}: {error}"
            return Message(Error(code=REJECTED, reason=reason), reply_to=entry.message), {}
        for key in entry.models:
            self.downlink.confirm(node, key, told.get(key))
        reply.content = RecordDict(records)
        return reply, states

    def _update(self, record: ArrayRecord, entry: Open, key: str) -> tuple[State, ArrayRecord]:
        sent = entry.models[key]
        payload, state, arrays = receive(record, sent, self.wire, entry.orders.seeds[key])
        self.traffic[-1]["up"] += len(payload)
        if self.preserve:
            decoded = self.downlink.decoded(sent)
            for name in (s.name for s in state.layout if s.kind in ("fp8", "float")):
                moved = arrays[name] - decoded[name]
                arrays[name] = (sent.arrays[name] + moved).astype(sent.arrays[name].dtype, copy=False)
        return state, ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def _is_lost(reply: Message) -> bool:
    told = reply.content.config_records.get(RECORD) if reply.has_content() else None
    return told is not None and told.get("lost") is True
