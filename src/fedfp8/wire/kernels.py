"""Numba kernels of the entropy coder over pieces of a tensor: predictions and contexts, tokens, priors.

Everything is integer arithmetic, or IEEE float32 and float64 in a fixed order, so both ends agree on every machine. The
decoding kernels trust nothing: an index that comes from the data is checked before it is used.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from fedfp8.fp8.intrinsics import I16, binade, centred, code_of, following, half_minus_uniform, poison, snap, uniform
from fedfp8.fp8.intrinsics import I32 as INT32
from fedfp8.fp8.parallel import WEYL

F = np.float32
I32, U8, U16, U32, U64 = np.int32, np.uint8, np.uint16, np.uint32, np.uint64
SINGLE = 8  # steps below this have tokens of their own
STRIP = 512  # elements that are looked at twice only if one of them needs it
FARTHEST = float(np.finfo(np.float32).max)
FLIP = 0x8000  # bit of a context: the step is coded with its sign turned

kernel = njit(nogil=True, cache=True, error_model="numpy")


# A mix of references, and the sums it is fitted with. Products of float32 numbers are exact in float64: a compiler that
# fuses them with the additions changes no bit.


@kernel
def mix(a, b, c, x, y, z, out):
    """x * a + y * b + z * c, added from the left in float64, cut to float32's range and rounded once."""
    for i in range(out.size):
        total = x * np.float64(a[i]) + y * np.float64(b[i]) + z * np.float64(c[i])
        out[i] = F(min(max(total, -FARTHEST), FARTHEST))


@kernel
def reference_piece(reference, start, stop, room):
    """A piece of a reference (`Reference.operands`): one tensor's values, a mix made in `room`, or none: its zeros."""
    a, b, c, x, y, z, count = reference
    if count == 1:
        return a[start:stop]
    out = room[: stop - start]
    if count:
        mix(a[start:stop], b[start:stop], c[start:stop], x, y, z, out)
    return out


@kernel
def products(a, b, c, count, codes, starts, length, step, key0, key1, turn, out):
    """out[i, j]: sum of the products of columns i and j, front to back, over `length` elements from each start on.

    The columns: `count` references, and what the receiver of dithered codes will have.
    """
    columns = np.empty((count + 1, length), np.float32)
    for start in starts:
        for i in range(length):
            columns[0, i], columns[1, i] = a[start + i], b[start + i]
            if count == 3:
                columns[2, i] = c[start + i]
            columns[count, i] = (F(codes[start + i]) + half_minus_uniform(start + i, key0, key1, turn)) * step
        for row in range(count + 1):
            for column in range(row, count + 1):
                total = out[row, column]
                for i in range(length):
                    total += np.float64(columns[row, i]) * np.float64(columns[column, i])
                out[row, column] = total


# Predictions: the reference on the new grid with the message's random bits, and the context of the step from there


@kernel
def predict_float(
    ref,
    start,
    pred,
    ctx,
    random,
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
    bad, key = U32(0), U32(U64(key0) + U64(WEYL) * U64(start))
    mantissa = I32(23) - I32(shift)
    largest = I32((1 << I32(sign_shift)) - 1)
    for i in range(ref.size):
        x = ref[i]
        bad = U32(bad | poison(x))
        y = min(max(x * scale_in, -top), top)
        b = max(binade(y), lowest)
        if random:
            y = y + centred(0, key, key1) * (b * spread)
        key = following(key)
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


@intrinsic
def uniform_context(typingctx: Any, place: Any, magnitude: Any, small: Any, large: Any) -> Any:
    """Class * 16 + place from the nearer end of the cell, and FLIP if that is the upper one; in 32 bits, for the lanes.

    place: from the lower end, in 32nds of the cell.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, magnitude, small, large = args
        place = builder.fptosi(place, INT32)  # 0 to 31; whatever it may be for NaN, the context stays below 48
        upper = builder.ashr(builder.shl(place, INT32(27)), INT32(31))  # its bit 4, in all bits
        place = builder.and_(builder.xor(place, upper), INT32(15))
        level = [builder.zext(builder.fcmp_ordered(">", magnitude, bound), INT32) for bound in (small, large)]
        found = builder.or_(place, builder.shl(builder.add(*level), INT32(4)))
        return builder.trunc(builder.or_(found, builder.and_(upper, INT32(FLIP))), I16)

    return types.uint16(types.float32, types.float32, types.float32, types.float32), codegen


@kernel
def predict_uniform(ref, start, pred, ctx, per_step, limit, small, large, key0, key1, turn):
    """pred = floor(ref / step + u). Context: class of |ref| * 16 + distance to the nearer end of the cell."""
    bad, key = U32(0), U32(U64(key0) + U64(WEYL) * U64(start))
    for i in range(ref.size):
        x = ref[i]
        bad = U32(bad | poison(x))
        y = min(max(x * per_step, -limit), limit) + uniform(0, key, key1, turn)
        key = following(key)
        floor = np.floor(y)
        pred[i] = I32(floor)
        ctx[i] = uniform_context((y - floor) * F(32), abs(x), small, large)
    return bad


# Tokens: 0 is no step, then +1, -1, +2, -2 ...; large steps share tokens and send their low bits; the last one escapes.
# Both directions go over a strip without branches for small steps, and again to look for the others if there are any.


@kernel
def tokenise(values, pred, ctx, narrow, shift, bucket, low, extra, tok, bits, state):
    """Steps as tokens; extra bits are appended to `bits`, whose write position (in bits) is state[0].

    The word that it is in must be 0 from there on; half a word an element and two more are room enough.
    """
    single, at = I32(SINGLE), U64(state[0])
    for start in range(0, tok.size, STRIP):
        count, large = min(STRIP, tok.size - start), I32(shift)
        for j in range(count):
            i = U64(start) + U64(j)
            d = I32(values[i] - pred[i])
            d = I32(-d) if ctx[i] & U16(FLIP) else d
            m = min(I32(abs(d)), single)
            tok[i] = U8(m + m - I32(d > 0))
            large |= I32(m == single)
        if large == 0:
            continue
        for j in range(count):
            i = U64(start) + U64(j)
            if shift == 0 and tok[i] < U8(2 * SINGLE - 1):
                continue
            step = np.int64(values[i]) - np.int64(pred[i])
            step = -step if ctx[i] & U16(FLIP) else step
            m = abs(step >> shift)
            if m < bucket.size and not (m >= SINGLE and narrow[ctx[i] & U16(0xFF)]):
                k = bucket[m]
                tok[i] = U8(2 * k - ((step >> shift) > 0))
                value = U64(((step & ((1 << shift) - 1)) << extra[k]) | (m - low[k]))
                many = U64(extra[k] + shift)
            else:
                tok[i] = U8(2 * low.size - 1)
                value, many = U64(values[i]) & U64(0xFFFFFFFF), U64(32)
            bits[at >> U64(6)] |= value << (at & U64(63))
            bits[(at >> U64(6)) + U64(1)] = (value >> U64(1)) >> (U64(63) - (at & U64(63)))
            at += many
    state[0] = np.int64(at)


@kernel
def detokenise(tok, pred, ctx, shift, low, extra, bits, state, largest, values):
    """The inverse; False if the data cannot be a tensor's: bits missing, or a value beyond +-largest."""
    at, end = U64(state[0]), U64((bits.size - 1) * 64)
    for start in range(0, tok.size, STRIP):
        count, bad, large = min(STRIP, tok.size - start), I32(0), I32(shift)
        for j in range(count):
            i = U64(start) + U64(j)
            t = I32(tok[i])
            m = (t + I32(1)) >> I32(1)
            m = m if ((t & I32(1)) != 0) != ((ctx[i] & U16(FLIP)) != 0) else I32(-m)
            values[i] = I32(pred[i] + m)
            single = t < I32(2 * SINGLE - 1)
            bad |= I32((abs(values[i]) > largest) & single)
            large |= I32(not single)
        if bad and shift == 0:
            return False
        if large == 0:
            continue
        for j in range(count):
            i = U64(start) + U64(j)
            if shift == 0 and tok[i] < U8(2 * SINGLE - 1):
                continue
            t = I32(tok[i])
            escape = t == 2 * low.size - 1
            k = min((t + 1) >> 1, low.size - 1)
            many = U64(32) if escape else U64(extra[k] + shift)
            if at + many > end:
                return False
            # 64 bits from `at` on; shifted in two parts since a shift by 64 is undefined
            more = (bits[at >> U64(6)] >> (at & U64(63))) | (
                (bits[(at >> U64(6)) + U64(1)] << U64(1)) << (U64(63) - (at & U64(63)))
            )
            more &= (U64(1) << many) - U64(1)
            at += many
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
    """Signed ranks of FP8 codes. The code of -0 has no rank of its own: `steps.has_ranks` asks first."""
    sign = I32(1) << I32(sign_shift)
    for i in range(codes.size):
        code = I32(codes[i])
        out[i] = code if code < sign else sign - code


@kernel
def from_ranks(rank, sign_shift, codes):
    sign = I32(1) << I32(sign_shift)
    for i in range(rank.size):
        codes[i] = U8(rank[i]) if rank[i] >= 0 else U8(sign - rank[i])


@kernel
def extremes(k):
    """(smallest, largest) of some integers and 0."""
    low, high = I32(0), I32(0)
    for i in range(k.size):
        low, high = I32(min(low, k[i])), I32(max(high, k[i]))  # without a widening, for the lanes
    return low, high


# Priors: tokens' probabilities from an update distribution


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
def weighted(costs, index, count):
    """What counted symbols cost together."""
    total = np.int64(0)
    for i in range(index.size):
        total += np.int64(costs[index[i]]) * count[i]
    return total
