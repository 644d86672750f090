"""Numba kernels of the coder itself: frequency tables, rANS with 64-bit states, 32-bit words and 16-bit frequencies.

Element i of a tensor belongs to lane i % lanes; four lanes, which take turns in registers, keep the processor busy.
The decoder never reads past its arrays: contexts are cut to 8 bits, tables are complete by construction, and words end
in four words of padding.

Helpers take scalars only: an array passed to one would be reference-counted for every element.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
LOW = 1 << 31  # states live in [2**31, 2**63) between symbols
PADDING = 4  # words

kernel = njit(nogil=True, cache=True, error_model="numpy")


def reciprocals(f: np.ndarray) -> np.ndarray:
    """ceil(2**(63 + s) / f), s = ceil(log2 f), for f from 1 to 2**32: `divided` multiplies by it."""
    s = np.ceil(np.log2(f.astype(np.float64))).astype(np.uint64)
    half, rest = np.divmod(U64(1 << 63), f)
    tail, more = np.divmod(rest << s, f)
    return (half << s) + tail + (more > 0)


RECIPROCALS = np.insert(reciprocals(np.arange(1, 1 << 16, dtype=np.uint64)), 0, 0)  # of every frequency, for `coded`


@intrinsic
def divided(typingctx: Any, x: Any, f: Any, reciprocal: Any) -> Any:
    """x // f by the reciprocal of f: exact for x < 2**63 (Granlund and Montgomery, 1994)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, f, reciprocal = args
        wide, narrow = ir.IntType(128), ir.IntType(64)
        product = builder.mul(builder.zext(builder.add(x, x), wide), builder.zext(reciprocal, wide))
        upper = builder.trunc(builder.lshr(product, wide(64)), narrow)
        zeros = builder.ctlz(builder.sub(f, narrow(1)), ir.IntType(1)(0))
        return builder.lshr(upper, builder.and_(builder.neg(zeros), narrow(63)))  # 64 - zeros is s

    return types.uint64(types.uint64, types.uint64, types.uint64), codegen


@kernel
def rebuild(counts, prior_, tokens, gain, totals, entries, lut, lut_bits):
    """entries[row * tokens + t] = start << 16 | frequency, which is at least 1; lut: the first token of a bucket.

    totals: of every row when it was last built (0: never). A row that has seen nothing since stays as it is. An encoder
    needs no lut and passes an empty one.
    """
    mass = np.empty(tokens, np.int64)
    for c in range(counts.size // tokens):
        base = c * tokens
        count, first, entry = counts[base : base + tokens], prior_[base : base + tokens], entries[base : base + tokens]
        total, largest = np.int64(0), np.int64(0)
        for t in range(tokens):
            mass[t] = np.int64(count[t]) * gain + np.int64(first[t])
            total += mass[t]
            largest = max(largest, mass[t])
        if U64(total) == totals[c]:
            continue
        totals[c] = total
        share, left = np.float64(65536 - tokens) / np.float64(total), np.int64(65536)
        for t in range(tokens):
            f = np.int64(np.float64(mass[t]) * share)  # of mass * (65536 - tokens) // total at most one off
            rest = mass[t] * (65536 - tokens) - f * total
            f += np.int64(rest >= total) - np.int64(rest < 0)
            f += np.int64(first[t] > 0)  # none for tokens that a row does not have
            entry[t] = f
            left -= f
        best = 0
        while mass[best] < largest:
            best += 1
        entry[best] += left
        start = U32(0)
        for t in range(tokens):
            f = entry[t]
            entry[t] = U32((start << U32(16)) | f)
            start += f
        if lut.size:
            mine, at, right = lut[c << lut_bits : (c + 1) << lut_bits], np.int64(0), U32(16 - lut_bits)
            for t in range(tokens):
                e = entry[t]
                end = np.int64(((e >> U32(16)) + (e & U32(0xFFFF)) + (U32(1) << right) - U32(1)) >> right)
                if at < end:
                    mine[at:end] = U8(t)
                    at = end


@kernel
def look_up(tok, ctx, row, tokens, entries, counts, count, out):
    """The table entry of every token; counts them if asked to."""
    tokens = U64(tokens)
    for i in range(tok.size):
        at = U64(row[ctx[i] & U16(0xFF)]) * tokens + U64(tok[i])
        out[i] = entries[at]
        if count:
            counts[at] += U32(1)


@kernel
def full(x, entry):
    """1 if the state must give up a word before the symbol, else 0."""
    return U64(x >= U64(entry & U32(0xFFFF)) << U64(47))


@kernel
def coded(x, entry, reciprocal):
    """The state after a symbol: x // f * 2**16 + x % f + start, for its frequency f."""
    f = U64(entry & U32(0xFFFF))
    return x + divided(x, f, reciprocal) * (U64(65536) - f) + U64(entry >> U32(16))


@kernel
def rans_encode(symbols, reciprocals, states):
    """Last element first, from states of 2**31; words take the place of symbols, from the end. Returns the first index.

    A symbol leaves at most one word, so that words never reach a symbol that is still to be coded.
    """
    words, at, i, single = symbols, U64(symbols.size), U64(symbols.size), states.size == 1
    x0 = x1 = x2 = x3 = U64(LOW)
    while i:
        i -= U64(1)
        e = symbols[i]
        out = full(x0, e)
        words[at - U64(1)] = U32(x0)  # in any case; it stays if `at` moves: no branch to mispredict
        at -= out
        x = coded(x0 >> (out << U64(5)), e, reciprocals[e & U32(0xFFFF)])
        x0, x1, x2, x3 = x1, x2, x3, x
        if single:
            x0 = x
    states[0] = x3
    if not single:
        states[1], states[2], states[3] = x2, x1, x0
    return np.int64(at)


@kernel
def beyond(slot, entry):
    return slot - (entry >> U32(16)) >= (entry & U32(0xFFFF))


@kernel
def before(x, slot, entry):
    """The state before the symbol that `slot`, the low 16 bits of x, belongs to."""
    return U64(entry & U32(0xFFFF)) * (x >> U64(16)) + U64(slot - (entry >> U32(16)))


@kernel
def rans_decode(states, words, at, ctx, row, tokens, entries, lut, lut_bits, counts, count, alone, often, tok):
    """Tokens of the next elements, the first of which is in lane 0. Returns the next word, beyond the end if short.

    The last PADDING words must be padding. alone: None for four lanes, anything else for one: Numba compiles these
    apart, where a condition in the loop would make each lane wait for the one before. often: None if words are rare
    enough for a branch, which is then mostly predicted.
    """
    at, i, n, end = U64(at), U64(0), U64(tok.size), U64(words.size - PADDING)
    tokens, low, bits, right = U64(tokens), U64(LOW), U64(lut_bits), U32(16 - lut_bits)
    last = U64(states.size - 1)
    x0, x1, x2, x3 = states[0], states[U64(1) & last], states[U64(2) & last], states[U64(3) & last]
    while i < n and at <= end:
        r = U64(row[ctx[i] & U16(0xFF)])
        s = U32(x0 & U64(0xFFFF))
        t = r * tokens + lut[(r << bits) + (s >> right)]
        e = entries[t]
        while beyond(s, e):
            t += U64(1)
            e = entries[t]
        x = before(x0, s, e)
        if often is not None:
            out = U64(x < low)
            x = (x << (out << U64(5))) | (U64(words[at]) * out)
            at += out
        elif x < low:
            x = (x << U64(32)) | U64(words[at])
            at += U64(1)
        tok[i] = U8(t - r * tokens)
        if count:
            counts[t] += U32(1)
        x0, x1, x2, x3 = x1, x2, x3, x
        if alone is not None:
            x0 = x
        i += U64(1)
    states[0] = x0
    if alone is None:
        states[1], states[2], states[3] = x1, x2, x3
    return np.int64(at)


@kernel
def rans_decode_one(states, words, at, entries, lut, lut_bits, counts, count, tok):
    """The same for a single table and four lanes.

    For one table of many symbols words come often and irregularly: here they are taken without a branch.
    """
    at, i, n, end = U64(at), U64(0), U64(tok.size), U64(words.size - PADDING)
    low, right = U64(LOW), U32(16 - lut_bits)
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    while i < n and at <= end:
        s = U32(x0 & U64(0xFFFF))
        t = U64(lut[s >> right])
        while beyond(s, entries[t]):
            t += U64(1)
        x = before(x0, s, entries[t])
        out = U64(x < low)
        x = (x << (out << U64(5))) | (U64(words[at]) * out)
        at += out
        tok[i] = U8(t)
        if count:
            counts[t] += U32(1)
        x0, x1, x2, x3 = x1, x2, x3, x
        i += U64(1)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    return np.int64(at)
