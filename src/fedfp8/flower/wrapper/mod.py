"""`fp8_mod`: the client's line of the two. The app inside goes on seeing ordinary ArrayRecords.

    app = ClientApp(mods=[fp8_mod])

On the way in, blobs become arrays under the app's own names; on the way out, the arrays of the reply become blobs,
coded given the model that was received. Messages of a server without `FP8(...)` pass untouched. Put it first in the
list of mods: those after it (clipping, noise) then see arrays, too.
"""

from dataclasses import dataclass
from logging import WARNING

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.supercore import log

from fedfp8.errors import Fedfp8Error
from fedfp8.flower.blob import blob_of, record_of
from fedfp8.flower.cache import ClientCache
from fedfp8.flower.wrapper.arrays import arrays_of, state_of_arrays
from fedfp8.flower.wrapper.orders import RECORD, Orders
from fedfp8.model.state import State, dequantize_state, quantize_state
from fedfp8.wire import decode, encode, header

__all__ = ["fp8_mod"]

FOREVER = 2**62  # one model an ArrayRecord is kept, replaced by the next: nothing to forget by age


@dataclass(frozen=True)
class Received:
    """A model that came in: its values, and the arrays that the app was given."""

    state: State
    arrays: dict[str, np.ndarray]


def fp8_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Decode what comes in, let the app run, encode what goes out."""
    told = message.content.config_records.get(RECORD) if message.has_content() else None
    if told is None:
        return call_next(message, context)
    orders, cache = Orders.from_record(told), ClientCache(context)
    content = RecordDict({key: value for key, value in message.content.items() if key != RECORD})
    received: dict[str, Received] = {}
    for key in orders.seeds:
        model = _receive(key, blob_of(content.array_records.get(key)), cache, orders)
        if model is None:
            return Message(RecordDict({RECORD: ConfigRecord({"lost": True})}), reply_to=message)
        received[key] = model
        content[key] = ArrayRecord({name: Array(array) for name, array in model.arrays.items()})
    message.content = content
    reply = call_next(message, context)
    if reply.has_content():
        answer = {key: _coded(key, value, received, orders) for key, value in reply.content.items()}
        held = {key: model.state.fingerprint for key, model in received.items()} if orders.cache else {}
        answer[RECORD] = ConfigRecord(dict(held))
        reply.content = RecordDict(answer)
    return reply


def _receive(key: str, payload: bytes, cache: ClientCache, orders: Orders) -> Received | None:
    """The model in `payload`; None if it needs one that this client does not have any more."""
    head = header(payload)
    reference, layout = None, None
    if head.reference_fingerprint is not None or not head.has_layout:
        try:
            reference = cache.get(key, None)
        except Fedfp8Error:  # damaged: as good as lost
            return None
        if reference is None or head.reference_fingerprint not in (None, reference.fingerprint):
            return None
        layout = reference.layout
    message = decode(payload, layout, reference=reference)
    if orders.cache:
        kept = payload if head.reference_fingerprint is None else encode(message, with_layout=True)
        cache.put(key, kept, orders.number, FOREVER)
    state = dequantize_state(message)
    return Received(state, arrays_of(state))


def _coded(key: str, value: object, received: dict[str, Received], orders: Orders) -> object:
    """A record of the reply as it travels: ArrayRecords that answer a received one as a blob, the rest untouched."""
    if not isinstance(value, ArrayRecord):
        return value
    source = key if key in received else next(iter(received)) if len(received) == 1 else None
    if source is None:
        return value
    model = received[source]
    arrays = {name: _like(array.numpy(), model.arrays.get(name)) for name, array in value.items()}
    if unknown := [name for name, array in arrays.items() if array is None]:
        log(WARNING, "fp8_mod: %s of the reply were not received like this; %r travels uncoded", unknown[:3], key)
        return value
    state = state_of_arrays({n: a for n, a in arrays.items() if a is not None}, orders.wire)
    dithered = orders.wire.rounding == "dithered"
    quantized = quantize_state(
        state,
        seed=orders.seeds[source],
        rounding=orders.wire.rounding,
        step=orders.step if dithered else None,
        step_of="update" if dithered else "weights",
        reference=model.state if dithered else None,
    )
    known = state.layout.fingerprint == model.state.layout.fingerprint
    return record_of(encode(quantized, reference=model.state, lossless=orders.lossless, with_layout=not known))


def _like(array: np.ndarray, received: np.ndarray | None) -> np.ndarray | None:
    """`array` in the dtype it was received in; None if it was not received, or would not survive that."""
    if received is None or array.shape != received.shape:
        return None
    if array.dtype == received.dtype:
        return array
    cast = array.astype(received.dtype)
    floats = array.dtype.kind == received.dtype.kind == "f"
    return cast if floats or np.array_equal(cast.astype(array.dtype), array) else None
