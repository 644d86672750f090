"""One tensor's codes as the fewest bytes: the modes, and the choice between them.

    raw         a fixed number of bits an element (`rawbits.py`)
    static      entropy coded on its own: FP8 codes by their frequencies; dithered integers given the dice alone
    reference   coded as steps from the reference, quantized to the new grid with the message's own dice (or, with the
                flag NO_DICE, without them: better for weights that already sit on the grid)
    same        exactly that prediction: no data at all

For large tensors the choice is made on their first elements; raw is the bound in every case.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fedfp8.errors import QuantizationError, WireFormatError
from fedfp8.layout import TensorSpec
from fedfp8.state import QuantState, State, coded_kinds, tensor_seed
from fedfp8.wire import rawbits, steps, stream

__all__ = ["NO_DICE", "RAW", "REFERENCE", "SAME", "STATIC", "Plan", "decode", "encode", "mode_name", "plans"]

RAW, STATIC, REFERENCE, SAME = range(4)
NO_DICE = 4
MODES = ("raw", "static", "reference", "same")
SAMPLE = 1 << 14  # elements on which the choice between modes is made


@dataclass(frozen=True)
class Plan:
    """Everything both sides know about a tensor before its codes."""

    spec: TensorSpec
    size: int
    dithered: bool
    dice: bool  # the codes were made with dice
    seed: int
    alpha: float
    step: float
    reference: np.ndarray | None

    @property
    def name(self) -> str:
        return self.spec.name

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


def plans(q: QuantState, reference: State | None) -> Iterator[Plan]:
    """The coded tensors of a message, in order. Needs the ranges and steps of `q`, not its codes."""
    dithered = q.rounding == "dithered"
    for index, spec in enumerate(q.layout):
        if spec.kind not in coded_kinds(q.rounding):
            continue
        alpha = 0.0 if dithered or spec.range is None else float(q.rest[spec.range])
        step = q.steps[spec.name] if dithered else 0.0
        values = None if reference is None else reference[spec.name].view(-1).numpy()
        seed = tensor_seed(q.seed, index)
        yield Plan(spec, spec.size, dithered, q.rounding != "nearest", seed, alpha, step, values)


def mode_name(mode: int) -> str:
    if mode not in (RAW, STATIC, REFERENCE, SAME, REFERENCE | NO_DICE, SAME | NO_DICE):
        return f"unknown ({mode})"
    return MODES[mode & 3] + (", no dice" if mode & NO_DICE else "")


def encode(plan: Plan, codes: np.ndarray, lossless: bool) -> tuple[int, bytes]:
    """(mode, data) of the smallest encoding."""
    if not plan.dithered and int(codes.max()) >= 2**plan.bits:
        raise QuantizationError(
            f"codes of {plan.name!r} reach {int(codes.max())}; {plan.bits}-bit codes are below {2**plan.bits}: was "
            "another format used?"
        )
    modes = _modes(plan, codes) if lossless else []
    if plan.size > SAMPLE and len(modes) > 1:
        part = replace(plan, size=SAMPLE)
        modes = [min(modes, key=lambda mode: len(_coded(part, codes[:SAMPLE], mode)[1]))]
    best = RAW, _raw(plan, codes)
    for mode in modes:
        coded = _coded(plan, codes, mode)
        if len(coded[1]) < len(best[1]):
            best = coded
    return best


def _modes(plan: Plan, codes: np.ndarray) -> list[int]:
    """Modes worth trying, the likeliest first."""
    if not steps.has_ranks(plan, codes):
        return [] if plan.dithered else [STATIC]
    if plan.reference is None:
        return [STATIC]
    with_and_without = [REFERENCE, REFERENCE | NO_DICE] if plan.dice and not plan.dithered else [REFERENCE]
    return [*with_and_without, STATIC]


def _coded(plan: Plan, codes: np.ndarray, mode: int) -> tuple[int, bytes]:
    if mode == STATIC and not plan.dithered:
        return STATIC, stream.encode_bytes(codes, plan.bits)
    dice = plan.dice and not mode & NO_DICE
    data = steps.encode(plan, codes, plan.reference if mode & 3 == REFERENCE else None, dice)
    return (mode, data) if data else (mode & NO_DICE | SAME, data)


def _raw(plan: Plan, codes: np.ndarray) -> bytes:
    return rawbits.pack_signed(codes) if plan.dithered else rawbits.pack(codes, plan.bits)


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
        return stream.decode_bytes(data, plan.size, plan.bits)
    if mode == STATIC:
        return steps.decode(plan, data, None, True)
    if mode & 3 not in (REFERENCE, SAME) or mode > (SAME | NO_DICE) or (mode & NO_DICE and plan.dithered):
        raise WireFormatError("this mode does not exist in this version; the message is damaged or from a newer fedfp8")
    if plan.reference is None:
        raise WireFormatError("needs a reference, but the header names none; the message is damaged")
    dice = plan.dice and not mode & NO_DICE
    if mode & 3 == SAME:
        if data:
            raise WireFormatError(f"{len(data)} bytes where none belong; the message is damaged")
        return steps.predicted(plan, plan.reference, dice)
    return steps.decode(plan, data, plan.reference, dice)
