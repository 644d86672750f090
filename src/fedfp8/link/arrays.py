"""Between the tensors of any program and a `State`: what is coded, and how everything else travels bit for bit.

There is no model here, only names, shapes and numbers, in torch tensors or numpy arrays of any dtype and device. Coded
are floating-point tensors of two or more dimensions (weights), long vectors, or those whose names match a pattern.
Everything else, biases, batch statistics, counters, travels as it is: as integers of the same width, so that no bit
changes whatever the dtype.

An FP8 code needs a range. A prepared model brings it along (``conv.alpha`` beside ``conv.weight``); for other tensors
it is max|w|, sent as one more number. In the layout a name gets a suffix where it does not stand for the tensor itself:

    conv.weight           coded
    conv.weight:range     max|w| of it, made here
    conv.alpha:float32    the range of a prepared layer
    bn.running_var:float32, bn.num_batches_tracked:int64    as they are, with the dtype to return to
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import Format
from fedfp8.fp8.grid import ALPHA_MAX, ALPHA_MIN
from fedfp8.model.layout import FLOAT_DTYPES, Layout, TensorSpec
from fedfp8.model.state import State, Values

__all__ = ["Arrays", "Frame", "fp8_part", "is_coded", "ranges_of", "state_of_arrays", "tensors_of", "torch_of"]

Arrays = Mapping[str, Any]  # torch tensors or numpy arrays
Coded = tuple[str, ...] | frozenset[str]  # patterns, or names
SMALL = 64  # fewer elements than this gain less than their step or range costs
LONG = 4096  # a vector of at least this many elements is coded: a bias is shorter, a flattened model is not
STATISTICS = ("running_mean", "running_var")  # a variance with noise could be negative
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element
MADE = "range"


def torch_of(name: str, array: Any) -> torch.Tensor:
    """`array` as a torch tensor on the CPU, without a copy where there need be none."""
    if isinstance(array, torch.Tensor):
        return array.detach().cpu()
    values = np.asarray(array)
    if values.dtype.name == "bfloat16":  # of ml_dtypes: numpy itself has none
        return torch.from_numpy(np.ascontiguousarray(values).view(np.int16)).view(torch.bfloat16)
    try:
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        plain = values.flags.writeable and all(stride >= 0 for stride in values.strides)
        return torch.from_numpy(values if plain else np.array(values, order="C"))
    except (TypeError, ValueError):
        raise QuantizationError(
            f"array {name!r} is {values.dtype}; numbers of at most 8 bytes can be sent: convert it, or leave it out"
        ) from None


def is_coded(name: str, tensor: torch.Tensor, coded: Coded = ()) -> bool:
    """Whether a tensor travels as codes. coded: name patterns, or a set of names; empty: weights, and long vectors."""
    if _dtype(tensor) not in FLOAT_DTYPES or not tensor.numel():
        return False
    if isinstance(coded, frozenset):
        return name in coded
    if coded:
        return any(fnmatchcase(name, pattern) for pattern in coded)
    if tensor.ndim < 2:
        return tensor.numel() >= LONG and name.rpartition(".")[2] not in STATISTICS
    return tensor.numel() >= SMALL


def state_of_arrays(
    arrays: Arrays,
    format: Format | None,
    coded: Coded = (),
    ranges: Mapping[str, float] | None = None,
    *,
    copy: bool = True,
) -> State:
    """The State of a program's tensors.

    format: of FP8 codes; None: coded tensors are plain floats, since dither needs no range. ranges: for coded tensors,
    instead of what max|w| would give. copy=False: coded tensors may be the caller's own, for a state that is not kept.
    """
    specs: list[TensorSpec] = []
    values: list[torch.Tensor] = []

    def add(spec: TensorSpec, tensor: torch.Tensor) -> None:
        specs.append(spec)
        values.append(tensor)

    tensors = {name: torch_of(name, array) for name, array in arrays.items()}
    chosen = {name for name, tensor in tensors.items() if is_coded(name, tensor, coded)}
    alphas = {n: a for n in chosen if format is not None and (a := _alpha_of(n, tensors)) is not None}
    own_ranges = set(alphas.values())
    for name, tensor in tensors.items():
        shape, dtype = tuple(tensor.shape), _dtype(tensor)
        if name in own_ranges:
            add(TensorSpec(f"{name}:{dtype}", (), "float32", "range"), _copy(tensor.reshape(())))
        elif name not in chosen:
            bits = _as_bits(name, tensor)
            add(TensorSpec(f"{name}:{dtype}", shape, _dtype(bits), "integer"), bits)
        elif format is None:
            add(TensorSpec(name, shape, dtype, "float"), _copy(tensor, copy))
        else:
            own = f"{alphas[name]}:{_dtype(tensors[alphas[name]])}" if name in alphas else f"{name}:{MADE}"
            floats = _copy(tensor, copy)
            add(TensorSpec(name, shape, dtype, "fp8", format, own), floats)
            if name not in alphas:
                made = (ranges or {}).get(name) or float(floats.abs().max()) or 1.0
                add(TensorSpec(own, (), "float32", "range"), torch.tensor(max(made, ALPHA_MIN)))
    layout = Layout(tuple(specs))
    return State(layout, {spec.name: tensor for spec, tensor in zip(specs, values, strict=True)})


def tensors_of(state: Values) -> dict[str, torch.Tensor]:
    """The inverse of `state_of_arrays`: names, order, shapes and dtypes as the program had them."""
    found: dict[str, torch.Tensor] = {}
    for spec in state.layout:
        name, _, dtype = spec.name.rpartition(":") if spec.kind in ("integer", "range") else (spec.name, "", spec.dtype)
        if spec.kind == "integer":
            found[name] = state[spec.name].view(getattr(torch, dtype))
        elif not (spec.kind == "range" and dtype == MADE):
            found[name] = state[spec.name].to(getattr(torch, dtype))
    return found


def ranges_of(state: State) -> dict[str, tuple[str, float]]:
    """coded name -> (name of its range in the program, or "" if it was made here; its value)"""
    found = {}
    for spec in state.layout:
        if spec.kind == "fp8" and spec.range is not None:
            own, _, dtype = spec.range.rpartition(":")
            found[spec.name] = ("" if dtype == MADE else own, float(state[spec.range]))
    return found


def fp8_part(state: State) -> State:
    """The FP8 weights of a state with their ranges."""
    used = {spec.range for spec in state.layout if spec.kind == "fp8"}
    specs = tuple(spec for spec in state.layout if spec.kind == "fp8" or spec.name in used)
    return State(Layout(specs), {spec.name: state[spec.name] for spec in specs})


class Frame:
    """What the tensors of a program are besides their values: numpy or torch, dtype, device. Gives them back alike."""

    def __init__(self, arrays: Arrays) -> None:
        self.kinds = {
            name: (array.dtype, array.device) if isinstance(array, torch.Tensor) else np.asarray(array).dtype
            for name, array in arrays.items()
        }
        self.shapes = {name: tuple(np.shape(array)) for name, array in arrays.items()}

    def check_same(self, other: "Frame") -> None:
        """The tensors of a model may not change from round to round."""
        for name in {**self.shapes, **other.shapes}:
            was, now = (_describe(frame, name) for frame in (self, other))
            if was != now:
                raise QuantizationError(
                    f"tensor {name!r} was {was} in the first round and is {now} now; a link serves one model: send "
                    "the same tensors every round, or make a new ServerLink"
                )

    def fits(self, other: "Frame") -> bool:
        """Whether the tensors have the same names, order, shapes and dtypes, be they torch's or numpy's."""
        names = list(self.shapes) == list(other.shapes)
        return names and all(_describe(self, name) == _describe(other, name) for name in self.shapes)

    def to_json(self) -> dict[str, Any]:
        return {
            name: [list(self.shapes[name]), _name(kind[0]), str(kind[1])] if isinstance(kind, tuple)
            else [list(self.shapes[name]), kind.name, None]
            for name, kind in self.kinds.items()
        }  # fmt: skip

    @classmethod
    def from_json(cls, rows: Mapping[str, Any]) -> "Frame":
        frame = cls({})
        for name, (shape, dtype, device) in rows.items():
            frame.shapes[name] = tuple(shape)
            frame.kinds[name] = np.dtype(dtype) if device is None else (getattr(torch, dtype), torch.device(device))
        return frame

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Tensors as the program gave them."""
        return {name: self._like(name, tensor) for name, tensor in tensors.items()}

    def _like(self, name: str, tensor: torch.Tensor) -> Any:
        kind = self.kinds[name]
        if isinstance(kind, tuple):
            return tensor.to(device=kind[1], dtype=kind[0])
        if kind.name == "bfloat16":
            return tensor.view(torch.int16).numpy().view(kind)
        return tensor.numpy().astype(kind, copy=False)


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    """For programs that want numpy: bfloat16, which numpy lacks, comes as float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _describe(frame: Frame, name: str) -> str:
    if name not in frame.shapes:
        return "missing"
    kind = frame.kinds[name]
    dtype = _name(kind[0]) if isinstance(kind, tuple) else kind.name
    return f"{dtype} {frame.shapes[name]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(tensor: torch.Tensor) -> str:
    return _name(tensor.dtype)


def _alpha_of(name: str, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The tensor that holds the range of `name`, if a prepared layer put one beside it (it has a ``beta`` as well)."""
    path, dot, last = name.rpartition(".")
    found = [tensors.get(f"{path}{dot}{r}") for r in ("alpha", "beta")]
    if last != "weight" or any(r is None or r.ndim or _dtype(r) not in FLOAT_DTYPES for r in found):
        return None
    alpha = f"{path}{dot}alpha"
    if not ALPHA_MIN <= (value := float(tensors[alpha])) <= ALPHA_MAX:
        raise QuantizationError(
            f"range {alpha!r} is {value}; it must be positive and finite to code {name!r}. Keep the strategy from "
            "moving ranges below 0, or use wire='dq', which needs none"
        )
    return alpha


def _as_bits(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() not in BITS or tensor.is_quantized:
        raise QuantizationError(f"array {name!r} is {tensor.dtype}; numbers of at most 8 bytes can be sent")
    return tensor.clone(memory_format=torch.contiguous_format).view(BITS[tensor.element_size()])


def _copy(tensor: torch.Tensor, always: bool = True) -> torch.Tensor:
    """A float32 copy in logical order; the tensor itself if it is one and need not be copied."""
    if not always:
        return tensor.to(torch.float32).contiguous()
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
