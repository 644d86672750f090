"""fedfp8: federated learning in 8-bit floating point.

Numerics (`quantize`, `to_codes`, ...), quantization-aware training (`prepare`), models as few bytes (`pack`, `unpack`),
and the federated method (`run`). Every name is imported when first used: reports and `--help` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the table below once more, as type checkers and editors read it
    from fedfp8 import flower as flower
    from fedfp8 import nvflare as nvflare
    from fedfp8.errors import ConfigError as ConfigError
    from fedfp8.errors import DataError as DataError
    from fedfp8.errors import Fedfp8Error as Fedfp8Error
    from fedfp8.errors import LostReference as LostReference
    from fedfp8.errors import MissingPackage as MissingPackage
    from fedfp8.errors import QuantizationError as QuantizationError
    from fedfp8.errors import RunError as RunError
    from fedfp8.errors import WireFormatError as WireFormatError
    from fedfp8.fl import Config as Config
    from fedfp8.fl import History as History
    from fedfp8.fl import Metric as Metric
    from fedfp8.fl import Task as Task
    from fedfp8.fl import preset as preset
    from fedfp8.fl import resume as resume
    from fedfp8.fl.runs import run as run
    from fedfp8.fp8 import E3M4 as E3M4
    from fedfp8.fp8 import E4M3 as E4M3
    from fedfp8.fp8 import E5M2 as E5M2
    from fedfp8.fp8 import Format as Format
    from fedfp8.fp8 import dither as dither
    from fedfp8.fp8 import fake_quantize as fake_quantize
    from fedfp8.fp8 import from_codes as from_codes
    from fedfp8.fp8 import quantize as quantize
    from fedfp8.fp8 import to_codes as to_codes
    from fedfp8.fp8 import undither as undither
    from fedfp8.link import ClientLink as ClientLink
    from fedfp8.link import ServerLink as ServerLink
    from fedfp8.link import Wire as Wire
    from fedfp8.link import average as average
    from fedfp8.nn import parameter_groups as parameter_groups
    from fedfp8.nn import prepare as prepare
    from fedfp8.nn import restore as restore
    from fedfp8.packing import pack as pack
    from fedfp8.packing import unpack as unpack
    from fedfp8.wire import inspect as inspect

__version__ = "0.2.0.dev0"  # the only place; pyproject.toml reads it

_NAMES = {  # module: its public names
    "fedfp8.errors": "ConfigError DataError Fedfp8Error LostReference MissingPackage QuantizationError RunError "
    "WireFormatError",
    "fedfp8.fl": "Config History Metric Task preset resume run",
    "fedfp8.fp8": "E3M4 E4M3 E5M2 Format dither fake_quantize from_codes quantize to_codes undither",
    "fedfp8.link": "ClientLink ServerLink Wire average",
    "fedfp8.nn": "parameter_groups prepare restore",
    "fedfp8.packing": "pack unpack",
    "fedfp8.wire": "inspect",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("flower", "nvflare")  # modules that are public names themselves; each needs an extra
__all__ = sorted(_HOME)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})


if not TYPE_CHECKING:  # else a type checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"fedfp8.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'fedfp8' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value
