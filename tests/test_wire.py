"""The wire format loses nothing, never costs more than raw, and says what is inside."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fedfp8
from fedfp8 import E4M3, E5M2, Format, quantize, to_codes, wire
from fedfp8.errors import QuantizationError
from fedfp8.fp8.parallel import SMALLEST_PIECE
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.state import ROUNDINGS, QuantState, State, dequantize_state, quantize_state
from fedfp8.models.lenet import lenet
from fedfp8.models.resnet import resnet18
from fedfp8.nn import layout_of, prepare, state_of
from fedfp8.wire import codec, steps
from tools import FORMATS
from wire_cases import assert_same, bell, one_weight, small_model, small_state


def quantized(state: State, rounding: str, seed: int = 5, step: float = 0.1) -> QuantState:
    return quantize_state(state, seed=seed, rounding=rounding, step=step if rounding == "dithered" else None)


def round_trip(q: QuantState, reference: State | None) -> bytes:
    """Encodes, checks that decoding gives q, and that no tensor costs more than raw + 64 bytes."""
    payload = wire.encode(q, reference=reference)
    assert_same(wire.decode(payload, q.layout, reference=reference), q)
    raw = wire.encode(q, lossless=False)
    assert_same(wire.decode(raw, q.layout), q)
    assert len(payload) <= len(raw) + 8  # the reference's fingerprint; modes are never longer than raw
    return payload


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_lossless_for_every_format_and_rounding(format: Format, rounding: str) -> None:
    layout = small_model(format)
    old = small_state(layout)
    for move in (0.0, 0.003, 0.3, 30.0):
        q = quantized(small_state(layout, 1, move), rounding)
        for reference in (None, old):
            round_trip(q, reference)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dithered"])
@pytest.mark.parametrize("n", [0, 1, 3, 64, 2047, 2048, 2049, 16383, 16384, 16387, 70001])
def test_lossless_for_every_size(n: int, rounding: str) -> None:
    """Sizes around the first block, the number of lanes and the piece length."""
    values = bell(n)
    for move, factor in ((0.0, 1.0), (0.02, 1.003), (0.02, 37.0), (0.5, 0.01)):
        q = quantized(one_weight(values + move * bell(n, 1), 2.0 * factor), rounding)
        round_trip(q, one_weight(values, 2.0))


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    reference=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=40, max_size=40),
    alpha=st.floats(2.0**-60, 2.0**60, width=32),
    format=st.sampled_from(FORMATS),
    rounding=st.sampled_from(["nearest", "stochastic", "dithered"]),
    seed=st.integers(0, 2**63 - 1),
)
@example([1.1754943508222875e-38], [0.0], 1.0, E4M3, "dithered", 0)  # the step would be below the smallest allowed
@example([-1.401298464324817e-45], [2.0**100], 2.0**-60, E4M3, "dithered", 1)
def test_lossless_property(
    values: list[float], reference: list[float], alpha: float, format: Format, rounding: str, seed: int
) -> None:
    new = one_weight(torch.tensor(values, dtype=torch.float32), alpha, format)
    old = one_weight(torch.tensor(reference[: len(values)], dtype=torch.float32), 1.0, format)
    q = quantized(new, rounding, seed)
    round_trip(q, old)


@given(
    codes=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-300, 300), min_size=1, max_size=50),
    step=st.floats(2.0**-90, 2.0**90, width=32),
)
def test_lossless_for_integers_no_quantizer_makes(codes: list[int], step: float) -> None:
    layout = Layout((TensorSpec("w", (len(codes),)),))
    q = QuantState(layout, "dithered", 9, {"w": torch.tensor(codes, dtype=torch.int32)}, {"w": step})
    round_trip(q, State(layout, {"w": bell(len(codes))}))


def test_every_code_of_every_format_even_minus_zero() -> None:
    for format in FORMATS:
        codes = torch.arange(2**format.bits, dtype=torch.uint8)
        state = one_weight(torch.zeros(len(codes)), 1.0, format)
        q = QuantState(state.layout, "stochastic", 1, {"w": codes}, {}, {"alpha": torch.tensor(1.0)})
        round_trip(q, state)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dithered"])
def test_all_equal_tensors_and_all_different_codes(rounding: str) -> None:
    equal = one_weight(torch.full((5000,), 0.37), 0.5)
    round_trip(quantized(equal, rounding), None)
    round_trip(quantized(equal, rounding), one_weight(torch.full((5000,), -0.4), 0.5))
    assert len(round_trip(quantized(one_weight(torch.zeros(5000), 0.5), rounding), None)) < 40


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dithered"])
def test_a_model_that_did_not_move_costs_a_flag_a_tensor(rounding: str) -> None:
    layout = Layout((TensorSpec("w", (100, 100), "float32", "fp8", E4M3, "a"), TensorSpec("a", (), "float32", "range")))
    state = State(layout, {"w": bell(10000).view(100, 100), "a": torch.tensor(2.0)})
    if rounding != "dithered":  # what the client got: values on the grid
        state = State(layout, {**state.tensors, "w": quantize(state["w"], 2.0)})
    q = quantized(state, rounding)
    payload = round_trip(q, state)
    assert wire.inspect(payload, layout).rows[0].mode == "same"  # type: ignore[index]
    assert len(payload) <= 30 + 8 + 8 + 2


def test_weights_that_sit_on_the_grid_are_predicted_without_dice() -> None:
    """Nearest-rounded weights stay put under stochastic rounding; the dice would only blur the reference."""
    values = bell(40000)
    q = quantized(one_weight(quantize(values, 2.0), 2.0), "stochastic")
    reference = one_weight(values * 1.0001, 2.0)
    payload = round_trip(q, reference)
    rows = wire.inspect(payload, q.layout).rows
    assert rows is not None and rows[0].mode == "reference, no dice"
    assert rows[0].bits_per_weight < 0.1


def test_dice_make_the_prediction() -> None:
    """The predictor's codes are those of the quantizer, with and without dice, and its places lie where they should."""
    old = bell(50000)
    q = quantized(one_weight(old, 1.7), "stochastic")
    plan = next(codec.plans(q, one_weight(old, 9.0)))
    assert np.array_equal(steps.predicted(plan, old.numpy(), True), q.codes["w"].numpy())
    assert np.array_equal(steps.predicted(plan, old.numpy(), False), to_codes(old, 1.7).numpy())
    d = quantized(one_weight(old, 1.7), "dithered")
    plan = next(codec.plans(d, one_weight(old, 1.7)))
    assert np.array_equal(steps.predicted(plan, old.numpy(), True), d.codes["w"].numpy())


def test_known_dice_cost_fewer_bits() -> None:
    """Independent stochastic rounding of a model that did not move costs 1.2 bits a weight without its dice."""
    values = bell(60000)
    q = quantized(one_weight(values, 2.0), "stochastic")
    plan = next(codec.plans(q, one_weight(values + 0.001 * bell(60000, 1), 2.0)))
    codes = q.codes["w"].numpy()
    with_dice = len(codec.encode(plan, codes, True)[1])
    blind = codec.Plan(**{**plan.__dict__, "dice": False})
    assert with_dice * 4 < len(codec.encode(blind, codes, True)[1])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dithered"])
def test_same_bytes_for_any_number_of_threads_and_in_another_process(rounding: str) -> None:
    """Quantized and encoded with 1, 2 and 4 threads: large enough that the kernels split it into four."""
    rows, columns = 700, 800
    layout = small_model(rows=rows, columns=columns)
    assert rows * columns >= 4 * SMALLEST_PIECE
    new, reference = small_state(layout, 1, 0.05), small_state(layout)
    digests = set()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        digests.add(hashlib.sha256(wire.encode(quantized(new, rounding), reference=reference)).hexdigest())
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1]); from wire_cases import *\n"
        "from fedfp8 import wire; from fedfp8.model.state import quantize_state\n"
        f"layout = small_model(rows={rows}, columns={columns})\n"
        "q = quantize_state(small_state(layout, 1, 0.05), seed=5, rounding=sys.argv[2], step=eval(sys.argv[3]))\n"
        "print(hashlib.sha256(wire.encode(q, reference=small_state(layout))).hexdigest())"
    )
    folder, step = str(__file__).rsplit("/", 1)[0], "0.1" if rounding == "dithered" else "None"
    out = subprocess.run(
        [sys.executable, "-c", code, folder, rounding, step], capture_output=True, text=True, check=True
    )
    assert digests == {out.stdout.strip()}


def test_reference_that_helps_no_tensor_is_not_asked_for() -> None:
    layout = small_model(rows=200, columns=200)
    q = quantized(small_state(layout), "stochastic")
    useless = small_state(layout, 7, move=1000.0)
    payload = wire.encode(q, reference=useless)
    assert wire.header(payload).reference_fingerprint is None
    assert_same(wire.decode(payload, q.layout), q)


def test_layout_section_makes_a_payload_decodable_without_the_model() -> None:
    q = quantized(small_state(small_model(E5M2)), "stochastic")
    payload = wire.encode(q, with_layout=True)
    decoded = wire.decode(payload)
    assert_same(decoded, q)
    assert decoded.layout == q.layout
    assert_same(wire.decode(payload, q.layout), q)


def test_header_says_what_the_server_needs() -> None:
    state = small_state(small_model())
    q = quantized(small_state(small_model(), 1, 0.01), "dithered", seed=2**63 - 1)
    head = wire.header(wire.encode(q, reference=state))
    assert head.reference_fingerprint == state.fingerprint
    assert head.layout_fingerprint == q.layout.fingerprint
    assert (head.version, head.rounding, head.seed, head.has_layout) == (1, "dithered", 2**63 - 1, False)


def test_inspection_adds_up_and_is_json() -> None:
    state = small_state(small_model())
    payload = wire.encode(
        quantized(small_state(small_model(), 1, 0.01), "stochastic"), reference=state, with_layout=True
    )
    found = fedfp8.inspect(payload)
    assert found.rows is not None and [r.name for r in found.rows] == [s.name for s in state.layout]
    modes = {r.name: r.mode for r in found.rows}
    assert modes["net.weight"] == "reference" and modes["net.bias"] == "as is" and modes["nothing"] == "as is"
    as_dict = json.loads(json.dumps(found.to_dict()))
    assert as_dict["bytes"] == len(payload) and as_dict["tensors"][2]["value"] == 2.0
    text = str(found)
    assert "net.weight" in text and "reference" in text and state.fingerprint.hex() in text
    plain = wire.encode(quantized(state, "stochastic"))
    assert fedfp8.inspect(plain).rows is None
    rows = wire.inspect(plain, state.layout).rows
    assert rows is not None and sum(r.bytes for r in rows) + 22 + 8 == len(plain)


@pytest.mark.parametrize(
    ("build", "limit"),
    [(lambda: prepare(lenet()), 400), (lambda: prepare(resnet18()), 3000)],
    ids=["lenet", "resnet18"],
)
def test_overhead_is_small(build, limit: int) -> None:  # type: ignore[no-untyped-def]
    """Everything but codes and float parameters: headers, modes, lengths, models, coder states, ranges, steps."""
    state = state_of(build())
    reference = State(state.layout, {n: t * 1.5 if t.is_floating_point() else t for n, t in state.items()})
    for rounding in ("stochastic", "dithered"):
        q = quantized(state, rounding)
        payload = wire.encode(q, reference=reference)
        total = len(payload)
        for plan in codec.plans(q, reference):
            if plan.empty:
                continue
            _, data = codec.encode(plan, q.codes[plan.name].numpy(), True)
            fixed = 3 + 8 * (4 if plan.size >= 1 << 14 else 1)
            total -= max(len(data) - fixed, 0)
        total -= sum(q.rest[s.name].nbytes for s in q.layout if s.kind == "float" and s.name in q.rest)
        assert total < limit


def test_fp32_baseline_costs_four_bytes_a_parameter() -> None:
    state = state_of(lenet())
    payload = wire.encode(quantize_state(state, rounding="none"))
    assert len(payload) == 4 * 797_962 + 30
    assert_same(wire.decode(payload, state.layout), quantize_state(state, rounding="none"))


def test_small_formats_are_packed() -> None:
    state = one_weight(bell(1000), 2.0, Format(2, 1))
    assert len(wire.encode(quantized(state, "nearest"), lossless=False)) == 22 + 4 + 1 + 2 + 500 + 8


def test_pack_and_unpack() -> None:
    model, other = prepare(lenet()), prepare(lenet())
    state = fedfp8.unpack(fedfp8.pack(model, seed=1), other)
    assert state.fingerprint == state_of(other).fingerprint
    q = quantize_state(state_of(model), seed=2, rounding="dithered", step=8.0, step_of="update", reference=state)
    options = {"rounding": "dithered", "step": 8.0, "step_of": "update", "reference": state}
    up = fedfp8.pack(model, seed=2, **options)  # type: ignore[arg-type]
    received = fedfp8.unpack(up, other, reference=state)
    assert received.fingerprint == dequantize_state(q).fingerprint
    assert layout_of(other) == layout_of(model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q: q.codes.pop("net.weight"), "net.weight"),
        (lambda q: q.rest.pop("net.bias"), "every tensor"),
        (lambda q: q.rest.update({"net.bias": torch.full((40,), float("nan"))}), "NaN"),
        (lambda q: q.rest.update({"net.alpha": torch.tensor(-1.0)}), "net.alpha"),
        (lambda q: q.rest.update({"net.beta": torch.tensor(-1.0)}), "net.beta"),
        (lambda q: q.rest.update({"net.bias": torch.zeros(3)}), "net.bias"),
        (lambda q: q.codes.update({"net.weight": torch.zeros(1200, dtype=torch.int32)}), "uint8"),
    ],
)
def test_states_that_cannot_be_sent_are_refused(change, words: str) -> None:  # type: ignore[no-untyped-def]
    q = quantized(small_state(small_model()), "stochastic")
    change(q)
    with pytest.raises(QuantizationError, match=words):
        wire.encode(q)


def test_codes_of_a_wider_format_are_refused() -> None:
    q = quantized(small_state(small_model(Format(2, 1))), "stochastic")
    q.codes["net.weight"][0] = 16
    with pytest.raises(QuantizationError, match="reach 16"):
        wire.encode(q)
