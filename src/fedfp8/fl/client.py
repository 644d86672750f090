"""A client's part of a round: bytes in, bytes out. No server, no other clients, no files."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from fedfp8.fl.config import Config
from fedfp8.fl.federation import FP32, Federation
from fedfp8.fl.local import learning_rate, local_update
from fedfp8.fl.wires import shares_start, wire_for
from fedfp8.link.client import read_message, write_reply
from fedfp8.link.history import Entry
from fedfp8.link.wire import Orders
from fedfp8.model.frequencies import Frequencies
from fedfp8.model.layout import Layout
from fedfp8.model.quantized import QuantState, dequantize_state
from fedfp8.model.state import State, Values
from fedfp8.nn import layout_of, load_state, set_rounding, state_of
from fedfp8.rng import derive_seed, generator
from fedfp8.wire import header
from fedfp8.wire.container import fingerprint_of

__all__ = ["Assignment", "Client", "Reply"]


@dataclass(frozen=True)
class Assignment:
    """What the server tells a client: take part in `round` starting from this model."""

    round: int
    client: int
    payload: bytes
    orders: Orders
    held: tuple[tuple[Entry, int], ...] = ()  # which models the client has on its disk; only a simulation must be told


@dataclass(frozen=True)
class Reply:
    """What comes back. `error` says why there is no payload."""

    client: int
    payload: bytes = b""
    examples: int = 0
    loss: float = math.nan
    seconds: float = 0.0
    training: float = 0.0  # processor seconds of LocalUpdate alone
    error: str = ""


class Client:
    """Runs assignments for any client of a federation; keeps one network per format, and the last payload it decoded.

    held: the models that the client of an assignment received and still has. A payload names its references, so equal
    bytes are an equal model: clients that are sent the same decode it once.
    """

    def __init__(self, config: Config, federation: Federation, held: Callable[[Assignment], Sequence[Values]]) -> None:
        self.config, self.federation, self.held = config, federation, held
        self.networks: dict[str, nn.Module] = {}
        self.start = state_of(self.network(federation.formats[0])) if shares_start(config) else None
        self._starts: dict[tuple[bytes, bool], Values] = {}
        self._decoded: tuple[str, bytes, QuantState, State] | None = None  # format, payload and what is in it

    def train(self, assignment: Assignment) -> Reply:
        """Receive, LocalUpdate, send: the client's half of algorithm 3."""
        begin = time.perf_counter()
        format = self.federation.formats[assignment.client]
        model = self.network(format)
        received = self.receive(assignment)
        load_state(model, received)
        before = time.thread_time()
        loss = self._update(model, assignment, format)
        training = time.thread_time() - before
        local = state_of(model)
        local = local.with_layout(wire_for(self.config, format).layout_up(local.layout))
        payload = write_reply(local, received, assignment.orders)
        seconds = time.perf_counter() - begin
        return Reply(assignment.client, payload, self.federation.size(assignment.client), loss, seconds, training)

    def network(self, format: str) -> nn.Module:
        if format not in self.networks:
            self.networks[format] = self.federation.network(self.config, format)
        return self.networks[format]

    def receive(self, assignment: Assignment) -> State:
        """The model of an assignment; LostReference if the client no longer has what it is coded given."""
        format = self.federation.formats[assignment.client]
        if self._decoded is None or self._decoded[:2] != (format, assignment.payload):
            layout = wire_for(self.config, format).layout_down(layout_of(self.network(format)))
            head = header(assignment.payload)
            wanted = head.reference_fingerprints
            start = self._start_for(layout, head.frequencies)
            known: list[Values] = []
            known += [start] if start is not None and fingerprint_of(start, head.version) in wanted else []
            if len(known) < len(wanted):
                known += self.held(assignment)
            message = read_message(assignment.payload, [layout], known)
            self._decoded = format, assignment.payload, message, dequantize_state(message)
        return self._decoded[3]

    def _start_for(self, layout: Layout, frequencies: bool) -> Values | None:
        """The start as a reference; the same object every time, since it remembers its fingerprint."""
        if self.start is None:
            return None
        key = layout.fingerprint, frequencies
        if key not in self._starts:
            start = self.start.with_layout(layout)
            self._starts[key] = Frequencies(start) if frequencies else start
        return self._starts[key]

    @property
    def message(self) -> QuantState:
        """What the last payload held, for whoever keeps it in another form."""
        assert self._decoded is not None
        return self._decoded[2]

    def _update(self, model: nn.Module, assignment: Assignment, format: str) -> float:
        config, client = self.config, assignment.client
        path = "train", assignment.round, client
        if config.qat.rounding == "stochastic" and format != FP32:
            set_rounding(model, "stochastic", seed=derive_seed(config.seed, "qat", *path[1:]))
        rate = learning_rate(config, assignment.round)
        return local_update(model, self.federation, client, config.local, rate, generator(config.seed, *path))
