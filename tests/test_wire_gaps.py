"""Gaps: where little moves, what moved and how far it is to there."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfp8 import wire
from fedfp8.errors import WireFormatError
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import QuantState, quantize_state
from fedfp8.model.state import State
from fedfp8.wire import codec, gaps, rans, steps
from fedfp8.wire.container import seal
from fedfp8.wire.model import SCALES
from wire_cases import assert_same, bell

SIZE = gaps.FROM
LAYOUT = Layout((TensorSpec("w", (SIZE,)),))


def message(codes: np.ndarray, step: float = 0.5, change: bool = True) -> QuantState:
    layout = Layout((TensorSpec("w", (codes.size,)),))
    return QuantState(layout, "dithered", 9, {"w": torch.from_numpy(codes)}, {"w": step}, {}, 1, 3, change)


def as_gaps(q: QuantState, reference: State | None = None, scale: int = 120, shape: int = 1) -> bytes:
    """Coded as gaps, whatever the encoder would choose."""
    plan = next(codec.plans(q, () if reference is None else (reference,)))
    predictor = steps.Predictor(plan, plan.references[0] if reference else None, True)
    return steps.encode(plan, q.codes["w"].numpy(), steps.Fit(predictor, steps.StepModel(shape, scale, 0, True), 0))


def back(q: QuantState, data: bytes, reference: State | None = None) -> np.ndarray:
    plan = next(codec.plans(q, () if reference is None else (reference,)))
    return steps.decode(plan, memoryview(data), plan.references[0] if reference else None, True)


# The curve


def test_the_curve_is_what_it_says() -> None:
    top = 1 << gaps.BITS
    for j, end in enumerate(gaps.CURVE[:-1].tolist()):
        assert abs(end - top * (1 - 2 ** (-j / 16))) <= 1 and end == top - math.floor(Fraction(top - end))
    assert gaps.CURVE.dtype == np.uint64 and (np.diff(gaps.CURVE.astype(np.int64)) > 0).all() and gaps.CURVE[-1] == top
    sums = np.unique(np.concatenate([np.arange(3000), np.geomspace(1, gaps.LIMIT, 5000).astype(np.int64)]))
    on = [int(gaps.on_curve(np.uint64(s), gaps.CURVE)) for s in sums]
    assert all(b > a for a, b in pairwise(on))  # every element has a chance to move
    assert max(abs(c / top - (1 - 2 ** (-s / 2**20))) for s, c in zip(sums, on, strict=True)) < 3e-4


@given(st.integers(0, (1 << 30) - 1))
def test_the_first_sum_beyond_a_slot(slot: int) -> None:
    found = int(gaps.first_beyond(np.uint64(slot), gaps.CURVE, gaps.SEGMENTS))
    on = [int(gaps.on_curve(np.uint64(s), gaps.CURVE)) for s in (max(found - 1, 0), found)]
    assert found > 0 and on[0] <= slot and (on[1] > slot or (found == gaps.LIMIT and slot >= gaps.CURVE[-2]))


@given(st.integers(1, 2**40), st.integers(1, 2**40))
def test_hazards(moves: int, stays: int) -> None:
    wanted = min(max(2**20 * math.log2((moves + stays) / stays), 1), gaps.LIMIT)
    assert abs(int(gaps.hazard(np.uint64(moves), np.uint64(stays))) - wanted) <= 2 + wanted / 2**20


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**17)), min_size=6, max_size=6),
    st.sampled_from([1, 256]),
)
def test_frequencies_are_exact(row: list[tuple[int, int]], gain: int) -> None:
    """Made with float64 numbers, they are still those of the integers."""
    counts, prior = (np.array(column, np.uint32) for column in zip((1, 1), (0, 1), *row, strict=True))
    totals, entries = np.zeros(1, np.uint64), np.zeros(8, np.uint32)
    rans.rebuild(counts, prior, 8, gain, totals, entries, np.zeros(0, np.uint8), 8)
    mass = [c * gain + p for c, p in zip(counts.tolist(), prior.tolist(), strict=True)]
    wanted = [m * (65536 - 8) // sum(mass) + (p > 0) for m, p in zip(mass, prior.tolist(), strict=True)]
    wanted[mass.index(max(mass))] += 65536 - sum(wanted)
    assert totals[0] == sum(mass) and [e & 0xFFFF for e in entries.tolist()] == wanted


# There and back


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([SIZE, SIZE + 1, 40_000]),
    st.sampled_from([0.0, 1e-4, 0.01, 0.1, 0.5, 1.0]),
    st.sampled_from([1, 3, 200, 2**30]),
    st.sampled_from([SCALES[0], 100, 120, 140, SCALES[-1]]),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_any_codes(size: int, share: float, far: int, scale: int, shape: int, given: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = np.where(rng.random(size) < share, rng.integers(-far, far + 1, size), 0).astype(np.int32)
    q = message(codes)
    reference = State(q.layout, {"w": bell(size) * 0.3}) if given else None
    assert np.array_equal(back(q, as_gaps(q, reference, scale, shape), reference), codes)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_moves_or_everything(share: float) -> None:
    q = quantize_state(State(LAYOUT, {"w": torch.full((SIZE,), share)}), rounding="dithered", step={"w": 1.0}, strata=2)
    payload = wire.encode(q, reference=State(LAYOUT, {"w": torch.zeros(SIZE)}))
    assert_same(wire.decode(payload, LAYOUT, reference=State(LAYOUT, {"w": torch.zeros(SIZE)})), q)


def test_no_more_bytes_than_a_symbol_an_element() -> None:
    """At 0.15 to 0.7 bits a weight, given a reference and without one."""
    old = bell(200_000)
    for step in (0.6, 0.9, 1.8):
        for change in (False, True):
            layout = Layout((TensorSpec("w", (200_000,)),))
            moved = 0.1 * bell(200_000, 5)
            state = State(layout, {"w": moved if change else old + moved})
            q = quantize_state(state, seed=1, rounding="dithered", step={"w": step}, strata=4, change=change)
            reference = None if change else State(layout, {"w": old})
            plan = next(codec.plans(q, () if change else (reference,)))  # type: ignore[arg-type]
            codes = q.codes["w"].numpy()
            fit = steps.fit(plan, codes, None if change else plan.references[0])
            assert fit.model.gaps
            whole = steps.Fit(fit.predictor, steps.StepModel(fit.model.shape, fit.model.scale, 0), 0)
            assert len(steps.encode(plan, codes, fit)) <= 1.003 * len(steps.encode(plan, codes, whole))


def test_messages_of_version_1_have_none() -> None:
    codes = (np.arange(SIZE) % 50 == 0).astype(np.int32)
    q = message(codes)
    assert as_gaps(q)[0] & 31 == steps.GAPS
    plain = QuantState(LAYOUT, "dithered", 9, {"w": torch.from_numpy(codes)}, {"w": 0.5})
    assert wire.header(wire.encode(plain)).version == 1
    with pytest.raises(WireFormatError, match="shift 31"):
        back(plain, as_gaps(q))
    old = State(LAYOUT, {"w": torch.zeros(SIZE)})
    payload = wire.encode(plain, references=[old, old, old])  # one of them is used, after all
    assert wire.header(payload).version == 1
    assert_same(wire.decode(payload, LAYOUT, reference=old), plain)


# Hostile input


def test_damage_is_refused_or_harmless() -> None:
    """Any byte of the data, changed: an error, or codes within bounds. Cut short or longer: an error."""
    rng = np.random.default_rng(0)
    codes = np.where(rng.random(SIZE) < 0.1, rng.integers(-2, 3, SIZE), 0).astype(np.int32)
    q = message(codes)
    data = as_gaps(q)
    refused = 0
    for at in [*range(40), *rng.integers(0, len(data), 300).tolist()]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(8))
        try:
            assert np.abs(back(q, bytes(damaged))).max() <= 2**30
        except WireFormatError:
            refused += 1
    assert refused > 300
    for other in (data[:-4], data[:-400], data[:40], data[:20], data[:2], data + bytes(4), data + bytes(1)):
        with pytest.raises(WireFormatError):
            back(q, other)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=27, max_size=400), st.integers(0, 3), st.integers(0, 255), st.booleans())
def test_noise_is_refused(noise: bytes, shape: int, scale: int, zeros: bool) -> None:
    q = message(np.zeros(SIZE, np.int32))
    data = bytes([shape << 5 | steps.GAPS, scale, 0]) + (bytes(len(noise)) if zeros else noise)
    with pytest.raises(WireFormatError):
        back(q, data)


def test_a_damaged_message_names_the_tensor() -> None:
    codes = (np.arange(SIZE) % 20 == 0).astype(np.int32)
    payload = wire.encode(message(codes))
    assert_same(wire.decode(payload, LAYOUT), message(codes))
    with pytest.raises(WireFormatError, match="tensor 'w', mode static"):
        wire.decode(seal(payload[:-20] + bytes(12)), LAYOUT)
