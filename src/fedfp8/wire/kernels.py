"""Numba kernels of the entropy coder: predictions and contexts, tokens, tables and rANS, over pieces of a tensor.

Everything is integer arithmetic, or IEEE float32 and float64 in a fixed order, so both ends agree on every machine. The
decoding kernels trust nothing: an index that comes from the data is checked before it is used.
"""

import numpy as np
from numba import njit

from fedfp8.fp8.intrinsics import binade, centred, code_of, poison, snap, uniform

F = np.float32
I32, U8, U16, U32, U64 = np.int32, np.uint8, np.uint16, np.uint32, np.uint64
FLIP = 0x8000  # bit of a context: the step is coded with its sign turned
BUCKETS = 64  # of a table's look-up: slot >> 10 -> the first token to try
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


# Tokens: 0 is no step, then +1, -1, +2, -2 ...; large steps share tokens and send their low bits; the last one escapes


@kernel
def tokenise(values, pred, ctx, shift, bucket, low, extra, tok, bits, state):
    """Steps as tokens; extra bits are appended to `bits`, whose write position (in bits) is state[0]."""
    escape = U8(2 * low.size - 1)
    for i in range(values.size):
        d = np.int64(values[i]) - np.int64(pred[i])
        if ctx[i] & FLIP:
            d = -d
        h = d >> shift
        m = abs(h)
        if m >= bucket.size:
            tok[i] = escape
            put(bits, state, np.int64(U32(values[i])), 32)
            continue
        k = bucket[m]
        tok[i] = U8(2 * k - 1) if h > 0 else U8(2 * k)
        if extra[k]:
            put(bits, state, m - low[k], extra[k])
        if shift:
            put(bits, state, d & ((1 << shift) - 1), shift)


@kernel
def put(bits, state, value, count):
    at = state[0]
    for j in range(count):
        bits[(at + j) >> 3] |= U8(((value >> j) & 1) << ((at + j) & 7))
    state[0] = at + count


@kernel
def get(bits, state, count):
    """The next bits, or -1 past the end."""
    at = state[0]
    if at + count > bits.size * 8:
        return np.int64(-1)
    value = np.int64(0)
    for j in range(count):
        value |= np.int64((bits[(at + j) >> 3] >> ((at + j) & 7)) & 1) << j
    state[0] = at + count
    return value


@kernel
def detokenise(tok, pred, ctx, shift, low, extra, bits, state, lowest, highest, values):
    """The inverse; False if the data cannot be a tensor's: bits missing, or a value out of [lowest, highest]."""
    escape = 2 * low.size - 1
    for i in range(tok.size):
        t = np.int64(tok[i])
        if t == 0 and shift == 0:
            values[i] = pred[i]
            continue
        if t >= escape:
            v = get(bits, state, 32)
            if v < 0:
                return False
            value = np.int64(I32(U32(v)))
        else:
            k = (t + 1) >> 1
            m = np.int64(low[k])
            if extra[k]:
                more = get(bits, state, np.int64(extra[k]))
                if more < 0:
                    return False
                m += more
            d = m if t & 1 else -m
            if shift:
                more = get(bits, state, shift)
                if more < 0:
                    return False
                d = (d << shift) + more
            value = np.int64(pred[i]) + (-d if ctx[i] & FLIP else d)
        if value < lowest or value > highest:
            return False
        values[i] = I32(value)
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
    """out[first[class] + place, token]: its probability, of 2**16."""
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
def rebuild(counts, prior_, gain, cum, lut):
    """cum[c, t] = frequency of tokens below t, each at least 1; lut[c, slot >> 10] = a token not above the slot's."""
    tokens = counts.shape[1]
    for c in range(counts.shape[0]):
        total = U64(0)
        for t in range(tokens):
            total += U64(counts[c, t]) * U64(gain) + U64(prior_[c, t])
        best, largest, used = 0, U64(0), U64(0)
        for t in range(tokens):
            v = U64(counts[c, t]) * U64(gain) + U64(prior_[c, t])
            f = U64(1) + v * U64(65536 - tokens) // total
            cum[c, t + 1] = U32(f)
            used += f
            if v > largest:
                best, largest = t, v
        cum[c, best + 1] += U32(U64(65536) - used)
        at = U32(0)
        cum[c, 0] = at
        for t in range(tokens):
            at += cum[c, t + 1]
            cum[c, t + 1] = at
        t = 0
        for k in range(BUCKETS):
            while cum[c, t + 1] <= U32(k << 10):
                t += 1
            lut[c, k] = U8(t)


# rANS: 64-bit states, 32-bit words, 16-bit frequencies; element i belongs to lane i % lanes


@kernel
def look_up(tok, ctx, row, cum, counts, out):
    """start << 16 | frequency of every token, counting them."""
    for i in range(tok.size):
        c = row[ctx[i] & 0xFF]
        t = tok[i]
        counts[c, t] += U32(1)
        s = cum[c, t]
        out[i] = U32((s << U32(16)) | (cum[c, t + 1] - s))


@kernel
def rans_encode(symbols, lanes, states, words):
    """Last element first; words are filled from the end. Returns the index of the first word."""
    at = words.size
    for j in range(lanes):
        states[j] = U64(LOW)
    for i in range(symbols.size - 1, -1, -1):
        x = states[i & (lanes - 1)]
        f = U64(symbols[i] & U32(0xFFFF))
        if x >= (f << U64(47)):
            at -= 1
            words[at] = U32(x & U64(0xFFFFFFFF))
            x >>= U64(32)
        q = x // f
        states[i & (lanes - 1)] = (q << U64(16)) + (x - q * f) + U64(symbols[i] >> U32(16))
    return at


@kernel
def rans_decode(lanes, states, words, at, ctx, row, cum, lut, counts, tok):
    """Tokens of the next elements, the first of which belongs to lane 0. Returns the next word, -1 if there is none."""
    for i in range(tok.size):
        x = states[i & (lanes - 1)]
        c = row[ctx[i] & 0xFF]
        slot = U32(x & U64(0xFFFF))
        t = np.int64(lut[c, slot >> U32(10)])
        while cum[c, t + 1] <= slot:
            t += 1
        s = cum[c, t]
        x = U64(cum[c, t + 1] - s) * (x >> U64(16)) + U64(slot - s)
        if x < U64(LOW):
            if at >= words.size:
                return np.int64(-1)
            x = (x << U64(32)) | U64(words[at])
            at += 1
        states[i & (lanes - 1)] = x
        counts[c, t] += U32(1)
        tok[i] = U8(t)
    return np.int64(at)
