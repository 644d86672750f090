"""The wire format loses nothing, never costs more than raw, and says what is inside."""

import dataclasses
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
from fedfp8 import E4M3, E5M2, Format, dither, quantize, to_codes, undither, wire
from fedfp8.errors import QuantizationError, WireFormatError
from fedfp8.fp8 import hash_uniform
from fedfp8.fp8.parallel import SMALLEST_PIECE
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import QuantState, dequantize_state, quantize_state, tensor_seed
from fedfp8.model.rounding import ROUNDINGS
from fedfp8.model.state import State
from fedfp8.models.lenet import lenet
from fedfp8.models.resnet import resnet18
from fedfp8.nn import layout_of, prepare, state_of
from fedfp8.wire import codec, kernels, steps
from fedfp8.wire.container import fingerprint_of
from fedfp8.wire.mix import Mix, fit_mix, products
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


def test_weights_that_sit_on_the_grid_are_predicted_without_random_bits() -> None:
    """Nearest-rounded weights stay put under stochastic rounding; the random bits would only blur the reference."""
    values = bell(40000)
    q = quantized(one_weight(quantize(values, 2.0), 2.0), "stochastic")
    reference = one_weight(values * 1.0001, 2.0)
    payload = round_trip(q, reference)
    rows = wire.inspect(payload, q.layout).rows
    assert rows is not None and rows[0].mode == "reference, no random bits"
    assert rows[0].bits_per_weight < 0.1


def test_random_bits_make_the_prediction() -> None:
    """The predictor's codes are those of the quantizer, with and without random bits, and its places are right."""
    old = bell(50000)
    q = quantized(one_weight(old, 1.7), "stochastic")
    plan = next(codec.plans(q, [one_weight(old, 9.0)]))
    assert np.array_equal(steps.predicted(plan, plan.references[0], True), q.codes["w"].numpy())
    assert np.array_equal(steps.predicted(plan, plan.references[0], False), to_codes(old, 1.7).numpy())
    d = quantized(one_weight(old, 1.7), "dithered")
    plan = next(codec.plans(d, [one_weight(old, 1.7)]))
    assert np.array_equal(steps.predicted(plan, plan.references[0], True), d.codes["w"].numpy())


def test_known_random_bits_cost_fewer_bits() -> None:
    """Independent stochastic rounding of a model that did not move costs 1.2 bits a weight without its random bits."""
    values = bell(60000)
    q = quantized(one_weight(values, 2.0), "stochastic")
    plan = next(codec.plans(q, [one_weight(values + 0.001 * bell(60000, 1), 2.0)]))
    codes = q.codes["w"].numpy()
    with_bits = len(codec.encode(plan, codes, True)[1])
    blind = codec.Plan(**{**plan.__dict__, "random": False})
    assert with_bits * 4 < len(codec.encode(blind, codes, True)[1])


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
        "from fedfp8 import wire; from fedfp8.model.quantized import quantize_state\n"
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
        for plan in codec.plans(q, [reference]):
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


# Version 2: strata, changes, several references


def three_tensors(move: tuple[float, float, float], seed: int) -> State:
    layout = Layout(tuple(TensorSpec(name, (3000,)) for name in "abc"))
    values = zip("abc", move, strict=True)
    return State(layout, {n: bell(3000, i) + m * bell(3000, i + seed) for i, (n, m) in enumerate(values)})


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dithered"])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_version_2_is_lossless_and_needs_only_what_it_names(rounding: str, count: int) -> None:
    layout = small_model(E5M2, 90, 70)
    states = [small_state(layout, i, 0.1 * i) for i in range(4)]
    dithered = rounding == "dithered"
    where = {"place": 6, "strata": 7, "change": True} if dithered else {}
    q = quantize_state(states[3], seed=5, rounding=rounding, step=0.2 if dithered else None, **where)  # type: ignore[arg-type]
    payload = wire.encode(q, references=states[:count])
    named = wire.header(payload).reference_fingerprints
    assert_same(wire.decode(payload, layout, references=reversed(states)), q)
    needed = [state for state in states if fingerprint_of(state, wire.header(payload).version) in named]
    assert len(needed) == len(named) <= count
    assert_same(wire.decode(payload, layout, references=needed), q)
    assert_same(wire.decode(wire.encode(q, references=states[:count], lossless=False), layout), q)
    if rounding != "dithered" and len(named) < 2:
        assert payload == wire.encode(q, references=needed) and wire.header(payload).version == 1


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    references=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=120, max_size=120),
    count=st.integers(0, 3),
    strata=st.integers(1, 256),
    data=st.data(),
    change=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
)
def test_version_2_is_lossless_property(
    values: list[float],
    references: list[float],
    count: int,
    strata: int,
    data: st.DataObject,
    change: bool,
    seed: int,
) -> None:
    place = data.draw(st.integers(0, strata - 1))
    new = one_weight(torch.tensor(values, dtype=torch.float32), 1.0)
    given = [one_weight(torch.tensor(references[40 * i :][: len(values)]), 1.0) for i in range(count)]
    q = quantize_state(new, seed=seed, rounding="dithered", step=0.1, place=place, strata=strata, change=change)
    payload = wire.encode(q, references=given)
    assert_same(wire.decode(payload, q.layout, references=given), q)
    assert len(payload) <= len(wire.encode(q, lossless=False)) + 3 + 8 * count
    back = dequantize_state(wire.decode(payload, q.layout, references=given))
    assert back.fingerprint == dequantize_state(q).fingerprint


def test_what_version_1_can_say_is_said_in_version_1() -> None:
    state = three_tensors((0.1, 0.1, 0.1), 5)
    for where, version in (
        ({}, 1),
        ({"place": 0, "strata": 1}, 1),
        ({"strata": 2}, 2),
        ({"change": True}, 2),
        ({"place": 255, "strata": 256}, 2),
    ):
        q = quantize_state(state, seed=1, rounding="dithered", step=0.3, **where)  # type: ignore[arg-type]
        payload = wire.encode(q)
        head = wire.header(payload)
        assert head.version == version
        assert head.size == (22 if version == 1 else 25)
        assert (head.place, head.strata, head.change) == (q.place, q.strata, q.change)
        assert_same(wire.decode(payload, q.layout), q)


def test_every_tensor_takes_the_reference_that_helps_most() -> None:
    """a is near the second reference, b near the third, c near none of them; the first helps nobody."""
    new = three_tensors((0.0, 0.0, 0.0), 1)
    far, near_a, near_b = (three_tensors(m, s) for m, s in (((9, 9, 9), 7), ((0.02, 3, 9), 8), ((2, 0.01, 9), 9)))
    q = quantize_state(new, seed=1, rounding="dithered", step=0.3, place=1, strata=4)
    payload = wire.encode(q, references=[far, near_a, near_b])
    assert wire.header(payload).reference_fingerprints == (near_a.quick_fingerprint, near_b.quick_fingerprint)
    rows = wire.inspect(payload, q.layout).rows
    assert rows is not None and [r.mode for r in rows] == ["reference 1", "reference 2", "static"]
    assert_same(wire.decode(payload, q.layout, references=[near_b, far, near_a]), q)
    alone = [wire.inspect(wire.encode(q, reference=r), q.layout).rows for r in (far, near_a, near_b, None)]
    for i, row in enumerate(rows):
        assert row.bytes <= min(found[i].bytes for found in alone if found is not None) * 1.01 + 2


def test_the_choice_looks_at_the_whole_tensor() -> None:
    """The first rows did not move since the first reference, everything else is near the second."""
    values = bell(100_000)
    first = values + torch.where(torch.arange(100_000) < 5000, 0.0, 1.0) * bell(100_000, 3)
    second = values + 0.05 * bell(100_000, 4)
    q = quantize_state(one_weight(values, 1.0), seed=2, rounding="dithered", step=0.3, strata=2)
    payload = wire.encode(q, references=[one_weight(first, 1.0), one_weight(second, 1.0)])
    assert wire.header(payload).reference_fingerprints == (one_weight(second, 1.0).quick_fingerprint,)


def test_equal_references_are_named_once() -> None:
    state = small_state(small_model(rows=200, columns=200))
    q = quantized(small_state(state.layout, 1, 0.01), "dithered")
    assert wire.encode(q, references=[state, state, state]) == wire.encode(q, references=[state])


def test_more_than_three_references_are_refused() -> None:
    state = small_state(small_model())
    with pytest.raises(WireFormatError, match="5 references"):
        wire.encode(quantized(state, "dithered"), reference=state, references=[state] * 4)


@pytest.mark.parametrize("rounding", ["none", "nearest", "stochastic"])
@pytest.mark.parametrize("where", [{"strata": 2}, {"place": 1}, {"change": True}])
def test_strata_and_changes_belong_to_dither(rounding: str, where: dict[str, int]) -> None:
    state = small_state(small_model())
    with pytest.raises(QuantizationError, match="dithered"):
        quantize_state(state, rounding=rounding, **where)  # type: ignore[arg-type]
    q = quantize_state(state, rounding=rounding)
    with pytest.raises(WireFormatError, match="strata"):
        wire.encode(dataclasses.replace(q, **where))  # type: ignore[arg-type]


def test_places_that_do_not_exist_are_refused_even_for_zeros() -> None:
    layout = Layout((TensorSpec("w", (5,)),))
    with pytest.raises(QuantizationError, match="place 4 of 4"):
        quantize_state(State(layout, {"w": torch.zeros(5)}), seed=1, rounding="dithered", step=1.0, place=4, strata=4)


def test_quantize_state_passes_the_place_on() -> None:
    state = small_state(small_model())
    q = quantize_state(state, seed=3, rounding="dithered", step=0.4, place=2, strata=3, change=True)
    step, seed = q.steps["net.weight"], tensor_seed(3, 0)
    k = dither(state["net.weight"].view(-1), step, seed=seed, place=2, strata=3)
    assert torch.equal(q.codes["net.weight"], k) and q.change
    back = dequantize_state(q)["net.weight"].view(-1)
    assert torch.equal(back, undither(k, step, seed=seed, place=2, strata=3))


def test_inspection_of_version_2() -> None:
    new = three_tensors((0.0, 0.0, 0.0), 1)
    given = [three_tensors(m, s) for m, s in (((0.02, 3, 9), 8), ((2, 0.01, 9), 9))]
    q = quantize_state(new, seed=1, rounding="dithered", step=0.3, place=1, strata=4, change=True)
    payload = wire.encode(q, references=given)
    found = fedfp8.inspect(payload)
    text = str(found)
    assert all(
        words in text for words in ("version 2 (a change)", "place 1 of 4", *(g.quick_fingerprint.hex() for g in given))
    )
    as_dict = json.loads(json.dumps(wire.inspect(payload, q.layout).to_dict()))
    assert (as_dict["place"], as_dict["strata"], as_dict["change"]) == (1, 4, True)
    assert as_dict["reference_fingerprints"] == [g.quick_fingerprint.hex() for g in given]
    assert [row["mode"] for row in as_dict["tensors"]] == ["reference 1", "reference 2", "static"]
    assert sum(row["bytes"] for row in as_dict["tensors"]) + found.header.size + 3 * 4 + 8 == len(payload)


def test_a_change_alone_costs_no_more_than_a_model_given_its_reference() -> None:
    """The uplink's case, 0.3 bits a weight: the change on its own grid against `local` given `received`, and against
    the entropy given the random bits (place in the cell as the context), with its own bias taken out."""
    n = 200_000
    received, change = bell(n) * 0.05, bell(n, 1) * 0.003
    step = {"w": float(8 * change.square().mean().sqrt())}
    local = quantize_state(one_weight(received + change, 1.0), seed=7, rounding="dithered", step=step)
    model = wire.encode(local, reference=one_weight(received, 1.0))
    q = quantize_state(one_weight(change, 1.0), seed=7, rounding="dithered", step=step, place=3, strata=16, change=True)
    alone = wire.encode(q)
    assert len(alone) <= 1.01 * len(model)
    place = (hash_uniform(tensor_seed(7, 0), n, place=3, strata=16) * 32).long().numpy()
    k = q.codes["w"].numpy().astype(np.int64)
    table = np.bincount(place * 8 + k + 4, minlength=256).reshape(32, 8).astype(float)
    used = table > 0
    bits = -(table[used] * np.log2((table / table.sum(1, keepdims=True))[used])).sum()
    bits += (used.sum() - 32) / (2 * np.log(2))
    assert 8 * len(alone) <= 1.03 * bits + 1600


# Mixes of references


def noisy(n: int, errors: list[float], strata: int = 4, step: float = 0.3) -> tuple[QuantState, list[State]]:
    """A weight, dithered, and a reference for each error: the weight plus independent noise of that scale."""
    values = bell(n)
    q = quantize_state(
        one_weight(values, 1.0), seed=3, rounding="dithered", step={"w": step}, place=strata - 1, strata=strata
    )
    return q, [one_weight(values + e * bell(n, 11 * i + 5), 1.0) for i, e in enumerate(errors)]


def mode_of(q: QuantState, given: list[State]) -> tuple[str, int]:
    """Mode and bytes of the first tensor, which must decode to itself, from the references in any order."""
    payload = wire.encode(q, references=given)
    assert_same(wire.decode(payload, q.layout, references=reversed(given)), q)
    rows = wire.inspect(payload, q.layout).rows
    assert rows is not None
    return rows[0].mode, rows[0].bytes


@pytest.mark.parametrize("n", [300, 2049, 8193, 40_000, 70_001])
@pytest.mark.parametrize("count", [2, 3])
def test_references_that_are_equally_good_are_mixed(n: int, count: int) -> None:
    """Independent errors of variance e² beside weights of variance 1: given all, a weight is known to 1/(1 + count/e²),
    given one reference as it is to e². On a fine grid that is log2(count + e²) / 2 bits a weight."""
    q, given = noisy(n, [0.3] * count, strata=1, step=float(np.float32(0.1)))
    alone = min(mode_of(q, [state])[1] for state in given)
    mode, size = mode_of(q, given)
    assert mode == "mix"
    gain = 8 * (alone - size) / n
    overhead = 8 * (4 * count + 24) / n  # coefficients; how well tables suit the two
    # Both variances are counted on n weights: (log2 e) / 2 * sqrt(2 / n + 2 / n), twice.
    assert abs(gain - np.log2(count + 0.09) / 2) <= overhead + 2.9 / np.sqrt(n)


@pytest.mark.parametrize("step", [0.3, 1.2, 4.8])
def test_a_mix_pays_on_coarse_grids_too(step: float) -> None:
    q, given = noisy(40_000, [0.3, 0.3], step=float(np.float32(step)))
    mode, size = mode_of(q, given)
    assert mode == "mix" and size < 0.85 * min(mode_of(q, [state])[1] for state in given)


def test_a_reference_that_is_exact_or_alone_useful_is_not_mixed() -> None:
    for errors, mode in (
        ([0.0, 0.3], "same"),
        ([0.3, 0.0], "same"),
        ([0.01, 30.0], "reference"),
        ([30.0, 0.01, 20.0], "reference"),
    ):
        q, given = noisy(40_000, errors)
        assert mode_of(q, given)[0] == mode


def test_a_mix_reaches_beyond_its_references() -> None:
    """A weight that goes on moving as it did from the first reference to the second: 2 b - a."""
    n, values = 20_000, bell(20_000)
    a, b = (one_weight(values + t * bell(n, 4), 1.0) for t in (0.0, 0.25))
    q = quantize_state(one_weight(values + 0.5 * bell(n, 4), 1.0), seed=3, rounding="dithered", step={"w": 0.125})
    plan = next(codec.plans(q, [a, b]))
    found = fit_mix(plan, products(plan, q.codes["w"].numpy(), steps.sample(plan)))
    assert found is not None
    # Errors of the cell, uniform: std 0.125 / sqrt(12), over a sample of 4,096 of which a - b has an rms of 0.29.
    assert found.coefficients == pytest.approx((-1.0, 2.0), abs=5 * 0.125 / np.sqrt(12) / (0.25 * 1.15) / 64)
    mode, size = mode_of(q, [a, b])
    assert mode == "mix" and 8 * size / n < 0.1


def test_a_mix_is_rounded_once() -> None:
    """float64 sums of exact products, from the left: what numpy computes in float64 too."""
    values = [bell(50_000, i).numpy() * np.float32(3) ** i for i in range(3)]
    given = tuple(codec.Reference(v, 1.0) for v in values)
    coefficients = tuple(float(np.float32(c)) for c in (0.7, -1.3, 1e-5))
    for k in (2, 3):
        mix = Mix(given[:k], coefficients[:k])
        out = kernels.reference_piece(mix.operands, 7, 40_000, np.empty(50_000, np.float32))
        exact = sum(c * v[7:40_000].astype(np.float64) for c, v in zip(coefficients[:k], values[:k], strict=True))
        assert np.array_equal(out, np.asarray(exact).astype(np.float32))


def test_references_that_cannot_be_mixed() -> None:
    """Equal ones, multiples, zeros, and values near the end of float32: single references are tried all the same."""
    n = 5000
    q, (one, other) = noisy(n, [0.3, 0.3])
    zero, huge = one_weight(torch.zeros(n), 1.0), one_weight(bell(n) * 5e37, 1.0)
    codes = q.codes["w"].numpy()
    for states in ([one, one], [one, one_weight(one["w"] * 2, 1.0)], [one, zero], [zero, zero], [one, one, other]):
        plan = next(codec.plans(q, states))
        assert fit_mix(plan, products(plan, codes, steps.sample(plan))) is None
        assert mode_of(q, states)[0] == "reference"
    for states in ([one, huge], [huge, other], [huge, one_weight(bell(n, 2) * 5e37, 1.0), one]):
        mode_of(q, states)


def test_fp8_codes_and_version_1_know_no_mix() -> None:
    values = bell(40_000)
    given = [one_weight(values + 0.1 * bell(40_000, i), 1.0) for i in (1, 2)]
    for rounding in ("nearest", "stochastic"):
        assert mode_of(quantized(one_weight(values, 1.0), rounding), given)[0].startswith("reference")
    q, given = noisy(5000, [0.3, 0.3], strata=1)
    assert wire.header(wire.encode(q, references=given)).version == 2
    assert wire.header(wire.encode(q, references=given[:1])).version == 1


def test_pack_and_unpack_given_several_references() -> None:
    torch.manual_seed(0)  # one time in twenty a model that helps nothing looks as if it did, on a sample
    model, other = prepare(lenet()), prepare(lenet())
    first, second = (fedfp8.unpack(fedfp8.pack(m, seed=i), other) for i, m in enumerate((prepare(lenet()), model)))
    payload = fedfp8.pack(model, seed=3, rounding="dithered", step=0.5, reference=[first, second])
    assert wire.header(payload).reference_fingerprint == second.fingerprint
    one = fedfp8.unpack(payload, other, reference=[first, second])
    assert one.fingerprint == fedfp8.unpack(payload, other, reference=second).fingerprint


def test_a_reference_that_is_what_is_coded() -> None:
    """In units of steps its distance is a difference of rounded sums, and may come out below 0."""
    layout = Layout((TensorSpec("w", (16, 16)),))
    for seed in range(40):
        state = State(layout, {"w": torch.full((16, 16), 1.0 + seed)})
        q = quantize_state(state, seed=seed, rounding="dithered", step=0.3, place=1, strata=3, together=True)
        exact = dequantize_state(q)
        payload = wire.encode(q, references=[exact])
        assert_same(wire.decode(payload, layout, references=[exact]), q)
        assert len(wire.header(payload).reference_fingerprints) == 1
