"""The kernels' arithmetic in plain torch operations, for devices and dtypes without a kernel; bit-equal to them.

Every function takes a flat float32 tensor on any device. Each line is one IEEE operation of the kernel, in its order.
"""

from typing import Any

import numpy as np
import torch

from fedfp8.fp8.grid import Grid
from fedfp8.fp8.parallel import WEYL, Keys

__all__ = ["centred", "dither", "from_codes", "quantize", "squared_error", "to_codes", "undither", "uniforms"]


def _number(x: Any) -> Any:
    """A numpy number as Python's; a tensor (`anydevice`) as it is."""
    return x.item() if isinstance(x, np.generic) else x


def _wrap(x: torch.Tensor) -> torch.Tensor:
    return x & 0xFFFFFFFF


def centred(n: int, keys: Keys, device: torch.device) -> torch.Tensor:
    """The random bits of elements 0 .. n-1 as signed 32-bit numbers: `intrinsics._hash` in int64, cut to 32 bits.

    A third key is the turn of `dither`.
    """
    h = _wrap(torch.arange(n, dtype=torch.int64, device=device) * WEYL + _number(keys[0]))
    h = _wrap((h ^ (h >> 16)) * 0x7FEB352D)
    h = _wrap((h ^ (h >> 15) ^ _number(keys[1])) * 0x846CA68B)
    return _wrap(h + sum(_number(turn) for turn in keys[2:])).to(torch.int32)


def uniforms(n: int, keys: Keys, device: torch.device) -> torch.Tensor:
    """u of elements 0 .. n-1 in [0, 1)."""
    return (centred(n, keys, device) >> 9).float() * 2.0**-23 + 0.5


def _binade(y: torch.Tensor, g: Grid) -> torch.Tensor:
    exponent = (y.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
    return exponent.clamp(min=float(g.lowest))


def _to_standard(x: torch.Tensor, g: Grid) -> torch.Tensor:
    return (x * _number(g.scale_in)).clamp(-float(g.top), float(g.top))


def _round(x: torch.Tensor, g: Grid, keys: Keys | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, b, c): value to be rounded on the standard grid, its binade and the magic constant."""
    y = _to_standard(x, g)
    b = _binade(y, g)
    if keys is not None:
        y = y + centred(x.numel(), keys, x.device).float() * (b * float(g.spread))
    return y, b, b * float(g.magic)


def quantize(x: torch.Tensor, g: Grid, keys: Keys | None) -> torch.Tensor:
    y, _, c = _round(x, g, keys)
    return ((y + c) - c) * _number(g.scale_out)


def to_codes(x: torch.Tensor, g: Grid, keys: Keys | None) -> torch.Tensor:
    y, b, c = _round(x, g, keys)
    count = (y + c).view(torch.int32) - c.view(torch.int32)
    magnitude = (b.view(torch.int32) >> int(g.shift)) - int(g.offset) + count.abs()
    sign_bit = 1 << int(g.sign_shift)
    return (magnitude + (count < 0) * sign_bit).to(torch.uint8)


def from_codes(codes: torch.Tensor, g: Grid) -> torch.Tensor:
    code = codes.to(torch.int32)
    sign = code >> int(g.sign_shift)
    one_up = ((code ^ (sign << int(g.sign_shift))) + int(g.offset)) << int(g.shift)
    normal = (one_up - (1 << 23)).view(torch.float32)
    value = torch.where(normal < float(g.lowest), one_up.view(torch.float32) - float(g.lowest), normal)
    return torch.where(sign == 1, -value, value) * float(g.scale_out)


def dither(x: torch.Tensor, per_step: float, keys: Keys) -> torch.Tensor:
    return torch.floor(x * per_step + uniforms(x.numel(), keys, x.device)).to(torch.int32)


def undither(k: torch.Tensor, step: float, keys: Keys) -> torch.Tensor:
    return (k.float() + (0.5 - uniforms(k.numel(), keys, k.device))) * step


def squared_error(w: torch.Tensor, target: torch.Tensor, g: Grid, rounding: str, keys: Keys | None) -> float:
    if rounding != "expected":
        return float((quantize(w, g, keys) - target).double().square().sum())
    y, b, c = _round(w, g, None)
    d = (y - ((y + c) - c)).abs()
    rounding_part = (d * (b * float(g.per_level) - d)).double().sum() * float(g.scale_out) ** 2
    return float((y * float(g.scale_out) - target).double().square().sum() + rounding_part)
