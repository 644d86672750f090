"""The server's side of the downlink for `FP8`: models quantized once, coded for what each node still holds."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord

from fedfp8.flower.wrapper.arrays import Wire, arrays_of, state_of_arrays
from fedfp8.model.state import QuantState, State, dequantize_state, quantize_state
from fedfp8.rng import derive_seed
from fedfp8.wire import decode, encode

__all__ = ["Downlink", "Sent"]


@dataclass(frozen=True, eq=False)
class Sent:
    """A model on its way: as the server has it, as quantized, and as every client decodes it."""

    number: int
    arrays: dict[str, np.ndarray]
    exact: State
    message: QuantState
    state: State
    plain: bytes  # with its layout and without a reference: any node can read it


class Downlink:
    """Quantizes models and remembers the last `history` of them, as payloads, for nodes that hold one."""

    def __init__(self, wire: Wire, step: float, seed: int, *, cache: bool, history: int, lossless: bool) -> None:
        self.wire, self.step, self.seed = wire, step, seed
        self.cache, self.history, self.lossless = cache, history, lossless
        self.count = 0
        self._latest: list[Sent] = []
        self._payloads: dict[bytes, bytes] = {}  # fingerprint -> payload, oldest first
        self._held: dict[tuple[int, str], bytes] = {}  # node, ArrayRecord -> fingerprint of what it confirmed to hold
        self._coded: dict[tuple[int, bytes | None], bytes] = {}

    def send(self, record: ArrayRecord, ranges: Mapping[str, float]) -> Sent:
        """The model in `record`, quantized. The same model again (evaluation, next round) is the same message."""
        arrays = {name: array.numpy() for name, array in record.items()}
        exact = state_of_arrays(arrays, self.wire, ranges)
        for sent in self._latest:
            if sent.exact.fingerprint == exact.fingerprint:
                return sent
        self.count += 1
        dithered = self.wire.rounding == "dithered"
        message = quantize_state(
            exact,
            seed=derive_seed(self.seed, "down", self.count),
            rounding=self.wire.rounding,
            step=self.step if dithered else None,
        )
        plain = encode(message, lossless=self.lossless, with_layout=True)
        sent = Sent(self.count, arrays, exact, message, dequantize_state(message), plain)
        self._latest = [*self._latest[-1:], sent]
        if self.cache and self.lossless:
            self._payloads[sent.state.fingerprint] = plain
            while len(self._payloads) > self.history:
                self._payloads.pop(next(iter(self._payloads)))
        return sent

    def payload(self, sent: Sent, node: int, key: str) -> bytes:
        """The bytes for one node: given the model it holds if the server remembers it, else on their own."""
        held = self._held.get((node, key))
        if held is None or held not in self._payloads:
            return sent.plain
        if (sent.number, held) not in self._coded:
            reference = dequantize_state(decode(self._payloads[held]))
            known = reference.layout.fingerprint == sent.message.layout.fingerprint
            payload = encode(sent.message, reference=reference, with_layout=not known) if known else sent.plain
            self._coded = {k: v for k, v in self._coded.items() if k[0] >= sent.number - 1}
            self._coded[sent.number, held] = min(payload, sent.plain, key=len)
        return self._coded[sent.number, held]

    def confirm(self, node: int, key: str, fingerprint: object) -> None:
        """A node says what it holds now. A lie costs it a message it cannot read, and gets it the whole model again."""
        if isinstance(fingerprint, bytes) and fingerprint in self._payloads:
            self._held[node, key] = fingerprint

    def forget(self, node: int) -> None:
        self._held = {key: value for key, value in self._held.items() if key[0] != node}

    @staticmethod
    def decoded(sent: Sent) -> dict[str, np.ndarray]:
        return arrays_of(sent.state)
