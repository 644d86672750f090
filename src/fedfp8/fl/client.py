"""A client's part of a round: bytes in, bytes out. No server, no other clients, no files."""

import math
import time
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from fedfp8.errors import WireFormatError
from fedfp8.fl.config import Config
from fedfp8.fl.federation import FP32, Federation
from fedfp8.fl.links import downlink, quantize_up, receive_down, send, uplink
from fedfp8.fl.local import learning_rate, local_update
from fedfp8.model.state import State
from fedfp8.nn import layout_of, load_state, set_rounding, state_of
from fedfp8.rng import derive_seed, generator
from fedfp8.wire import header

__all__ = ["Client", "References", "Reply", "Task"]


@dataclass(frozen=True)
class Task:
    """What the server tells a client: take part in `round` starting from this model."""

    round: int
    client: int
    payload: bytes


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
    resent: int = 0  # bytes sent down once more, to a client that had lost its reference


class References(Protocol):
    """Models a client still has from earlier rounds."""

    def get(self, fingerprint: bytes) -> State | None: ...

    def put(self, client: int, state: State) -> None: ...


class Client:
    """Runs tasks for any client of a federation; keeps one network per format, and the last payload it decoded.

    A payload names its reference, so equal bytes are an equal model: clients that are sent the same decode it once.
    """

    def __init__(self, config: Config, federation: Federation, references: References) -> None:
        self.config, self.federation, self.references = config, federation, references
        self.networks: dict[str, nn.Module] = {}
        self._decoded: tuple[str, bytes, State] | None = None  # format, payload and what is in it

    def train(self, task: Task) -> Reply:
        """Receive, LocalUpdate, send: the client's half of algorithm 3."""
        start = time.perf_counter()
        config, format = self.config, self.federation.formats[task.client]
        model = self._network(format)
        received = self._receive(task, model, format)
        load_state(model, received)
        before = time.thread_time()
        loss = self._update(model, task, format)
        training = time.thread_time() - before
        link = uplink(config, format)
        message = quantize_up(config, task.round, task.client, state_of(model), received, link)
        payload = send(config, message, reference=received)
        seconds = time.perf_counter() - start
        return Reply(task.client, payload, self.federation.size(task.client), loss, seconds, training)

    def _network(self, format: str) -> nn.Module:
        if format not in self.networks:
            self.networks[format] = self.federation.network(self.config, format)
        return self.networks[format]

    def _receive(self, task: Task, model: nn.Module, format: str) -> State:
        if self._decoded is None or self._decoded[:2] != (format, task.payload):
            self._decoded = format, task.payload, self._decode(task, model, format)
        received = self._decoded[2]
        self.references.put(task.client, received)
        return received

    def _decode(self, task: Task, model: nn.Module, format: str) -> State:
        wanted = header(task.payload).reference_fingerprint
        reference = self.references.get(wanted) if wanted else None
        if wanted and reference is None:
            raise WireFormatError(
                f"the model for client {task.client} is coded given model {wanted.hex()}, which this client no longer "
                "has; the server must send it without a reference"
            )
        return receive_down(task.payload, layout_of(model), downlink(self.config, format), reference)

    def _update(self, model: nn.Module, task: Task, format: str) -> float:
        config, path = self.config, ("train", task.round, task.client)
        if config.qat.rounding == "stochastic" and format != FP32:
            set_rounding(model, "stochastic", seed=derive_seed(config.seed, "qat", *path[1:]))
        rate = learning_rate(config, task.round)
        return local_update(model, self.federation, task.client, config.local, rate, generator(config.seed, *path))
