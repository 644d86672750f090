"""A payload in a Flower message: one blob in one Array, whatever the number of tensors.

Flower adds some 320 bytes to every Array and splits large ones into chunks by itself, so a model is one Array with a
type of its own, ``fedfp8/1``, that Flower carries without looking inside.
"""

from functools import lru_cache
from io import BytesIO
from math import prod

import numpy as np
from flwr.app import Array, ArrayRecord

from fedfp8.errors import WireFormatError

__all__ = ["STYPE", "array_of", "array_of_blob", "blob_of", "numpy_view", "record_of", "short", "split"]

STYPE = "fedfp8/1"
KEY = "payload"
NUMPY = "numpy.ndarray"  # Flower's name for what np.save wrote
LONGEST = 400  # characters of what others sent that go into a log line or an error


def array_of_blob(payload: bytes) -> Array:
    return Array("uint8", (len(payload),), STYPE, payload)


def record_of(payload: bytes, name: str = KEY) -> ArrayRecord:
    return ArrayRecord({name: array_of_blob(payload)})


def split(record: ArrayRecord) -> tuple[dict[str, bytes], dict[str, Array]]:
    """(payloads of ours by name, the other Arrays) of a record that came over the network."""
    blobs = {name: _checked(array) for name, array in record.items() if array.stype == STYPE}
    return blobs, {name: array for name, array in record.items() if name not in blobs}


def blob_of(record: object) -> bytes:
    """The payload of a record that holds one and nothing else; whatever else it may be is a WireFormatError."""
    if isinstance(record, ArrayRecord) and len(record) == 1:
        blobs, _ = split(record)
        for payload in blobs.values():
            return payload
    raise WireFormatError(f"expected one Array of type {STYPE!r}, got {_describe(record)}; is fp8_mod in place?")


def numpy_view(name: str, array: Array) -> np.ndarray:
    """The values of an Array that holds what np.save wrote, without a copy; refused if it is anything else."""
    try:
        if array.stype != NUMPY:
            raise ValueError(f"its type is {array.stype!r}")
        data = memoryview(array.data)
        head = 10 if data[6] == 1 else 12  # magic, version, and the length of the header in 2 or 4 bytes
        start = head + int.from_bytes(data[8:head], "little")
        shape, fortran, dtype = _read_header(data[6], bytes(data[8:start]))
        if bytes(data[:6]) != b"\x93NUMPY" or dtype.hasobject or prod(shape) * dtype.itemsize != len(data) - start:
            raise ValueError("its header does not fit its bytes")
        return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if fortran else "C")
    except (ValueError, TypeError, IndexError, EOFError, SyntaxError) as error:
        raise WireFormatError(f"array {name!r} cannot be read as numbers ({short(error)}); send numpy arrays") from None


def array_of(values: np.ndarray) -> Array:
    """What Flower's Array(values) makes, with one copy instead of three."""
    values = np.asarray(values)
    if not values.flags.c_contiguous:
        return Array(values)
    data = b"".join([_write_header(values.dtype.str, values.shape), values.reshape(-1).view(np.uint8).data])
    return Array(str(values.dtype), tuple(values.shape), NUMPY, data)


@lru_cache(maxsize=4096)
def _read_header(version: int, data: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    read = np.lib.format.read_array_header_1_0 if version == 1 else np.lib.format.read_array_header_2_0
    return read(BytesIO(data))


@lru_cache(maxsize=4096)
def _write_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def short(text: object) -> str:
    """What another machine may have written, short enough for a log."""
    text = str(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 100]} ... {text[-90:]}"


def _checked(array: Array) -> bytes:
    if array.shape != (len(array.data),):
        raise WireFormatError(f"an Array of shape {array.shape} holds {len(array.data)} bytes; the message is damaged")
    return bytes(array.data)


def _describe(record: object) -> str:
    if not isinstance(record, ArrayRecord):
        return "no ArrayRecord" if record is None else f"a {type(record).__name__}"
    return f"{len(record)} Arrays of type {short(sorted({array.stype for array in record.values()}))}"
