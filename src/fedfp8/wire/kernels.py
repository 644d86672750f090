"""Numba kernels of the entropy coder: predictions and contexts, tokens, tables and rANS, over pieces of a tensor.

Everything is integer arithmetic, or IEEE float32 and float64 in a fixed order, so both ends agree on every machine. The
decoding kernels trust nothing: an index that comes from the data is checked before it is used.
"""

import numpy as np
from numba import njit

from fedfp8.fp8.intrinsics import binade, centred, code_of, poison, snap, uniform

F = np.float32
I32, U8, U16, U32, U64 = np.int32, np.uint8, np.uint16, np.uint32, np.uint64
SINGLE = 8  # steps below this have tokens of their own
FLIP = 0x8000  # bit of a context: the step is coded with its sign turned
LOW = 1 << 31  # rANS states live in [2**31, 2**63) between symbols

kernel = njit(nogil=True, cache=True, error_model="numpy")


# Predictions: the reference on the new grid with the message's dice, and the context of the step from there


@kernel
def predict_float(
    ref,
    start,
    dice,
    pred,
    ctx,
    scale_in,
    top,
    lowest,
    magic,
    spread,
    per_level,
    shift,
    offset,
    sign_shift,
    drop,
    key0,
    key1,
):
    """pred: signed rank (a code's magnitude, with its sign). Context: exponent class * 16 + place, seen from zero."""
    bad = U32(0)
    mantissa = I32(23) - I32(shift)
    largest = I32((1 << I32(sign_shift)) - 1)
    for i in range(ref.size):
        x = ref[i]
        bad = U32(bad | poison(x))
        y = min(max(x * scale_in, -top), top)
        b = max(binade(y), lowest)
        if dice:
            y = y + centred(start + i, key0, key1) * (b * spread)
        code = I32(code_of(y, b, b * magic, shift, offset, sign_shift))
        place = I32((y - snap(y, b * magic)) / (b * per_level) * F(16) + F(8))
        place = min(max(place, I32(0)), I32(15))
        negative = code >> I32(sign_shift)
        rank = I32(code & largest)
        exponent = min(max((rank >> mantissa) - I32(drop), I32(0)), I32(15))
        place = I32(15) - place if negative else place
        pred[i] = -rank if negative else rank
        ctx[i] = U16(exponent * I32(16) + place + (negative << I32(15)))
    return bad


@kernel
def predict_uniform(ref, start, pred, ctx, per_step, limit, small, large, key0, key1):
    """pred = floor(ref / step + u). Context: class of |ref| * 16 + distance to the nearer end of the cell."""
    bad = U32(0)
    for i in range(ref.size):
        x = ref[i]
        bad = U32(bad | poison(x))
        y = min(max(x * per_step, -limit), limit) + uniform(start + i, key0, key1)
        floor = np.floor(y)
        place = I32((y - floor) * F(32))
        place = min(max(place, I32(0)), I32(31))
        upper = place >> I32(4)
        place = I32(31) - place if upper else place
        a = abs(x)
        level = I32(a > small) + I32(a > large)
        pred[i] = I32(floor)
        ctx[i] = U16(level * I32(16) + place + (upper << I32(15)))
    return bad


# Tokens: 0 is no step, then +1, -1, +2, -2 ...; large steps share tokens and send their low bits; the last one escapes.
# Both directions go over a piece twice: a pass without branches for small steps, and one that looks for the others.


@kernel
def tokenise(values, pred, ctx, narrow, shift, bucket, low, extra, tok, bits, state):
    """Steps as tokens; extra bits are appended to `bits`, whose write position (in bits) is state[0]."""
    single = I32(SINGLE)
    for i in range(tok.size):
        d = I32(values[i] - pred[i])
        d = I32(-d) if ctx[i] & U16(FLIP) else d
        m = min(I32(abs(d)), single)
        tok[i] = U8(m + m - I32(d > 0))
    at = U64(state[0])
    for i in range(tok.size):
        if shift == 0 and tok[i] < U8(2 * SINGLE - 1):
            continue
        step = np.int64(values[i]) - np.int64(pred[i])
        step = -step if ctx[i] & U16(FLIP) else step
        m = abs(step >> shift)
        if m < bucket.size and not (m >= SINGLE and narrow[ctx[i] & U16(0xFF)]):
            k = bucket[m]
            tok[i] = U8(2 * k - ((step >> shift) > 0))
            value = U64(((step & ((1 << shift) - 1)) << extra[k]) | (m - low[k]))
            count = U64(extra[k] + shift)
        else:
            tok[i] = U8(2 * low.size - 1)
            value, count = U64(values[i]) & U64(0xFFFFFFFF), U64(32)
        bits[at >> U64(6)] |= value << (at & U64(63))
        bits[(at >> U64(6)) + U64(1)] |= (value >> U64(1)) >> (U64(63) - (at & U64(63)))
        at += count
    state[0] = np.int64(at)


@kernel
def detokenise(tok, pred, ctx, shift, low, extra, bits, state, largest, values):
    """The inverse; False if the data cannot be a tensor's: bits missing, or a value beyond +-largest."""
    bad = False
    for i in range(tok.size):
        t = I32(tok[i])
        m = (t + I32(1)) >> I32(1)
        m = m if ((t & I32(1)) != 0) != ((ctx[i] & U16(FLIP)) != 0) else I32(-m)
        values[i] = I32(pred[i] + m)
        bad |= (abs(values[i]) > largest) & (t < I32(2 * SINGLE - 1))
    if bad and shift == 0:
        return False
    at, end = U64(state[0]), U64((bits.size - 1) * 64)
    for i in range(tok.size):
        if shift == 0 and tok[i] < U8(2 * SINGLE - 1):
            continue
        t = I32(tok[i])
        escape = t == 2 * low.size - 1
        k = min((t + 1) >> 1, low.size - 1)
        count = U64(32) if escape else U64(extra[k] + shift)
        if at + count > end:
            return False
        # 64 bits from `at` on; shifted in two parts since a shift by 64 is undefined
        more = (bits[at >> U64(6)] >> (at & U64(63))) | (
            (bits[(at >> U64(6)) + U64(1)] << U64(1)) << (U64(63) - (at & U64(63)))
        )
        more &= (U64(1) << count) - U64(1)
        at += count
        step = np.int64(low[k]) + np.int64(more & ((U64(1) << U64(extra[k])) - U64(1)))
        step = ((step if t & 1 else -step) << shift) + np.int64(more >> U64(extra[k]))
        value = np.int64(pred[i]) + (-step if ctx[i] & U16(FLIP) else step)
        value = np.int64(I32(U32(more))) if escape else value
        if abs(value) > largest:
            return False
        values[i] = I32(value)
    state[0] = np.int64(at)
    return True


@kernel
def ranks(codes, sign_shift, out):
    """Signed ranks of FP8 codes; False if one is the code of -0, which has no rank of its own."""
    sign = I32(1) << I32(sign_shift)
    zero = False
    for i in range(codes.size):
        code = I32(codes[i])
        zero |= code == sign
        out[i] = code if code < sign else sign - code
    return not zero


@kernel
def from_ranks(rank, sign_shift, codes):
    sign = I32(1) << I32(sign_shift)
    for i in range(rank.size):
        codes[i] = U8(rank[i]) if rank[i] >= 0 else U8(sign - rank[i])


# Tables: prior plus counts so far, as cumulative frequencies of 2**16 in all


@kernel
def area(z, table, per_unit):
    """Integral from 0 to z of the mass in [0, z]: an even function; linear between entries and beyond the last."""
    x = abs(z) * per_unit
    i = int(min(x, table.size - 2.0))
    return table[i] + (x - i) * (table[i + 1] - table[i])


@kernel
def mass(lo, hi, sigma, a, b, table, per_unit):
    """Probability of [lo - f, hi - f) cells, averaged over f from a to b: a difference of areas."""
    up = area((hi - a) / sigma, table, per_unit) - area((hi - b) / sigma, table, per_unit)
    down = area((lo - a) / sigma, table, per_unit) - area((lo - b) / sigma, table, per_unit)
    return U32(1) + U32(min(max((up - down) * (65536.0 * sigma / (b - a)), 0.0), 65536.0))


@kernel
def prior(lo, hi, sigma, first, places, width, table, per_unit, out):
    """out[first[class] + place, token]: its probability, of 2**16 or so."""
    for c in range(lo.shape[0]):
        side = width / places[c]
        for p in range(places[c]):
            for t in range(lo.shape[1]):
                out[first[c] + p, t] = mass(lo[c, t], hi[c, t], sigma[c], p * side, (p + 1) * side, table, per_unit)


@kernel
def prior_cost(cells, lo, hi, sigma, places, width, table, per_unit, log2):
    """Cost of counted tokens, rows of (context, token, count), under a prior; in bits / 256."""
    total = np.int64(0)
    side = width / places
    for i in range(cells.shape[0]):
        c, p, t = cells[i, 0] // places, cells[i, 0] % places, cells[i, 1]
        f = mass(lo[c, t], hi[c, t], sigma[c], p * side, (p + 1) * side, table, per_unit)
        total += cells[i, 2] * log2[min(f, U32(65535))]
    return total


@kernel
def rebuild(counts, prior_, tokens, gain, entries, lut, lut_bits):
    """entries[row * tokens + t] = start << 16 | frequency, which is at least 1; lut: the first token of a bucket."""
    for c in range(counts.size // tokens):
        base = c * tokens
        total = U64(0)
        for t in range(base, base + tokens):
            total += U64(counts[t]) * U64(gain) + U64(prior_[t])
        best, largest, left = base, U64(0), U64(65536)
        for t in range(base, base + tokens):
            v = U64(counts[t]) * U64(gain) + U64(prior_[t])
            f = U64(prior_[t] > 0) + v * U64(65536 - tokens) // total  # none for tokens that a row does not have
            entries[t] = U32(f)
            left -= f
            if v > largest:
                best, largest = t, v
        entries[best] += U32(left)
        start, bucket = U32(0), U32(0)
        for t in range(base, base + tokens):
            f = entries[t]
            entries[t] = U32((start << U32(16)) | f)
            start += f
            while bucket < U32(1 << lut_bits) and (bucket << U32(16 - lut_bits)) < start:
                lut[(c << lut_bits) + bucket] = U8(t - base)
                bucket += U32(1)


# rANS: 64-bit states, 32-bit words, 16-bit frequencies; element i belongs to lane i % lanes


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
def coded(x, entry):
    """The state after a symbol: x // f * 2**16 + x % f + start, for its frequency f."""
    f = U64(entry & U32(0xFFFF))
    return x + x // f * (U64(65536) - f) + U64(entry >> U32(16))


@kernel
def full(x, entry):
    """1 if the state must give up a word before the symbol, else 0."""
    return U64(x >= U64(entry & U32(0xFFFF)) << U64(47))


@kernel
def rans_encode(symbols, states, words):
    """Last element first, from states of 2**31; words are filled from the end. Returns the index of the first word."""
    at, i, lanes = U64(words.size), U64(symbols.size), U64(states.size)
    while i and (i % U64(4) or lanes == U64(1)):
        i -= U64(1)
        x, e = states[i % lanes], symbols[i]
        out = full(x, e)
        words[at - U64(1)] = U32(x)
        at -= out
        states[i % lanes] = coded(x >> (out << U64(5)), e)
    if i == U64(0):
        return np.int64(at)
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    while i:
        i -= U64(4)
        e0, e1, e2, e3 = symbols[i], symbols[i + U64(1)], symbols[i + U64(2)], symbols[i + U64(3)]
        o0, o1, o2, o3 = full(x0, e0), full(x1, e1), full(x2, e2), full(x3, e3)
        # A word is written in any case and stays if `at` moves: no branch to mispredict.
        words[at - U64(1)] = U32(x3)
        at -= o3
        words[at - U64(1)] = U32(x2)
        at -= o2
        words[at - U64(1)] = U32(x1)
        at -= o1
        words[at - U64(1)] = U32(x0)
        at -= o0
        x0, x1 = coded(x0 >> (o0 << U64(5)), e0), coded(x1 >> (o1 << U64(5)), e1)
        x2, x3 = coded(x2 >> (o2 << U64(5)), e2), coded(x3 >> (o3 << U64(5)), e3)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    return np.int64(at)


@kernel
def beyond(slot, entry):
    return slot - (entry >> U32(16)) >= (entry & U32(0xFFFF))


@kernel
def before(x, slot, entry):
    """The state before the symbol that `slot`, the low 16 bits of x, belongs to."""
    return U64(entry & U32(0xFFFF)) * (x >> U64(16)) + U64(slot - (entry >> U32(16)))


# Helpers above take scalars only: an array passed to one would be reference-counted for every element.


@kernel
def rans_decode(states, words, at, ctx, row, tokens, entries, lut, lut_bits, counts, count, tok):
    """Tokens of the next elements, the first of which is in lane 0. Returns the next word, beyond the end if short.

    The last four words must be padding.
    """
    at, i, n = U64(at), U64(0), U64(tok.size)
    end, lanes, tokens = U64(words.size - 4), U64(states.size), U64(tokens)
    low, bits, right = U64(LOW), U64(lut_bits), U32(16 - lut_bits)
    x0, x1, x2, x3 = states[0], states[U64(1) % lanes], states[U64(2) % lanes], states[U64(3) % lanes]
    while lanes == U64(4) and i + U64(4) <= n and at <= end:
        r0, r1 = U64(row[ctx[i] & U16(0xFF)]), U64(row[ctx[i + U64(1)] & U16(0xFF)])
        r2, r3 = U64(row[ctx[i + U64(2)] & U16(0xFF)]), U64(row[ctx[i + U64(3)] & U16(0xFF)])
        s0, s1, s2, s3 = U32(x0 & U64(0xFFFF)), U32(x1 & U64(0xFFFF)), U32(x2 & U64(0xFFFF)), U32(x3 & U64(0xFFFF))
        t0, t1 = r0 * tokens + lut[(r0 << bits) + (s0 >> right)], r1 * tokens + lut[(r1 << bits) + (s1 >> right)]
        t2, t3 = r2 * tokens + lut[(r2 << bits) + (s2 >> right)], r3 * tokens + lut[(r3 << bits) + (s3 >> right)]
        e0, e1, e2, e3 = entries[t0], entries[t1], entries[t2], entries[t3]
        while beyond(s0, e0):
            t0 += U64(1)
            e0 = entries[t0]
        while beyond(s1, e1):
            t1 += U64(1)
            e1 = entries[t1]
        while beyond(s2, e2):
            t2 += U64(1)
            e2 = entries[t2]
        while beyond(s3, e3):
            t3 += U64(1)
            e3 = entries[t3]
        x0, x1, x2, x3 = before(x0, s0, e0), before(x1, s1, e1), before(x2, s2, e2), before(x3, s3, e3)
        if x0 < low:
            x0 = (x0 << U64(32)) | U64(words[at])
            at += U64(1)
        if x1 < low:
            x1 = (x1 << U64(32)) | U64(words[at])
            at += U64(1)
        if x2 < low:
            x2 = (x2 << U64(32)) | U64(words[at])
            at += U64(1)
        if x3 < low:
            x3 = (x3 << U64(32)) | U64(words[at])
            at += U64(1)
        tok[i], tok[i + U64(1)] = U8(t0 - r0 * tokens), U8(t1 - r1 * tokens)
        tok[i + U64(2)], tok[i + U64(3)] = U8(t2 - r2 * tokens), U8(t3 - r3 * tokens)
        if count:
            counts[t0] += U32(1)
            counts[t1] += U32(1)
            counts[t2] += U32(1)
            counts[t3] += U32(1)
        i += U64(4)
    if lanes == U64(4):
        states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    while i < n and at <= end:
        r, x = U64(row[ctx[i] & U16(0xFF)]), states[i % lanes]
        s = U32(x & U64(0xFFFF))
        t = r * tokens + lut[(r << bits) + (s >> right)]
        while beyond(s, entries[t]):
            t += U64(1)
        x = before(x, s, entries[t])
        if x < low:
            x = (x << U64(32)) | U64(words[at])
            at += U64(1)
        states[i % lanes] = x
        tok[i] = U8(t - r * tokens)
        if count:
            counts[t] += U32(1)
        i += U64(1)
    return np.int64(at)
