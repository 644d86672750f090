"""A payload is hostile until proven otherwise: whatever is wrong with it, WireFormatError and an untouched model."""

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedfp8
from fedfp8 import Format, wire
from fedfp8.errors import WireFormatError
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import QuantState, quantize_state
from fedfp8.model.state import State
from fedfp8.models.lenet import lenet
from fedfp8.nn import prepare, state_of
from fedfp8.wire.container import seal, varint
from wire_cases import assert_same, bell, one_weight, small_model, small_state

LAYOUT = small_model()
REFERENCE = small_state(LAYOUT)


def payload_of(rounding: str, **options: object) -> bytes:
    step = 0.3 if rounding == "dithered" else None
    q = quantize_state(small_state(LAYOUT, 1, 0.05), seed=5, rounding=rounding, step=step)
    return wire.encode(q, reference=REFERENCE, **options)  # type: ignore[arg-type]


SECOND = small_state(LAYOUT, 3, 0.5)


def payload_2(**options: object) -> bytes:
    """Version 2: the weight is near the first reference and the bias near the second."""
    state = small_state(LAYOUT, 1, 0.05)
    mixed = State(LAYOUT, {**state.tensors, "net.bias": SECOND["net.bias"] + 0.01})
    q = quantize_state(mixed, seed=5, rounding="dithered", step=0.3, place=2, strata=5, change=True)
    return wire.encode(q, references=(REFERENCE, SECOND), **options)  # type: ignore[arg-type]


def payload_mix() -> bytes:
    """The weight lies between the two references."""
    state = small_state(LAYOUT, 1, 0.05)
    middle = State(LAYOUT, {**state.tensors, "net.weight": (REFERENCE["net.weight"] + SECOND["net.weight"]) / 2})
    q = quantize_state(middle, seed=5, rounding="dithered", step=0.3, place=2, strata=5)
    return wire.encode(q, references=(REFERENCE, SECOND))


def payload_together() -> bytes:
    """Bias and nothing are one."""
    state = small_state(LAYOUT, 1, 0.05)
    q = quantize_state(state, seed=5, rounding="dithered", step=0.3, place=2, strata=5, together=True)
    return wire.encode(q, references=(REFERENCE, SECOND))


MIX_AT = 25 + 2 * 8 + 4 + 4 + 8 + 3 * 4 + 2  # of the coefficients: header, alpha, beta, an int64, steps; mode, length


PAYLOADS = {
    "none": payload_of("none"),
    "nearest": payload_of("nearest"),
    "stochastic": payload_of("stochastic"),
    "dithered": payload_of("dithered"),
    "raw": payload_of("dithered", lossless=False),
    "layout": payload_of("stochastic", with_layout=True),
    "two": payload_2(),
    "mix": payload_mix(),
    "two raw": payload_2(lossless=False),
    "two layout": payload_2(with_layout=True),
    "together": payload_together(),
}


def resealed(payload: bytes, change: Callable[[bytearray], None]) -> bytes:
    """A payload changed by someone who knows the checksum."""
    body = bytearray(payload[:-8])
    change(body)
    return seal(bytes(body))


def refused(
    payload: bytes, words: str | None = None, layout: Layout | None = LAYOUT, reference: State | None = REFERENCE
) -> None:
    with pytest.raises(WireFormatError, match=words):
        wire.decode(payload, layout, reference=reference, references=(SECOND,))


def not_inspected(payload: bytes) -> None:
    """`inspect` shows nothing of a damaged payload, with a layout at hand or without."""
    for layout in (LAYOUT, None):
        with pytest.raises(WireFormatError):
            wire.inspect(payload, layout)


@pytest.mark.parametrize("name", PAYLOADS)
def test_every_truncation_is_refused(name: str) -> None:
    payload = PAYLOADS[name]
    for length in range(len(payload)):
        refused(payload[:length])
        if length % 7 == 0:
            not_inspected(payload[:length])


@pytest.mark.parametrize("name", PAYLOADS)
def test_every_single_bit_flip_is_refused(name: str) -> None:
    payload = PAYLOADS[name]
    stride = max(1, len(payload) * 8 // 4000) | 1  # odd: all bit positions are met in long payloads too
    for bit in [*range(min(64 * 8, len(payload) * 8)), *range(0, len(payload) * 8, stride)]:
        changed = bytearray(payload)
        changed[bit >> 3] ^= 1 << (bit & 7)
        refused(bytes(changed))
        if bit % 7 == 0:
            not_inspected(bytes(changed))


@pytest.mark.parametrize("name", PAYLOADS)
def test_extensions_are_refused(name: str) -> None:
    payload = PAYLOADS[name]
    refused(payload + b"\0")
    refused(payload * 2)
    refused(resealed(payload, lambda body: body.append(0)), "after the last field")


def survives(payload: bytes, layout: Layout | None = LAYOUT, reference: State | None = REFERENCE) -> None:
    """Decodes to something of the right shape, or raises WireFormatError: nothing else may happen."""
    try:
        q = wire.decode(payload, layout, reference=reference, references=(SECOND,))
    except WireFormatError:
        return
    for spec in q.layout:
        tensor = q.codes.get(spec.name, q.rest.get(spec.name))
        assert tensor is not None and tensor.numel() == spec.size


@given(
    name=st.sampled_from(sorted(PAYLOADS)),
    changes=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 40),
)
def test_changed_payloads_with_a_valid_checksum(name: str, changes: list[tuple[int, int]], cut: int) -> None:
    def change(body: bytearray) -> None:
        for at, value in changes:
            body[at % len(body)] ^= value
        del body[len(body) - cut :]

    survives(resealed(PAYLOADS[name], change))


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    survives(data)
    survives(seal(data))
    survives(seal(PAYLOADS["stochastic"][:30] + data))
    survives(seal(PAYLOADS["dithered"][:30] + data))
    survives(seal(PAYLOADS["two"][:41] + data))
    survives(seal(PAYLOADS["two"][:5] + data))


def test_every_byte_of_a_coded_tensor_under_a_valid_checksum() -> None:
    """The entropy decoders meet every damaged state, word, length, shape and scale without a checksum to save them."""
    for name in ("stochastic", "dithered", "two", "mix"):
        payload = PAYLOADS[name]
        for at in range(wire.header(payload).size, len(payload) - 8):
            for value in (0x01, 0x80, 0xFF):

                def change(body: bytearray, at: int = at, value: int = value) -> None:
                    body[at] ^= value

                survives(resealed(payload, change))


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, b"PK", "not a fedfp8 message"),
        (4, b"\x03", "version is 3"),
        (5, b"\xf9", "flags"),
        (6, b"\0\0", "layout fingerprint"),
        (21, b"\xff", "63 bits"),
        (22, b"\0\0", "reference fingerprint"),
    ],
)
def test_header_fields_are_named(at: int, value: bytes, words: str) -> None:
    def change(body: bytearray) -> None:
        body[at : at + len(value)] = value

    refused(resealed(PAYLOADS["stochastic"], change), words)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (5, 0x4A, "flags"),
        (5, 0x8A, "flags"),
        (5, 0x0E, "layout section"),
        (6, 4, "rounding is 4"),
        (6, 255, "rounding is 255"),
        (6, 2, "strata 5.*rounding stochastic"),
        (7, 5, "place 5 of 5"),
        (7, 255, "place 255 of 5"),
        (8, 1, "place 2 of 2"),
        (9, 0, "layout fingerprint"),
        (24, 0xFF, "63 bits"),
        (25, 0, "reference fingerprint"),
        (33, 0, "reference fingerprint"),
    ],
)
def test_header_fields_of_version_2_are_named(at: int, value: int, words: str) -> None:
    payload = PAYLOADS["two"]
    assert wire.header(payload).version == 2 and payload[5] == 0x0A and payload[at] != value

    def change(body: bytearray) -> None:
        body[at] = value

    refused(resealed(payload, change), words)


def test_version_2_without_what_is_new_decodes_too() -> None:
    """A sender may write it; ours does not."""
    one = PAYLOADS["dithered"]
    flags, rounding = one[5] & 1, one[5] >> 2
    head = one[:4] + bytes([2, flags, rounding, 0, 0]) + one[6:22] + REFERENCE.quick_fingerprint
    assert_same(
        wire.decode(seal(head + one[30:-8]), LAYOUT, reference=REFERENCE),
        wire.decode(one, LAYOUT, reference=REFERENCE),
    )


@pytest.mark.parametrize("mode", [8, 9, 12, 13, 18, 19, 24, 25, 27, 30, 31, 34, 42, 58, 66, 130, 255])
@pytest.mark.parametrize("name", ["dithered", "two"])
def test_references_and_modes_that_the_message_does_not_have(name: str, mode: int) -> None:
    """Index 2 and above, an index on raw or static, no random bits on the uniform grid, and a mix that is "same"."""
    payload = PAYLOADS[name]
    at = wire.header(payload).size + 4 + 4 + 8 + 3 * 4  # alpha, beta, an int64; steps of three tensors

    def change(body: bytearray) -> None:
        assert body[at] == 2
        body[at] = mode

    refused(resealed(payload, change), "tensor 'net.weight'.*(does not exist|needs reference)")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38, -16.001, 16.001])
@pytest.mark.parametrize("at", [0, 1])
def test_coefficients_are_checked(value: float, at: int) -> None:
    where = MIX_AT + 4 * at
    refused(
        resealed(PAYLOADS["mix"], lambda body: struct.pack_into("<f", body, where, value)),
        "tensor 'net.weight', mode mix: coefficients",
    )


def test_coefficients_at_the_bound_that_are_not_the_senders() -> None:
    """They are possible; what follows does not fit, or gives other codes."""
    for pair in ((16.0, -16.0), (0.0, -0.0), (1e-45, 0.0)):
        survives(resealed(PAYLOADS["mix"], lambda body, pair=pair: struct.pack_into("<ff", body, MIX_AT, *pair)))  # type: ignore[misc]


def test_a_mix_needs_two_references_dither_and_its_bytes() -> None:
    payload = PAYLOADS["mix"]
    assert wire.header(payload).size == MIX_AT - 2 - 28 and payload[MIX_AT - 2] == 26
    one = seal(payload[:5] + bytes([payload[5] & ~3 | 1]) + payload[6:33] + payload[41:-8])
    refused(one, "a mix of 1 references")
    for length in (0, 7, 8, 9):
        start = payload[: MIX_AT - 1] + bytes([length])
        refused(seal(start + payload[MIX_AT : MIX_AT + length]), "net.weight")
    crafted_fp8, state = crafted(26, bytes(40))
    refused(crafted_fp8, "does not exist", state.layout, None)


def test_a_mix_beyond_float32_is_cut() -> None:
    """Finite references and coefficients, but a sum that is not: refused, or other codes. What is coded comes back."""
    big = [State(LAYOUT, {**s.tensors, "net.weight": s["net.weight"] * 5e37}) for s in (REFERENCE, SECOND)]
    named = b"".join(state.quick_fingerprint for state in big)

    def change(body: bytearray) -> None:
        body[25:41] = named
        struct.pack_into("<ff", body, MIX_AT, 16.0, 16.0)

    with suppress(WireFormatError):
        wire.decode(resealed(PAYLOADS["mix"], change), LAYOUT, references=big)
    rows = torch.arange(40).view(40, 1) < 20  # where the references, of opposite sign elsewhere, add up
    near, far = (State(LAYOUT, {**s.tensors, "net.weight": s["net.weight"].sign() * 3e38}) for s in (REFERENCE, SECOND))
    new = State(
        LAYOUT, {**REFERENCE.tensors, "net.weight": torch.where(rows, near["net.weight"], far["net.weight"]) / 2}
    )
    steps = {"net.weight": 2.0**100, "net.bias": 0.1, "nothing": 1.0}
    small = State(LAYOUT, {**new.tensors, "net.weight": new["net.weight"] / 2**20})
    q = quantize_state(small, seed=5, rounding="dithered", step=steps, place=2, strata=5)
    assert_same(wire.decode(wire.encode(q, references=(near, far)), LAYOUT, references=(near, far)), q)


def test_an_empty_layout_is_a_layout() -> None:
    """It used to count as none, so that a receiver without tensors took any payload that brought its own layout."""
    refused(PAYLOADS["layout"], "layout fingerprint", layout=Layout(()))
    with pytest.raises(WireFormatError, match="layout fingerprint"):
        wire.inspect(PAYLOADS["layout"], Layout(()))


def test_a_missing_reference_is_named() -> None:
    payload = PAYLOADS["two"]
    for held, missing in (((REFERENCE,), SECOND), ((SECOND,), REFERENCE)):
        with pytest.raises(WireFormatError, match=missing.quick_fingerprint.hex()):
            wire.decode(payload, LAYOUT, references=held)


def test_missing_wrong_or_useless_context() -> None:
    refused(PAYLOADS["stochastic"], "pass it as reference", reference=None)
    refused(PAYLOADS["stochastic"], "very model", reference=small_state(LAYOUT, 2, 0.1))
    refused(PAYLOADS["stochastic"], "layout", layout=small_model(Format(5, 2)))
    refused(PAYLOADS["stochastic"], "with_layout=True", layout=None)
    other = State(LAYOUT, {**REFERENCE.tensors, "net.weight": torch.full((40, 30), float("nan"))})
    q = quantize_state(REFERENCE, seed=1)
    with pytest.raises(WireFormatError, match=r"NaN or Inf"):
        wire.encode(q, reference=other)
    with pytest.raises(WireFormatError, match="another model"):
        wire.encode(q, reference=one_weight(bell(10), 1.0))


def test_swapped_payloads_are_refused() -> None:
    other = small_model(rows=30, columns=40)
    q = quantize_state(small_state(other), seed=1)
    refused(wire.encode(q), "layout fingerprint")
    head, tail = PAYLOADS["stochastic"][:30], PAYLOADS["dithered"][30:-8]
    survives(seal(head + tail))


def crafted(
    mode: int, data: bytes, rounding: str = "stochastic", n: int = 1000, alpha: float = 1.0
) -> tuple[bytes, State]:
    """A payload of one tensor with hand-made mode and data."""
    state = one_weight(bell(n), alpha)
    empty = quantize_state(state, seed=1, rounding=rounding, step=0.5 if rounding == "dithered" else None)
    full = wire.encode(empty, lossless=False)
    plain = 22 + 4 + (4 if rounding == "dithered" else 0)
    return seal(full[:plain] + bytes([mode]) + varint(len(data)) + data), state


@pytest.mark.parametrize(
    ("mode", "data", "words"),
    [
        (0, b"\0" * 999, "1000 codes"),
        (7, b"", "reference"),
        (9, b"\0" * 20, "does not exist"),
        (2, b"\0\x80\0" + b"\0" * 8, "reference"),
        (1, b"\0" * 7, "states"),
        (1, b"\0" * 8, "out of range"),
        (1, b"\xff" * 8, "out of range"),
        (1, struct.pack("<Q", 1 << 31), "end before"),
        (1, struct.pack("<Q", 1 << 40) + b"\x01\0\0\0" * 2000, "end where"),
    ],
)
def test_impossible_tensors(mode: int, data: bytes, words: str) -> None:
    payload, state = crafted(mode, data)
    refused(payload, words, state.layout, None)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x21", "raw integers|bytes do not hold"),
        (b"\x00\x00", "bytes do not hold"),
    ],
)
def test_impossible_raw_integers(data: bytes, words: str) -> None:
    payload, state = crafted(0, data, "dithered")
    refused(payload, words, state.layout, None)


@pytest.mark.parametrize("head", [b"\xe0\x80\0", b"\x1f\x80\0", b"\0\x00\0", b"\0\xff\0", b"\0\x80\xff\xff\xff\x7f"])
def test_impossible_models_of_steps(head: bytes) -> None:
    payload, state = crafted(1, head + struct.pack("<Q", 1 << 31), "dithered")
    refused(payload, None, state.layout, None)


def test_huge_counts_allocate_nothing() -> None:
    """A few bytes that claim four thousand million elements."""
    big = Layout((TensorSpec("w", (2**16, 2**15), "float32", "float"), TensorSpec("v", (2**31,), "float32", "float")))
    start = wire.container.write_header(QuantState(big, "none", 0), (), True)
    for payload in (seal(start), seal(start + b"\0" * 100)):
        tracemalloc.start()
        with pytest.raises(WireFormatError, match="too many"):
            wire.decode(payload)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


def test_coded_tensors_allocate_no_more_than_their_data_explains() -> None:
    """FP8 and dithered tensors of 2**31 elements with next to no data: refused before the codes are allocated."""
    weight = TensorSpec("w", (2**31,), "float32", "fp8", fedfp8.E4M3, "a")
    layout = Layout((weight, TensorSpec("a", (), "float32", "range")))
    for rounding, plain in (("stochastic", struct.pack("<f", 1.0)), ("dithered", struct.pack("<ff", 1.0, 1.0))):
        start = wire.container.write_header(QuantState(layout, rounding, 0), (), True) + plain
        for mode, data in (
            (0, b"\x08" * 50),
            (1, b"\0\x80\0" + b"\x7f" * 61),
            (1, b"\x7f" * 64),
            (1, b""),
            (2, b"\0" * 64),
        ):
            tracemalloc.start()
            with pytest.raises(WireFormatError):
                wire.decode(seal(start + bytes([mode]) + varint(len(data)) + data))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 1 << 22


def test_decompression_bombs_and_odd_layouts() -> None:
    import zlib

    head = PAYLOADS["layout"][:30]
    for packed in (zlib.compress(b"[" * (1 << 25)), zlib.compress(b"[]x"), b"\0\1\2", zlib.compress(b"[]") + b"!", b""):
        tracemalloc.start()
        refused(seal(head + varint(len(packed)) + packed), "layout", None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 26


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, 1e-30, 1e38])
def test_ranges_are_checked(value: float) -> None:
    plain = bytearray(PAYLOADS["stochastic"])
    at = plain.index(struct.pack("<f", 2.0))
    refused(
        resealed(bytes(plain), lambda body: struct.pack_into("<f", body, at, value)), r"net\.alpha|net\.bias|NaN|range"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, -0.0, 1e-38, 1e38])
def test_steps_are_checked(value: float) -> None:
    layout = Layout((TensorSpec("w", (4,)),))
    q = quantize_state(State(layout, {"w": bell(4)}), seed=1, rounding="dithered", step=0.5)
    payload = resealed(wire.encode(q), lambda body: struct.pack_into("<f", body, 22, value))
    refused(payload, "step of 'w'", layout, None)


def test_floats_and_bools_that_travel_as_they_are() -> None:
    layout = Layout((TensorSpec("f", (2,)), TensorSpec("b", (3,), "bool", "integer")))
    state = State(layout, {"f": torch.tensor([1.0, -0.0]), "b": torch.tensor([True, False, True])})
    payload = wire.encode(quantize_state(state, rounding="none"))
    assert_same(wire.decode(payload, layout), quantize_state(state, rounding="none"))
    refused(resealed(payload, lambda body: struct.pack_into("<f", body, 22, float("inf"))), "'f'", layout, None)
    refused(resealed(payload, lambda body: struct.pack_into("<B", body, 31, 2)), "'b'", layout, None)


def test_a_refused_payload_leaves_the_model_untouched() -> None:
    model = prepare(lenet())
    other = prepare(lenet())
    good = fedfp8.pack(other, seed=3)
    before = state_of(model).fingerprint

    def damage_last_tensor(body: bytearray) -> None:
        body[-1] ^= 0xFF

    for bad in (good[:-1], resealed(good, damage_last_tensor), resealed(good, lambda body: body.append(0))):
        with pytest.raises(WireFormatError):
            fedfp8.unpack(bad, model)
        assert state_of(model).fingerprint == before
    fedfp8.unpack(good, model)
    assert state_of(model).fingerprint != before
