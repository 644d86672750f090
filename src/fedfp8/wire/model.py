"""What the coder expects before it has seen anything: how likely each step from the prediction is.

The sender's weight is the reference plus an update. If updates have scale sigma, the chance that the code moves by d is
the mass of the update distribution on one cell of the grid, seen from where the reference lies in its own cell. Two
bytes a tensor, shape and scale, therefore give all tables at once; counts then correct them (`rans.rebuild`).

Steps become tokens: 0, +1, -1, +2, ... up to 7 each on its own, then ranges (8-11, 12-15, 16-23, ... 240-255) with
extra bits, then an escape that sends the value itself.

Everything here is made of sums, products and roundings of float64 in a fixed order: the same bits on every machine.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from fedfp8.fp8.format import Format
from fedfp8.wire import kernels

__all__ = [
    "BUCKET",
    "EXTRA",
    "LOW",
    "SCALES",
    "SHAPES",
    "TOKENS",
    "Costs",
    "Intervals",
    "costs_of",
    "intervals_of",
    "narrow_of",
    "prior_of",
    "sigma_of",
]

LOW = np.array([*range(8), 8, 12, *range(16, 128, 8), *range(128, 256, 16)], dtype=np.int64)  # smallest step of a token
EXTRA = np.array([0] * 8 + [2, 2] + [3] * 14 + [4] * 8, dtype=np.int64)  # its extra bits
TOKENS = 2 * len(LOW)  # token 2k-1 is +LOW[k], 2k is -LOW[k], the last one the escape
STEPS = 1 << 8  # steps of this size or more escape
BUCKET = np.repeat(np.arange(len(LOW)), 1 << EXTRA)  # |step| -> k
PLACES = 16  # in a cell
NARROW = 0.5  # cells; see `narrow_of`
SCALES = range(72, 248)  # of the byte that says sigma: quarter octaves, 128 = one (smallest) cell
QUARTERS = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)  # 2**(i/4)
PER_UNIT = 512  # entries of a shape's table per sigma
LENGTH = 16 * PER_UNIT


@dataclass(frozen=True)
class Intervals:
    """Per class of predictions: the interval of each token, in cells from the lower end of the predicted one."""

    lo: np.ndarray  # [class, token]
    hi: np.ndarray
    cell: np.ndarray  # size of the class's own cell, in smallest cells
    width: float  # of the part of the cell that the places divide


@lru_cache(maxsize=64)
def intervals_of(format: Format | None) -> Intervals:
    """A float format's (up to 16 classes by exponent), or for None the uniform grid (3 classes of |reference|).

    On the uniform grid contexts are folded: the places divide the half of the cell that is nearer to an end.
    """
    if format is None:
        return _intervals(np.tile(np.arange(-STEPS, STEPS + 1.0), (3, 1)), np.ones(3), 0.5)
    e, m = format.exponent_bits, format.mantissa_bits
    values = format.grid().numpy()[: 2 ** (e + m)] / format.grid()[1].item()
    values = np.concatenate([-values[:0:-1], values])  # by rank: the magnitude's code with the sign
    far = np.full(STEPS + 2, 2.0**40)
    ends = np.concatenate([-far, (values[1:] + values[:-1]) / 2, far])
    classes = min(2**e, 16)
    position, cell = np.zeros((classes, 2 * STEPS + 1)), np.zeros(classes)
    for c in range(classes):
        exponent = c + 2**e - classes
        at = STEPS + 2 ** (e + m) + (exponent << m) + (1 << m >> 1)  # lower end of the middle mantissa's cell
        cell[c] = 2.0 ** max(exponent - 1, 0)
        position[c] = (ends[at - STEPS : at + STEPS + 1] - ends[at]) / cell[c]
    return _intervals(position, cell, 1.0)


def _intervals(position: np.ndarray, cell: np.ndarray, width: float) -> Intervals:
    """position[class, STEPS + d] is the lower end of the cell d steps away."""
    lo, hi = np.zeros((2, len(position), TOKENS))
    for k, (first, count) in enumerate(zip(LOW, 1 << EXTRA, strict=True)):
        for token, start in ((2 * k, 1 - first - count), (max(2 * k - 1, 0), first)):
            lo[:, token], hi[:, token] = position[:, STEPS + start], position[:, STEPS + start + count]
    return Intervals(lo, hi, cell, width)


@lru_cache(maxsize=1024)
def narrow_of(format: Format | None, scale: int) -> np.ndarray:
    """For each context, whether updates are so much smaller than its cell that large steps just escape.

    A token that never comes still takes a 2**16th: where hardly anything moves, forty of them would show.
    """
    intervals, narrow = intervals_of(format), np.zeros(256, dtype=np.bool_)
    narrow[: PLACES * len(intervals.cell)] = np.repeat(sigma_of(intervals, scale) < NARROW, PLACES)
    return narrow


def prior_of(format: Format | None, shape: int, scale: int) -> tuple[np.ndarray, np.ndarray]:
    """(prior[row, token] of about 2**16 a row, row of each context).

    The wider the updates, the less the place in the cell says: places are pooled so that a pool is at most a third of
    sigma wide.
    """
    intervals = intervals_of(format)
    sigma = sigma_of(intervals, scale)
    places = np.full(len(sigma), PLACES, dtype=np.int64)
    for bound in (0.375, 0.75, 1.5, 3.0):
        places[sigma >= bound * 2 * intervals.width] //= 2
    first = np.concatenate([[0], np.cumsum(places)])
    row = np.zeros(256, dtype=np.uint8)
    for c, count in enumerate(places):
        row[c * PLACES : (c + 1) * PLACES] = first[c] + np.arange(PLACES) * count // PLACES
    prior = np.empty((first[-1], TOKENS), dtype=np.uint32)
    kernels.prior(intervals.lo, intervals.hi, sigma, first, places, intervals.width, SHAPES[shape], PER_UNIT, prior)
    narrow = np.repeat(sigma < NARROW, places)
    prior[narrow, 2 * kernels.SINGLE - 1 : TOKENS - 1] = 0
    return prior, row


class Costs:
    """table[shape, scale - SCALES[0], context * TOKENS + token]: the cost under a prior, in 1/256 bits.

    Made where a search looks, and kept for other tensors and rounds: up to 32 KB a shape and scale, some 50 of them.
    """

    def __init__(self, format: Format | None) -> None:
        self.intervals = intervals_of(format)
        self.places = np.full(len(self.intervals.cell), PLACES, dtype=np.int64)
        self.table = np.zeros((len(SHAPES), len(SCALES), PLACES * len(self.places) * TOKENS), np.uint16)
        self.made = np.zeros(self.table.shape[:2], np.bool_)

    def make(self, number: int) -> None:
        """The table number shape * len(SCALES) + scale - SCALES[0]. Threads that make the same make it equal."""
        shape, at = divmod(number, len(SCALES))
        intervals, prior = self.intervals, np.empty((PLACES * len(self.places), TOKENS), dtype=np.uint32)
        sigma, first = sigma_of(intervals, SCALES[at]), PLACES * np.arange(len(self.places))
        lo, hi, width = intervals.lo, intervals.hi, intervals.width
        kernels.prior(lo, hi, sigma, first, self.places, width, SHAPES[shape], PER_UNIT, prior)
        self.table[shape, at] = LOG2[np.minimum(prior, 65535)].reshape(-1)
        self.made[shape, at] = True


@lru_cache(maxsize=16)
def costs_of(format: Format | None) -> Costs:
    return Costs(format)


def sigma_of(intervals: Intervals, scale: int) -> np.ndarray:
    """The updates' scale in cells, for each class."""
    octave, quarter = divmod(scale - 128, 4)
    return QUARTERS[quarter] * 2.0**octave / intervals.cell


# Shapes of the update distribution: mass(z) is the probability of [0, z]; tables hold its integral (`kernels.area`)


def _gauss() -> np.ndarray:
    mass, ratio = [0.0], 1.0
    for i in range(LENGTH):
        mass.append(mass[-1] + ratio)
        d = (i + 1) / PER_UNIT / PER_UNIT
        ratio *= 1 - d + d * d / 2  # exp(-d)
    return np.array(mass) / (2 * mass[-1])


def _laplace(rate: float) -> np.ndarray:
    left = [1.0]
    for _ in range(LENGTH):
        left.append(left[-1] * (1 - rate / PER_UNIT))
    return (1 - np.array(left)) / 2


def _area(mass: np.ndarray) -> np.ndarray:
    total = [0.0]
    for a, b in pairwise(mass.tolist()):
        total.append(total[-1] + (a + b) / 2)
    return np.array(total) / PER_UNIT


def _shapes() -> tuple[np.ndarray, ...]:
    wide = _laplace(0.5)
    peaked, spiked = (_laplace(6.0) + wide) / 2, _laplace(24.0) * 0.75 + wide * 0.25
    return tuple(_area(mass) for mass in (_gauss(), _laplace(1.4142135623730951), peaked, spiked))


SHAPES = _shapes()


# Logarithms, to compare costs when shape and scale are chosen


def _log2_table() -> np.ndarray:
    """-log2(f / 2**16) in 1/256 bits for f of 16 bits, from integers alone (the top 9 bits of f)."""
    fraction = []
    for top in range(256, 512):
        x, bits = top << 24, 0  # in [2**32, 2**33): its square decides the next bit of the logarithm
        for _ in range(8):
            x = x * x >> 32
            bits = bits << 1 | x >> 33
            x >>= x >> 33
        fraction.append(bits)
    table = np.zeros(1 << 16, np.int64)
    for f in range(1, 1 << 16):
        exponent = f.bit_length() - 1
        table[f] = (16 - exponent) * 256 - fraction[((f << 16) >> exponent >> 8) - 256]
    table[0] = table[1]
    return table


LOG2 = _log2_table()
