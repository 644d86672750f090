"""One model on its way to a cohort, and what comes back: what `ServerLink.open` gives, and engines work with."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedfp8.errors import RunError, WireFormatError
from fedfp8.link.history import Entry
from fedfp8.link.wire import FAN_IN_UP, Orders, Wire, unlike
from fedfp8.model.frequencies import from_frequencies
from fedfp8.model.layout import Layout
from fedfp8.model.quantized import QuantState, dequantize_state
from fedfp8.model.state import State, Values
from fedfp8.wire import decode, encode, header
from fedfp8.wire.container import REFERENCES, checked_body

if TYPE_CHECKING:
    from fedfp8.link.server import ServerLink

__all__ = ["Client", "Round", "Visit"]

Client = str | int
Visit = tuple[int, int]  # (number of the model that was sent, place it was sent for)


class Round:
    """One model on its way to a cohort: lazily coded, so that no more than one client's message is in memory."""

    def __init__(
        self,
        link: "ServerLink",
        entry: Entry,
        round: int,
        wires: dict[Client, Wire],
        places: dict[Client, int],
        cohort: int,
    ):
        self.link, self.entry, self.round, self.wires, self.places = link, entry, round, wires, places
        self.cohort = cohort  # clients that are to answer: as many as there are wires, or more that join
        self.confirmed: set[Client] = set()
        self.traffic: dict[str, dict[Client, int]] = {"down": {}, "up": {}, "resent": {}}
        self.notes: dict[int, str] = {}  # on models of the history that are lost
        self._message: tuple[tuple[Wire, int], QuantState] | None = None
        self._payloads: dict[tuple[Any, ...], bytes] = {}

    @property
    def model(self) -> State:
        return self.link.history.model(self.entry.number)

    def payload(self, client: Client) -> bytes:
        """The bytes for one client, coded given what it holds."""
        payload = self._encoded(client, self.link.usable(client), self.link.has_start(client))
        self.traffic["down"][client] = self.traffic["down"].get(client, 0) + len(payload)
        return payload

    def whole(self, client: Client) -> bytes:
        """The same model for a client that holds nothing."""
        payload = self._encoded(client, (), False)
        self.traffic["resent"][client] = self.traffic["resent"].get(client, 0) + len(payload)
        return payload

    def sent(self, client: Client) -> Values:
        """What a client works with, or did."""
        wire = self.wires[client]
        sent = self.link.history.sent(self.entry.number, wire, self.places[client])
        return from_frequencies(sent, wire.layout_down(self.model.layout)) if wire.as_frequencies else sent

    def orders(self, client: Client) -> Orders:
        link, wire = self.link, self.wires[client]
        return Orders(
            wire.up, wire.format_up, wire.kappa_up_for(self.cohort), float(np.float32(wire.fan_in * FAN_IN_UP)),
            wire.seed_up(link.seed, self.round, client), *self._place_up(client), wire.lossless,
            wire.as_frequencies, self.kept(client), link.coded,
        )  # fmt: skip

    def kept(self, client: Client) -> int:
        """Models that a client is to keep."""
        return self.wires[client].kept if self.link.cache else 0

    def receive(self, client: Client, payload: bytes) -> State:
        """A client's update in the server's frame, checked: its layout, its random bits, finite values."""
        if client not in self.wires:
            raise WireFormatError(f"client {client!r} is not of this round; its reply came too late or unasked")
        self.traffic["up"][client] = self.traffic["up"].get(client, 0) + len(payload)
        wire = self.wires[client]
        layout = wire.layout_up(self.model.layout)
        if header(payload).has_layout:
            layout = _part_of(checked_body(payload, None)[1], layout)
        references = () if header(payload).reference_fingerprint is None else (self.sent(client),)
        message = decode(payload, layout, references=references)
        self._check(client, wire, message)
        update = dequantize_state(message, consume=True)
        if message.change:
            base = self.model if wire.preserve else self.sent(client)
            update = _moved(update, lambda name, change: change.add_(base[name]))
        elif wire.preserve and not wire.sends_changes:
            sent, model = self.sent(client), self.model
            change = _moved(update, lambda name, value: value - sent[name])
            if not unlike(update, change):
                update = _moved(change, lambda name, moved: model[name] + moved)
        _check_finite(update, self.model)
        self.confirmed.add(client)
        return update

    def _place_up(self, client: Client) -> tuple[int, int]:
        return (self.places[client], self.entry.strata) if self.wires[client].sends_changes else (0, 1)

    def _check(self, client: Client, wire: Wire, message: QuantState) -> None:
        seed = wire.seed_up(self.link.seed, self.round, client)
        place, strata = self._place_up(client)
        found = message.rounding, message.seed, message.place, message.strata
        if found != (wire.up, seed, place, strata):
            raise WireFormatError(
                f"the update was rounded {message.rounding!r} with seed {message.seed}, place {message.place} of "
                f"{message.strata}; this round and client call for {wire.up!r} with {seed}, {place} of {strata}: the "
                "message belongs to another round, client or run"
            )

    def _encoded(self, client: Client, held: tuple[Visit, ...], start: bool) -> bytes:
        wire, place = self.wires[client], self.places[client]
        if held and held[0][0] == self.entry.number:
            held = held[:1]  # this very model: nothing else is needed
        given = held if wire.has_places else tuple((number, 0) for number, _ in held)
        key = wire, place if wire.has_places else 0, given, start
        if key in self._payloads:
            return self._payloads[key]
        if self._message is None or self._message[0] != key[:2]:
            self._message = None  # before the next one is made: each takes as much memory as the model
            self._message = key[:2], self.link.history.quantized(self.entry.number, wire, place)
        references: list[Values] = []
        message = self._message[1]
        if wire.lossless:
            for number, at in held:
                try:
                    references.append(self.link.history.sent(number, wire, at))
                except RunError as error:  # a damaged file: the message does without
                    self.notes[number] = f"{error}; until then messages do without it"
            references += [self.link.start_for(message)] if start else []
            references = references[:REFERENCES]
        known = bool(references) or start or self.link.layout_known
        payload = encode(message, references=references, lossless=wire.lossless, with_layout=not known)
        if not held or not wire.has_places:  # others will ask for the same
            self._payloads[key] = payload
        if self.cohort <= self.entry.strata:  # nobody else has this place
            self._message = None
        return payload


def _part_of(layout: Layout, whole: Layout) -> Layout:
    """A reply may leave tensors out; it may not bring others. Checked before anything of its sizes is allocated."""
    known = set(whole)
    for spec in layout:
        if spec not in known:
            raise WireFormatError(
                f"the update has a tensor {spec.name!r} {spec.shape} that was not sent: another model"
            )
    return layout


def _moved(update: State, move: Callable[[str, torch.Tensor], torch.Tensor]) -> State:
    moved = {s.name: move(s.name, update[s.name]) for s in update.layout if s.kind in ("fp8", "float")}
    return State(update.layout, {name: moved.get(name, tensor) for name, tensor in update.items()})


def _check_finite(update: State, model: State) -> None:
    for spec in update.layout:
        values = update[spec.name]
        if spec.kind == "integer":  # floats that travel as bits may hold what the model holds there, and no other NaN
            dtype = getattr(torch, spec.name.rpartition(":")[2], None)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                continue
            good = values.view(dtype).isfinite() | (values == model[spec.name])
            finite = bool(good.all())
        else:
            finite = math.isfinite(update.largest(spec.name))
        if not finite:
            raise WireFormatError(f"tensor {spec.name!r} of the update holds NaN or Inf; the update is not usable")
