"""The server's side of the downlink: one quantized model a round, coded for what each client still has."""

import hashlib
from dataclasses import dataclass, field, replace

from fedfp8.fl.aggregate import WeightedMean
from fedfp8.fl.config import Config
from fedfp8.fl.links import Link, quantize_down, send
from fedfp8.fl.store import ModelStore
from fedfp8.model.state import QuantState, State, dequantize_state
from fedfp8.wire import CHECKSUM

__all__ = ["Broadcast", "Server"]


@dataclass(frozen=True)
class Server:
    """All that a server remembers between rounds."""

    round: int
    state: State
    received: dict[int, bytes] = field(default_factory=dict)  # client -> fingerprint of the model it got last
    sent: dict[bytes, int] = field(default_factory=dict)  # fingerprint -> round, of the models still kept


class Broadcast:
    """The model of one round on its way to the cohort.

    Quantized once for all clients of a link, so that every client decodes the same values whatever its reference; coded
    once per distinct reference.
    """

    def __init__(self, config: Config, server: Server, store: ModelStore) -> None:
        self.config, self.server, self.store = config, server, store
        self.round = server.round + 1
        self._messages: dict[Link, tuple[QuantState, State]] = {}
        self._payloads: dict[tuple[Link, bytes | None], bytes] = {}
        self._digest = hashlib.blake2b(digest_size=8)
        self._received: dict[int, bytes | None] = {}  # by client; None until it is known to have it
        self._weights: dict[Link, float] = {}  # of the clients that came back
        self.bytes = 0

    def payload(self, link: Link, client: int) -> bytes:
        """The bytes for one client."""
        message, _ = self._message(link)
        wanted = self.server.received.get(client) if self.config.wire.client_cache else None
        key = (link, wanted if wanted in self.server.sent else None)
        if key not in self._payloads:
            reference = None if key[1] is None else self.store.get(key[1])
            self._payloads[key] = send(self.config, message, reference)
        payload = self._payloads[key]
        self._received[client] = None
        self._digest.update(payload[-CHECKSUM:])
        self.bytes += len(payload)
        return payload

    def sent(self, link: Link) -> State:
        """The values that clients of this link decode."""
        return self._message(link)[1]

    def returned(self, link: Link, client: int, weight: float) -> None:
        """A valid update came back from a client: it started from ``sent(link)``, and still has that."""
        self._received[client] = self.sent(link).fingerprint
        self._weights[link] = self._weights.get(link, 0.0) + weight

    def mean_sent(self) -> State:
        """What the clients of the mean started from, weighted as they are."""
        mean = WeightedMean(self.server.state.layout)
        for link, weight in self._weights.items():
            mean.add(self.sent(link), weight)
        return mean.result()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def next_server(self, state: State) -> Server:
        """The server after this round, with the bounded memory of what clients hold."""
        if not self.config.wire.client_cache:
            return Server(self.round, state)
        sent = self.server.sent | {s.fingerprint: self.round for _, s in self._messages.values()}
        # A client whose update failed may not have the model, nor its older one: it gets the next without a reference.
        received = {k: f for k, f in (self.server.received | self._received).items() if f is not None}
        held = [f for f in sorted(sent, key=lambda f: sent[f], reverse=True) if f in received.values()]
        kept = {f: sent[f] for f in sorted(held[: self.config.wire.history], key=lambda f: (sent[f], f))}
        received = {k: f for k, f in received.items() if f in kept}
        return replace(self.server, round=self.round, state=state, received=received, sent=kept)

    def _message(self, link: Link) -> tuple[QuantState, State]:
        if link not in self._messages:
            message = quantize_down(self.config, self.round, self.server.state, link)
            sent = dequantize_state(message)
            if self.config.wire.client_cache:
                self.store.save(sent)
            self._messages[link] = message, sent
        return self._messages[link]
