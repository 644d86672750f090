"""`fp8_mod`: the client's line of the two. The app inside goes on seeing ordinary ArrayRecords.

    app = ClientApp(mods=[fp8_mod])

On the way in, blobs become arrays under the app's own names; on the way out, the arrays of the reply become blobs,
coded given the model that was received. Messages of a server without `FP8(...)` pass untouched. Put it first in the
list of mods: those after it (clipping, noise) then see arrays, too.

The models received last are kept in ``Context.state``, about a byte a weight each, out of the app's sight.
"""

from collections import defaultdict
from collections.abc import Callable
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedfp8.errors import Fedfp8Error, LostReference
from fedfp8.flower.blob import array_of, array_of_blob, numpy_view, record_of, short, split
from fedfp8.flower.releases import log
from fedfp8.link import ClientLink
from fedfp8.link.arrays import Arrays

__all__ = ["CACHE", "LOST", "arrays_of", "fp8_mod", "fp8_mod_with"]

CACHE = "fedfp8-received"  # the record of Context.state
LOST = "fedfp8-lost"  # the record of a reply that asks for the whole model

ClientAppCallable = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, ClientAppCallable], Message]


def fp8_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Decode what comes in, let the app run, encode what goes out."""
    return _serve(message, context, call_next, None)


def fp8_mod_with(*, start: Any = None) -> Mod:
    """`fp8_mod` for a client that has the server's first model already: ``mods=[fp8_mod_with(start=make_model)]``.

    start: a state dict, an ArrayRecord, or a function that makes one; the same as in ``FP8(strategy, start=...)``.
    First models are then coded given it. If it differs from the server's, the model is sent whole, and nothing is lost
    but bytes.
    """

    def fp8_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return _serve(message, context, call_next, start)

    return fp8_mod


def arrays_of(start: Any) -> Arrays | None:
    """The tensors of a start, however it was given."""
    made = start() if callable(start) and not hasattr(start, "state_dict") else start
    made = made.state_dict() if hasattr(made, "state_dict") else made
    if isinstance(made, ArrayRecord):
        return {name: numpy_view(name, array) for name, array in made.items()}
    return made


class Received:
    """A model that came in: its link, and the shapes of the arrays that the app was given."""

    def __init__(self, payload: bytes, held: list[bytes], start: Any) -> None:
        self.link = ClientLink(start=arrays_of(start), packed=held, arrays="numpy")
        arrays = self.link.receive(payload, copy=False)
        self.shapes = {name: array.shape for name, array in arrays.items()}
        self.record = ArrayRecord({name: array_of(array) for name, array in arrays.items()})


def _serve(message: Message, context: Context, call_next: ClientAppCallable, start: Any) -> Message:
    blobs = {key: split(record)[0] for key, record in message.content.array_records.items()} if _has(message) else {}
    if not any(blobs.values()):
        return call_next(message, context)
    held: dict[str, list[bytes]] = defaultdict(list)  # by the name of the blob, newest first
    for key, array in sorted(context.state.pop(CACHE, ArrayRecord()).items()):
        held[key.rpartition("@")[0]].append(array.data)
    try:
        content, models = _decoded(message, blobs, held, start)
        if content is None:
            return Message(RecordDict({LOST: ConfigRecord({"lost": True})}), reply_to=message)
        message.content = content
        reply = call_next(message, context)
        return _coded(reply, models) if _has(reply) else reply
    finally:
        kept = {f"{name}@{i}": data for name, models in held.items() for i, data in enumerate(models)}
        if kept:
            context.state[CACHE] = ArrayRecord({key: array_of_blob(data) for key, data in kept.items()})


def _decoded(
    message: Message, blobs: dict[str, dict[str, bytes]], held: dict[str, list[bytes]], start: Any
) -> tuple[RecordDict | None, dict[str, Received]]:
    """(what the app is given, the models in it by the names of their blobs); None if a reference is lost."""
    content, models = dict(message.content.items()), {}
    try:
        for key, name, payload in ((key, *item) for key, one in blobs.items() for item in one.items()):
            models[name] = model = Received(payload, held[name], start)
            content[key], held[name] = model.record, model.link.packed or []
    except LostReference:
        return None, {}
    except Fedfp8Error as error:  # its text may quote what the message holds
        raise type(error)(short(error)) from None
    return RecordDict(content), models


def _has(message: Message) -> bool:
    return message.has_content() and bool(message.content.array_records)


def _coded(reply: Message, models: dict[str, Received]) -> Message:
    """The reply as it travels: of every model that was received one record as a blob, the rest untouched."""
    left, records = dict(models), dict(reply.content.items())
    by_name = sorted(reply.content.array_records.items(), key=lambda item: item[0] not in models)  # those go first
    for key, record in by_name:
        name = key if key in left else next((n for n, model in left.items() if _known(record, model)), None)
        if name is not None:
            records[key] = _blob(key, record, name, left.pop(name))
    reply.content = RecordDict(records)
    return reply


def _known(record: ArrayRecord, model: Received) -> list[str]:
    """Names of the arrays of a reply that were received like this."""
    return [n for n, array in record.items() if n in model.shapes and numpy_view(n, array).shape == model.shapes[n]]


def _blob(key: str, record: ArrayRecord, name: str, model: Received) -> ArrayRecord:
    """What was received, as a blob, beside the arrays that are the app's own."""
    try:
        known = _known(record, model)
        others = {n: array for n, array in record.items() if n not in known}
        payload = model.link.reply({n: numpy_view(n, record[n]) for n in known}) if known else b""
    except Fedfp8Error as error:
        log(WARNING, "fp8_mod: record %r of the reply travels uncoded: %s", key, short(error))
        return record
    if others:
        text = "fp8_mod: %s of the reply were not received by these names and shapes, and travel uncoded"
        log(WARNING, text, short(list(others)[:3]))
    if not known or name in others:
        return record
    return ArrayRecord(dict(record_of(payload, name)) | others)
