"""fedfp8: federated learning in 8-bit floating point.

Numerics (`quantize`, `to_codes`, ...), quantization-aware training (`prepare`), models as few bytes (`pack`, `unpack`),
and the federated method (`run`). Every room is imported when first used: reports and `--help` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedfp8.fp8 import (
        E3M4,
        E4M3,
        E5M2,
        Format,
        dither,
        fake_quantize,
        from_codes,
        quantize,
        to_codes,
        undither,
    )

__version__ = "0.1.0"
_NUMERICS = (
    "E3M4",
    "E4M3",
    "E5M2",
    "Format",
    "dither",
    "fake_quantize",
    "from_codes",
    "quantize",
    "to_codes",
    "undither",
)
_LAZY = dict.fromkeys(_NUMERICS, "fedfp8.fp8") | {
    "prepare": "fedfp8.nn",
    "parameter_groups": "fedfp8.nn",
    "pack": "fedfp8.packing",
    "unpack": "fedfp8.packing",
    "inspect": "fedfp8.wire",
    "ServerLink": "fedfp8.link",
    "ClientLink": "fedfp8.link",
    "LostReference": "fedfp8.errors",
    "average": "fedfp8.link",
    "run": "fedfp8.fl",
    "flower": "fedfp8.flower",
    "nvflare": "fedfp8.nvflare",
}
__all__ = [
    "E3M4",
    "E4M3",
    "E5M2",
    "ClientLink",
    "Format",
    "LostReference",
    "ServerLink",
    "average",
    "dither",
    "fake_quantize",
    "from_codes",
    "inspect",
    "pack",
    "parameter_groups",
    "prepare",
    "quantize",
    "run",
    "to_codes",
    "undither",
    "unpack",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fedfp8' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    value = globals()[name] = module if name in ("flower", "nvflare") else getattr(module, name)
    return value
