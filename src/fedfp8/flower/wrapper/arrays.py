"""Between the arrays of any app and a `State`: what is coded, and how everything else travels bit for bit.

There is no model here, only names, shapes and numbers. Coded are floating-point arrays of two or more dimensions
(weights), or those whose names match a pattern. Everything else, biases, batch statistics, counters, travels as it is:
as integers of the same width, so that no bit changes whatever the dtype.

An FP8 code needs a range. A prepared model brings it along (``conv.alpha`` beside ``conv.weight``); for other arrays it
is max|w|, sent as one more number. In the layout a name gets a suffix where it does not stand for the array itself:

    conv.weight           coded
    conv.weight:range     max|w| of it, made here
    conv.alpha:float32    the range of a prepared layer
    bn.running_var:float32, bn.num_batches_tracked:int64    as they are, with the dtype to return to
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch

from fedfp8.errors import ConfigError, QuantizationError
from fedfp8.fp8 import E4M3, Format
from fedfp8.fp8.grid import ALPHA_MAX, ALPHA_MIN
from fedfp8.model.layout import FLOAT_DTYPES, Layout, TensorSpec
from fedfp8.model.state import ROUNDINGS, State

__all__ = ["Wire", "arrays_of", "ranges_of", "state_of_arrays"]

SMALL = 64  # fewer elements than this gain less than their step or range costs
BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by bytes an element
MADE = "range"

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Wire:
    """How one direction codes arrays."""

    rounding: str = "dithered"
    format: Format = E4M3
    coded: tuple[str, ...] = ()  # name patterns; empty: two or more dimensions, and not tiny

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise ConfigError(f"rounding {self.rounding!r}; choose one of {', '.join(ROUNDINGS)}")

    def codes(self, name: str, array: np.ndarray) -> bool:
        if self.rounding == "none" or str(array.dtype) not in FLOAT_DTYPES or not array.size:
            return False
        if self.coded:
            return any(fnmatchcase(name, pattern) for pattern in self.coded)
        return array.ndim >= 2 and array.size >= SMALL


def state_of_arrays(arrays: Arrays, wire: Wire, ranges: Mapping[str, float] | None = None) -> State:
    """The State of an app's arrays. ranges: for coded arrays, instead of what max|w| would give."""
    specs: list[TensorSpec] = []
    tensors: list[torch.Tensor] = []

    def add(spec: TensorSpec, values: np.ndarray) -> None:
        specs.append(spec)
        tensors.append(torch.from_numpy(values))

    alphas = {name: a for name in arrays if (a := _alpha_of(name, arrays, wire)) is not None}
    for name, array in arrays.items():
        shape, dtype = tuple(array.shape), str(array.dtype)
        if name in alphas.values():
            add(TensorSpec(f"{name}:{dtype}", (), "float32", "range"), _copy(array.reshape(()), "float32"))
        elif not wire.codes(name, array):
            add(TensorSpec(f"{name}:{dtype}", shape, _bits(name, array), "integer"), _as_bits(name, array))
        elif wire.rounding == "dithered":
            add(TensorSpec(name, shape, dtype, "float"), _copy(array, "float32"))
        else:
            own = f"{alphas[name]}:{arrays[alphas[name]].dtype}" if name in alphas else f"{name}:{MADE}"
            values = _copy(array, "float32")
            add(TensorSpec(name, shape, dtype, "fp8", wire.format, own), values)
            if name not in alphas:
                made = (ranges or {}).get(name) or float(np.abs(values).max()) or 1.0
                add(TensorSpec(own, (), "float32", "range"), np.array(max(made, ALPHA_MIN), np.float32))
    layout = Layout(tuple(specs))
    return State(layout, {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)})


def arrays_of(state: State) -> dict[str, np.ndarray]:
    """The inverse of `state_of_arrays`: names, order, shapes and dtypes as the app had them."""
    arrays: dict[str, np.ndarray] = {}
    for spec in state.layout:
        name, _, dtype = spec.name.rpartition(":") if spec.kind in ("integer", "range") else (spec.name, "", spec.dtype)
        values = state[spec.name].numpy()
        if spec.kind == "integer":
            arrays[name] = values.view(dtype)
        elif not (spec.kind == "range" and dtype == MADE):
            arrays[name] = values.astype(dtype, copy=False)
    return arrays


def ranges_of(state: State) -> dict[str, tuple[str, float]]:
    """coded name -> (name of its range in the app, or "" if it was made here; its value)"""
    found = {}
    for spec in state.layout:
        if spec.kind == "fp8" and spec.range is not None:
            own, _, dtype = spec.range.rpartition(":")
            found[spec.name] = ("" if dtype == MADE else own, float(state[spec.range]))
    return found


def _alpha_of(name: str, arrays: Arrays, wire: Wire) -> str | None:
    """The array that holds the range of `name`, if a prepared layer put one beside it (it has a ``beta`` as well)."""
    if wire.rounding not in ("nearest", "stochastic") or not wire.codes(name, arrays[name]):
        return None
    path, dot, last = name.rpartition(".")
    found = [arrays.get(f"{path}{dot}{r}") for r in ("alpha", "beta")]
    if last != "weight" or any(r is None or r.ndim or str(r.dtype) not in FLOAT_DTYPES for r in found):
        return None
    alpha = f"{path}{dot}alpha"
    if not ALPHA_MIN <= (value := float(arrays[alpha])) <= ALPHA_MAX:
        raise QuantizationError(
            f"range {alpha!r} is {value}; it must be positive and finite to code {name!r}. Keep the strategy from "
            "moving ranges below 0, or use wire='dq', which needs none"
        )
    return alpha


def _bits(name: str, array: np.ndarray) -> str:
    if array.dtype.kind not in "biufc" or array.dtype.itemsize not in BITS:
        raise QuantizationError(f"array {name!r} is {array.dtype}; numbers of at most 8 bytes can be sent")
    return BITS[array.dtype.itemsize]


def _as_bits(name: str, array: np.ndarray) -> np.ndarray:
    return np.array(array, order="C").view(_bits(name, array))


def _copy(array: np.ndarray, dtype: str) -> np.ndarray:
    return np.array(array, dtype=dtype, order="C")
