"""The adaptive coder over a whole tensor: symbols with contexts in, bytes out, and back.

Tables are fixed within a block and rebuilt between blocks from the prior and all counts so far; blocks double in length
(2048, 2048, 4096, 8192, ...). The decoder does the same, so no table is ever sent, and within a block coding is as fast
as with static tables. rANS states are written first, then the words in the order in which the decoder needs them.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

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

    def __init__(self, prior: np.ndarray, row: np.ndarray, gain: int, *, decodes: bool = True) -> None:
        rows, self.tokens = prior.shape
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

    def rebuild(self) -> None:
        made = self.totals, self.entries, self.lut, self.lut_bits
        rans.rebuild(self.counts, self.prior, self.tokens, self.gain, *made)


class Encoder:
    """Collects symbols front to back, then codes them back to front, as rANS wants."""

    def __init__(self, tables: Tables, count: int) -> None:
        self.tables, self.lanes = tables, lanes_for(count)
        self.symbols = np.empty(count, dtype=np.uint32)

    def push(self, piece: Piece, tok: np.ndarray, ctx: np.ndarray) -> None:
        t, out = self.tables, self.symbols[piece.start : piece.stop]
        rans.look_up(tok, ctx, t.row, t.tokens, t.entries, t.counts, piece.counts, out)
        if piece.rebuild:
            t.rebuild()

    def finish(self) -> bytes:
        states = np.full(self.lanes, rans.LOW, dtype=np.uint64)
        words = np.empty(self.symbols.size // 2 + 2, dtype=np.uint32)
        first = rans.rans_encode(self.symbols, rans.RECIPROCALS, states, words)
        return states.astype("<u8").tobytes() + words[first:].astype("<u4").tobytes()


class Decoder:
    """Symbols front to back; `finish` checks that the data ended where it had to."""

    def __init__(self, tables: Tables, count: int, data: memoryview) -> None:
        self.tables = tables
        head = 8 * lanes_for(count)
        if len(data) < head or (len(data) - head) % 4:
            raise WireFormatError(f"{len(data)} bytes cannot hold {head} bytes of states and whole words; {AGAIN}")
        self.states = np.frombuffer(data[:head], dtype="<u8").astype(np.uint64)
        self.words = np.concatenate([np.frombuffer(data[head:], dtype="<u4"), np.zeros(rans.PADDING, np.uint32)])
        self.at = 0
        self.alone = None if len(self.states) == 4 else True
        self.often = True if 32 * len(self.words) > 2 * count else None  # more than two bits a symbol
        if not all(rans.LOW <= state < 1 << 63 for state in self.states.tolist()):
            raise WireFormatError(f"a coder state is out of range; {AGAIN}")

    def pull(self, piece: Piece, ctx: np.ndarray, tok: np.ndarray) -> None:
        t, coded = self.tables, (self.states, self.words, self.at)
        found = t.entries, t.lut, t.lut_bits, t.counts, piece.counts
        if len(t.totals) == 1 and len(self.states) == 4:
            self.at = rans.rans_decode_one(*coded, *found, tok)
        else:
            self.at = rans.rans_decode(*coded, ctx, t.row, t.tokens, *found, self.alone, self.often, tok)
        if self.at > len(self.words) - rans.PADDING:
            raise WireFormatError(f"the coded symbols end before the tensor does; {AGAIN}")
        if piece.rebuild:
            t.rebuild()

    def finish(self) -> None:
        if self.at != len(self.words) - rans.PADDING or any(state != rans.LOW for state in self.states.tolist()):
            raise WireFormatError(f"the coded symbols do not end where they should; {AGAIN}")


# Mode static of FP8: the codes themselves as symbols, one context


def encode_bytes(codes: np.ndarray, bits: int) -> bytes:
    encoder = Encoder(_flat(bits), codes.size)
    ctx = np.zeros(min(codes.size, PIECE), np.uint16)
    for piece in pieces(codes.size, FIRST_BYTES):
        encoder.push(piece, codes[piece.start : piece.stop], ctx[: piece.stop - piece.start])
    return encoder.finish()


def decode_bytes(data: memoryview, count: int, bits: int) -> np.ndarray:
    decoder = Decoder(_flat(bits), count, data)
    codes = np.empty(count, np.uint8)
    ctx = np.zeros(min(count, PIECE), np.uint16)
    for piece in pieces(count, FIRST_BYTES):
        decoder.pull(piece, ctx[: piece.stop - piece.start], codes[piece.start : piece.stop])
    decoder.finish()
    return codes


def _flat(bits: int) -> Tables:
    return Tables(np.full((1, 1 << bits), (1 << 16) >> bits, np.uint32), np.zeros(256, np.uint8), BYTE_GAIN)
