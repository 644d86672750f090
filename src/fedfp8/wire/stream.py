"""The adaptive coder over a whole tensor: symbols with contexts in, bytes out, and back.

Tables are fixed within a block and rebuilt between blocks from the prior and all counts so far; blocks double in length
(1024, 1024, 2048, 4096, ...). The decoder does the same, so no table is ever sent, and within a block coding is as fast
as with static tables. rANS states are written first, then the words in the order in which the decoder needs them.
"""

from collections.abc import Iterator

import numpy as np

from fedfp8.errors import WireFormatError
from fedfp8.wire import kernels

__all__ = ["PIECE", "Decoder", "Encoder", "Tables", "decode_bytes", "encode_bytes", "pieces"]

FIRST_BLOCK = 1024
PIECE = 1 << 15  # elements handled at a time: their scratch stays in the cache
BYTE_GAIN = 1 << 13  # static tables: the flat prior is worth 8 observations


def lanes_for(count: int) -> int:
    """Independent rANS states: four for speed, one where their 8 bytes each would show."""
    return 4 if count >= 1 << 14 else 1


def pieces(count: int) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, whether the tables are rebuilt after it)."""
    start, end = 0, FIRST_BLOCK
    while start < count:
        stop = min(start + PIECE, end, count)
        last = stop == end
        yield start, stop, last and stop < count
        start, end = stop, 2 * end if last else end


class Tables:
    """Cumulative frequencies per context, from a prior and what has been seen."""

    def __init__(self, prior: np.ndarray, row: np.ndarray, gain: int) -> None:
        contexts, tokens = prior.shape
        self.prior, self.row, self.gain = prior, row, gain
        self.counts = np.zeros((contexts, tokens), dtype=np.uint32)
        self.cum = np.zeros((contexts, tokens + 1), dtype=np.uint32)
        self.lut = np.zeros((contexts, kernels.BUCKETS), dtype=np.uint8)
        self.rebuild()

    def rebuild(self) -> None:
        kernels.rebuild(self.counts, self.prior, self.gain, self.cum, self.lut)


class Encoder:
    """Collects symbols front to back, then codes them back to front, as rANS wants."""

    def __init__(self, tables: Tables, count: int) -> None:
        self.tables, self.lanes = tables, lanes_for(count)
        self.symbols = np.empty(count, dtype=np.uint32)

    def push(self, start: int, tok: np.ndarray, ctx: np.ndarray, rebuild: bool) -> None:
        out = self.symbols[start : start + tok.size]
        kernels.look_up(tok, ctx, self.tables.row, self.tables.cum, self.tables.counts, out)
        if rebuild:
            self.tables.rebuild()

    def finish(self) -> bytes:
        states = np.zeros(self.lanes, dtype=np.uint64)
        words = np.empty(self.symbols.size // 2 + 1, dtype=np.uint32)
        first = kernels.rans_encode(self.symbols, self.lanes, states, words)
        return states.astype("<u8").tobytes() + words[first:].astype("<u4").tobytes()


class Decoder:
    """Symbols front to back; `finish` checks that the data ended where it had to."""

    def __init__(self, tables: Tables, count: int, data: memoryview) -> None:
        self.tables, self.lanes = tables, lanes_for(count)
        head = 8 * self.lanes
        if len(data) < head or (len(data) - head) % 4:
            raise WireFormatError(f"{len(data)} bytes cannot hold {self.lanes} states and whole words")
        self.states = np.frombuffer(data[:head], dtype="<u8").astype(np.uint64)
        self.words = np.frombuffer(data[head:], dtype="<u4")
        self.at = 0
        if bool((self.states < kernels.LOW).any()) or bool((self.states >> np.uint64(63)).any()):
            raise WireFormatError("a coder state is out of range")

    def pull(self, ctx: np.ndarray, tok: np.ndarray, rebuild: bool) -> None:
        t = self.tables
        self.at = kernels.rans_decode(
            self.lanes, self.states, self.words, self.at, ctx, t.row, t.cum, t.lut, t.counts, tok
        )
        if self.at < 0:
            raise WireFormatError("the coded symbols end before the tensor does")
        if rebuild:
            t.rebuild()

    def finish(self) -> None:
        if self.at != len(self.words) or bool((self.states != kernels.LOW).any()):
            raise WireFormatError("the coded symbols do not end where they should")


# Mode static of FP8: the codes themselves as symbols, one context


def encode_bytes(codes: np.ndarray, bits: int) -> bytes:
    encoder = Encoder(_flat(bits), codes.size)
    ctx = np.zeros(min(codes.size, PIECE), np.uint16)
    for start, stop, rebuild in pieces(codes.size):
        encoder.push(start, codes[start:stop], ctx[: stop - start], rebuild)
    return encoder.finish()


def decode_bytes(data: memoryview, count: int, bits: int) -> np.ndarray:
    decoder = Decoder(_flat(bits), count, data)
    codes = np.empty(count, np.uint8)
    ctx = np.zeros(min(count, PIECE), np.uint16)
    for start, stop, rebuild in pieces(count):
        decoder.pull(ctx[: stop - start], codes[start:stop], rebuild)
    decoder.finish()
    return codes


def _flat(bits: int) -> Tables:
    return Tables(np.full((1, 1 << bits), (1 << 16) >> bits, np.uint32), np.zeros(256, np.uint8), BYTE_GAIN)
