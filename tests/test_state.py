"""Layouts, states, and the lossy step between a state and what is sent."""

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedfp8 import E4M3, E5M2, Format, dither, from_codes, quantize, to_codes, undither
from fedfp8.errors import QuantizationError, WireFormatError
from fedfp8.fp8 import rms
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import QuantState, Remade, dequantize_state, describe, quantize_state, tensor_seed
from fedfp8.model.state import State

LAYOUT = Layout(
    (
        TensorSpec("conv.weight", (4, 3, 3, 3), kind="fp8", format=E4M3, range="conv.alpha"),
        TensorSpec("conv.alpha", (), kind="range"),
        TensorSpec("conv.beta", (), kind="range"),
        TensorSpec("conv.bias", (4,)),
        TensorSpec("fc.weight", (10, 36), kind="fp8", format=E5M2, range="fc.alpha"),
        TensorSpec("fc.alpha", (), kind="range"),
        TensorSpec("head", (0, 5)),
        TensorSpec("still", (6,)),
        TensorSpec("steps", (), dtype="int64", kind="integer"),
    )
)


def state(seed: int = 0) -> State:
    rng = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for spec in LAYOUT:
        tensors[spec.name] = torch.randn(spec.shape, generator=rng)
    tensors["conv.alpha"] = tensors["conv.weight"].abs().max()
    tensors["fc.alpha"] = tensors["fc.weight"].abs().max() * 0.9
    tensors["conv.beta"] = torch.tensor(0.0)  # not set yet
    tensors["still"] = torch.zeros(6)
    tensors["steps"] = torch.tensor(17)
    return State(LAYOUT, tensors)


def equal(a: State, b: State) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# Layout


def test_layout_bytes_round_trip() -> None:
    again = Layout.from_bytes(LAYOUT.to_bytes())
    assert again == LAYOUT and again.fingerprint == LAYOUT.fingerprint and len(LAYOUT.fingerprint) == 8
    assert len(again) == 9 and again.num_elements == 108 + 1 + 1 + 4 + 360 + 1 + 0 + 6 + 1
    assert Layout.from_bytes(Layout(()).to_bytes()) == Layout(())


def test_fingerprint_depends_on_everything() -> None:
    def with_first(**changes: object) -> bytes:
        spec = LAYOUT.tensors[0]
        fields = {name: getattr(spec, name) for name in ("name", "shape", "dtype", "kind", "format", "range")}
        return Layout((TensorSpec(**{**fields, **changes}), *LAYOUT.tensors[1:])).fingerprint  # type: ignore[arg-type]

    prints = [
        LAYOUT.fingerprint,
        with_first(name="conv.w"),
        with_first(shape=(4, 3, 9)),
        with_first(dtype="float16"),
        with_first(format=Format(3, 4)),
        with_first(range="conv.beta"),
        with_first(kind="float", format=None, range=None),
        Layout(LAYOUT.tensors[:-1]).fingerprint,
        Layout((*LAYOUT.tensors[:3], *LAYOUT.tensors[3:][::-1])).fingerprint,
    ]
    assert len(set(prints)) == len(prints)


def test_with_format() -> None:
    narrow = LAYOUT.with_format(Format(2, 1))
    assert [s.format for s in narrow if s.kind == "fp8"] == [Format(2, 1)] * 2
    plain = LAYOUT.with_format(None)
    assert not any(s.kind == "fp8" or s.format or s.range for s in plain) and len(plain) == len(LAYOUT)
    assert equal(state().with_layout(plain), state())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "weights"}, "kind 'weights'"),
        ({"dtype": "complex64"}, "complex64"),
        ({"kind": "integer", "dtype": "float32"}, "integer"),
        ({"kind": "range", "dtype": "float16"}, "range"),
        ({"kind": "fp8"}, "format and range"),
        ({"kind": "fp8", "format": E4M3}, "format and range"),
        ({"kind": "float", "format": E4M3, "range": "a"}, "format and range"),
        ({"shape": (3, -1)}, "sizes must be >= 0"),
        ({"shape": (2.0,)}, "sizes must be >= 0"),
        ({"shape": (2**16, 2**16)}, "2\\*\\*32"),
    ],
)
def test_tensors_that_make_no_sense(fields: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TensorSpec(**{"name": "w", "shape": (3,), **fields})


def test_layouts_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="twice"):
        Layout((TensorSpec("w", (1,)), TensorSpec("w", (2,))))
    weight = TensorSpec("w", (1,), kind="fp8", format=E4M3, range="a")
    with pytest.raises(ValueError, match=r"'w'.*'a' is not a range"):
        Layout((weight,))
    with pytest.raises(ValueError, match=r"'w'.*'a' is not a range"):
        Layout((weight, TensorSpec("a", ())))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"3",
        b'{"a": 1}',
        b"[1]",
        b'["abcdef"]',
        b"[[]]",
        b'[["w",[3],"float32","float",null]]',
        b'[["w",[3],"float32","float",null,null,null]]',
        b'[["w",[true],"float32","float",null,null]]',
        b'[["w",[1e400],"float32","float",null,null]]',
        b'[["w",3,"float32","float",null,null]]',
        b'[[7,[3],"float32","float",null,null]]',
        b'[["w",[3],["float32"],"float",null,null]]',
        b'[["w",[3],"float32","fp8","E9M9","a"],["a",[],"float32","range",null,null]]',
        b'[["w",[3],"float32","fp8",4,"a"],["a",[],"float32","range",null,null]]',
        b'[["w",[3],"float32","fp8","E4M3",["a"]]]',
        b"[" * 100_000,
        LAYOUT.to_bytes()[:-1],
    ],
)
def test_damaged_layout_bytes(data: bytes) -> None:
    with pytest.raises(WireFormatError, match="layout section is damaged"):
        Layout.from_bytes(data)


def test_every_truncation_and_flip_of_layout_bytes_is_refused_or_another_layout() -> None:
    data = LAYOUT.to_bytes()
    for cut in range(len(data)):
        with pytest.raises(WireFormatError):
            Layout.from_bytes(data[:cut])
    rng = np.random.default_rng(0)
    for _ in range(500):
        flipped = bytearray(data)
        flipped[rng.integers(len(data))] ^= 1 << rng.integers(8)
        try:
            other = Layout.from_bytes(bytes(flipped))
        except WireFormatError:
            continue
        assert other.fingerprint != LAYOUT.fingerprint or json.loads(bytes(flipped)) == json.loads(data)


# State


def test_state_checks_names_order_shapes_and_dtypes() -> None:
    good = dict(state())
    with pytest.raises(QuantizationError, match=r"in its order.*\['steps'\]"):
        State(LAYOUT, {name: t for name, t in good.items() if name != "steps"})
    with pytest.raises(QuantizationError, match="in its order"):
        State(LAYOUT, dict(reversed(good.items())))
    for name, wrong in {
        "conv.bias": torch.zeros(5),
        "fc.weight": good["fc.weight"].t().contiguous().t(),
        "conv.weight": good["conv.weight"].double(),
        "steps": torch.tensor(17, dtype=torch.int32),
    }.items():
        with pytest.raises(QuantizationError, match=f"'{name}'"):
            State(LAYOUT, {**good, name: wrong})


def test_fingerprint_of_values() -> None:
    assert state().fingerprint == state().fingerprint != state(1).fingerprint
    for name in LAYOUT.tensors[0].name, "conv.beta", "steps", "still":
        tensors = {n: t.clone() for n, t in state().items()}
        tensors[name].view(-1)[-1] += 1
        assert State(LAYOUT, tensors).fingerprint != state().fingerprint, name
    assert state().with_layout(LAYOUT.with_format(E4M3)).fingerprint != state().fingerprint


def test_quick_fingerprint() -> None:
    """Of the bytes of any dtype, also those of a last word that is not full; and of the layout."""
    specs = [TensorSpec("f", (9,)), *(TensorSpec(f"i{n}", (n,), "uint8", "integer") for n in range(6))]
    layout = Layout((*specs, TensorSpec("l", (3,), "int64", "integer")))
    tensors = {s.name: torch.arange(s.size, dtype=getattr(torch, s.dtype)).add(3).view(s.shape) for s in layout}
    found = {State(layout, tensors).quick_fingerprint}
    assert State(layout, {n: t.clone() for n, t in tensors.items()}).quick_fingerprint in found
    for name, tensor in tensors.items():
        for at in range(tensor.numel()):
            other = {n: t.clone() for n, t in tensors.items()}
            other[name][at] += 1
            found.add(State(layout, other).quick_fingerprint)
    other = {n: t.flip(0) for n, t in tensors.items()}
    found.add(State(layout, other).quick_fingerprint)
    found.add(
        State(
            Layout((TensorSpec("g", (9,)), *layout.tensors[1:])),
            {"g": tensors["f"]} | {n: t for n, t in tensors.items() if n != "f"},
        ).quick_fingerprint
    )
    assert len(found) == 1 + 9 + 15 + 3 + 2
    one = State(Layout((TensorSpec("f", (2,)),)), {"f": torch.tensor([1.0, -2.0])})
    sums = sum(_hash(i + 1) * int(np.float32(v).view(np.uint32)) for i, v in enumerate((1.0, -2.0))) % 2**64
    said = hashlib.blake2b(one.layout.fingerprint + sums.to_bytes(8, "little"), digest_size=8).digest()
    assert one.quick_fingerprint == said


def _hash(index: int) -> int:
    """As docs/numerics.md has it, with keys of 0."""
    h = 0x9E3779B9 * index % 2**32
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32
    return (h ^ h >> 15) * 0x846CA68B % 2**32


# The lossy step


def test_none_sends_everything_as_it_is() -> None:
    q = quantize_state(state(), rounding="none")
    assert not q.codes and not q.steps and equal(dequantize_state(q), state())


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codes_of_weights_and_the_rest_as_it_is(rounding: str) -> None:
    s = state()
    q = quantize_state(s, seed=9, rounding=rounding)
    assert set(q.codes) == {"conv.weight", "fc.weight"} and set(q.rest) == set(s) - set(q.codes) and not q.steps
    back = dequantize_state(q)
    for index, spec in enumerate(LAYOUT):
        if spec.kind == "fp8":
            alpha, seed = s[spec.range], tensor_seed(9, index)
            flat = s[spec.name].view(-1)
            assert torch.equal(q.codes[spec.name], to_codes(flat, alpha, spec.format, rounding=rounding, seed=seed))
            expected = quantize(s[spec.name], alpha, spec.format, rounding=rounding, seed=seed)
            assert torch.equal(back[spec.name], expected)
        else:
            assert torch.equal(back[spec.name], s[spec.name])
    # what was decoded is on the grid: quantizing it again, by whatever random bits, changes nothing
    assert equal(dequantize_state(quantize_state(back, seed=10, rounding=rounding)), back)


def test_dithered_codes_of_every_float_tensor() -> None:
    s = state()
    q = quantize_state(s, seed=9, rounding="dithered", step=0.3)
    assert set(q.codes) == set(q.steps) == {"conv.weight", "conv.bias", "fc.weight", "head", "still"}
    assert set(q.rest) == {"conv.alpha", "conv.beta", "fc.alpha", "steps"}
    assert q.steps["still"] == q.steps["head"] == 0.0 and torch.equal(
        q.codes["still"], torch.zeros(6, dtype=torch.int32)
    )
    back = dequantize_state(q)
    for index, spec in enumerate(LAYOUT):
        step = q.steps.get(spec.name)
        if step:
            assert step == float(np.float32(0.3 * rms(s[spec.name])))
            seed = tensor_seed(9, index)
            assert torch.equal(q.codes[spec.name], dither(s[spec.name].view(-1), step, seed=seed))
            assert torch.equal(back[spec.name].view(-1), undither(q.codes[spec.name], step, seed=seed))
            largest = float(s[spec.name].abs().max())
            assert float((back[spec.name] - s[spec.name]).abs().max()) <= step / 2 + 2.0**-21 * largest
        else:
            assert torch.equal(back[spec.name], s[spec.name])


def test_steps_from_the_update_and_by_name() -> None:
    s, reference = state(), state(1)
    q = quantize_state(s, seed=2, rounding="dithered", step=8.0, step_of="update", reference=reference)
    for name in ("conv.weight", "conv.bias", "fc.weight"):
        assert q.steps[name] == float(np.float32(8.0 * rms(s[name] - reference[name])))
    unmoved = quantize_state(s, seed=2, rounding="dithered", step=8.0, step_of="update", reference=s)
    assert all(0 < unmoved.steps[n] < 0.01 * rms(s[n]) for n in ("conv.weight", "conv.bias", "fc.weight"))
    steps = {"conv.weight": 0.1, "conv.bias": 0.2, "fc.weight": 0.4}
    named = quantize_state(s, seed=2, rounding="dithered", step=steps)
    assert {n: v for n, v in named.steps.items() if v} == {n: float(np.float32(v)) for n, v in steps.items()}


def test_a_spike_sets_a_floor_on_the_step() -> None:
    """One huge element among many small ones: the step stays large enough for 2**20 steps."""
    layout = Layout((TensorSpec("w", (100_000,)),))
    w = torch.full((100_000,), 1e-9)
    w[3] = 100.0
    q = quantize_state(State(layout, {"w": w}), seed=1, rounding="dithered", step=1e-6)
    assert q.steps["w"] == float(np.float32(100.0 / 2**19))


def test_every_message_and_tensor_has_its_own_random_bits() -> None:
    same = torch.full((2000,), 0.31)
    layout = Layout((TensorSpec("a", (2000,)), TensorSpec("b", (2000,))))
    s = State(layout, {"a": same, "b": same.clone()})
    steps = {"a": 0.1, "b": 0.1}
    errors = []
    for seed in (1, 2):
        back = dequantize_state(quantize_state(s, seed=seed, rounding="dithered", step=steps))
        errors += [(back["a"] - same).numpy(), (back["b"] - same).numpy()]
    correlation = np.corrcoef(errors) - np.eye(4)
    assert np.abs(correlation).max() <= 6 / math.sqrt(2000)
    assert len({tensor_seed(seed, index) for seed in range(20) for index in range(20)}) == 400


def test_a_quant_state_decodes_without_the_original() -> None:
    q = quantize_state(state(), seed=5, rounding="stochastic")
    copy = QuantState(Layout.from_bytes(LAYOUT.to_bytes()), q.rounding, q.seed, dict(q.codes), {}, dict(q.rest))
    assert equal(dequantize_state(copy), dequantize_state(q))
    assert torch.equal(
        dequantize_state(q)["fc.weight"].view(-1), from_codes(q.codes["fc.weight"], q.rest["fc.alpha"], E5M2)
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rounding": "up"}, "'up'.*none, nearest, stochastic, dithered"),
        ({"rounding": "dithered"}, "needs one"),
        ({"rounding": "nearest", "step": 0.1}, "belongs to 'dithered'"),
        ({"rounding": "dithered", "step": 0.1, "step_of": "noise"}, "'weights' or 'update'"),
        ({"rounding": "dithered", "step": 0.1, "step_of": "update"}, "needs the reference"),
        ({"rounding": "dithered", "step": {"conv.weight": 0.1}}, "'conv.bias'"),
        ({"rounding": "dithered", "step": {"conv.weight": 0.0}}, "'conv.weight' is 0.0.*> 0"),
        ({"rounding": "dithered", "step": 0.0}, "> 0"),
        ({"rounding": "dithered", "step": -1.0}, "> 0"),
        ({"rounding": "dithered", "step": float("nan")}, "> 0"),
    ],
)
def test_requests_that_make_no_sense(arguments: dict, says: str) -> None:
    with pytest.raises(QuantizationError, match=says):
        quantize_state(state(), seed=0, **arguments)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_errors_name_the_tensor(bad: float) -> None:
    tensors = {name: t.clone() for name, t in state().items()}
    tensors["fc.weight"][3, 3] = bad
    broken = State(LAYOUT, tensors)
    for arguments in ({"rounding": "stochastic"}, {"rounding": "nearest"}, {"rounding": "dithered", "step": 0.3}):
        with pytest.raises(QuantizationError, match=r"'fc\.weight'"):
            quantize_state(broken, seed=0, **arguments)
    tensors = {**dict(state()), "fc.alpha": torch.tensor(0.0)}
    with pytest.raises(QuantizationError, match=r"alpha of 'fc\.weight'"):
        quantize_state(State(LAYOUT, tensors), seed=0, rounding="nearest")


def remade(values: State, how: dict[str, Any]) -> dict[str, torch.Tensor]:
    return dict(Remade(describe(values, **how), values))


@pytest.mark.parametrize("rounding", ["none", "nearest", "stochastic", "dithered"])
def test_what_is_received_can_be_made_at_once(rounding: str) -> None:
    """Of large tensors, which go alone, of small ones, of one that is all zero; also -0 and what is out of reach."""
    specs = [TensorSpec("large", (1 << 18,)), TensorSpec("a", (40,)), TensorSpec("b", (3, 5)), TensorSpec("zero", (7,))]
    layout = Layout(
        (TensorSpec("w", (50, 20), "float32", "fp8", E4M3, "r"), TensorSpec("r", (), "float32", "range"), *specs)
    )
    draw = torch.Generator().manual_seed(1)
    tensors = {s.name: torch.randn(s.shape, generator=draw) for s in layout}
    tensors |= {"zero": torch.zeros(7), "r": torch.tensor(2.0)}
    tensors["large"][:3] = torch.tensor([0.0, -0.0, -1e-30])
    how = {"seed": 3, "rounding": rounding} | ({"step": 0.4, "place": 2, "strata": 5} if rounding == "dithered" else {})
    found = remade(State(layout, tensors), how)
    wanted = dequantize_state(quantize_state(State(layout, tensors), **how))  # type: ignore[arg-type]
    for name, tensor in wanted.items():
        assert tensor.numpy().tobytes() == found[name].numpy().tobytes() and tensor.shape == found[name].shape, name
    if rounding == "dithered":
        tensors["large"][5] = math.inf
        with pytest.raises(QuantizationError, match="'large'"):
            remade(State(layout, tensors), how)


# Small tensors that are one, and states that are made again


def small_and_large() -> State:
    shapes = {"a": (40,), "w": (50, 30), "b": (3, 5), "one": (), "zero": (7,), "c": (8, 16), "empty": (0,)}
    layout = Layout(
        (*(TensorSpec(name, shape) for name, shape in shapes.items()), TensorSpec("n", (2,), "int64", "integer"))
    )
    draw = torch.Generator().manual_seed(2)
    tensors = {s.name: torch.randn(s.shape, generator=draw) * 10.0 ** (i - 3) for i, s in enumerate(layout)}
    return State(layout, tensors | {"zero": torch.zeros(7), "n": torch.tensor([3, 4])})


HOW = {"seed": 3, "rounding": "dithered", "step": 0.4, "place": 2, "strata": 5, "together": True}


def test_small_tensors_share_one_stream_of_random_bits() -> None:
    """Each is dithered with its own step and its own part of the bits of the first: vectors in one, others in one."""
    values = small_and_large()
    q = quantize_state(values, **HOW)  # type: ignore[arg-type]
    assert list(q.codes) == ["a", "w", "b", "one", "zero", "c", "empty"]
    assert [[s.name for s in small.specs] for small in q.small] == [["a", "one", "zero", "empty"], ["b", "c"]]
    received = dequantize_state(q)
    for small in q.small:
        steps = torch.cat([torch.full((s.size,), q.steps[s.name]) for s in small.specs])
        flat = torch.cat([values[s.name].view(-1) for s in small.specs])
        units = flat * torch.where(steps > 0, 1.0 / steps.double(), 0.0).float()
        where = {"seed": tensor_seed(3, small.index), "place": 2, "strata": 5}
        codes = torch.cat([q.codes[s.name] for s in small.specs])
        assert torch.equal(codes, dither(units, 1.0, **where))  # type: ignore[arg-type]
        back = torch.cat([received[s.name].view(-1) for s in small.specs])
        assert torch.equal(back, undither(codes, 1.0, **where) * steps)  # type: ignore[arg-type]
        assert bool(((back - flat).abs() <= 0.501 * steps).all())
    assert not received["zero"].any() and q.steps["zero"] == 0.0


def test_steps_of_messages_with_small_tensors_have_16_bits() -> None:
    values = small_and_large()
    long, short = (quantize_state(values, **(HOW | {"together": t})).steps for t in (False, True))  # type: ignore[arg-type]
    for name, step in short.items():
        assert 0 <= step - long[name] <= long[name] / 128 and np.float32(step).view(np.uint32) & 0xFFFF == 0


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("width", [torch.int32, torch.int16])
def test_a_remade_state_is_the_received_one(together: bool, width: torch.dtype) -> None:
    """From the values that were quantized, and from the codes; and it has its fingerprints."""
    values, how = small_and_large(), HOW | {"together": together}
    q = quantize_state(values, **how)  # type: ignore[arg-type]
    wanted, sums = dequantize_state(q), dict[str, int]()
    narrow = replace(q, codes={name: codes.to(width) for name, codes in q.codes.items()})
    made = Remade(describe(values, **how), values, sums), Remade(narrow)  # type: ignore[arg-type]
    for state in made:
        assert equal(state, wanted)  # type: ignore[arg-type]
        assert state.quick_fingerprint == wanted.quick_fingerprint and state.fingerprint == wanted.fingerprint
        assert state.rms("w") == wanted.rms("w")
    assert set(sums) == set(wanted)
    again = Remade(describe(values, **how), values, sums)  # type: ignore[arg-type]
    assert again.quick_fingerprint == wanted.quick_fingerprint
    specs = [spec for spec in values.layout if spec.name in ("b", "c")]
    assert torch.equal(again.joined(specs), wanted.joined(specs))
    named = Remade(narrow, fingerprint=b"12345678")  # whoever kept it knows
    assert named.quick_fingerprint == b"12345678"


def test_together_belongs_to_dithered() -> None:
    with pytest.raises(QuantizationError, match="together=True"):
        quantize_state(state(), seed=0, rounding="nearest", together=True)
