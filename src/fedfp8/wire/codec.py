"""One tensor's codes as the fewest bytes: the modes, and the choice between them.

raw         a fixed number of bits an element (`rawbits.py`)
static      entropy coded on its own: FP8 codes by their frequencies; dithered integers given the random bits alone
reference   coded as steps from a reference, quantized to the new grid with the message's own random bits (or, with the
            flag NO_RANDOM_BITS, without them: better for weights that already sit on the grid)
same        exactly that prediction: no data at all

Which of the message's references it is stands in the mode too, from bit INDEX on; ALL: a mix of them (`mix.py`).

Small tensors of a message are one tensor here: its elements are those of all of them, in units of their steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedfp8.errors import QuantizationError, WireFormatError
from fedfp8.fp8.format import Format
from fedfp8.fp8.parallel import Keys, dither_keys, random_keys
from fedfp8.model.layout import TensorSpec
from fedfp8.model.quantized import QuantState, Small, tensor_seed
from fedfp8.model.rounding import ROUNDINGS
from fedfp8.model.state import Values
from fedfp8.wire import kernels, rawbits, steps, stream
from fedfp8.wire.container import REFERENCES, version_of
from fedfp8.wire.mix import Mix, fit_mix, products, read_mix

__all__ = [
    "ALL",
    "INDEX",
    "MIX",
    "NO_RANDOM_BITS",
    "RAW",
    "REFERENCE",
    "SAME",
    "STATIC",
    "Plan",
    "Reference",
    "codes_of",
    "decode",
    "encode",
    "mode_name",
    "plans",
    "reference_of",
    "split_codes",
]

RAW, STATIC, REFERENCE, SAME = range(4)
NO_RANDOM_BITS = 4
INDEX = 3
ALL = 3  # in the place of an index
MIX = REFERENCE | ALL << INDEX
NEAR = 1.25  # references farther than this, in squares, from what is coded than the nearest are not looked at
MODES = ("raw", "static", "reference", "same")


@dataclass(frozen=True)
class Reference:
    """The same tensor of a model that both sides hold."""

    values: np.ndarray
    whole_rms: float | None = None  # of dithered tensors in messages that take it from all elements

    @cached_property
    def rms(self) -> float:
        """For the classes of a dithered tensor's values; of a sample, which every tensor has at hand."""
        return steps.sampled_rms(self.values) if self.whole_rms is None else self.whole_rms

    @property
    def operands(self) -> tuple[Any, ...]:
        """For kernels, as those of a mix."""
        return self.values, self.values, self.values, 1.0, 0.0, 0.0, 1


@dataclass(frozen=True)
class Plan:
    """Everything both sides know about a tensor before its codes."""

    spec: TensorSpec
    parts: tuple[TensorSpec, ...]  # the tensors that it is made of: itself, or those that are coded together
    size: int
    dithered: bool
    random: bool  # the codes were made with random bits
    seed: int
    alpha: float
    step: float
    references: tuple[Reference, ...]
    place: int = 0
    strata: int = 1
    version: int = 1  # of the format, as far as the sender's choices go
    second: bool = False  # the message is of version 2 whatever references it names: steps may be coded as gaps

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def keys(self) -> Keys:
        """Of the random bits."""
        return dither_keys(self.seed, self.place, self.strata) if self.dithered else random_keys(self.seed)

    @property
    def format(self) -> Format | None:
        """Of the codes; None on the uniform grid."""
        return None if self.dithered else self.spec.format

    @property
    def bits(self) -> int:
        """Of an FP8 code."""
        assert self.spec.format is not None
        return self.spec.format.bits

    @property
    def dtype(self) -> type:
        return np.int32 if self.dithered else np.uint8

    @property
    def empty(self) -> bool:
        """Nothing to send: no elements, or a step of 0, which says that all are zero."""
        return self.size == 0 or (self.dithered and self.step == 0.0)


def plans(q: QuantState, references: Sequence[Values] = ()) -> Iterator[Plan]:
    """The coded tensors of a message, in order; small ones, if they are coded together, where the first of them stands.

    Needs the ranges and steps of `q`, not its codes.
    """
    rule, version, second = ROUNDINGS[q.rounding], version_of(q, len(references)), version_of(q, 0) > 1
    dithered, small = rule.has_steps, {one.index: one for one in q.small}
    joined = {spec.name for one in q.small for spec in one.specs}
    for index, spec in q.coded:
        if index in small:
            yield _plan_of_small(q, small[index], references, version)
        if spec.name in joined:
            continue
        alpha = 0.0 if dithered or spec.range is None else float(q.rest[spec.range])
        whole = dithered and not q.together
        given = tuple(
            Reference(state[spec.name].view(-1).numpy(), state.rms(spec.name) if whole else None)
            for state in references
        )
        yield Plan(
            spec, (spec,), spec.size, dithered, rule.is_random, tensor_seed(q.seed, index), alpha,
            q.steps.get(spec.name, 0.0), given, q.place, q.strata, version, second,
        )  # fmt: skip


def _plan_of_small(q: QuantState, small: Small, references: Sequence[Values], version: int) -> Plan:
    """Small tensors as one, in units of their steps."""
    per_step = small.per_step(q)
    # Cut as the kernels would, which look for NaN, too
    most = float(steps.FARTHEST)
    given = [(state.joined(small.specs) * per_step).clamp_(-most, most) for state in references]
    return Plan(
        small.spec, small.specs, small.spec.size, True, True, tensor_seed(q.seed, small.index), 0.0,
        float(per_step.any()), tuple(Reference(values.numpy()) for values in given), q.place, q.strata, version, True,
    )  # fmt: skip


def codes_of(plan: Plan, q: QuantState) -> np.ndarray:
    """What is to be coded."""
    codes = [q.codes[part.name] for part in plan.parts]
    return (codes[0] if len(codes) == 1 else torch.cat(codes)).numpy()


def split_codes(plan: Plan, q: QuantState, codes: np.ndarray) -> Iterator[tuple[str, torch.Tensor]]:
    """The inverse: (name, codes) of every tensor."""
    for part, own in zip(plan.parts, torch.from_numpy(codes).split([part.size for part in plan.parts]), strict=True):
        if plan.parts != (plan.spec,) and not q.steps[part.name] and bool(own.any()):
            raise WireFormatError(f"tensor {part.name!r} has a step of 0 and other codes; the message is damaged")
        yield part.name, own


def mode_name(mode: int, references: int = 1) -> str:
    """For people; which reference it is where a message has several."""
    if mode == MIX:
        return "mix"
    given = mode & 3 in (REFERENCE, SAME)
    if mode >> INDEX >= REFERENCES or (mode & ~3 and not given):
        return f"unknown ({mode})"
    index = f" {(mode >> INDEX) + 1}" if given and (references > 1 or mode >> INDEX) else ""
    return MODES[mode & 3] + index + (", no random bits" if mode & NO_RANDOM_BITS else "")


def reference_of(mode: int) -> int | None:
    """Which of the message's references a mode asks for (ALL: every one); None for raw and static."""
    return mode >> INDEX if mode & 3 in (REFERENCE, SAME) else None


def encode(plan: Plan, codes: np.ndarray, lossless: bool) -> tuple[int, bytes]:
    """(mode, data) of the smallest encoding."""
    low, high = kernels.extremes(codes)
    if not plan.dithered and high >= 2**plan.bits:
        raise QuantizationError(
            f"codes of {plan.name!r} reach {high}; {plan.bits}-bit codes are below {2**plan.bits}: was "
            "another format used?"
        )
    if lossless and not plan.dithered and not high:
        return STATIC, b""
    found: list[tuple[int, bytes]] = []
    if lossless and steps.has_ranks(plan, codes, low, high) and (plan.references or plan.dithered):
        found.append(_steps(plan, codes))
    raw = rawbits.packed_size(plan.size, plan.bits) if not plan.dithered else rawbits.signed_size(plan.size, low, high)
    # Where a reference halves the bytes, coding the codes on their own cannot win: do not spend the time.
    if lossless and not plan.dithered and not (found and 2 * len(found[0][1]) < raw):
        found.append((STATIC, stream.encode_bytes(codes, plan.bits)))
    found = [coded for coded in found if len(coded[1]) < raw]
    if found:
        return min(found, key=lambda coded: len(coded[1]))
    return RAW, rawbits.pack_signed(codes) if plan.dithered else rawbits.pack(codes, plan.bits)


def _steps(plan: Plan, codes: np.ndarray) -> tuple[int, bytes]:
    """As steps from whatever reference, mix of all, or from none, promises the fewest bits on a sample."""
    found: list[tuple[int, Reference | Mix | None]] = [
        (REFERENCE | i << INDEX, reference) for i, reference in enumerate(plan.references)
    ]
    if plan.dithered and not found:
        found = [(STATIC, None)]
    elif plan.dithered and plan.version > 1:  # version 1 always took its reference
        found = _near([*found, (STATIC, None)], sums := products(plan, codes, steps.sample(plan)))
        if len(plan.references) > 1 and (mix := fit_mix(plan, sums)):
            found.append((MIX, mix))
    fits = [(mode, steps.fit(plan, codes, given)) for mode, given in found]
    mode, fitted = min(fits, key=lambda pair: pair[1].cost)
    data = steps.encode(plan, codes, fitted)
    return mode | (0 if data else SAME) | (0 if fitted.predictor.random or not plan.random else NO_RANDOM_BITS), data


def _near(found: list[tuple[int, Any]], sums: list[list[float]]) -> list[tuple[int, Any]]:
    """Of the references and none, the last, those that are about as near to what is coded as the nearest."""
    own = sums[-1][-1]
    distances = [sums[i][i] - 2 * sums[i][-1] + own for i in range(len(sums) - 1)] + [own]
    most = NEAR * max(min(distances), 0.0)  # a sum of rounded products may lie below 0
    return [one for one, distance in zip(found, distances, strict=True) if not distance > most]


def decode(plan: Plan, mode: int, data: memoryview) -> np.ndarray:
    """The codes; every WireFormatError names the tensor."""
    try:
        return _decode(plan, mode, data)
    except WireFormatError as error:
        raise WireFormatError(f"tensor {plan.name!r}, mode {mode_name(mode)}: {error}") from None


def _decode(plan: Plan, mode: int, data: memoryview) -> np.ndarray:
    if mode == RAW:
        if plan.dithered:
            return rawbits.unpack_signed(data, plan.size)
        return rawbits.unpack(data, plan.size, plan.bits, np.uint8)
    if mode == STATIC and not plan.dithered:
        if not data:
            return np.zeros(plan.size, np.uint8)
        return stream.decode_bytes(data, plan.size, plan.bits)
    if mode == STATIC:
        return steps.decode(plan, data, None, True)
    if mode == MIX and plan.dithered:
        mix, data = read_mix(plan.references, data)
        return steps.decode(plan, data, mix, True)
    index = reference_of(mode)
    if index is None or index >= REFERENCES or (mode & NO_RANDOM_BITS and plan.dithered):
        raise WireFormatError("this mode does not exist in this version; the message is damaged or from a newer fedfp8")
    if index >= len(plan.references):
        raise WireFormatError(
            f"needs reference {index + 1}, but the header names {len(plan.references) or 'none'}; the message is "
            "damaged"
        )
    reference = plan.references[index]
    random = plan.random and not mode & NO_RANDOM_BITS
    if mode & 3 == SAME:
        if data:
            raise WireFormatError(f"{len(data)} bytes where none belong; the message is damaged")
        return steps.predicted(plan, reference, random)
    return steps.decode(plan, data, reference, random)
