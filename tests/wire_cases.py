"""States for the wire tests, made from integers alone so that they are the same for ever and on every machine."""

import numpy as np
import torch

from fedfp8 import E4M3, Format
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import QuantState
from fedfp8.model.state import State


def bell(n: int, seed: int = 0) -> torch.Tensor:
    """n float32 numbers, roughly normal: sums of four 16-bit multiplicative hashes, exact in float32."""
    index = np.arange(n, dtype=np.uint64) + np.uint64(seed * 7919 + 1)
    total = np.zeros(n)
    for k in (2654435761, 2246822519, 3266489917, 668265263):
        h = index * np.uint64(k) & np.uint64(0xFFFFFFFF)
        h = (h ^ h >> np.uint64(15)) * np.uint64(k) & np.uint64(0xFFFFFFFF)
        total += (h >> np.uint64(16)).astype(np.float64) - 32767.5
    return torch.from_numpy((total / 2**15).astype(np.float32))


def small_model(format: Format = E4M3, rows: int = 40, columns: int = 30) -> Layout:
    return Layout(
        (
            TensorSpec("net.weight", (rows, columns), "float32", "fp8", format, "net.alpha"),
            TensorSpec("net.bias", (rows,)),
            TensorSpec("net.alpha", (), "float32", "range"),
            TensorSpec("net.beta", (), "float32", "range"),
            TensorSpec("steps", (), "int64", "integer"),
            TensorSpec("nothing", (0,)),
        )
    )


def many_small() -> Layout:
    """Vectors and matrices below and above the size from which on a tensor is coded alone."""
    shapes = {"a": (40, 30), "b": (40,), "c": (5, 7), "d": (), "e": (3, 11, 2), "f": (1024,), "g": (1023,), "h": (0,)}
    return Layout(tuple(TensorSpec(name, shape) for name, shape in shapes.items()))


def a_kernel() -> Layout:
    """One that travels as frequencies, the layer behind it, which does too, and one that does not."""
    shapes = {"conv": (32, 64, 3, 3), "bias": (32,), "fc": (128, 32 * 4), "last": (10, 128)}
    return Layout(tuple(TensorSpec(name, shape) for name, shape in shapes.items()))


def small_state(layout: Layout, seed: int = 0, move: float = 0.0, alpha: float = 2.0) -> State:
    """Values for any layout; `move` is how far they are from those of move=0, in their own scale."""
    tensors = {}
    for index, spec in enumerate(layout):
        if spec.kind == "integer":
            tensors[spec.name] = torch.full(spec.shape, 3, dtype=getattr(torch, spec.dtype))
        elif spec.kind == "range":
            tensors[spec.name] = torch.full(spec.shape, alpha if spec.name.endswith("alpha") else 0.0)
        else:
            values = bell(spec.size, 100 * index) + move * bell(spec.size, 100 * index + 50 + seed)
            tensors[spec.name] = values.view(spec.shape)
    return State(layout, tensors)


def one_weight(values: torch.Tensor, alpha: float, format: Format = E4M3) -> State:
    weight = TensorSpec("w", tuple(values.shape), "float32", "fp8", format, "alpha")
    layout = Layout((weight, TensorSpec("alpha", (), "float32", "range")))
    return State(layout, {"w": values.contiguous(), "alpha": torch.tensor(alpha)})


def assert_same(a: QuantState, b: QuantState) -> None:
    """Bit for bit, order included."""
    assert (a.rounding, a.seed, a.steps, list(a.codes)) == (b.rounding, b.seed, b.steps, list(b.codes))
    assert (a.place, a.strata, a.change, a.together) == (b.place, b.strata, b.change, b.together)
    for left, right in ((a.codes, b.codes), (a.rest, b.rest)):
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            other = right[name]
            assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
            assert tensor.numpy().tobytes() == other.numpy().tobytes(), name
