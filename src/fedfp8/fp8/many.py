"""Kernels over many small tensors in one call: a model of hundreds of them pays for the call once.

Tensors are on the CPU, contiguous, and held by the caller: the kernels are given their addresses. Results are those of
the functions for one tensor, bit for bit. Large tensors gain nothing here and have threads there (`batches`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from fedfp8.fp8.parallel import Keys
from fedfp8.fp8.quantizers import DITHER_LIMIT

__all__ = ["batches", "dither_many", "hashed_sum_many", "largest_many", "rms_many", "undither_many"]

BATCH = 1 << 17  # elements that are handled together, at most; a larger tensor is a batch of its own
T = TypeVar("T")


def batches(items: Sequence[T], size: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """`items` in order, as many at a time as have at most BATCH elements together, and at least one."""
    start, total = 0, 0
    for end, item in enumerate(items):
        if end > start and total + size(item) > BATCH:
            yield items[start:end]
            start, total = end, 0
        total += size(item)
    if items:
        yield items[start:]


def dither_many(tensors: Sequence[torch.Tensor], steps: Sequence[float], keys: Sequence[Keys]) -> list[torch.Tensor]:
    """`dither` of each, flat; none at all if one cannot be: `dither` says which and why."""
    from fedfp8.fp8 import kernels

    found = _flat_like(tensors, torch.int32)
    per_step = np.array([1.0 / step for step in steps]).astype(np.float32)
    given = _addresses(tensors), _addresses(found), _sizes(tensors), per_step, np.array(keys)
    return [] if kernels.dither_many(*given, np.float32(DITHER_LIMIT)) else found


def undither_many(codes: Sequence[torch.Tensor], steps: Sequence[float], keys: Sequence[Keys]) -> list[torch.Tensor]:
    """`undither` of each, flat."""
    from fedfp8.fp8 import kernels

    found = _flat_like(codes, torch.float32)
    given = _addresses(codes), _addresses(found), _sizes(codes), np.array(steps, np.float32), np.array(keys)
    kernels.undither_many(*given)
    return found


def rms_many(tensors: Sequence[torch.Tensor]) -> list[float]:
    """`rms` of each."""
    from fedfp8.fp8 import kernels

    sizes = _sizes(tensors)
    ends = np.cumsum(np.maximum(-(-sizes // kernels.CHUNK), 1))
    partial = np.zeros(int(ends[-1]))
    kernels.sum_of_squares_many(_addresses(tensors), sizes, ends, partial)
    sums = np.split(partial, ends[:-1]) if len(partial) > len(sizes) else partial[:, None]
    return [math.sqrt(math.fsum(one) / max(size, 1)) for one, size in zip(sums, sizes.tolist(), strict=True)]


def largest_many(tensors: Sequence[torch.Tensor]) -> list[float]:
    """`largest` of each."""
    from fedfp8.fp8 import kernels

    top = np.zeros(len(tensors), np.uint32)
    kernels.largest_bits_many(_addresses(tensors), _sizes(tensors), top)
    return top.view(np.float32).tolist()


def hashed_sum_many(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Of each, a 64-bit number that stands for its bytes: found at the speed of memory, no proof against forgery."""
    from fedfp8.fp8 import kernels

    sums = np.zeros(len(tensors), np.uint64)
    kernels.hashed_sum_many(_addresses(tensors), np.array([tensor.nbytes for tensor in tensors], np.int64), sums)
    return sums


def _addresses(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return np.array([tensor.data_ptr() for tensor in tensors], np.int64)


def _sizes(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return np.array([tensor.numel() for tensor in tensors], np.int64)


def _flat_like(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty(tensor.numel(), dtype=dtype) for tensor in tensors]
