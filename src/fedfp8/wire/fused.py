"""Numba kernels that code a whole tensor in one call: predictions, tokens, tables and rANS, piece by piece.

A piece's scratch stays in the cache, and a tensor of a hundred elements costs one call instead of a dozen. Grids: of
`dithered` and `float8` one is the constants of its prediction (`kernels.py`) and the other None: Numba leaves out what
asks for it. Numba's cache on disk looks at this file alone: after a change in the others, touch it.
"""

import numpy as np

from fedfp8.wire.kernels import (
    detokenise,
    from_ranks,
    kernel,
    predict_float,
    predict_uniform,
    ranks,
    reference_piece,
    tokenise,
)
from fedfp8.wire.rans import PADDING, look_up, rans_decode, rans_encode, rebuild
from fedfp8.wire.stream import FIRST_BLOCK, PIECE

DONE, NOT_FINITE, SHORT, MISFIT = range(4)  # what became of a tensor


@kernel
def encode(
    codes, reference, dithered, float8, bits_of_code, narrow, shift, bucket, low, extra, tables, symbols, extra_bits,
    reciprocals, states,
):  # fmt: skip
    """(what became of it, whether a step is not 0, number of extra bits, index of the first word)."""
    prior, row, tokens, gain, lut_bits, counts, totals, entries, lut = tables
    n = codes.size
    room, pred, ctx = (
        np.zeros(min(n, PIECE), np.float32),
        np.empty(min(n, PIECE), np.int32),
        np.empty(min(n, PIECE), np.uint16),
    )
    values, toks = np.empty(min(n, PIECE), np.int32), np.empty(min(n, PIECE), np.uint8)
    used, moved, start, end = np.zeros(1, np.int64), np.uint8(0), 0, FIRST_BLOCK
    extra_bits[0] = 0
    while start < n:
        stop = min(start + PIECE, end, n)
        m = stop - start
        ref, p, c, tok = reference_piece(reference, start, stop, room), pred[:m], ctx[:m], toks[:m]
        bad, v = np.uint32(0), values[:m]
        if dithered is not None:
            bad = predict_uniform(ref, start, p, c, *dithered)
            v = codes[start:stop]
        if float8 is not None:
            bad = predict_float(ref, start, p, c, *float8)
            ranks(codes[start:stop], bits_of_code - 1, v)
        if bad:
            return NOT_FINITE, False, 0, 0
        tokenise(v, p, c, narrow, shift, bucket, low, extra, tok, extra_bits, used)
        for i in range(m):
            moved |= tok[i]
        look_up(tok, c, row, tokens, entries, counts, end < n, symbols[start:stop])
        if stop == end and end < n:
            rebuild(counts, prior, tokens, gain, totals, entries, lut, lut_bits)
            end *= 2
        start = stop
    return DONE, moved != 0, used[0], rans_encode(symbols, reciprocals, states)


@kernel
def decode(
    codes, reference, dithered, float8, bits_of_code, shift, low, extra, tables, extra_bits, largest, states, words,
    alone, often,
):  # fmt: skip
    """(what became of it, number of extra bits, index of the next word)."""
    prior, row, tokens, gain, lut_bits, counts, totals, entries, lut = tables
    n = codes.size
    room, pred, ctx = (
        np.zeros(min(n, PIECE), np.float32),
        np.empty(min(n, PIECE), np.int32),
        np.empty(min(n, PIECE), np.uint16),
    )
    values, toks = np.empty(min(n, PIECE), np.int32), np.empty(min(n, PIECE), np.uint8)
    used, at, start, end = np.zeros(1, np.int64), 0, 0, FIRST_BLOCK
    while start < n:
        stop = min(start + PIECE, end, n)
        m = stop - start
        ref, p, c, tok = reference_piece(reference, start, stop, room), pred[:m], ctx[:m], toks[:m]
        bad, v = np.uint32(0), values[:m]
        if dithered is not None:
            bad = predict_uniform(ref, start, p, c, *dithered)
            v = codes[start:stop]
        if float8 is not None:
            bad = predict_float(ref, start, p, c, *float8)
        if bad:
            return NOT_FINITE, used[0], at
        at = rans_decode(states, words, at, c, row, tokens, entries, lut, lut_bits, counts, end < n, alone, often, tok)
        if at > words.size - PADDING:
            return SHORT, used[0], at
        if not detokenise(tok, p, c, shift, low, extra, extra_bits, used, largest, v):
            return MISFIT, used[0], at
        if float8 is not None:
            from_ranks(v, bits_of_code - 1, codes[start:stop])
        if stop == end and end < n:
            rebuild(counts, prior, tokens, gain, totals, entries, lut, lut_bits)
            end *= 2
        start = stop
    return DONE, used[0], at
