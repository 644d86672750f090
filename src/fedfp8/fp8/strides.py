"""From a tensor of any shape and strides to the flat arrays of a kernel, and back to a tensor like it.

Here too: whether there is a kernel at all. The environment variable FEDFP8_KERNELS, or `use_kernels` in a program,
sends CPU tensors the way of other devices: "0" in plain torch operations, "compiled" in fused ones, as a GPU would.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8.parallel import Keys, run

__all__ = ["flat", "has_kernel", "memory_order", "setting", "through", "use_kernels"]

SETTINGS = ("1", "0", "compiled")


def _checked(value: str) -> str:
    if value not in SETTINGS:
        raise QuantizationError(f"FEDFP8_KERNELS is {value!r}; it must be one of {', '.join(SETTINGS)}")
    return value


_setting = _checked(os.environ.get("FEDFP8_KERNELS", "1"))

LARGE = 1 << 21  # elements


def setting() -> str:
    """FEDFP8_KERNELS, or what `use_kernels` says."""
    return _setting


@contextmanager
def use_kernels(value: str) -> Iterator[None]:
    """Within this block, as if FEDFP8_KERNELS were `value`; for the whole process."""
    global _setting
    before, _setting = _setting, _checked(value)
    try:
        yield
    finally:
        _setting = before


def has_kernel(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    return x.is_cpu and x.dtype == dtype and _setting == "1"


def memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of x from the largest stride to the smallest."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: -strides[d])


def flat(x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """x in logical order as a flat tensor, and the way back to its shape and strides."""
    x = x.detach()
    return x.reshape(-1), lambda out: torch.empty_like(x, dtype=out.dtype).copy_(out.view(x.shape))


def through(
    kernel: Callable[..., Any],
    x: torch.Tensor,
    dtype: torch.dtype,
    constants: tuple[Any, ...],
    keys: Keys | None = None,
) -> tuple[torch.Tensor, bool]:
    """A kernel over x, into a new tensor with x's shape and strides; and whether any call returned non-zero.

    In memory order if x is dense and there are no random bits, else in logical order.
    """
    if x.requires_grad or x.is_neg():  # asked first: every view of a tensor costs a microsecond
        x = x.detach().resolve_neg()
    source = x
    if not x.is_contiguous() and not (keys is None and _is_dense(x)):
        source = x.contiguous()
    out = _empty_like(source, dtype)
    returned = run(kernel, (_memory(source), _memory(out)), constants, keys)
    if source is not x:
        out = torch.empty_like(x, dtype=dtype).copy_(out)
    return out, any(returned)


def _empty_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``torch.empty_like`` for a dense x; large results in huge pages, which numpy asks for and torch does not.

    Memory this large is new to the process each time: 64 MB are 32 page faults this way instead of 16384.
    """
    if x.numel() < LARGE:
        return torch.empty_like(x, dtype=dtype)
    size = x.numel() * dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return torch.from_numpy(room[start : start + size]).view(dtype).as_strided(x.shape, x.stride())


def _is_dense(x: torch.Tensor) -> bool:
    """Whether x fills its memory without gaps, in whatever order of dimensions (channels-last, transposed)."""
    return x.permute(memory_order(x)).is_contiguous()


def _memory(x: torch.Tensor) -> np.ndarray:
    """A dense tensor's elements as a flat array in memory order, no copy."""
    array: np.ndarray = x.numpy().reshape(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,)).numpy()
    return array
