"""A payload in a Flower message: one blob in one Array, whatever the number of tensors.

Flower adds some 320 bytes to every Array and splits large ones into chunks by itself, so a model is one Array with a
type of its own, ``fedfp8/1``, that Flower carries without looking inside.
"""

from flwr.app import Array, ArrayRecord

from fedfp8.errors import WireFormatError

__all__ = ["STYPE", "blob_of", "is_blob", "record_of"]

STYPE = "fedfp8/1"
KEY = "payload"


def record_of(payload: bytes) -> ArrayRecord:
    return ArrayRecord({KEY: Array("uint8", (len(payload),), STYPE, payload)})


def is_blob(record: ArrayRecord) -> bool:
    """Whether an ArrayRecord is a payload of ours rather than arrays of an app."""
    return len(record) == 1 and next(iter(record.values())).stype == STYPE


def blob_of(record: object) -> bytes:
    """The payload of a record that came over the network; whatever else it may be is a WireFormatError."""
    if not isinstance(record, ArrayRecord) or not is_blob(record):
        raise WireFormatError(f"expected one Array of type {STYPE!r}, got {_describe(record)}; is fp8_mod in place?")
    array = next(iter(record.values()))
    if array.shape != (len(array.data),):
        raise WireFormatError(f"an Array of shape {array.shape} holds {len(array.data)} bytes; the message is damaged")
    return bytes(array.data)


def _describe(record: object) -> str:
    if not isinstance(record, ArrayRecord):
        return "no ArrayRecord" if record is None else f"a {type(record).__name__}"
    return f"{len(record)} Arrays of type {sorted({array.stype for array in record.values()})}"
