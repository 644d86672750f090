"""Numba kernels that choose how steps are described: a sample's tokens are counted, and the cheapest table is found.

A few microseconds a tensor, all in one call: models of hundreds of small tensors spend their time here.
"""

import numpy as np

from fedfp8.wire.kernels import kernel, predict_uniform, reference_piece, tokenise, weighted

SPACING = 16  # of the scales that are looked at first


@kernel
def cheapest(counts, costs, made):
    """(table that is missing or -1, cost, shape, scale) for counts[context * tokens + token] of a sample.

    costs[shape, scale]: of every context and token, where made[shape, scale] says so. Coarse over scales, then finer
    for each shape.
    """
    index = np.flatnonzero(counts)
    count = counts[index].astype(np.int64)
    shapes, scales = made.shape
    start, lowest = 0, np.int64(2**62)
    for scale in range(0, scales, SPACING):
        if not made[0, scale]:
            return scale, np.int64(0), 0, 0
        cost = weighted(costs[0, scale], index, count)
        if cost < lowest:
            start, lowest = scale, cost
    total, best_shape = np.int64(2**62), 0
    for shape in range(shapes):
        if not made[shape, start]:
            return shape * scales + start, np.int64(0), 0, 0
        at, lowest = start, weighted(costs[shape, start], index, count)
        for move in (8, 4, 2, 1):
            centre = at
            for scale in (centre - move, centre + move):
                if not 0 <= scale < scales:
                    continue
                if not made[shape, scale]:
                    return shape * scales + scale, np.int64(0), 0, 0
                cost = weighted(costs[shape, scale], index, count)
                if cost < lowest or (cost == lowest and scale < at):
                    at, lowest = scale, cost
        if lowest < total:
            total, best_shape, start = lowest, shape, at
    return -1, total, best_shape, start


@kernel
def fit_uniform(reference, codes, starts, length, bucket, low, extra, costs, made, grid):
    """(missing or -1, bad, cost, shape, scale, shift, how many moved) of dithered codes.

    On `length` elements from each start on. cost: in 1/256 bits, extra bits included. bad: not 0 if the reference holds
    NaN or Inf.
    """
    n, tokens = starts.size * length, 2 * low.size
    values, pred, ctx = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.uint16)
    bad, room = np.uint32(0), np.zeros(length, np.float32)
    for span in range(starts.size):
        at, first = span * length, starts[span]
        ref = reference_piece(reference, first, first + length, room)
        bad |= predict_uniform(ref, first, pred[at : at + length], ctx[at : at + length], *grid)
        values[at : at + length] = codes[first : first + length]
    shift = _shift(values, pred)
    tok, bits, used = np.empty(n, np.uint8), np.empty(n // 2 + 2, np.uint64), np.zeros(1, np.int64)
    bits[0] = 0
    tokenise(values, pred, ctx, np.zeros(256, np.bool_), shift, bucket, low, extra, tok, bits, used)
    counts, moved = np.zeros(costs.shape[2], np.int32), 0
    for i in range(n):
        counts[(ctx[i] & np.uint16(0xFF)) * tokens + tok[i]] += 1
        moved += int(tok[i] > 0)
    missing, cost, shape, scale = cheapest(counts, costs, made)
    return missing, bad, cost + 256 * used[0], shape, scale, shift, moved


@kernel
def _shift(values, pred):
    """Low bits of every step that go as they are, so that half of the steps are below 32."""
    n, near = values.size, 0
    for i in range(n):
        near += int(abs(np.int64(values[i]) - np.int64(pred[i])) < 32)
    if near > n // 2:
        return 0
    steps = np.sort(np.abs(values.astype(np.int64) - pred.astype(np.int64)))
    median, shift = (steps[(n - 1) // 2] + steps[n // 2]) // 2, 0
    while median >> (shift + 5):
        shift += 1
    return shift
