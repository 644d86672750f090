"""A slow second opinion on the FP8 numerics, written from the paper's formulas alone. Used by tests only.

Nothing here shares code with `kernels`, `eager`, `quantize` or even `Format`: a format is its two numbers (e, m), the
grid is a sorted list searched by bisection, and arithmetic is float64 (exact for float32 inputs on the standard grid).

A *position* is x on the standard grid, x * top / alpha. The fast code computes it in float32 with two roundings, so it
may take the other neighbour where a position lies closer than `POSITION_ERROR` (relative) to the middle of two values.
"""

import numpy as np

__all__ = [
    "POSITION_ERROR",
    "VALUE_ERROR",
    "between",
    "decode",
    "dither",
    "encode",
    "gradients",
    "magnitudes",
    "near_tie",
    "paper_quantize",
    "position",
    "top",
    "undither",
    "uniforms",
]

# fl(x * fl(top / alpha)): two roundings of 2**-24 each; 2**-47 covers their product and the float64 arithmetic here.
POSITION_ERROR = 2.0**-23 + 2.0**-47
# fl(v * fl(alpha / top)): the same for a value on the way back.
VALUE_ERROR = 2.0**-23 + 2.0**-47


def magnitudes(e: int, m: int) -> np.ndarray:
    """The non-negative values of the standard grid in ascending order; the index is the code."""
    bias = 2 ** (e - 1) - 1
    subnormal = [2.0 ** (1 - bias) * (j / 2**m) for j in range(2**m)]
    normal = [2.0 ** (p - bias) * (1 + j / 2**m) for p in range(1, 2**e) for j in range(2**m)]
    return np.array(subnormal + normal)


def top(e: int, m: int) -> float:
    return float(magnitudes(e, m)[-1])


def position(x: np.ndarray, alpha: float, e: int, m: int) -> np.ndarray:
    return np.asarray(x, np.float64) * (top(e, m) / alpha)


def between(t: np.ndarray, e: int, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of the magnitudes around |t| (clipped to the grid), and where |t| lies between them, 0 <= f < 1."""
    grid = magnitudes(e, m)
    a = np.minimum(np.abs(t), grid[-1])
    lower = np.searchsorted(grid, a, side="right") - 1
    upper = np.minimum(lower + 1, len(grid) - 1)
    gap = np.where(upper > lower, grid[upper] - grid[lower], 1.0)
    return lower, upper, (a - grid[lower]) / gap


def encode(t: np.ndarray, e: int, m: int) -> np.ndarray:
    """Codes of positions t rounded to nearest, a tie to the even multiple of the step (as the paper's round(x / s))."""
    grid = magnitudes(e, m)
    lower, upper, f = between(t, e, m)
    step = np.where(upper > lower, grid[upper] - grid[lower], 1.0)
    odd = (grid[lower] / step) % 2 == 1
    code = np.where((f > 0.5) | ((f == 0.5) & odd), upper, lower)
    return np.where((t < 0) & (code > 0), code + 2 ** (e + m), code).astype(np.uint8)


def near_tie(t: np.ndarray, e: int, m: int) -> np.ndarray:
    """Where the float32 position may fall on the other side of the middle between two grid values."""
    grid = magnitudes(e, m)
    lower, upper, _ = between(t, e, m)
    middle = (grid[lower] + grid[upper]) / 2
    return (upper > lower) & (np.abs(np.abs(t) - middle) <= POSITION_ERROR * np.abs(t))


def decode(codes: np.ndarray, alpha: float, e: int, m: int) -> np.ndarray:
    """Values of codes on the grid that ends at alpha."""
    sign_bit = 2 ** (e + m)
    value = magnitudes(e, m)[codes & (sign_bit - 1)] * (alpha / top(e, m))
    return np.where(codes & sign_bit, -value, value)


def paper_quantize(x: np.ndarray, alpha: float, e: int, m: int) -> np.ndarray:
    """Q_det of section 3.3 letter by letter, with its real-valued bias b: leaves the grid by float64 ulps."""
    b = 2**e - np.log2(alpha) + np.log2(2 - 2.0**-m) - 1
    with np.errstate(divide="ignore"):
        level = np.floor(np.log2(np.abs(x)) + b)
    p = np.where(level > 1, level, 1) - b - m
    s = 2.0**p
    return np.where(x <= -alpha, -alpha, np.where(x >= alpha, alpha, s * np.round(x / s)))


def gradients(x: np.ndarray, q: np.ndarray, g: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """dL/dx and the terms of dL/dalpha, element by element (docs/numerics.md), for upstream gradients g."""
    inside, tie = np.abs(x) < alpha, np.abs(x) == alpha
    keep = np.where(inside, 1.0, np.where(tie, 0.5, 0.0))
    to_alpha = np.where(inside, (q - x) / alpha, np.where(tie, 0.5, 1.0) * np.sign(x))
    return g * keep, g * to_alpha


def uniforms(seed: int, n: int, place: int = 0, strata: int = 1) -> np.ndarray:
    """u of elements 0 .. n-1, from the formulas of docs/numerics.md in Python's integers."""
    word, wide = 2**32, 2**64
    z = (seed + 0x9E3779B97F4A7C15) % wide
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % wide
    z = (z ^ z >> 27) * 0x94D049BB133111EB % wide
    key1, key0 = divmod(z ^ z >> 31, word)
    found = []
    for i in range(n):
        h = (0x9E3779B9 * i + key0) % word
        h = (h ^ h >> 16) * 0x7FEB352D % word
        h = (h ^ h >> 15 ^ key1) * 0x846CA68B % word
        h = (h + place * (word // strata)) % word
        signed = h - word if h >= word // 2 else h
        found.append(0.5 + signed // 2**9 / 2**23)
    return np.array(found)


def dither(x: np.ndarray, step: float, u: np.ndarray) -> np.ndarray:
    """floor(x / step + u) with the roundings to float32 that the format prescribes."""
    y = (np.asarray(x, np.float64) * float(np.float32(1.0 / step))).astype(np.float32)
    return np.floor((y.astype(np.float64) + u).astype(np.float32)).astype(np.int32)


def undither(k: np.ndarray, step: float, u: np.ndarray) -> np.ndarray:
    centre = (k.astype(np.float32).astype(np.float64) + (0.5 - u)).astype(np.float32)
    return (centre.astype(np.float64) * step).astype(np.float32)
