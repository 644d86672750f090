"""The adaptive coder over a whole tensor: symbols with contexts in, bytes out, and back.

Tables are fixed within a block and rebuilt between blocks from the prior and all counts so far; blocks double in length
(2048, 2048, 4096, 8192, ...). The decoder does the same, so no table is ever sent, and within a block coding is as fast
as with static tables. rANS states are written first, then the words in the order in which the decoder needs them.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fedfp8.errors import WireFormatError
from fedfp8.wire import rans
from fedfp8.wire.container import AGAIN

__all__ = ["FIRST_BLOCK", "PIECE", "Decoder", "Encoder", "Piece", "Tables", "decode_bytes", "encode_bytes", "pieces"]

FIRST_BLOCK = 2048
FIRST_BYTES = 64  # first block of mode static, which begins knowing nothing
PIECE = 1 << 15  # elements handled at a time: their scratch stays in the cache
BYTE_GAIN = 1 << 13  # static tables: the flat prior is worth 8 observations


def lanes_for(count: int) -> int:
    """Independent rANS states: four for speed, one where their 8 bytes each would show."""
    return 4 if count >= 1 << 14 else 1


class Piece(NamedTuple):
    start: int
    stop: int
    counts: bool  # whether a later table will use its counts
    rebuild: bool  # whether the tables are rebuilt after it


def pieces(count: int, first: int = FIRST_BLOCK) -> Iterator[Piece]:
    start, end = 0, first
    while start < count:
        stop = min(start + PIECE, end, count)
        yield Piece(start, stop, end < count, stop == end < count)
        start, end = stop, 2 * end if stop == end else end


class Tables:
    """Frequencies per row, from a prior and what has been seen; `row` maps the 256 contexts to rows."""

    def __init__(
        self, prior: np.ndarray, row: np.ndarray, gain: int, *, decodes: bool = True, moved_only: bool = False
    ) -> None:
        """moved_only: without token 0, "as predicted", whose mass is in `stays`."""
        rows, self.tokens = prior.shape
        self.stays = prior[:, 0].copy()
        if moved_only:
            prior[:, 0] = 0
        self.prior, self.row, self.gain = prior.reshape(-1), row, gain
        self.lut_bits = 12 if rows == 1 else 8
        self.counts = np.zeros(prior.size, dtype=np.uint32)
        self.totals = np.zeros(rows, dtype=np.uint64)
        self.entries = np.zeros(prior.size, dtype=np.uint32)
        self.lut = np.zeros(rows << self.lut_bits if decodes else 0, dtype=np.uint8)
        self.rebuild()

    def copy(self) -> "Tables":
        new = copy.copy(self)
        new.counts, new.totals = self.counts.copy(), self.totals.copy()
        new.entries, new.lut = self.entries.copy(), self.lut.copy()
        return new

    @property
    def parts(self) -> tuple[Any, ...]:
        """For kernels that rebuild them."""
        made = self.counts, self.totals, self.entries, self.lut
        return self.prior, self.row, self.tokens, self.gain, self.lut_bits, *made

    def rebuild(self) -> None:
        made = self.totals, self.entries, self.lut, self.lut_bits
        rans.rebuild(self.counts, self.prior, self.tokens, self.gain, *made)


class Encoder:
    """Room for symbols, which are collected front to back and then coded back to front, as rANS wants."""

    def __init__(self, count: int) -> None:
        self.symbols = np.empty(count, dtype=np.uint32)
        self.states = np.full(lanes_for(count), rans.LOW, dtype=np.uint64)

    def written(self, first: int) -> tuple[memoryview, memoryview]:
        """States, and words in the place of symbols, from the first of them on."""
        return self.states.astype("<u8", copy=False).data, self.symbols[first:].astype("<u4", copy=False).data


class Decoder:
    """What was coded, while symbols are taken from it; `finish` checks that it ended where it had to."""

    def __init__(self, count: int, data: memoryview, states: int = 0) -> None:
        head = 8 * (states or lanes_for(count))
        if len(data) < head or (len(data) - head) % 4:
            raise WireFormatError(f"{len(data)} bytes cannot hold {head} bytes of states and whole words; {AGAIN}")
        self.states = np.frombuffer(data[:head], dtype="<u8").astype(np.uint64)
        self.words = np.zeros((len(data) - head) // 4 + rans.PADDING, np.uint32)
        self.words[: -rans.PADDING] = np.frombuffer(data[head:], dtype="<u4")
        self.at = 0  # the next word
        self.alone = None if len(self.states) == 4 else True
        self.often = True if 32 * len(self.words) > 2 * count else None  # more than two bits a symbol
        if not all(rans.LOW <= state < 1 << 63 for state in self.states.tolist()):
            raise WireFormatError(f"a coder state is out of range; {AGAIN}")

    def finish(self) -> None:
        end = len(self.words) - rans.PADDING
        if self.at > end:
            raise WireFormatError(f"the coded symbols end before the tensor does; {AGAIN}")
        if self.at != end or any(state != rans.LOW for state in self.states.tolist()):
            raise WireFormatError(f"the coded symbols do not end where they should; {AGAIN}")


# Mode static of FP8: the codes themselves as symbols, one context


def encode_bytes(codes: np.ndarray, bits: int) -> bytes:
    encoder, t = Encoder(codes.size), _flat(bits)
    ctx = np.zeros(min(codes.size, PIECE), np.uint16)
    for start, stop, counts, rebuild in pieces(codes.size, FIRST_BYTES):
        tok, out = codes[start:stop], encoder.symbols[start:stop]
        rans.look_up(tok, ctx[: stop - start], t.row, t.tokens, t.entries, t.counts, counts, out)
        if rebuild:
            t.rebuild()
    return b"".join(encoder.written(rans.rans_encode(encoder.symbols, rans.RECIPROCALS, encoder.states)))


def decode_bytes(data: memoryview, count: int, bits: int) -> np.ndarray:
    decoder, t = Decoder(count, data), _flat(bits)
    codes = np.empty(count, np.uint8)
    ctx = np.zeros(min(count, PIECE), np.uint16)
    for start, stop, counts, rebuild in pieces(count, FIRST_BYTES):
        coded = decoder.states, decoder.words, decoder.at
        found = t.entries, t.lut, t.lut_bits, t.counts, counts
        if decoder.alone is None:
            decoder.at = rans.rans_decode_one(*coded, *found, codes[start:stop])
        else:
            here = ctx[: stop - start], t.row, t.tokens
            decoder.at = rans.rans_decode(*coded, *here, *found, decoder.alone, decoder.often, codes[start:stop])
        if decoder.at > len(decoder.words) - rans.PADDING:
            break
        if rebuild:
            t.rebuild()
    decoder.finish()
    return codes


def _flat(bits: int) -> Tables:
    return Tables(np.full((1, 1 << bits), (1 << 16) >> bits, np.uint32), np.zeros(256, np.uint8), BYTE_GAIN)
