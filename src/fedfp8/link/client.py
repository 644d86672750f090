"""`ClientLink`: what a client must remember and do. It needs no settings: every message brings its orders.

client = ClientLink()
model.load_state_dict(client.receive(payload))      # LostReference: ask the server to resend
...                                                 # train
reply = client.reply(model.state_dict())
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedfp8.errors import Fedfp8Error, LostReference, QuantizationError, RunError, WireFormatError
from fedfp8.link.arrays import Arrays, numpy_of, state_of_arrays, tensors_of, torch_of
from fedfp8.link.store import narrow_codes, pack_message, unpack_message, write_atomic
from fedfp8.link.wire import Orders, steps_of, unlike
from fedfp8.model.frequencies import Frequencies
from fedfp8.model.layout import Layout
from fedfp8.model.quantized import QuantState, Remade, dequantize_form, dequantize_state, quantize_state
from fedfp8.model.rounding import ROUNDINGS
from fedfp8.model.state import State, Values
from fedfp8.wire import decode, encode, header
from fedfp8.wire.container import REFERENCES, checked_body, fingerprint_of

__all__ = ["ClientLink", "quantize_reply", "read_message", "write_reply"]

ALWAYS, BELIEVED = 1 << 28, 64  # elements of a model that are believed: so many, or so many a byte of its message


def read_message(payload: bytes, layouts: Iterable[Layout], references: Iterable[Values]) -> QuantState:
    """What is in a payload; LostReference if it needs a model that is not among `references`."""
    head = header(payload)
    held = {fingerprint_of(state, head.version): state for state in references if head.reference_fingerprints}
    if missing := [f for f in head.reference_fingerprints if f not in held]:
        raise LostReference(
            f"the model is coded given model {missing[0].hex()}, which this client does not have (any more); ask the "
            "server to send it whole: ServerLink.resend(client)"
        )
    layout = None
    if not head.has_layout:
        layout = next((one for one in layouts if one.fingerprint == head.layout_fingerprint), None)
        if layout is None:
            raise LostReference(
                "the message names a model that this client has never seen; ask the server to send it whole: "
                "ServerLink.resend(client)"
            )
    used = [held[f] for f in head.reference_fingerprints]
    return decode(payload, layout, references=used)


def write_reply(local: State, received: Values, orders: Orders, *, whole: bool = True) -> bytes:
    """A client's model as it is sent back, given the one it received. whole: it has all the tensors of that one."""
    q, reference = quantize_reply(local, received, orders)
    references = () if reference is None else (reference,)
    return encode(q, references=references, lossless=orders.lossless, with_layout=not whole)


def quantize_reply(local: State, received: Values, orders: Orders) -> tuple[QuantState, Values | None]:
    """(what is sent, the reference it is coded with). Dithered: the change, on a grid of its own."""
    rule = ROUNDINGS[orders.up]
    if not rule.has_steps:
        return quantize_state(local, seed=orders.seed, rounding=orders.up), received
    coded = [spec.name for spec in local.layout if spec.kind in rule.kinds]
    change = {name: local[name] - received[name] for name in coded}
    moved = State(local.layout, {name: change.get(name, tensor) for name, tensor in local.items()})
    is_change = not unlike(local, moved)
    state = moved if is_change else local
    q = quantize_state(
        state, seed=orders.seed, rounding=orders.up, place=orders.place, strata=orders.strata, change=is_change,
        together=True, frequencies=orders.frequencies,
        step=steps_of(state, orders.up, orders.kappa_up, orders.fan_in),
    )  # fmt: skip
    return q, None


class ClientLink:
    """Models in, updates out. One for each client.

    start: the model that the server was given as start, if it was. store: a folder where the last models are kept, for
    a client whose process does not live from round to round. packed: the same for a client whose memory is kept by
    others: what the attribute was after the last message, nothing at first. arrays: "torch" or "numpy", what `receive`
    returns.
    """

    def __init__(
        self,
        *,
        start: "Arrays | Callable[[], Arrays] | None" = None,
        store: "str | Path | None" = None,
        packed: Iterable[bytes] | None = None,
        arrays: str = "torch",
    ) -> None:
        if arrays not in ("torch", "numpy"):
            raise RunError(f"arrays is {arrays!r}; choose 'torch' or 'numpy'")
        self.start = start() if callable(start) else start
        self.store = None if store is None else Path(store)
        self.arrays = arrays
        self.visits: list[Remade] = []  # models received, newest first: as many as the server said to keep
        self._last: Remade | None = None  # the last one, for the reply, and its values
        self._received: State | None = None
        self.packed = None if packed is None else list(packed)  # the same as bytes
        self._orders: Orders | None = None
        if self.store is not None:
            self.store.mkdir(parents=True, exist_ok=True)
        self._read()

    @property
    def held(self) -> State | None:
        """The model received last."""
        if self._received is None and self._last is not None:
            self._received = dequantize_state(self._last.q)
        return self._received

    def receive(self, message: bytes, *, copy: bool = True) -> dict[str, Any]:
        """The model in a message; raises LostReference if the server has to send it whole. Nothing changes then.

        copy=False: the very tensors that the link remembers, for a caller that does not write to them.
        """
        orders, payload = Orders.split(message)
        start = None if self.start is None else state_of_arrays(self.start, orders.format_up, orders.coded)
        known: list[Values] = list(self.visits)
        layouts = [visit.q.layout for visit in self.visits]
        if start is not None:
            known.append(Frequencies(start) if header(payload).frequencies else start)
            layouts.append(start.layout)
        _check_size(payload)
        content = read_message(payload, layouts, known)
        kept = narrow_codes(content)
        form = dequantize_form(content, consume=True)
        received = content.restored(form)
        self._remember(Remade(kept, fingerprint=form.quick_fingerprint), received, orders)
        tensors = tensors_of(received)
        if copy:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return {name: numpy_of(t) for name, t in tensors.items()} if self.arrays == "numpy" else tensors

    def _remember(self, visit: Remade, received: State, orders: Orders) -> None:
        """As many models as the server counts on; one that was sent twice (to evaluate, then to train) is one.

        What is kept are the messages, about a byte a weight; the values of the last one are there for the reply.
        """
        again = self._last is not None and self._last.quick_fingerprint == visit.quick_fingerprint
        self._orders, self._last, self._received = orders, visit, received
        self.visits = [visit, *self.visits[again:]][: orders.kept]
        if self.packed is not None:
            self.packed = [_packed(visit), *self.packed[again:]][: orders.kept] if orders.kept else []
        if self.store is not None and orders.kept and not again:
            for number in reversed(range(1, orders.kept)):
                with suppress(FileNotFoundError):
                    self._file(number - 1).replace(self._file(number))
            write_atomic(self._file(0), _packed(visit))

    def _file(self, number: int) -> Path:
        assert self.store is not None
        return self.store / f"received{f'-{number}' if number else ''}.bin"

    def reply(self, arrays: Arrays) -> bytes:
        """The bytes to send back: `arrays` given what was received. Some of its tensors may be left out."""
        if self.held is None or self._orders is None:
            raise RunError("there is nothing to reply to; call receive first")
        given = self._like_received(arrays)
        local = state_of_arrays(given, self._orders.format_up, self._coded(), copy=False)
        received = {spec.name: spec for spec in self.held.layout}
        for spec in local.layout:  # a range made here is max|w| of the reply; nothing else may differ
            if received.get(spec.name) != spec:
                raise QuantizationError(f"tensor {spec.name!r} is {spec}; it was received as {received.get(spec.name)}")
        whole = local.layout.fingerprint == self.held.layout.fingerprint
        return write_reply(local, self.held, self._orders, whole=whole)

    def _coded(self) -> frozenset[str]:
        assert self.held is not None
        return frozenset(spec.name for spec in self.held.layout if spec.kind in ("fp8", "float"))

    def _like_received(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """`arrays` in the dtypes they were received in; refused by name where that would lose something."""
        assert self.held is not None
        received = tensors_of(self.held)
        found: dict[str, torch.Tensor] = {}
        for name in (*(n for n in received if n in arrays), *(n for n in arrays if n not in received)):
            was, tensor = received.get(name), torch_of(name, arrays[name])
            if was is None:
                raise QuantizationError(f"tensor {name!r} was not received; a reply holds tensors of the model only")
            if tensor.shape != was.shape:
                raise QuantizationError(
                    f"tensor {name!r} is {tuple(tensor.shape)} and was received as {tuple(was.shape)}; shapes must stay"
                )
            cast = tensor.to(was.dtype)
            floats = tensor.is_floating_point() and was.is_floating_point()
            if tensor.dtype != was.dtype and not floats and not torch.equal(cast.to(tensor.dtype), tensor):
                raise QuantizationError(
                    f"tensor {name!r} is {tensor.dtype} and was received as {was.dtype}, which cannot hold its values"
                )
            found[name] = cast
        return found

    # Saving

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the client holds, as named tensors, also between `receive` and `reply`."""
        if self._last is None:
            return {}
        found = {str(i): _packed(one) for i, one in enumerate(self.visits or [self._last])}
        if self._orders is not None:
            found["orders"] = self._orders.to_bytes()
        return {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in found.items()}

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        try:
            found = {name: tensor.numpy().tobytes() for name, tensor in saved.items()}
            orders = found.pop("orders", b"")
            visits = [_unpacked(found[str(i)]) for i in range(len(found))]
            self._orders = Orders.split(orders)[0] if orders else None
            self.visits, self._last, self._received = visits, visits[0] if visits else None, None
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise RunError(f"this is not the state of a ClientLink: {error}; give what state_dict returned") from None

    def _read(self) -> None:
        files = [] if self.store is None else [self._file(number) for number in range(REFERENCES)]
        for packed in (*(file.read_bytes() for file in files if file.exists()), *(self.packed or ())):
            with suppress(Fedfp8Error):  # damaged: as good as lost
                self.visits.append(_unpacked(packed))
        self._last = self.visits[0] if self.visits else None


def _packed(visit: Remade) -> bytes:
    return pack_message(visit.q, visit.quick_fingerprint)


def _unpacked(packed: bytes) -> Remade:
    content, fingerprint = unpack_message(packed)
    return Remade(content, fingerprint=fingerprint)


def _check_size(payload: bytes) -> None:
    """Before anything is allocated: a message of some kB that claims gigabytes is an attack or damaged."""
    if header(payload).has_layout:
        elements = checked_body(payload, None)[1].num_elements
        if elements > max(ALWAYS, BELIEVED * len(payload)):
            raise WireFormatError(
                f"a message of {len(payload)} bytes claims a model of {elements} elements; that is not believed"
            )
