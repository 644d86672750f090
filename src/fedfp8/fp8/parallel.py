"""Run a kernel over pieces of flat arrays, on as many threads as ``torch.get_num_threads()`` says.

The random bits of an element are a hash of key + WEYL * index: a piece that begins at `start` gets
``key + WEYL * start``, so its elements have the random bits they have in the whole tensor, for any number of threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
import torch

from fedfp8.errors import QuantizationError

__all__ = ["STRATA_MAX", "WEYL", "Keys", "dither_keys", "random_keys", "run"]

Keys = tuple[np.uint32, ...]  # two of the hash, and for dither the turn
STRATA_MAX = 256
WEYL = 0x9E3779B9  # 2**32 / golden ratio, odd: without it elements 16, 1024, 4096 apart were visibly dependent
SMALLEST_PIECE = 1 << 17  # below this a thread costs more than it saves
ALIGNED = 1 << 15  # elements; the `chunk` of every kernel that sums divides it
_pools: dict[int, ThreadPoolExecutor] = {}  # by process id: threads do not survive a fork


def random_keys(seed: int) -> Keys:
    """The two 32-bit keys of a 64-bit seed (the finaliser of SplitMix64, so that close seeds give unrelated keys)."""
    mask = 2**64 - 1
    z = (index(seed) + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return np.uint32(z & 0xFFFFFFFF), np.uint32(z >> 32)


@lru_cache(maxsize=4096)
def dither_keys(seed: int, place: int = 0, strata: int = 1) -> Keys:
    """The keys of `dither`: those of the seed, and the turn, place / strata of a cell, that is added to the hash."""
    if not (1 <= index(strata) <= STRATA_MAX and 0 <= index(place) < strata):
        raise QuantizationError(
            f"place {place} of {strata} strata; strata go from 1 to {STRATA_MAX} and places from 0 to strata - 1"
        )
    return *random_keys(seed), np.uint32(place * (2**32 // strata))


def _pieces(n: int) -> list[tuple[int, int]]:
    """Equal shares of n elements, a multiple of ALIGNED long, so that partial sums are the same for every number."""
    count = 1 if n < 2 * SMALLEST_PIECE else min(torch.get_num_threads(), n // SMALLEST_PIECE)
    if count == 1:
        return [(0, n)]
    length = -(-n // (count * ALIGNED)) * ALIGNED
    return [(start, min(start + length, n)) for start in range(0, n, length)]


def run(
    kernel: Callable[..., Any],
    arrays: tuple[np.ndarray, ...],
    constants: tuple[Any, ...],
    keys: Keys | None = None,
    partial: np.ndarray | None = None,
    chunk: int = 1,
) -> list[Any]:
    """``kernel(*arrays, [partial,] *constants, *keys)`` over all pieces; returns what the calls returned.

    `partial` holds one number per `chunk` elements and is cut along.
    """
    n = arrays[0].size
    if n >= 2**32:
        raise ValueError(f"a tensor of {n} elements; random bits have a 32-bit index: split it below 2**32 elements")
    pieces = _pieces(n)
    if len(pieces) == 1:
        sums = () if partial is None else (partial,)
        return [kernel(*arrays, *sums, *constants, *(keys or ()))]

    def one(piece: tuple[int, int]) -> Any:
        start, stop = piece
        cut = tuple(a[start:stop] for a in arrays)
        sums = () if partial is None else (partial[start // chunk : -(-stop // chunk)],)
        moved = () if keys is None else (np.uint32((int(keys[0]) + WEYL * start) % 2**32), *keys[1:])
        return kernel(*cut, *sums, *constants, *moved)

    pool = _pools.get(os.getpid())
    if pool is None:
        _pools.clear()
        pool = _pools[os.getpid()] = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fedfp8")
    return list(pool.map(one, pieces))
