"""Many tensors in one call: bit for bit what each of them gives alone."""

import math

import pytest
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import dither, rms, undither, use_kernels
from fedfp8.fp8.many import BATCH, batches, dither_many, largest_many, rms_many, undither_many
from fedfp8.fp8.measure import largest
from fedfp8.fp8.parallel import dither_keys
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import dequantize_state, quantize_state
from fedfp8.model.state import State

SIZES = [1, 0, 128, 7, 40_000, 3]  # one without elements, one of several chunks


def tensors() -> list[torch.Tensor]:
    return [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in SIZES]


def test_measures() -> None:
    given = [*tensors(), torch.tensor([1.0, math.inf]), torch.zeros(5)]
    assert rms_many(given) == [rms(x) for x in given]
    assert largest_many(given) == [largest(x) for x in given]
    assert math.isnan(largest_many([torch.tensor([2.0, math.nan])])[0])


def test_dither_and_back() -> None:
    given, steps = tensors(), [0.1 * (i + 1) for i in range(len(SIZES))]
    keys = [dither_keys(seed, 2, 5) for seed in range(len(SIZES))]
    codes = dither_many(given, steps, keys)
    back = undither_many(codes, steps, keys)
    for seed, (x, step, k, y) in enumerate(zip(given, steps, codes, back, strict=True)):
        assert torch.equal(k, dither(x, step, seed=seed, place=2, strata=5))
        assert torch.equal(y, undither(k, step, seed=seed, place=2, strata=5))
    assert dither_many([given[2], torch.tensor([math.nan])], [1.0, 1.0], keys[:2]) == []


def test_batches_hold_all_in_order_and_few_elements() -> None:
    sizes = [5, BATCH, 1, BATCH - 1, 1, 3 * BATCH, 0, 2]
    found = [list(batch) for batch in batches(sizes, int)]
    assert [size for batch in found for size in batch] == sizes
    assert all(len(batch) == 1 or sum(batch) <= BATCH for batch in found)
    assert list(batches([], int)) == []


def test_a_state_is_quantized_as_with_plain_operations() -> None:
    """Zeros, an empty tensor and a large one among small ones; the kernels switched off take them one by one."""
    shapes = {"a": (8, 16), "zero": (4, 4), "none": (0, 3), "b": (3, 50), "large": (BATCH + 1,), "c": (7,)}
    layout = Layout(tuple(TensorSpec(name, shape) for name, shape in shapes.items()))
    draw = torch.Generator().manual_seed(0)
    state = State(layout, {n: torch.randn(s, generator=draw) * (n != "zero") for n, s in shapes.items()})
    settings = {"seed": 3, "rounding": "dithered", "step": 0.3, "place": 1, "strata": 4}
    q = quantize_state(state, **settings)
    back = dequantize_state(q)
    with use_kernels("0"):
        plain = quantize_state(state, **settings)
        again = dequantize_state(plain)
    assert q.steps == plain.steps and q.steps["zero"] == 0.0
    for name in shapes:
        assert torch.equal(q.codes[name], plain.codes[name]) and torch.equal(back[name], again[name])


def test_a_tensor_that_cannot_be_dithered_is_named() -> None:
    layout = Layout(tuple(TensorSpec(name, (10,)) for name in ("good", "far")))
    state = State(layout, {"good": torch.ones(10), "far": torch.full((10,), 1e9)})
    with pytest.raises(QuantizationError, match=r"tensor 'far' reaches 1e\+09"):
        quantize_state(state, seed=1, rounding="dithered", step={"good": 0.1, "far": 0.1})
