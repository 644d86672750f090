"""A QuantState as one blob of bytes, and back. Nothing is rounded here: ``decode(encode(q)) == q``, bit for bit.

The body is: every tensor that travels as it is (ranges, float parameters, integers), the steps (float32, only if
dithered), then the coded tensors in layout order, each ``mode | length | data`` in its smallest mode (`codec.py`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from fedfp8.errors import QuantizationError, WireFormatError
from fedfp8.fp8.grid import ALPHA_MAX, ALPHA_MIN
from fedfp8.fp8.quantizers import STEP_MAX, STEP_MIN
from fedfp8.model.frequencies import layout_of_frequencies
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import QuantState
from fedfp8.model.rounding import ROUNDINGS
from fedfp8.model.state import Values
from fedfp8.wire import codec
from fedfp8.wire.container import (
    AGAIN,
    REFERENCES,
    Header,
    Reader,
    checked_body,
    fingerprint_of,
    seal,
    varint,
    write_header,
)

__all__ = ["decode", "encode", "read_plain", "records"]


def encode(
    q: QuantState,
    *,
    reference: Values | None = None,
    references: Sequence[Values] = (),
    lossless: bool = True,
    with_layout: bool = False,
) -> bytes:
    """The payload of `q`: the same bytes for the same arguments on every machine.

    references: up to 3 states the receiver holds too, bit for bit; every tensor is then coded given the values of the
    one that helps most, or of a mix of all, and the header names those that helped. reference: a single one.
    lossless=False: mode raw for every tensor, the paper's byte a weight.
    with_layout: include names, shapes and formats, for a receiver that has no model.
    """
    _check_complete(q)
    given = held(reference, references) if lossless and q.codes else ()
    if len(given) > REFERENCES:
        raise WireFormatError(f"{len(given)} references; a message is coded given at most {REFERENCES}")
    for state in given:
        _check_reference(q.form, state)
    coded = [codec.encode(plan, codec.codes_of(plan, q), lossless) for plan in codec.plans(q, given) if not plan.empty]
    asked = {codec.reference_of(mode) for mode, _ in coded}
    used = [i for i in range(len(given)) if asked & {i, codec.ALL}]  # the receiver need not have the others
    head = write_header(q, [given[i] for i in used], with_layout)
    return seal(head, *_write_plain(q), *_write_coded(coded, used))


def held(reference: Values | None, references: Iterable[Values]) -> tuple[Values, ...]:
    return (*(() if reference is None else (reference,)), *references)


def _write_coded(coded: list[tuple[int, bytes]], used: list[int]) -> Iterator[bytes]:
    """mode | length | data of every tensor; references are counted among those that are used."""
    for mode, data in coded:
        index = codec.reference_of(mode)
        new = mode if index is None or index == codec.ALL else mode + (used.index(index) - index << codec.INDEX)
        yield bytes([new]) + varint(len(data))
        yield data


def _write_plain(q: QuantState) -> Iterator[bytes | memoryview]:
    for spec in q.form:
        if spec.name in q.rest:
            tensor = q.rest[spec.name]
            _check_rest(spec, tensor, _is_alpha(q.form, q.rounding, spec), QuantizationError)
            yield tensor.contiguous().view(-1).numpy().data if spec.size else b""
    steps = np.array([q.steps[spec.name] for _, spec in q.coded if q.steps], dtype="<f4")
    yield steps.view("<u2")[1::2].tobytes() if q.together else steps.tobytes()  # the upper halves


def decode(
    payload: bytes,
    layout: Layout | None = None,
    *,
    reference: Values | None = None,
    references: Iterable[Values] = (),
) -> QuantState:
    """The inverse of :func:`encode`; raises WireFormatError for anything that `encode` cannot have written.

    layout: the receiver's; None if the payload carries its own. references: any states the receiver holds; those that
    the sender used (`header`) must be among them. reference: a single one.
    """
    head, layout, reader = checked_body(payload, layout)
    form = layout_of_frequencies(layout) if head.frequencies else layout
    used = _find_references(head, form, held(reference, references))
    q, found = read_plain(head, layout, reader), dict[str, torch.Tensor]()
    for plan, mode, data in records(q, used, reader):
        codes = np.zeros(plan.size, plan.dtype) if mode is None else codec.decode(plan, mode, data)
        found.update(codec.split_codes(plan, q, codes))
    reader.finish()
    q.codes.update({spec.name: found[spec.name] for _, spec in q.coded})
    return q


def read_plain(head: Header, layout: Layout, reader: Reader) -> QuantState:
    """Everything before the coded tensors: ranges, other tensors that travel as they are, and steps."""
    q = QuantState(
        layout, head.rounding, head.seed, place=head.place, strata=head.strata, change=head.change,
        together=head.together, frequencies=head.frequencies,
    )  # fmt: skip
    for spec in q.form:
        if spec.kind not in ROUNDINGS[head.rounding].kinds:
            q.rest[spec.name] = _read_rest(spec, reader, _is_alpha(q.form, head.rounding, spec))
    if ROUNDINGS[head.rounding].has_steps:
        q.steps.update(_read_steps(q.form, reader, head.together))
    return q


def records(
    q: QuantState, references: Sequence[Values], reader: Reader
) -> Iterator[tuple[codec.Plan, int | None, memoryview]]:
    """(plan, mode, data) of every coded tensor; mode None for one that needs no data (empty, or all zero)."""
    for plan in codec.plans(q, references):
        if plan.empty:
            yield plan, None, reader.data[:0]
            continue
        reader.where = f"tensor {plan.name!r}"
        mode = reader.take(1, "mode")[0]
        # No mode takes more than 9 bytes an element and a few words.
        length = reader.varint("length", 9 * plan.size + 64)
        yield plan, mode, reader.take(length, "codes")
    reader.where = "payload"


# Checks


def _is_alpha(layout: Layout, rounding: str, spec: TensorSpec) -> bool:
    return ROUNDINGS[rounding].has_ranges and any(s.range == spec.name for s in layout)


def _check_complete(q: QuantState) -> None:
    rule = ROUNDINGS[q.rounding]
    coded, wanted = [s for s in q.form if s.kind in rule.kinds], rule.codes
    for spec in coded:
        codes = q.codes.get(spec.name)
        if codes is None or codes.dtype != wanted or codes.shape != (spec.size,) or not codes.is_contiguous():
            raise QuantizationError(
                f"codes of {spec.name!r} must be {spec.size} contiguous {wanted}; use quantize_state"
            )
        step = q.steps.get(spec.name, 0.0)
        if rule.has_steps:
            _check_step(spec.name, step, QuantizationError)
            if q.together and np.float32(step).view(np.uint32) & 0xFFFF:
                raise QuantizationError(
                    f"step of {spec.name!r} is {step!r}, which 16 bits do not hold; use quantize_state"
                )
            if step == 0.0 and bool(codes.any()):
                raise QuantizationError(f"step of {spec.name!r} is 0 but its codes are not all 0; use quantize_state")
    if len(q.codes) != len(coded) or len(q.codes) + len(q.rest) != len(q.form):
        raise QuantizationError("a QuantState must hold every tensor of its layout once, as codes or as rest")


def _check_step(name: str, step: float, error: type[Exception]) -> None:
    if not (step == 0.0 or STEP_MIN <= step <= STEP_MAX) or float(np.float32(step)) != step:
        raise error(f"step of {name!r} is {step!r}; it must be a float32, 0 or between 2**-100 and 2**100")


def _check_rest(spec: TensorSpec, tensor: torch.Tensor, is_alpha: bool, error: type[Exception]) -> None:
    if tuple(tensor.shape) != spec.shape or (tensor.dtype == torch.float32) != (spec.kind != "integer"):
        raise error(f"tensor {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}; its layout says {spec}")
    if spec.kind == "integer" or not tensor.numel():
        return
    if not (math.isfinite(float(tensor)) if tensor.numel() == 1 else bool(torch.isfinite(tensor).all())):
        raise error(f"tensor {spec.name!r} holds NaN or Inf; only finite values are sent: check the training step")
    if spec.kind == "range" and float(tensor.min()) < (ALPHA_MIN if is_alpha else 0.0):
        lowest = "2**-80" if is_alpha else "0 (not set yet)"
        raise error(f"range {spec.name!r} is {float(tensor.min())}; the smallest allowed is {lowest}")
    if is_alpha and (tensor.numel() != 1 or float(tensor.max()) > ALPHA_MAX):
        raise error(f"range {spec.name!r} must be one number of at most 2**100, as it scales a weight's grid")


def _check_reference(layout: Layout, reference: Values) -> None:
    theirs = {s.name: s for s in reference.layout}
    for spec in layout:
        if spec.name not in theirs or theirs[spec.name].shape != spec.shape:
            raise WireFormatError(
                f"reference has no tensor {spec.name!r} of shape {spec.shape}: it is of another model"
            )


def _find_references(head: Header, layout: Layout, given: tuple[Values, ...]) -> list[Values]:
    """Those the header names, in its order."""
    found, known = [], {fingerprint_of(state, head.version): state for state in given if head.reference_fingerprints}
    for wanted in head.reference_fingerprints:
        state = known.get(wanted)
        if state is None:
            others = ", ".join(one.hex() for one in known) or "none"
            raise WireFormatError(
                f"the payload is coded given the model with reference fingerprint {wanted.hex()}, the receiver gave "
                f"{others}; pass it as reference (the very model the sender used), or have the sender encode without it"
            )
        _check_reference(layout, state)
        found.append(state)
    return found


def _read_rest(spec: TensorSpec, reader: Reader, is_alpha: bool) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype) if spec.kind == "integer" else torch.float32
    data = reader.take(spec.size * dtype.itemsize, f"values of {spec.name!r}")
    if dtype == torch.bool and any(byte > 1 for byte in data):
        raise WireFormatError(f"tensor {spec.name!r}: a bool is neither 0 nor 1; {AGAIN}")
    tensor = torch.frombuffer(bytearray(data), dtype=dtype) if spec.size else torch.empty(0, dtype=dtype)
    _check_rest(spec, tensor.view(spec.shape), is_alpha, WireFormatError)
    return tensor.view(spec.shape)


def _read_steps(layout: Layout, reader: Reader, short: bool) -> dict[str, float]:
    names = [s.name for s in layout if s.kind in ROUNDINGS["dithered"].kinds]
    data = np.frombuffer(reader.take((2 if short else 4) * len(names), "steps"), "<u2" if short else "<u4")
    values = (data.astype(np.uint32) << 16 if short else data.astype(np.uint32)).view(np.float32)
    steps = {name: float(value) for name, value in zip(names, values, strict=True)}
    for name, step in steps.items():
        if math.copysign(1.0, step) < 0:
            raise WireFormatError(f"step of {name!r} is {step}; steps are not negative; {AGAIN}")
        _check_step(name, step, WireFormatError)
    return steps
