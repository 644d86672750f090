"""The outside of a payload: header, optional layout section, checksum, and a reader that never runs past the end.

    version 1   magic "fp8w" | 1 | flags | layout fingerprint | seed | [reference fingerprint]
    version 2   magic "fp8w" | 2 | flags | rounding | place | strata - 1 | layout fingerprint | seed | reference
                fingerprints, 0 to 3
    then        [layout] | body | checksum

A message is of version 1 unless it needs something that only version 2 has (`version_of`). Integers are little-endian.
A payload is hostile until its checksum and every length in it have been checked, and every check happens before
anything of that length is allocated.
"""

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from fedfp8.errors import WireFormatError
from fedfp8.fp8.parallel import STRATA_MAX
from fedfp8.model.layout import Layout
from fedfp8.model.quantized import QuantState
from fedfp8.model.rounding import ROUNDINGS, rounding_of
from fedfp8.model.state import Values

__all__ = [
    "CHECKSUM",
    "REFERENCES",
    "VERSION",
    "Header",
    "Reader",
    "checked_body",
    "fingerprint_of",
    "header",
    "seal",
    "varint",
    "verified",
    "version_of",
    "write_header",
]

MAGIC = b"fp8w"
VERSION = 2  # the newest
FINGERPRINT = 8
CHECKSUM = 8  # bytes; the last ones of a payload
REFERENCES = 3  # at most, in a message
HAS_REFERENCE, HAS_LAYOUT = 1, 2  # flags of version 1; bits 2 and 3 are the rounding, the others must be 0
# Flags of version 2; bits 0 and 1 count the references, 6 and 7 must be 0
HAS_LAYOUT_2, IS_CHANGE, TOGETHER, FREQUENCIES = 4, 8, 16, 32
LAYOUT_LIMIT = 1 << 24  # bytes of a layout once decompressed: far above any model, far below harm
AGAIN = "the message is damaged or cut short: ask the sender for it again"


@dataclass(frozen=True)
class Header:
    """What a receiver needs before it can decode: which model, which reference, which random bits."""

    version: int
    rounding: str
    seed: int
    layout_fingerprint: bytes
    reference_fingerprints: tuple[bytes, ...]
    has_layout: bool
    place: int = 0
    strata: int = 1
    change: bool = False
    together: bool = False
    frequencies: bool = False

    @property
    def reference_fingerprint(self) -> bytes | None:
        """The first of them."""
        return self.reference_fingerprints[0] if self.reference_fingerprints else None

    @property
    def size(self) -> int:
        return (6 if self.version == 1 else 9) + FINGERPRINT * (2 + len(self.reference_fingerprints))


class Reader:
    """Reads from bytes front to back; a read past the end is a WireFormatError that names the field."""

    def __init__(self, data: bytes | memoryview, where: str = "payload") -> None:
        self.data, self.position, self.where = memoryview(data), 0, where

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def take(self, count: int, field: str) -> memoryview:
        if count > self.left:
            raise WireFormatError(
                f"{self.where}: {field} needs {count} bytes and {self.left} are left; {AGAIN}, or the model differs "
                "from the sender's"
            )
        self.position += count
        return self.data[self.position - count : self.position]

    def varint(self, field: str, limit: int) -> int:
        """An unsigned integer in groups of 7 bits, low group first, in its shortest form."""
        value = 0
        for shift in range(0, 63, 7):
            byte = self.take(1, field)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if (byte == 0 and shift) or value > limit:
                    break
                return value
        raise WireFormatError(f"{self.where}: {field} is malformed or beyond {limit}; {AGAIN}")

    def finish(self) -> None:
        if self.left:
            raise WireFormatError(f"{self.where}: {self.left} bytes after the last field; {AGAIN}")


def varint(value: int) -> bytes:
    groups = []
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def version_of(q: QuantState, references: int) -> int:
    """Of a message of `q` that is coded given this many references."""
    return 2 if q.strata > 1 or q.change or q.together or q.frequencies or references > 1 else 1


def fingerprint_of(state: Values, version: int) -> bytes:
    """What a message of this version calls a reference."""
    return state.fingerprint if version == 1 else state.quick_fingerprint


def write_header(q: QuantState, references: Sequence[Values], with_layout: bool) -> bytes:
    if not 0 <= q.seed < 2**63:
        raise WireFormatError(f"seed is {q.seed}; a payload's seed has 63 bits: use fedfp8.rng.derive_seed")
    _check_place(q.rounding, q.place, q.strata, (q.change, q.together, q.frequencies), "use quantize_state")
    rounding, count = ROUNDINGS[q.rounding].number, len(references)
    version = version_of(q, count)
    if version == 1:
        start = bytes([1, count * HAS_REFERENCE | with_layout * HAS_LAYOUT | rounding << 2])
    else:
        flags = count | with_layout * HAS_LAYOUT_2 | q.change * IS_CHANGE | q.together * TOGETHER
        flags |= q.frequencies * FREQUENCIES
        start = bytes([2, flags, rounding, q.place, q.strata - 1])
    named = (fingerprint_of(state, version) for state in references)
    head = b"".join([MAGIC, start, q.layout.fingerprint, q.seed.to_bytes(8, "little"), *named])
    if not with_layout:
        return head
    packed = zlib.compress(q.layout.to_bytes(), 9)
    return head + varint(len(packed)) + packed


def _check_place(rounding: str, place: int, strata: int, marks: tuple[bool, ...], advice: str) -> None:
    if not (1 <= strata <= STRATA_MAX and 0 <= place < strata):
        raise WireFormatError(f"place {place} of {strata} strata; places go from 0 to strata - 1; {advice}")
    if not ROUNDINGS[rounding].has_steps and (strata > 1 or any(marks)):
        raise WireFormatError(
            f"strata {strata}; change, together, frequencies {marks} with rounding {rounding}; only dithered has them; "
            f"{advice}"
        )


def seal(*parts: "bytes | memoryview") -> bytes:
    """The parts of a payload in one piece, with the checksum at the end; nothing is copied twice."""
    digest = _checksum()
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.digest()])


def header(payload: bytes) -> Header:
    """The header alone: cheap, and not proof against damage (that is `decode`'s checksum)."""
    r = Reader(payload)
    if bytes(r.take(4, "magic")) != MAGIC:
        raise WireFormatError(f"payload begins with {bytes(payload[:4])!r}, not {MAGIC!r}: it is not a fedfp8 message")
    version, flags = r.take(2, "version and flags")
    if version not in (1, VERSION):
        raise WireFormatError(
            f"payload version is {version}; this fedfp8 reads versions 1 and {VERSION}: update the older side"
        )
    if flags >> 2 + 2 * version:
        raise WireFormatError(
            f"flags are {flags:#04x}; bits {2 + 2 * version} to 7 are 0 in version {version}; {AGAIN}"
        )
    place, strata, marks = 0, 1, (False, False, False)
    if version == 1:
        rounding, references, has_layout = flags >> 2, flags & HAS_REFERENCE, bool(flags & HAS_LAYOUT)
    else:
        rounding, place, more = r.take(3, "rounding, place and strata")
        strata, references = more + 1, flags & 3
        has_layout = bool(flags & HAS_LAYOUT_2)
        marks = bool(flags & IS_CHANGE), bool(flags & TOGETHER), bool(flags & FREQUENCIES)
        if rounding >= len(ROUNDINGS):
            raise WireFormatError(f"rounding is {rounding}; version {version} has 0 to {len(ROUNDINGS) - 1}; {AGAIN}")
        _check_place(rounding_of(rounding).name, place, strata, marks, AGAIN)
    layout = bytes(r.take(FINGERPRINT, "layout fingerprint"))
    seed = int.from_bytes(r.take(8, "seed"), "little")
    if seed >> 63:
        raise WireFormatError(f"seed is {seed}, above 63 bits; {AGAIN}")
    named = tuple(bytes(r.take(FINGERPRINT, "reference fingerprint")) for _ in range(references))
    return Header(version, rounding_of(rounding).name, seed, layout, named, has_layout, place, strata, *marks)


def verified(payload: bytes) -> tuple[Header, Reader]:
    """The header, and a reader after it, of a payload whose checksum is right."""
    head, body = header(payload), memoryview(payload)[:-CHECKSUM]
    if len(payload) < head.size + CHECKSUM or payload[-CHECKSUM:] != _checksum(body).digest():
        raise WireFormatError(f"checksum of the payload ({len(payload)} bytes) does not match; {AGAIN}")
    return head, Reader(body[head.size :])


def checked_body(payload: bytes, layout: Layout | None) -> tuple[Header, Layout, Reader]:
    """The header, the layout (the payload's own, or the given one) and a reader at the start of the body."""
    head, reader = verified(payload)
    if head.has_layout:
        own = _read_layout(reader)
        if own.fingerprint != head.layout_fingerprint:
            raise WireFormatError(f"layout section does not match the layout fingerprint; {AGAIN}")
        if layout is None and not head.reference_fingerprints and own.num_elements > 1024 * (64 + len(payload)):
            raise WireFormatError(
                f"the payload's own layout has {own.num_elements} elements, too many for its {len(payload)} bytes to "
                "be believed; if you expect such a model, pass its layout"
            )
        layout = own if layout is None else layout
    if layout is None:
        raise WireFormatError(
            "the payload carries no layout; pass the model's layout, or have the sender encode with with_layout=True"
        )
    if layout.fingerprint != head.layout_fingerprint:
        raise WireFormatError(
            f"layout fingerprint is {head.layout_fingerprint.hex()}, that of the receiver {layout.fingerprint.hex()}: "
            "names, shapes, dtypes or formats differ; build and prepare the model as the sender does"
        )
    return head, layout, reader


def _checksum(data: "bytes | memoryview" = b"") -> "hashlib.blake2b":
    return hashlib.blake2b(data, digest_size=CHECKSUM)


def _read_layout(reader: Reader) -> Layout:
    packed = reader.take(reader.varint("length of the layout section", LAYOUT_LIMIT), "layout section")
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(packed, LAYOUT_LIMIT)
    except zlib.error as error:
        raise WireFormatError(f"layout section cannot be decompressed ({error}); {AGAIN}") from None
    if not inflate.eof or inflate.unused_data or inflate.unconsumed_tail:
        raise WireFormatError(f"layout section is incomplete or above {LAYOUT_LIMIT} bytes; {AGAIN}")
    return Layout.from_bytes(data)
