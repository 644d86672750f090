"""`ServerLink`: what a server must remember and do to exchange models with its clients in few bytes.

    server = ServerLink("dq", seed=1)
    payloads = server.broadcast(model.state_dict(), clients=["a", "b", "c"])    # {client: bytes}
    update = server.receive("a", reply)                                         # a state dict, in the server's frame
    payload = server.resend("a")                                                # for a client that lost its reference

It averages nothing and sends nothing: that is the caller's. Replies may come in any order, from several threads. A
reply that cannot be used raises an error that names the client and changes nothing.
"""

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedfp8.errors import Fedfp8Error, QuantizationError, RunError
from fedfp8.link.arrays import Arrays, Frame, state_of_arrays, tensors_of
from fedfp8.link.history import Entry, History
from fedfp8.link.round import Client, Round, Visit
from fedfp8.link.wire import Wire, wire_named
from fedfp8.model.layout import Layout
from fedfp8.model.quantized import QuantState
from fedfp8.model.state import State, Values
from fedfp8.rng import generator

__all__ = ["ServerLink"]

LOSSES = 2  # a client that lost its reference this often is sent models without one


class ServerLink:
    """Models to clients and updates back, in few bytes.

    wire: "dq" (the default), "fp8", "bq", "fp32", or a `Wire` for single settings. seed: of all random bits; None draws
    one. start: a model that every client has too (a state dict, or a function that makes it; give the same to
    ClientLink): first models are then coded given it. history: of how many rounds the server remembers its model.
    cache=False: clients keep nothing between rounds. coded: name patterns of the tensors to code; default: two or more
    dimensions, and long vectors. folder: for the history; default: a temporary one.
    """

    def __init__(
        self,
        wire: "str | Wire | Callable[[Client], Wire]" = "dq",
        *,
        seed: int | None = None,
        start: "Arrays | State | Callable[[], Arrays] | None" = None,
        history: int = 16,
        cache: bool = True,
        coded: str | Iterable[str] = (),
        folder: "str | Path | None" = None,
        layout_known: bool = False,
        **settings: Any,
    ) -> None:
        self._wire = wire if callable(wire) else wire_named(wire, **settings)
        self.seed = secrets.randbits(62) if seed is None else seed
        self.cache, self.limit, self.layout_known = cache, history, layout_known
        self.coded = (coded,) if isinstance(coded, str) else tuple(coded)
        self.history = History(self.seed, None if folder is None else Path(folder))
        self.ranges: dict[str, float] = {}  # of FP8 codes, where the caller chose them
        self.start = self._state(start() if callable(start) else start) if start is not None else None
        self._starts: dict[tuple[bytes, bool], Values] = {}
        self.frame: Frame | None = None
        self.held: dict[Client, tuple[Visit, ...]] = {}  # what each client holds, newest first
        self.losses: dict[Client, int] = {}
        self.without_start: set[Client] = set()
        self.saved_elsewhere = folder is not None  # then whoever saves the link cleans its history
        self.opened = 0
        self.number = 0
        self.round: Round | None = None
        self.traffic: list[dict[str, Any]] = []  # a line a round: round, and bytes down, up and resent by client
        self._lock = threading.RLock()

    # The four calls

    def broadcast(self, state: "Arrays | State", clients: Iterable[Client]) -> dict[Client, bytes]:
        """Opens a round for this cohort and returns what to send to each client."""
        round = self.open(state, clients)
        order = sorted(round.places, key=lambda client: round.places[client])  # clients of a place share their message
        payloads = {client: self.message(client) for client in order}
        return {client: payloads[client] for client in round.places}

    def receive(self, client: Client, reply: bytes) -> Any:
        """What a client brings, as tensors like those broadcast: the server's model plus the client's change."""
        with self._naming(client):
            state = self._current().receive(client, reply)
            return state if self.frame is None else self.frame.restore(tensors_of(state))

    def resend(self, client: Client) -> bytes:
        """The whole model, for a client that lost its reference (LostReference)."""
        with self._lock, self._naming(client):
            round = self._current()
            if client not in round.wires:
                raise RunError("is not of this round; only those that broadcast named can be sent it again")
            self.losses[client] = self.losses.get(client, 0) + 1
            self.held.pop(client, None)
            self.without_start.add(client)
            return self._with_orders(client, round.whole(client), round.traffic["resent"])

    def confirm(self, client: Client) -> None:
        """A client has received its model, although it sends none back (an evaluation)."""
        self._current().confirmed.add(client)

    # Rounds

    def open(self, state: "Arrays | State", clients: Iterable[Client], *, expected: int = 0) -> Round:
        """A round whose messages are coded one by one, as they are asked for.

        expected: of how many clients the round will be, where others are to `join` it.
        """
        with self._lock:
            cohort = list(dict.fromkeys(clients))
            if not cohort:
                raise RunError("a round needs clients; broadcast was given none")
            if strange := [c for c in cohort if not isinstance(c, str | int)]:
                raise RunError(f"client {strange[0]!r} is a {type(strange[0]).__name__}; ids are strings or ints")
            model = self._checked(state)
            self.close()
            self.opened += 1
            wires = {client: self._wire(client) if callable(self._wire) else self._wire for client in cohort}
            size = max(expected, len(cohort))
            entry = self._entry(model, max(wire.places(size) for wire in set(wires.values())), size)
            self.round = Round(self, entry, self.opened, wires, self._deal(cohort, entry), size)
            self.traffic.append({"round": self.opened} | self.round.traffic)
            return self.round

    def join(self, client: Client) -> None:
        """One more client for the open round, where clients come and ask for their model. Places go around in turn."""
        with self._lock:
            round = self._current()
            if client not in round.wires:
                round.wires[client] = self._wire(client) if callable(self._wire) else self._wire
                turn = len(round.places) % round.entry.strata
                round.places[client] = self._place(client, round.entry, turn)

    def message(self, client: Client) -> bytes:
        """What to send to one client of the open round."""
        with self._lock, self._naming(client):
            round = self._current()
            return self._with_orders(client, round.payload(client), round.traffic["down"])

    def _with_orders(self, client: Client, payload: bytes, traffic: dict[Client, int]) -> bytes:
        """The message: orders count as bytes, too."""
        orders = self._current().orders(client).to_bytes()
        traffic[client] += len(orders)
        return orders + payload

    def close(self) -> None:
        """Remember who received the open round's model. A client that did not answer may hold that or an older one."""
        with self._lock:
            if self.round is None:
                return
            number = self.round.entry.number
            for client, place in self.round.places.items():
                before = self.held.pop(client, ())
                if self.cache and client in self.round.confirmed:
                    older = [visit for visit in before if visit[0] != number]
                    self.held[client] = ((number, place), *older)[: self.round.kept(client)]
            self.round = None
            numbers = {number for visits in self.held.values() for number, _ in visits}
            newest = set(sorted(numbers | {self.number}, reverse=True)[: self.limit])
            found = {client: tuple(v for v in visits if v[0] in newest) for client, visits in self.held.items()}
            self.held = {client: visits for client, visits in found.items() if visits}
            self.history.keep_only(newest)
            if not self.saved_elsewhere:
                self.history.clean()

    def usable(self, client: Client) -> tuple[Visit, ...]:
        """The models that a client holds and that serve as references, newest first."""
        if self.losses.get(client, 0) >= LOSSES:
            return ()
        return tuple(visit for visit in self.held.get(client, ()) if visit[0] in self.history.entries)

    def has_start(self, client: Client) -> bool:
        return self.start is not None and client not in self.without_start

    def start_for(self, message: QuantState) -> Values:
        """The start as a reference for a message; the same object every time, since it remembers its fingerprint."""
        assert self.start is not None
        key = message.layout.fingerprint, message.frequencies
        if key not in self._starts:
            self._starts[key] = message.formed(self.start.with_layout(message.layout))
        return self._starts[key]

    def _current(self) -> Round:
        if self.round is None:
            raise RunError("no round is open; call broadcast first")
        return self.round

    def _entry(self, model: State, strata: int, cohort: int) -> Entry:
        """The same model again (evaluation, then the next round) is the same message: who holds it needs nothing."""
        last = self.history.entries.get(self.number)
        if last is not None and last.fingerprint == model.quick_fingerprint:
            return last
        self.number += 1
        return self.history.add(self.number, model, cohort, strata)

    def _deal(self, cohort: list[Client], entry: Entry) -> dict[Client, int]:
        """Places, dealt evenly in an order drawn for the round; who holds this very model keeps its place."""
        order = torch.randperm(len(cohort), generator=generator(self.seed, "places", self.opened)).tolist()
        return {c: self._place(c, entry, turn % entry.strata) for c, turn in zip(cohort, order, strict=True)}

    def _place(self, client: Client, entry: Entry, turn: int) -> int:
        """In this round: the next in turn, or the one it had when it was sent this very model."""
        return next((place for number, place in self.held.get(client, ()) if number == entry.number), turn)

    # Tensors

    def _state(self, arrays: "Arrays | State") -> State:
        if isinstance(arrays, State):
            return arrays
        wire = self._wire if isinstance(self._wire, Wire) else Wire()
        return state_of_arrays(arrays, wire.format_down, self.coded, self.ranges)

    def _checked(self, arrays: "Arrays | State") -> State:
        state = self._state(arrays)
        if not isinstance(arrays, State):
            frame = Frame(arrays)
            if self.frame is not None:
                self.frame.check_same(frame)
            self.frame = frame
        if self.start is not None and self.start.layout.fingerprint != state.layout.fingerprint:
            differ = {s.name for s in self.start.layout} ^ {s.name for s in state.layout} or {
                a.name for a, b in zip(self.start.layout, state.layout, strict=True) if a != b
            }
            raise QuantizationError(
                f"start and model differ in {sorted(differ)[:3]}; start must be a model with the same tensors"
            )
        return state

    @contextmanager
    def _naming(self, client: Client):  # type: ignore[no-untyped-def]
        """Errors say which client they are about."""
        try:
            yield
        except Fedfp8Error as error:
            if f"client {client!r}" in str(error):
                raise
            raise type(error)(f"client {client!r}: {error}") from None

    # Saving

    def meta(self) -> dict[str, Any]:
        """All that the link remembers besides its models, as JSON can hold it."""
        round = self.round
        return {
            "seed": self.seed,
            "opened": self.opened,
            "number": self.number,
            "held": [[client, *visits] for client, visits in self.held.items()],
            "losses": list(map(list, self.losses.items())),
            "without_start": list(self.without_start),
            "entries": [[e.number, e.fingerprint.hex(), e.cohort, e.strata] for e in self.history.entries.values()],
            "frame": None if self.frame is None else self.frame.to_json(),
            "round": round and {
                "places": list(map(list, round.places.items())),
                "confirmed": list(round.confirmed),
                "number": round.entry.number,
                "cohort": round.cohort,
            },
        }  # fmt: skip

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """The inverse; the models must be in the history's folder."""
        self.seed = self.history.root = int(meta["seed"])
        self.opened, self.number = int(meta["opened"]), int(meta["number"])
        self.held = {client: tuple((number, place) for number, place in visits) for client, *visits in meta["held"]}
        self.losses = dict(map(tuple, meta["losses"]))
        self.without_start = set(meta["without_start"])
        self.history.entries = {n: Entry(n, bytes.fromhex(f), size, strata) for n, f, size, strata in meta["entries"]}
        self.frame = None if meta["frame"] is None else Frame.from_json(meta["frame"])
        self.round = None
        if open := meta["round"]:
            places = dict(open["places"])
            wires = {client: self._wire(client) if callable(self._wire) else self._wire for client in places}
            self.round = Round(self, self.history.entries[open["number"]], self.opened, wires, places, open["cohort"])
            self.round.confirmed = set(open["confirmed"])
            self.traffic.append({"round": self.opened} | self.round.traffic)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything, as named tensors: for torch.save or safetensors, also in the middle of a round."""
        with self._lock:
            text = json.dumps(self.meta()).encode()
            found = {"meta": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
            for number in self.history.entries:
                model = self.history.model(number)
                layout = bytearray(model.layout.to_bytes())
                found[f"{number}/layout"] = torch.frombuffer(layout, dtype=torch.uint8)
                found |= {f"{number}/tensor/{name}": tensor for name, tensor in model.items()}
            return found

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Into a link made with the same arguments."""
        with self._lock:
            try:
                meta = json.loads(saved["meta"].numpy().tobytes())
                self.history.entries = {}
                for number, *_ in meta["entries"]:
                    layout = Layout.from_bytes(saved[f"{number}/layout"].numpy().tobytes())
                    model = State(layout, {s.name: saved[f"{number}/tensor/{s.name}"].contiguous() for s in layout})
                    self.history.add(number, model, 1, 1)
                self.load_meta(meta)
            except (KeyError, ValueError, TypeError) as error:
                raise RunError(f"not the state of a ServerLink: {error}; give what state_dict returned") from None
