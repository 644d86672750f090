"""One tensor's codes as the fewest bytes: tries the modes that apply, keeps the smallest."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedfp8.errors import QuantizationError, WireFormatError
from fedfp8.layout import TensorSpec
from fedfp8.state import QuantState, State, coded_kinds, tensor_seed
from fedfp8.wire import rawbits

__all__ = ["MODES", "Plan", "decode", "encode", "mode_name", "plans"]

RAW = 0
MODES = ("raw",)


@dataclass(frozen=True)
class Plan:
    """Everything both sides know about a tensor before its codes."""

    name: str
    size: int
    bits: int  # of a raw code; 0: as the data says (dithered)
    alpha: float
    step: float
    seed: int
    reference: np.ndarray | None
    spec: TensorSpec

    @property
    def dithered(self) -> bool:
        return self.bits == 0

    @property
    def dtype(self) -> type:
        return np.int32 if self.dithered else np.uint8

    @property
    def empty(self) -> bool:
        """Nothing to send: no elements, or a step of 0, which says that all are zero."""
        return self.size == 0 or (self.dithered and self.step == 0.0)


def plans(q: QuantState, reference: State | None) -> Iterator[Plan]:
    for index, spec in enumerate(q.layout):
        if spec.kind not in coded_kinds(q.rounding):
            continue
        dithered = q.rounding == "dithered"
        yield Plan(
            spec.name,
            spec.size,
            0 if dithered or spec.format is None else spec.format.bits,
            0.0 if dithered or spec.range is None else float(q.rest[spec.range]),
            q.steps[spec.name] if dithered else 0.0,
            tensor_seed(q.seed, index),
            None if reference is None else reference[spec.name].view(-1).numpy(),
            spec,
        )


def encode(plan: Plan, codes: np.ndarray, lossless: bool) -> tuple[int, bytes]:
    if plan.dithered:
        return RAW, rawbits.pack_signed(codes)
    if int(codes.max()) >= 2**plan.bits:
        raise QuantizationError(
            f"codes of {plan.name!r} reach {int(codes.max())}; {plan.bits}-bit codes are below {2**plan.bits}"
        )
    return RAW, rawbits.pack(codes, plan.bits)


def decode(plan: Plan, mode: int, data: memoryview) -> np.ndarray:
    if mode != RAW:
        raise WireFormatError(f"tensor {plan.name!r}: mode {mode} is unknown; update fedfp8")
    if plan.dithered:
        return rawbits.unpack_signed(data, plan.size)
    if len(data) != rawbits.packed_size(plan.size, plan.bits):
        raise WireFormatError(f"tensor {plan.name!r}: {len(data)} bytes for {plan.size} codes of {plan.bits} bits")
    return rawbits.unpack(data, plan.size, plan.bits, np.uint8)


def mode_name(mode: int) -> str:
    return MODES[mode] if mode < len(MODES) else f"unknown ({mode})"
