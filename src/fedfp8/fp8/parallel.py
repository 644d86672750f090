"""Run a kernel over pieces of flat arrays, on as many threads as ``torch.get_num_threads()`` says.

Pieces start at multiples of a power of two not smaller than their length, so that an element's index inside a piece and
the start of the piece combine by exclusive or: the dice of a piece are those of the whole tensor with the start put
into the key, for any number of threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import index
from typing import Any

import numpy as np
import torch

__all__ = ["Keys", "dice_keys", "run"]

Keys = tuple[np.uint32, np.uint32]
SMALLEST_PIECE = 1 << 17  # below this a thread costs more than it saves
_pools: dict[int, ThreadPoolExecutor] = {}  # by process id: threads do not survive a fork


def dice_keys(seed: int) -> Keys:
    """The two 32-bit keys of a 64-bit seed (the finaliser of SplitMix64, so that close seeds give unrelated keys)."""
    mask = 2**64 - 1
    z = (index(seed) + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return np.uint32(z & 0xFFFFFFFF), np.uint32(z >> 32)


def _pieces(n: int) -> list[tuple[int, int]]:
    threads = torch.get_num_threads()
    if threads == 1 or n < 2 * SMALLEST_PIECE:
        return [(0, n)]
    length = max(SMALLEST_PIECE, 1 << (-(-n // threads) - 1).bit_length())
    if threads > 2 and length > SMALLEST_PIECE:
        length //= 2  # more pieces than threads: the last, short one does not leave a thread idle for long
    return [(start, min(start + length, n)) for start in range(0, n, length)]


def run(
    kernel: Callable[..., Any],
    arrays: tuple[np.ndarray, ...],
    constants: tuple[Any, ...],
    keys: Keys | None = None,
    partial: np.ndarray | None = None,
    chunk: int = 1,
) -> list[Any]:
    """``kernel(*arrays, [partial,] *constants, [key0, key1])`` over all pieces; returns what the calls returned.

    `partial` holds one number per `chunk` elements and is cut along; `chunk` divides every piece's start.
    """
    n = arrays[0].size

    def one(piece: tuple[int, int]) -> Any:
        start, stop = piece
        cut = arrays if stop - start == n else tuple(a[start:stop] for a in arrays)
        sums = () if partial is None else (partial[start // chunk : -(-stop // chunk)],)
        dice = () if keys is None else (np.uint32(keys[0] ^ np.uint32(start)), keys[1])
        return kernel(*cut, *sums, *constants, *dice)

    if n >= 2**32:
        raise ValueError(f"a tensor of {n} elements; the dice are indexed with 32 bits: split it below 2**32 elements")
    pieces = _pieces(n)
    if len(pieces) == 1:
        return [one(pieces[0])]
    pool = _pools.get(os.getpid())
    if pool is None:
        _pools.clear()
        pool = _pools[os.getpid()] = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fedfp8")
    return list(pool.map(one, pieces))
