"""Numba kernels that code a tensor of which little moved: how far it is to the next step that is not 0, and that step.

In a context the chance that an element moves is the same for all, whatever came before. So every element has a hazard,
-log2 of the chance that it stays, a small integer by its context; hazards add up along the tensor, and the sum at which
something moves next is distributed alike everywhere, 1 - 2**-sum. One rANS symbol says where that is: the stretch of
this curve that belongs to the element. Elements that stay cost an addition, and as many bits as they would if each had
a symbol of its own. Beyond LIMIT a symbol says "not yet", and the sum begins anew.

Numba's cache on disk looks at this file alone: after a change in `kernels.py` or `rans.py`, touch it.
"""

from math import isqrt
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedfp8.wire.fused import DONE, MISFIT, NOT_FINITE, SHORT
from fedfp8.wire.kernels import detokenise, kernel, predict_uniform, reference_piece, tokenise
from fedfp8.wire.rans import LOW, PADDING, before, beyond, coded, divided, full, rebuild, reciprocals
from fedfp8.wire.stream import FIRST_BLOCK, PIECE

I32, U8, U16, U32, U64 = np.int32, np.uint8, np.uint16, np.uint32, np.uint64
UNIT = 20  # a hazard of 1 << UNIT is one bit
SEGMENT = 16  # the curve is straight between sums that are multiples of 1 << SEGMENT, a sixteenth of a bit
LIMIT = 8 << UNIT
BITS = 30  # of the frequencies of gaps
SLOTS = 18  # so many that one in a hundred lie in another segment than the first of 2**SLOTS
STATES = 3  # two that gaps take in turn, and one of the steps: none waits for another
FROM = 1 << 14  # elements; in smaller tensors so many states would show
MOVED = np.uint64(1 << 63)  # marks a gap that a step follows
WINDOW = 32  # sums that the decoder compares at a time


def _curve() -> np.ndarray:
    """2**30 - floor(2**(30 - j / 16)) for the ends of the segments; the last one, which nothing reaches, is 2**30."""
    octave = [isqrt(isqrt(isqrt(isqrt(1 << 480 - j)))) for j in range(16)]
    ends = [(1 << BITS) - (octave[j % 16] >> j // 16) for j in range((LIMIT >> SEGMENT) + 1)]
    return np.array([*ends, 1 << BITS], np.uint64)


def _segments(curve: np.ndarray) -> np.ndarray:
    """The segment that the first of 2**SLOTS slots lies in."""
    slots = np.arange(1 << BITS - SLOTS, dtype=np.uint64) << np.uint64(SLOTS)
    return (np.searchsorted(curve, slots, side="right") - 1).astype(np.uint8)


CURVE = _curve()
SEGMENTS = _segments(CURVE)
PER_WIDTH = reciprocals(np.diff(CURVE))
NOT_YET = int(CURVE[-2])  # from this slot on a symbol says so


@kernel
def on_curve(total, curve):
    """Chance, of 2**30, that something has moved before the hazards add up to `total`, which is at most LIMIT."""
    segment, rest = total >> U64(SEGMENT), total & U64((1 << SEGMENT) - 1)
    return curve[segment] + ((curve[segment + U64(1)] - curve[segment]) * rest >> U64(SEGMENT))


@kernel
def first_beyond(slot, curve, segments):
    """The smallest sum at which the curve is above `slot`; LIMIT if there is none."""
    segment = U64(segments[slot >> U64(SLOTS)])
    while curve[segment + U64(1)] <= slot:
        segment += U64(1)
    if segment >= U64(LIMIT >> SEGMENT):
        return U64(LIMIT)
    width = curve[segment + U64(1)] - curve[segment]
    above = ((slot - curve[segment] + U64(1)) << U64(SEGMENT)) + width - U64(1)
    return (segment << U64(SEGMENT)) + divided(above, width, PER_WIDTH[segment])


@kernel
def hazard(moves, stays):
    """log2((moves + stays) / stays) in units of 2**-20, at least 1 and at most LIMIT; from integers alone."""
    x, bits = moves + stays, U64(0)
    while x >> U64(1) >= stays:
        stays <<= U64(1)
        bits += U64(1)
    if bits >= U64(8):
        return U32(LIMIT)
    while stays >> U64(30):
        x, stays = x >> U64(1), stays >> U64(1)
    y = min((x << U64(31)) // stays, U64(0xFFFFFFFF))  # from 2**31 on
    for _ in range(UNIT):
        y = y * y >> U64(31)
        bits <<= U64(1)
        if y >> U64(32):
            y >>= U64(1)
            bits |= U64(1)
    return max(U32(bits), U32(1))


@kernel
def rebuild_hazards(stays, row, seen, made, hazards):
    """Of every context, from the prior mass of staying, how many elements of each class were seen, and what moved.

    The random bits spread the elements of a class evenly over its places: nobody has to count those that stay.
    made: the tables of what moved (`Tables.parts`), as `rebuild` left them.
    """
    tokens, gain, counts, totals = made
    share = np.zeros(totals.size, np.uint64)  # in sixteenths
    for c in range(16 * seen.size):
        share[row[c]] += U64(seen[c >> 4])
    for r in range(totals.size):
        moved = U64(0)
        for t in range(r * tokens, (r + 1) * tokens):
            moved += U64(counts[t])
        still = share[r] >> U64(4)
        still = still - moved if still > moved else U64(0)
        share[r] = hazard(totals[r], still * U64(gain) + U64(stays[r]))
    for c in range(16 * seen.size):
        hazards[c] = U32(share[row[c]])


@kernel
def count_classes(ctx, seen):
    """Adds how many elements are of each class of |reference|."""
    levels, top = U32(0), U32(0)
    for i in range(ctx.size):
        level = U32(ctx[i] >> U16(4)) & U32(3)
        levels = U32(levels + level)
        top = U32(top + (level >> U32(1)))
    seen[0] += ctx.size + np.int64(top) - np.int64(levels)
    seen[1] += np.int64(levels) - 2 * np.int64(top)
    seen[2] += top


@kernel
def find(codes, pred, ctx, hazards, found):
    """Where codes differ from predictions, and the hazards up to there; without a branch. (how many, sum of all).

    Index and sum, which is below 2**40 in a piece, share a number: one addition and one store an element.
    """
    ahead = np.empty(256, np.uint64)
    for c in range(256):
        ahead[c] = U64(1 << 40) | U64(hazards[c])
    here, moved = U64(0), U64(0)
    for i in range(U64(codes.size)):
        found[moved] = here
        here += ahead[ctx[i] & U16(0xFF)]
        moved += U64(codes[i] != pred[i])
    return moved, here & U64((1 << 40) - 1)


@kernel
def encode(codes, reference, grid, narrow, buckets, stays, tables, gaps, steps, extra_bits, curve):
    """(what became of it, number of extra bits, of gaps, of steps)."""
    prior, row, tokens, gain, lut_bits, counts, totals, entries, lut = tables
    bucket, low, extra = buckets
    n = codes.size
    m = min(n, PIECE)
    room, pred, ctx, tok = np.zeros(m, np.float32), np.empty(m, np.int32), np.empty(m, np.uint16), np.empty(m, np.uint8)
    found, vs, ps, cs = np.empty(m + 1, np.uint64), np.empty(m, np.int32), np.empty(m, np.int32), np.empty(m, np.uint16)
    hazards, seen, used = np.zeros(256, np.uint32), np.zeros(3, np.int64), np.zeros(1, np.int64)
    rebuild_hazards(stays, row, seen, (tokens, gain, counts, totals), hazards)
    extra_bits[0] = 0
    total, start, end, limit = U64(0), 0, FIRST_BLOCK, U64(LIMIT)
    gap, step, not_yet = U64(0), U64(0), curve[-2] << U64(32) | (curve[-1] - curve[-2])
    while start < n:
        stop = min(start + PIECE, end, n)
        v, p, c = codes[start:stop], pred[: stop - start], ctx[: stop - start]
        if predict_uniform(reference_piece(reference, start, stop, room), start, p, c, *grid):
            return NOT_FINITE, 0, 0, 0
        moved, after = find(v, p, c, hazards, found)
        for i in range(moved):
            where = found[i] >> U64(40)
            vs[i], ps[i], cs[i] = v[where], p[where], c[where]
        tokenise(vs, ps, cs, narrow, 0, bucket, low, extra, tok[:moved], extra_bits, used)
        last = U64(0) - total  # where the last step was, in front of this piece
        for i in range(moved):
            context = U64(cs[i] & U16(0xFF))
            here = found[i] & U64((1 << 40) - 1)
            begin = here - last
            while begin >= limit:
                gaps[gap], begin, gap = not_yet, begin - limit, gap + U64(1)
            until = begin + U64(hazards[context])
            last = here + U64(hazards[context])
            below = on_curve(begin, curve)
            gaps[gap] = MOVED | below << U64(32) | (on_curve(min(until, limit), curve) - below)
            t = U64(row[context]) * U64(tokens) + U64(tok[i])
            steps[step] = entries[t]
            counts[t] += U32(1)
            gap, step = gap + U64(1), step + U64(1)
        total = after - last
        if end < n:
            count_classes(c, seen)
        if stop == end and end < n:
            rebuild(counts, prior, tokens, gain, totals, entries, lut, lut_bits)
            rebuild_hazards(stays, row, seen, (tokens, gain, counts, totals), hazards)
            end *= 2
        start = stop
    while total >= limit:
        gaps[gap], total, gap = not_yet, total - limit, gap + U64(1)
    below = on_curve(total, curve)
    gaps[gap] = below << U64(32) | (curve[-1] - below)
    return DONE, used[0], np.int64(gap) + 1, np.int64(step)


@kernel
def write(gaps, steps, reciprocals, states, words):
    """rANS of all symbols, last one first; words fill their array from its end. Returns the first index."""
    at, step = U64(words.size), U64(steps.size)
    x0 = x1 = x2 = U64(LOW)
    for i in range(gaps.size - 1, -1, -1):
        g = gaps[i]
        if g >> U64(63):
            step -= U64(1)
            e = steps[step]
            out = full(x2, e)
            words[at - U64(1)] = U32(x2)  # in any case; it stays if `at` moves
            at -= out
            x2 = coded(x2 >> U64(32) if out else x2, e, reciprocals[e & U32(0xFFFF)])
        f = g & U64(0xFFFFFFFF)
        out = U64(x0 >= f << U64(63 - BITS))
        words[at - U64(1)] = U32(x0)
        at -= out
        x0 = x0 >> U64(32) if out else x0
        q = x0 // f
        x0, x1 = x1, (q << U64(BITS)) + (x0 - q * f) + ((g >> U64(32)) & U64((1 << BITS) - 1))
    states[0], states[1], states[2] = x1, x0, x2
    return np.int64(at)


@intrinsic
def run_below(typingctx: Any, sums: Any, at: Any, base: Any, goal: Any) -> Any:
    """How many of the WINDOW sums from `at` on are less than `goal` beyond `base`, up to the first that is not.

    Modulo 2**32; in vectors, since the end of a walk from one to the next is a branch that nothing predicts.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, at, base, goal = args
        lanes, bits = ir.VectorType(ir.IntType(32), WINDOW), ir.IntType(WINDOW + 1)
        nothing, zeros = ir.Constant(lanes, ir.Undefined), ir.Constant(lanes, None)

        def everywhere(x: Any) -> Any:
            return builder.shuffle_vector(builder.insert_element(nothing, x, ir.IntType(32)(0)), nothing, zeros)

        data = context.make_array(signature.args[0])(context, builder, sums).data
        here = builder.load(builder.bitcast(builder.gep(data, [at]), lanes.as_pointer()), align=4)
        reached = builder.icmp_unsigned(">=", builder.sub(here, everywhere(base)), everywhere(goal))
        reached = builder.zext(builder.bitcast(reached, ir.IntType(WINDOW)), bits)
        first = builder.cttz(builder.or_(reached, bits(1 << WINDOW)), ir.IntType(1)(1))
        return builder.zext(first, ir.IntType(64))

    return types.uint64(sums, types.uint64, types.uint32, types.uint32), codegen


@kernel
def add_up(ctx, hazards, total, sums):
    """sums[i]: `total` and the hazards of the first i elements, modulo 2**32."""
    sums[0] = total
    for i in range(U64(ctx.size)):
        total += U64(hazards[ctx[i] & U16(0xFF)])
        sums[i + U64(1)] = total


@kernel
def refilled(x, word, at):
    """(the state, with a word more if it needs one; index of the next word)."""
    out = x < U64(LOW)
    return (x << U64(32)) | U64(word) if out else x, at + U64(out)


@kernel
def decode(codes, reference, grid, buckets, stays, tables, extra_bits, largest, states, words, curve, segments):
    """(what became of it, number of extra bits, index of the next word)."""
    prior, row, tokens, gain, lut_bits, counts, totals, entries, lut = tables
    low, extra = buckets
    n, last = codes.size, U64(words.size - PADDING)
    m = min(n, PIECE)
    room, ctx, tok = np.zeros(m, np.float32), np.empty(m, np.uint16), np.empty(m, np.uint8)
    sums, where, values = np.empty(m + 1 + WINDOW, np.uint32), np.empty(m, np.uint64), np.empty(m, np.int32)
    preds, cs = np.empty(m, np.int32), np.empty(m, np.uint16)
    hazards, seen, used = np.zeros(256, np.uint32), np.zeros(3, np.int64), np.zeros(1, np.int64)
    rebuild_hazards(stays, row, seen, (tokens, gain, counts, totals), hazards)
    mask, right, limit, rows = U64((1 << BITS) - 1), U64(16 - lut_bits), U64(LIMIT), U64(tokens)
    x0, x1, x2 = states[0], states[1], states[2]
    at, total = U64(0), U64(0)
    goal, next_goal = first_beyond(x0 & mask, curve, segments), first_beyond(x1 & mask, curve, segments)
    start, end = 0, FIRST_BLOCK
    while start < n:
        stop = min(start + PIECE, end, n)
        v, c = codes[start:stop], ctx[: stop - start]
        if predict_uniform(reference_piece(reference, start, stop, room), start, v, c, *grid):
            return NOT_FINITE, used[0], np.int64(at)
        add_up(c, hazards, total, sums)
        moved, i, size, base = U64(0), U64(0), U64(v.size), U32(0)
        while True:
            run = U64(WINDOW)
            while run == U64(WINDOW) and i <= size:
                run = run_below(sums, i, base, U32(goal))
                i += run
            if i > size:
                break
            slot, below, above = x0 & mask, U64(NOT_YET), U64(1 << BITS)
            if slot < below:
                until = U32(sums[i] - base)
                begin = max(I32(sums[i - U64(1)] - base), I32(0))  # after "not yet" it may lie before the base
                below, above = on_curve(U64(begin), curve), on_curve(min(U64(until), limit), curve)
                x, at = refilled((above - below) * (x0 >> U64(BITS)) + (slot - below), words[at], at)
                base = sums[i]
                where[moved], cs[moved] = i - U64(1), c[i - U64(1)]
                r = U64(row[c[i - U64(1)] & U16(0xFF)])
                s = U32(x2 & U64(0xFFFF))
                t = r * rows + U64(lut[(r << U64(lut_bits)) + (U64(s) >> right)])
                while beyond(s, entries[t]):
                    t += U64(1)
                tok[moved] = U8(t - r * rows)
                moved += U64(1)
                x2, at = refilled(before(x2, s, entries[t]), words[at], at)
                counts[t] += U32(1)
            else:
                base = U32(base + U32(LIMIT))
                x, at = refilled((above - below) * (x0 >> U64(BITS)) + (slot - below), words[at], at)
            if at > last:
                return SHORT, used[0], np.int64(at)
            x0, x1 = x1, x
            goal, next_goal = next_goal, first_beyond(x & mask, curve, segments)  # long before it is needed
        total = U64(U32(sums[size] - base))
        for j in range(moved):
            preds[j] = v[where[j]]
        found = values[:moved]
        if not detokenise(tok[:moved], preds, cs, 0, low, extra, extra_bits, used, largest, found):
            return MISFIT, used[0], np.int64(at)
        for j in range(moved):
            v[where[j]] = found[j]
        if end < n:
            count_classes(c, seen)
        if stop == end and end < n:
            rebuild(counts, prior, tokens, gain, totals, entries, lut, lut_bits)
            rebuild_hazards(stays, row, seen, (tokens, gain, counts, totals), hazards)
            end *= 2
        start = stop
    below = on_curve(total, curve)
    x0 = (curve[-1] - below) * (x0 >> U64(BITS)) + (x0 & mask) - below
    if x0 < U64(LOW):
        x0 = x0 << U64(32) | U64(words[at])
        at += U64(1)
    states[0], states[1], states[2] = x0, x1, x2
    return DONE, used[0], np.int64(at)
