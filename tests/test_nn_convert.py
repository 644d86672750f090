"""Models to layouts and states, and back."""

import pytest
import torch
from torch import nn

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import E4M3
from fedfp8.model.quantized import dequantize_state, quantize_state
from fedfp8.model.state import State
from fedfp8.models import MODELS, build
from fedfp8.nn import FP8Layer, layout_of, load_state, prepare, state_of


class Everything(nn.Module):
    """Tied weights, float and integer buffers, a buffer that is not saved, a skipped layer, a loose parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.embed = nn.Embedding(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 5)
        self.head.weight = self.embed.weight
        self.keep = nn.Linear(5, 5)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)


def kinds(model: nn.Module) -> dict[str, str]:
    return {spec.name: spec.kind for spec in layout_of(model)}


def test_layout_covers_everything_once_in_the_order_of_state_dict() -> None:
    model = prepare(Everything(), skip="keep")
    layout = layout_of(model)
    assert [(s.name, s.kind, s.dtype) for s in layout] == [
        ("scale", "float", "float32"),
        ("mask", "integer", "bool"),
        ("embed.weight", "fp8", "float32"),  # = head.weight, under its first name
        ("norm.weight", "float", "float32"),
        ("norm.bias", "float", "float32"),
        ("norm.running_mean", "buffer", "float32"),
        ("norm.running_var", "buffer", "float32"),
        ("norm.num_batches_tracked", "integer", "int64"),
        ("head.bias", "float", "float32"),
        ("head.alpha", "range", "float32"),
        ("head.beta", "range", "float32"),
        ("keep.weight", "float", "float32"),
        ("keep.bias", "float", "float32"),
    ]
    tied = layout.tensors[2]
    assert tied.format == E4M3 and tied.range == "head.alpha" and tied.shape == (5, 6)


def test_a_float_model_is_all_float() -> None:
    assert set(kinds(build("lenet")).values()) == {"float"}
    assert kinds(Everything())["mask"] == "integer"


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_of_every_network_is_coded(name: str) -> None:
    model = prepare(build(name, seed=0))
    found = kinds(model)
    layers = [n for n, m in model.named_modules() if isinstance(m, FP8Layer) and hasattr(m, "weight")]
    assert [n for n, k in found.items() if k == "fp8"] == [f"{n}.weight" for n in layers]
    coded = sum(s.size for s in layout_of(model) if s.kind == "fp8")
    assert coded > 0.9 * sum(p.numel() for p in model.parameters())


def test_equal_models_have_equal_fingerprints_and_others_do_not() -> None:
    fingerprints = {
        layout_of(m).fingerprint
        for m in (prepare(build("digits", seed=0)), prepare(build("digits", seed=1)), build("digits", seed=0))
    }
    assert len(fingerprints) == 2


def test_state_round_trip_is_exact_and_a_copy() -> None:
    model, twin = prepare(build("digits", seed=0)), prepare(build("digits", seed=1))
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model(x)
    state = state_of(model)
    assert isinstance(state, State) and all(t.is_contiguous() for t in state.values())
    load_state(twin, state)
    assert state_of(twin).fingerprint == state.fingerprint and torch.equal(twin(x), model(x))
    twin[0].weight.data.zero_()
    model[0].weight.data.zero_()
    assert state["0.weight"].abs().max() > 0


def test_channels_last_and_other_dtypes_arrive_in_logical_order_as_float32() -> None:
    model = prepare(build("digits", seed=0))
    expected = state_of(model)
    moved = model.to(memory_format=torch.channels_last)
    assert state_of(moved).fingerprint == expected.fingerprint
    load_state(moved, expected)
    assert moved[2].weight.is_contiguous(memory_format=torch.channels_last)
    assert {t.dtype for t in state_of(Everything().double()).values() if t.is_floating_point()} == {torch.float32}


def test_loading_writes_through_ties_and_into_buffers() -> None:
    model = prepare(Everything(), skip="keep")
    state = state_of(model)
    changed = {n: torch.full_like(t, 1) for n, t in state.items()}
    load_state(model, State(state.layout, changed))
    assert model.head.weight is model.embed.weight and model.head.weight.eq(1).all()
    assert model.mask.all() and model.norm.num_batches_tracked.item() == 1
    assert model.scratch.eq(0).all()


def test_state_raises_ranges_to_their_floor_but_keeps_unset_ones() -> None:
    model = prepare(nn.Linear(16, 4))
    model.alpha.data.fill_(-2.0)
    state = state_of(model)
    assert state["alpha"].item() == model.alpha.item() == 2**-6 / 4
    assert state["beta"].item() == 0.0
    model.beta.data.fill_(-1.0)
    assert state_of(model)["beta"].item() == 2**-10


def test_the_fp8_values_that_are_sent_are_those_the_forward_sees() -> None:
    """Nearest rounding on the wire, then again in the receiver's forward: nothing changes the second time."""
    model, twin = prepare(build("digits", seed=0)), prepare(build("digits", seed=1))
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model(x)
    load_state(twin, dequantize_state(quantize_state(state_of(model), rounding="nearest")))
    assert torch.equal(twin(x), model(x))


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    model = prepare(build("digits", seed=0))
    before = state_of(model).fingerprint
    for other, message in (
        (prepare(build("digits", 7, seed=0)), r"has 8\.weight \(7, 64\) where the model has 8\.weight \(10, 64\)"),
        (build("digits", seed=0), r"has 2\.weight .* where the model has 0\.alpha"),
    ):
        with pytest.raises(QuantizationError, match=message):
            load_state(model, state_of(other))
    assert state_of(model).fingerprint == before


def test_extra_state_and_complex_tensors_are_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(QuantizationError, match=r"_extra_state.*not a tensor"):
        layout_of(Extra(2, 2))
    with pytest.raises(QuantizationError, match="complex"):
        layout_of(nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]))
