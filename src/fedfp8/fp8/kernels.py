"""Numba kernels behind the FP8 numerics: flat float32 arrays in, flat arrays out, one pass, no temporaries.

Rounding uses no ``log2`` (the textbook formula picks the wrong binade for floats next to a power of two). With
y = x * (top / alpha) on the standard grid, the exponent bits of y give its binade b = 2**floor(log2|y|), the step there
is s = b / 2**m, and adding and subtracting c = 1.5 * 2**23 * s rounds y to a multiple of s, ties to even:

    c = max(binade(y), smallest normal) * (1.5 * 2**(23 - m))        # subnormals share the lowest binade
    q = (y + c) - c

Stochastic rounding adds s * (u - 1/2) first, with u from a hash of (seed, index). The noise is a hair (`grid.py`) short
of half a step, so that grid values stay what they are and the largest is never passed. All of it is plain IEEE float32
arithmetic in a fixed order, so results are equal on every machine, for every number of threads, and to the torch
version in `eager.py`. Only sums may be taken in another order (`plus`).

The random bits: a Weyl sequence in the index, then two rounds of multiply and xorshift, a 32-bit key before each;
a bijection of the index. Read as a signed number h they are the noise of stochastic rounding, h / 2**32 of a step;
dither has u = 1/2 + floor(h / 2**9) / 2**23, after a turn (place / strata of 2**32) has been added to h modulo 2**32.
"""

import numpy as np
from numba import carray, njit

from fedfp8.fp8.intrinsics import (
    binade,
    centred,
    code_of,
    following,
    half_minus_uniform,
    hashed,
    plus,
    pointer,
    poison,
    snap,
    uniform,
    value_of,
    value_of_wide,
)

F = np.float32
HALF = F(0.5)
TWO = F(2.0)
CHUNK = 1 << 15  # elements per partial sum
STRIP = 1 << 9  # of them whose squares are made at a time
TILE = 1 << 8  # blocks that are transformed at a time

kernel = njit(nogil=True, cache=True, error_model="numpy")


# The constants scale_in ... sign_shift that every kernel takes are fields of `grid.Grid`. Where there are random bits,
# element i of the array uses hash(WEYL * i + key0, key1): a caller with a piece of a tensor puts its start into key0.


@kernel
def quantize(x, out, scale_in, scale_out, top, lowest, magic):
    for i in range(x.size):
        y = min(max(x[i] * scale_in, -top), top)
        out[i] = snap(y, max(binade(y), lowest) * magic) * scale_out


@kernel
def quantize_stochastic(x, out, scale_in, scale_out, top, lowest, magic, spread, key0, key1):
    for i in range(x.size):
        y = min(max(x[i] * scale_in, -top), top)
        b = max(binade(y), lowest)
        y = y + centred(0, key0, key1) * (b * spread)
        key0 = following(key0)
        out[i] = snap(y, b * magic) * scale_out


@kernel
def to_codes(x, out, scale_in, top, lowest, magic, shift, offset, sign_shift):
    """Returns non-zero if x held NaN or Inf; the same for the kernels below that return something."""
    bad = np.uint32(0)
    for i in range(x.size):
        bad = np.uint32(bad | poison(x[i]))
        y = min(max(x[i] * scale_in, -top), top)
        b = max(binade(y), lowest)
        out[i] = code_of(y, b, b * magic, shift, offset, sign_shift)
    return bad


@kernel
def to_codes_stochastic(x, out, scale_in, top, lowest, magic, spread, shift, offset, sign_shift, key0, key1):
    bad = np.uint32(0)
    for i in range(x.size):
        bad = np.uint32(bad | poison(x[i]))
        y = min(max(x[i] * scale_in, -top), top)
        b = max(binade(y), lowest)
        y = y + centred(0, key0, key1) * (b * spread)
        key0 = following(key0)
        out[i] = code_of(y, b, b * magic, shift, offset, sign_shift)
    return bad


@kernel
def from_codes(codes, out, scale, left, right, mask):
    for i in range(codes.size):
        out[i] = value_of(codes[i], left, right, mask) * scale


@kernel
def from_codes_wide(codes, out, scale_out, lowest, shift, offset, sign_shift):
    for i in range(codes.size):
        out[i] = value_of_wide(codes[i], shift, offset, lowest, sign_shift) * scale_out


@kernel
def dither(x, out, per_step, limit, key0, key1, turn):
    """Returns non-zero if an element is not finite or |x| / step exceeds `limit`."""
    bad = False
    for i in range(x.size):
        y = x[i] * per_step
        bad |= not (abs(y) <= limit)
        out[i] = np.int32(np.floor(y + uniform(0, key0, key1, turn)))
        key0 = following(key0)
    return bad


@kernel
def undither(k, out, step, key0, key1, turn):
    for i in range(k.size):
        out[i] = (F(k[i]) + half_minus_uniform(0, key0, key1, turn)) * step
        key0 = following(key0)


@kernel
def dither_and_back(x, out, per_step, limit, step, key0, key1, turn):
    """`undither` of `dither`, without the integers; returns what `dither` does."""
    bad = False
    for i in range(x.size):
        y = x[i] * per_step
        bad |= not (abs(y) <= limit)
        k = np.floor(y + uniform(0, key0, key1, turn))
        out[i] = (k + half_minus_uniform(0, key0, key1, turn)) * step
        key0 = following(key0)
    return bad


@kernel
def uniforms(out, key0, key1, turn):
    for i in range(out.size):
        out[i] = uniform(0, key0, key1, turn)
        key0 = following(key0)


# Sums: `partial` gets one float64 per CHUNK elements, so that the total does not depend on the number of threads.


@kernel
def fake_quantize_backward(x, g, gx, partial, alpha, scale_in, scale_out, top, lowest, magic):
    """gx = dL/dx; partial sums of dL/dalpha: (q-x)/alpha inside, sign(x) outside, halves on the edge."""
    for chunk in range(partial.size):
        lo, hi = chunk * CHUNK, min((chunk + 1) * CHUNK, x.size)
        x_, g_, gx_ = (
            x[lo:hi],
            g[lo:hi],
            gx[lo:hi],
        )  # slices from 0 let the loop vectorise without index checks
        inside, outside = F(0), F(0)
        for i in range(x_.size):
            xi, gi = x_[i], g_[i]
            y = min(max(xi * scale_in, -top), top)
            q = snap(y, max(binade(y), lowest) * magic) * scale_out
            a = abs(xi)
            keep = HALF * F(a < alpha) + HALF * F(a <= alpha)
            gx_[i] = gi * keep
            inside = plus(inside, gi * (q - min(max(xi, -alpha), alpha)) * F(a < alpha))  # clipped: Inf is 0, NaN stays
            outside = plus(outside, gi * np.copysign(F(1) - keep, xi))
        partial[chunk] = np.float64(inside) / np.float64(alpha) + np.float64(outside)


@kernel
def fake_quantize_backward_stochastic(
    x, g, gx, partial, alpha, scale_in, scale_out, top, lowest, magic, spread, key0, key1
):
    for chunk in range(partial.size):
        lo, hi = chunk * CHUNK, min((chunk + 1) * CHUNK, x.size)
        x_, g_, gx_ = (
            x[lo:hi],
            g[lo:hi],
            gx[lo:hi],
        )  # slices from 0 let the loop vectorise without index checks
        inside, outside = F(0), F(0)
        for i in range(x_.size):
            xi, gi = x_[i], g_[i]
            y = min(max(xi * scale_in, -top), top)
            b = max(binade(y), lowest)
            y = y + centred(lo + i, key0, key1) * (b * spread)
            q = snap(y, b * magic) * scale_out
            a = abs(xi)
            keep = HALF * F(a < alpha) + HALF * F(a <= alpha)
            gx_[i] = gi * keep
            inside = plus(inside, gi * (q - min(max(xi, -alpha), alpha)) * F(a < alpha))  # clipped: Inf is 0, NaN stays
            outside = plus(outside, gi * np.copysign(F(1) - keep, xi))
        partial[chunk] = np.float64(inside) / np.float64(alpha) + np.float64(outside)


@kernel
def error_nearest(w, target, partial, scale_in, scale_out, top, lowest, magic):
    for chunk in range(partial.size):
        lo, hi = chunk * CHUNK, min((chunk + 1) * CHUNK, w.size)
        w_, target_ = w[lo:hi], target[lo:hi]  # slices from 0 let the loop vectorise without index checks
        total = F(0)
        for i in range(w_.size):
            y = min(max(w_[i] * scale_in, -top), top)
            d = snap(y, max(binade(y), lowest) * magic) * scale_out - target_[i]
            total = plus(total, d * d)
        partial[chunk] = np.float64(total)


@kernel
def error_expected(w, target, partial, scale_in, scale_out, top, lowest, magic, per_level):
    """Expectation over the random bits: (clip(w) - t)**2 + s**2 f (1 - f), f the place between the two neighbours."""
    for chunk in range(partial.size):
        lo, hi = chunk * CHUNK, min((chunk + 1) * CHUNK, w.size)
        w_, target_ = w[lo:hi], target[lo:hi]  # slices from 0 let the loop vectorise without index checks
        clipped, rounding = F(0), F(0)
        for i in range(w_.size):
            y = min(max(w_[i] * scale_in, -top), top)
            b = max(binade(y), lowest)
            d = abs(y - snap(y, b * magic))
            rounding = plus(rounding, d * (b * per_level - d))
            e = y * scale_out - target_[i]
            clipped = plus(clipped, e * e)
        partial[chunk] = np.float64(clipped) + np.float64(rounding) * np.float64(scale_out) ** 2


@kernel
def error_stochastic(w, target, partial, scale_in, scale_out, top, lowest, magic, spread, key0, key1):
    for chunk in range(partial.size):
        lo, hi = chunk * CHUNK, min((chunk + 1) * CHUNK, w.size)
        w_, target_ = w[lo:hi], target[lo:hi]  # slices from 0 let the loop vectorise without index checks
        total = F(0)
        for i in range(w_.size):
            y = min(max(w_[i] * scale_in, -top), top)
            b = max(binade(y), lowest)
            y = y + centred(lo + i, key0, key1) * (b * spread)
            d = snap(y, b * magic) * scale_out - target_[i]
            total = plus(total, d * d)
        partial[chunk] = np.float64(total)


@kernel
def server_step(w, target, out, alpha, rate, scale_in, scale_out, top, lowest, magic, spread, key0, key1):
    """One straight-through gradient step on ||Q_rand(w) - target||**2 (the paper's equation 7)."""
    for i in range(w.size):
        y = min(max(w[i] * scale_in, -top), top)
        b = max(binade(y), lowest)
        y = y + centred(0, key0, key1) * (b * spread)
        key0 = following(key0)
        q = snap(y, b * magic) * scale_out
        out[i] = w[i] - rate * (TWO * (q - target[i])) * F(abs(w[i]) <= alpha)


@kernel
def sum_of_squares(x, partial):
    """In float64 and strictly in order: equal on every machine, since step sizes are made from it.

    Four chunks at a time, since each addition of a sum waits for the one before; squares are made in vectors first.
    """
    fours, squares = x.size // (4 * CHUNK), np.empty((4, STRIP))
    for four in range(fours):
        group = x[4 * four * CHUNK :]
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        for start in range(0, CHUNK, STRIP):
            for k in range(4):
                part, row = group[k * CHUNK + start : k * CHUNK + start + STRIP], squares[k]
                for i in range(STRIP):
                    row[i] = np.float64(part[i]) * np.float64(part[i])
            for i in range(STRIP):
                a, b, c, d = a + squares[0, i], b + squares[1, i], c + squares[2, i], d + squares[3, i]
        partial[4 * four], partial[4 * four + 1], partial[4 * four + 2], partial[4 * four + 3] = a, b, c, d
    for chunk in range(4 * fours, partial.size):
        total = 0.0
        for value in x[chunk * CHUNK : (chunk + 1) * CHUNK]:
            total += np.float64(value) * np.float64(value)
        partial[chunk] = total


@kernel
def largest_bits(x):
    """Of the float32 bits in x without their signs: those of the largest magnitude, above those of Inf for a NaN."""
    top = np.uint32(0)
    for i in range(x.size):
        top = max(top, np.uint32(x[i] & np.uint32(0x7FFFFFFF)))
    return top


@kernel
def hashed_sum(words):
    """Sum of word times a hash of its index, modulo 2**64: in any order, at the speed of memory.

    Hashes of indices below 2**32 differ, and only that of the last one is 0: no change of a word, and no exchange of
    two, leaves the sum as it was.
    """
    total, key = np.uint64(0), np.uint32(0)
    at = key
    for i in range(words.size):
        at = following(at)
        total += np.uint64(hashed(0, at, key)) * np.uint64(words[i])
    return total


@kernel
def add_weighted(total, x, weight):
    """total += weight * x in float64."""
    for i in range(x.size):
        total[i] += weight * np.float64(x[i])


@kernel
def narrow(k, out):
    """int32 to the narrower integers of `out`; False if they do not fit."""
    bad = np.int32(0)
    for i in range(k.size):
        out[i] = k[i]
        bad |= k[i] ^ np.int32(out[i])
    return bad == 0


# Many tensors in one call (`many.py`), by their addresses. keys: two of the hash and the turn, of each.


@kernel
def dither_many(sources, targets, sizes, per_step, keys, limit):
    bad = False
    for i in range(sizes.size):
        x = carray(pointer(sources[i]), sizes[i], np.float32)
        out = carray(pointer(targets[i]), sizes[i], np.int32)
        bad |= dither(x, out, per_step[i], limit, keys[i, 0], keys[i, 1], keys[i, 2])
    return bad


@kernel
def undither_many(sources, targets, sizes, steps, keys):
    for i in range(sizes.size):
        k = carray(pointer(sources[i]), sizes[i], np.int32)
        out = carray(pointer(targets[i]), sizes[i], np.float32)
        undither(k, out, steps[i], keys[i, 0], keys[i, 1], keys[i, 2])


@kernel
def sum_of_squares_many(sources, sizes, ends, partial):
    """partial: of every tensor one number a CHUNK, up to its end."""
    start = 0
    for i in range(sizes.size):
        sum_of_squares(carray(pointer(sources[i]), sizes[i], np.float32), partial[start : ends[i]])
        start = ends[i]


@kernel
def largest_bits_many(sources, sizes, out):
    for i in range(sizes.size):
        out[i] = largest_bits(carray(pointer(sources[i]), sizes[i], np.uint32))


@kernel
def hashed_sum_many(sources, sizes, out):
    """sizes: in bytes; what is left of a last word counts as if zeros followed."""
    for i in range(sizes.size):
        raw = carray(pointer(sources[i]), sizes[i], np.uint8)
        words, rest = sizes[i] // 4, np.zeros(1, np.uint32)
        for j in range(sizes[i] - 4 * words):
            rest[0] |= np.uint32(raw[4 * words + j]) << np.uint32(8 * j)
        out[i] = hashed_sum(carray(pointer(sources[i]), words, np.uint32))
        out[i] += np.uint64(hashed(words + 1, np.uint32(0), np.uint32(0))) * np.uint64(rest[0])


@kernel
def to_frequencies(blocks, basis, out):
    """out[f, n] = sum_j basis[f, j] * blocks[n, j], some blocks at a time, each sum from the first to the last."""
    columns, sums = np.empty((blocks.shape[1], TILE), np.float32), np.empty(TILE, np.float32)
    for start in range(0, blocks.shape[0], TILE):
        size = min(TILE, blocks.shape[0] - start)
        for n in range(size):
            for j in range(blocks.shape[1]):
                columns[j, n] = blocks[start + n, j]
        for f in range(basis.shape[0]):
            mix(basis[f], columns, sums, size)
            out[f, start : start + size] = sums[:size]


@kernel
def from_frequencies(rows, basis, out):
    """out[n, j] = sum_f basis[f, j] * rows[f, n]: the inverse."""
    columns, sums = np.empty((rows.shape[0], TILE), np.float32), np.empty((basis.shape[1], TILE), np.float32)
    transposed = basis.T.copy()
    for start in range(0, rows.shape[1], TILE):
        size = min(TILE, rows.shape[1] - start)
        columns[:, :size] = rows[:, start : start + size]
        for j in range(basis.shape[1]):
            mix(transposed[j], columns, sums[j], size)
        for n in range(size):
            for j in range(basis.shape[1]):
                out[start + n, j] = sums[j, n]


@kernel
def mix(weights, rows, sums, size):
    """sums[n] = sum_j weights[j] * rows[j, n]: five at a time, so that a sum is read and written less often."""
    sums[:] = F(0.0)
    whole = weights.size - weights.size % 5
    for j in range(0, whole, 5):
        a, b, c, d, e = weights[j], weights[j + 1], weights[j + 2], weights[j + 3], weights[j + 4]
        p, q, r, s, t = rows[j], rows[j + 1], rows[j + 2], rows[j + 3], rows[j + 4]
        for n in range(size):
            sums[n] = ((((sums[n] + a * p[n]) + b * q[n]) + c * r[n]) + d * s[n]) + e * t[n]
    for j in range(whole, weights.size):
        weight, row = weights[j], rows[j]
        for n in range(size):
            sums[n] += weight * row[n]
