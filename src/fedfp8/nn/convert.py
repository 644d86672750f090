"""Between a model and its `State`: which tensors travel, as what, in which order.

The order and the names are those of ``state_dict``. A tensor that appears there under several names (tied
weights, a module used twice) travels once, under its first name. Weights of FP8 layers are ``fp8`` and name
their range; ranges, whole numbers and everything else travel as they are. A model that was never prepared
has a layout too: all of it is ``float`` and ``integer``.
"""

from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor, nn

from fedfp8.errors import QuantizationError
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.state import State
from fedfp8.nn.layers import FP8Layer

__all__ = ["float_state_dict", "layout_of", "load_state", "state_of"]


def layout_of(model: nn.Module) -> Layout:
    """What of `model` travels: parameters and persistent buffers, each once."""
    tensors = dict(_tensors(model))
    first_name = {id(tensor): name for name, tensor in tensors.items()}
    ranges: set[int] = set()
    coded: dict[int, tuple[FP8Layer, str]] = {}  # weight -> its layer, the name of its range
    for layer in model.modules():
        if not isinstance(layer, FP8Layer):
            continue
        ranges.update(id(r) for r in layer.ranges().values())
        for range_name, weight in layer.weights().items():
            coded[id(weight)] = layer, first_name[id(getattr(layer, range_name))]

    def spec(name: str, tensor: Tensor) -> TensorSpec:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if id(tensor) in coded:
            layer, range_name = coded[id(tensor)]
            return TensorSpec(name, shape, dtype, "fp8", layer.format, range_name)
        if id(tensor) in ranges:
            return TensorSpec(name, shape, "float32", "range")
        if not tensor.is_floating_point():
            return TensorSpec(name, shape, dtype, "integer")
        return TensorSpec(name, shape, dtype, "float" if isinstance(tensor, nn.Parameter) else "buffer")

    return Layout(tuple(spec(name, tensor) for name, tensor in tensors.items()))


def state_of(model: nn.Module) -> State:
    """A copy of what travels, on the CPU; ranges that an optimizer pushed too low are raised to their floor
    first.
    """
    for layer in model.modules():
        if isinstance(layer, FP8Layer):
            layer.settle_ranges()
    return State(layout_of(model), {name: _copy(tensor) for name, tensor in _tensors(model)})


def load_state(model: nn.Module, state: State) -> None:
    """Write `state` into the model in place; raises, and changes nothing, if names or shapes differ."""
    if difference := _difference(state.layout, layout_of(model)):
        raise QuantizationError(
            f"the state does not fit the model: {difference}. Build and prepare the model exactly as on the side "
            "that made the state"
        )
    with torch.no_grad():
        for name, tensor in _tensors(model):
            tensor.copy_(state[name])


def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """``model.state_dict()`` without the ranges: what a float twin of the model loads."""
    ranges = {
        f"{name}.{r}" if name else r
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, FP8Layer)
        for r in layer.range_names
    }
    return {name: tensor for name, tensor in model.state_dict().items() if name not in ranges}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(first name, tensor) of everything in ``state_dict``, in its order."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise QuantizationError(
                f"{name!r} is a {type(tensor).__name__}, not a tensor; only parameters and buffers can be "
                "sent: make it a buffer"
            )
        if tensor.is_complex():
            raise QuantizationError(
                f"{name!r} is {tensor.dtype}; complex tensors cannot be sent: split it into two real ones"
            )
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous CPU copy; floats become float32."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()


def _difference(given: Layout, wanted: Layout) -> str:
    """The first name or shape in which two layouts differ; empty if there is none."""
    for a, b in zip_longest(given, wanted):
        theirs, ours = (f"{spec.name} {spec.shape}" if spec else "nothing more" for spec in (a, b))
        if theirs != ours:
            return f"the state has {theirs} where the model has {ours}"
    return ""
