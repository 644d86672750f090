"""Modes reference and same: codes as steps from a prediction that both sides can make.

The prediction is the reference on the new grid, rounded with the message's own random bits: a weight that did not move
gives exactly the predicted code, and one that moved does unless it crossed its own known threshold. Without a reference
(mode static of the uniform grid) the reference is 0 everywhere, and the random bits alone still help.

    data = [coefficients of a mix,] shape << 5 | shift, scale, number of bytes of extra bits, extra bits, rANS states
           and words

`shift`: low bits of every step that are sent as they are, for updates of hundreds of cells.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfp8.errors import WireFormatError
from fedfp8.fp8.format import Format
from fedfp8.fp8.grid import grid_for
from fedfp8.fp8.kernels import sum_of_squares
from fedfp8.wire import fused, gaps, kernels, rans, search
from fedfp8.wire.container import Reader, varint
from fedfp8.wire.mix import Mix
from fedfp8.wire.model import BUCKET, EXTRA, LOW, SCALES, SHAPES, TOKENS, costs_of, narrow_of, prior_of
from fedfp8.wire.stream import FIRST_BLOCK, PIECE, Decoder, Encoder, Tables

if TYPE_CHECKING:
    from fedfp8.wire.codec import Plan, Reference

__all__ = ["FARTHEST", "decode", "encode", "fit", "has_ranks", "predicted", "sample", "sampled_rms"]

GAIN = 1 << 8  # a count weighs as much as this prior mass of 2**16: the prior is worth 256 observations
FIT = 1 << 12  # elements on which shape and scale are chosen; at most a piece
SPANS = 8  # of a large tensor that they are taken from, from version 2 on: its first rows may not be like the others
GAPS = 31  # in the place of a shift
FEW = 5  # gaps are coded where at most one element in so many moved: there they are faster
LARGEST = 1 << 30  # dithered integers beyond this go raw
NO_REFERENCE = (*[np.zeros(0, np.float32)] * 3, 0.0, 0.0, 0.0, 0)  # operands where there is none
NOT_FINITE = "the reference, or the mix of them, holds NaN or Inf; use another one, or none"
FARTHEST = np.float32(2.0**22)  # references are cut here, in cells: beyond any code, within int32


class Predictor:
    """What it takes to predict a tensor: a reference and a grid, as the kernels want them."""

    def __init__(self, plan: "Plan", reference: "Reference | Mix | None", random: bool) -> None:
        self.plan, self.reference, self.random = plan, reference, random
        self.operands = NO_REFERENCE if reference is None else reference.operands
        rms = 0.0 if reference is None else min(reference.rms, 2.0**126)  # 1.5 times as much is a float32, too
        self.dithered = self._uniform(rms) if plan.dithered else None
        self.float8 = None if plan.dithered else self._float()

    def _uniform(self, rms: float) -> tuple[Any, ...]:
        return np.float32(1.0 / self.plan.step), FARTHEST, np.float32(rms / 2), np.float32(rms * 1.5), *self.plan.keys

    def _float(self) -> tuple[Any, ...]:
        format = self.plan.spec.format
        assert format is not None
        g = grid_for(self.plan.alpha, format, self.plan.name)
        drop = max(2**format.exponent_bits - 16, 0)
        rounding = g.scale_in, g.top, g.lowest, g.magic, g.spread, g.per_level
        return self.random, *rounding, g.shift, g.offset, g.sign_shift, drop, *self.plan.keys

    @property
    def bits(self) -> int:
        """Of an FP8 code."""
        return 0 if self.plan.dithered else self.plan.bits

    def __call__(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Predictions and contexts of a piece."""
        pred, ctx = np.empty(stop - start, np.int32), np.empty(stop - start, np.uint16)
        ref = kernels.reference_piece(self.operands, start, stop, np.zeros(stop - start, np.float32))
        if self.dithered is not None:
            bad = kernels.predict_uniform(ref, start, pred, ctx, *self.dithered)
        else:
            assert self.float8 is not None
            bad = kernels.predict_float(ref, start, pred, ctx, *self.float8)
        if bad:
            raise WireFormatError(NOT_FINITE)
        return pred, ctx

    def ranks(self, codes: np.ndarray) -> np.ndarray:
        """What is predicted: signed ranks of FP8 codes; dithered integers as they are."""
        if self.plan.dithered:
            return codes
        out = np.empty(codes.size, np.int32)
        kernels.ranks(codes, self.plan.bits - 1, out)
        return out


def has_ranks(plan: "Plan", codes: np.ndarray, low: int, high: int) -> bool:
    """False for what no quantizer makes: the code of -0, which has no rank of its own, or integers beyond LARGEST."""
    if plan.dithered:
        return -LARGEST <= low and high <= LARGEST
    return not bool((codes == 1 << plan.bits - 1).any())


@dataclass(frozen=True)
class StepModel:
    """What the sender says about the steps of a tensor."""

    shape: int
    scale: int
    shift: int
    gaps: bool = False  # only what moved is coded, and how far it is to there (`gaps.py`)

    def to_bytes(self) -> bytes:
        return bytes([self.shape << 5 | (GAPS if self.gaps else self.shift), self.scale])

    def tables(self, plan: "Plan", *, decodes: bool = True) -> Tables:
        tables = _tables(plan.format, self.shape, self.scale, decodes, self.gaps)
        return tables if plan.size <= FIRST_BLOCK else tables.copy()  # a single block leaves them as they are


@lru_cache(maxsize=64)
def _tables(format: Format | None, shape: int, scale: int, decodes: bool, gaps: bool) -> Tables:
    """Before any symbol is seen; kept, up to 200 KB each, for the tensors and rounds that begin with the same."""
    prior, row = prior_of(format, shape, scale)
    return Tables(prior, row, GAIN, decodes=decodes, moved_only=gaps)


def encode(plan: "Plan", codes: np.ndarray, fitted: "Fit") -> bytes:
    """The data; none if every code is as predicted from a single reference."""
    predictor, model = fitted.predictor, fitted.model
    mix = predictor.reference.to_bytes() if isinstance(predictor.reference, Mix) else b""
    bits = _room_for_bits(plan.size)
    if model.gaps:
        moved, used, *written = _encode_gaps(plan, codes, fitted, bits)
    else:
        moved, used, *written = _encode_all(plan, codes, fitted, bits)
    if predictor.reference is not None and not mix and not moved and not model.shift:
        return b""
    extra = bits[: (used >> 6) + 1].astype("<u8", copy=False).view(np.uint8)[: used + 7 >> 3].data
    return b"".join([mix, model.to_bytes(), varint(len(extra)), extra, *written])


Coded = tuple[bool, int, memoryview, memoryview]  # whether something moved, number of extra bits, states, words


def _encode_all(plan: "Plan", codes: np.ndarray, fitted: "Fit", bits: np.ndarray) -> Coded:
    """A symbol for every element."""
    predictor, model, encoder = fitted.predictor, fitted.model, Encoder(plan.size)
    done, moved, used, first = fused.encode(
        codes, predictor.operands, predictor.dithered, predictor.float8, predictor.bits,
        narrow_of(plan.format, model.scale), model.shift, BUCKET, LOW, EXTRA, model.tables(plan, decodes=False).parts,
        encoder.symbols, bits, rans.RECIPROCALS, encoder.states,
    )  # fmt: skip
    if done == fused.NOT_FINITE:
        raise WireFormatError(NOT_FINITE)
    return moved, used, *encoder.written(first)


def _encode_gaps(plan: "Plan", codes: np.ndarray, fitted: "Fit", bits: np.ndarray) -> Coded:
    predictor, model, tables = fitted.predictor, fitted.model, fitted.model.tables(plan, decodes=False)
    found, moved = np.empty(2 * plan.size + 1, np.uint64), np.empty(plan.size, np.uint32)
    assert predictor.dithered is not None
    done, used, gap_count, moved_count = gaps.encode(
        codes, predictor.operands, predictor.dithered, narrow_of(None, model.scale), (BUCKET, LOW, EXTRA), tables.stays,
        tables.parts, found, moved, bits, gaps.CURVE,
    )  # fmt: skip
    if done == fused.NOT_FINITE:
        raise WireFormatError(NOT_FINITE)
    states, words = np.empty(gaps.STATES, np.uint64), np.empty(gap_count + moved_count + 1, np.uint32)
    first = gaps.write(found[:gap_count], moved[:moved_count], rans.RECIPROCALS, states, words)
    return moved_count > 0, used, states.astype("<u8", copy=False).data, words[first:].astype("<u4", copy=False).data


def _room_for_bits(count: int) -> np.ndarray:
    """For the extra bits of so many elements, low bit first: at most 32 each, and a word that is not full."""
    return np.empty(count // 2 + 2, np.uint64)


@dataclass(frozen=True)
class Fit:
    """How a tensor would be coded given a reference, and what that would cost on the sample, in 1/256 bits.

    A coefficient of a mix counts for as much of its 32 bits as the sample is of the tensor, and for 6 bits (half the
    logarithm of the sample's size) since coefficients fit their sample better than the rest: by more than 12 bits, for
    two references that help nothing, one time in 4,000.
    """

    predictor: Predictor
    model: StepModel
    cost: int


def fit(plan: "Plan", codes: np.ndarray, reference: "Reference | Mix | None") -> Fit:
    """With the random bits or without, and the shape and scale under which a sample costs least.

    Weights that already sit on the grid are better predicted without the random bits, and then clearly so: if the first
    predictions are a tenth nearer.
    """
    predictor = Predictor(plan, reference, plan.random)
    if plan.random and not plan.dithered:
        without = Predictor(plan, reference, False)
        if 10 * _distance(without, codes) < 9 * _distance(predictor, codes):
            predictor = without
    cost, model = (_fit_uniform if plan.dithered else _fit_float)(predictor, codes)
    if isinstance(reference, Mix):
        counted = min(plan.size, FIT)
        cost += 256 * len(reference.coefficients) * (6 + 32 * counted // plan.size)
    return Fit(predictor, model, cost)


def _fit_uniform(predictor: Predictor, codes: np.ndarray) -> tuple[int, StepModel]:
    plan, costs = predictor.plan, costs_of(None)
    starts, length = sample(plan)
    while True:
        missing, bad, cost, shape, scale, shift, moved = search.fit_uniform(
            predictor.operands, codes, starts, length, BUCKET, LOW, EXTRA, costs.table, costs.made, predictor.dithered
        )
        if bad:
            raise WireFormatError(NOT_FINITE)
        if missing < 0:
            few = plan.second and plan.size >= gaps.FROM and not shift and FEW * moved <= len(starts) * length
            return cost, StepModel(shape, SCALES[scale], shift, few)
        costs.make(missing)


def _fit_float(predictor: Predictor, codes: np.ndarray) -> tuple[int, StepModel]:
    plan, costs, used = predictor.plan, costs_of(predictor.plan.format), 0
    counts = np.zeros(costs.table.shape[2], np.int32)
    starts, length = sample(plan)
    for a in starts.tolist():
        b = a + length
        pred, ctx = predictor(a, b)
        tok, bits, at = np.empty(b - a, np.uint8), _room_for_bits(b - a), np.zeros(1, np.int64)
        bits[0] = 0
        values = predictor.ranks(codes[a:b])
        kernels.tokenise(values, pred, ctx, np.zeros(256, np.bool_), 0, BUCKET, LOW, EXTRA, tok, bits, at)
        used += int(at[0])
        counts += np.bincount((ctx & 0xFF).astype(np.int64) * TOKENS + tok, minlength=counts.size).astype(np.int32)
    while (found := search.cheapest(counts, costs.table, costs.made))[0] >= 0:
        costs.make(found[0])
    _, cost, shape, scale = found
    return cost + 256 * used, StepModel(shape, SCALES[scale], 0)


def sample(plan: "Plan") -> tuple[np.ndarray, int]:
    """(starts, length) of the spans where choices are made.

    The first elements (version 1), or of a large tensor as many in SPANS equal distances.
    """
    return _spans(plan.size, plan.version == 1 or plan.size <= 2 * FIT)


def sampled_rms(values: np.ndarray) -> float:
    """Root mean square of a tensor's sample (of version 2), the same on every machine."""
    starts, length = _spans(values.size, values.size <= 2 * FIT)
    sample = values[:length] if len(starts) == 1 else np.concatenate([values[a : a + length] for a in starts.tolist()])
    partial = np.zeros(1)
    sum_of_squares(np.ascontiguousarray(sample), partial)
    return math.sqrt(float(partial[0]) / max(len(sample), 1))


@lru_cache(maxsize=1024)
def _spans(size: int, first: bool) -> tuple[np.ndarray, int]:
    if first:
        return np.zeros(1, np.int64), min(size, FIT)
    length = FIT // SPANS
    return np.array([i * (size - length) // (SPANS - 1) for i in range(SPANS)]), length


def _distance(predictor: Predictor, codes: np.ndarray) -> int:
    """How far the first codes are from their predictions: the sum of |step|, large ones cut."""
    n = min(codes.size, FIT)
    pred, _ = predictor(0, n)
    return int(np.minimum(np.abs(predictor.ranks(codes[:n]) - pred), 8).sum())


def decode(plan: "Plan", data: memoryview, reference: "Reference | Mix | None", random: bool) -> np.ndarray:
    reader = Reader(data, "coded steps")
    head, scale = reader.take(2, "shape and scale")
    shape, shift = head >> 5, head & 31
    model = StepModel(shape, scale, shift)
    if shift == GAPS and plan.second:
        model, shift = StepModel(shape, scale, 0, gaps=True), 0
    if shape >= len(SHAPES) or scale not in SCALES or (shift and not plan.dithered) or shift > 26:
        raise WireFormatError(f"shape {shape}, shift {shift}, scale {scale} are not possible; the message is damaged")
    extra = reader.take(reader.varint("number of extra bytes", 8 * plan.size + 8), "extra bits")
    bits = np.zeros(len(extra) // 8 + 3, "<u8")
    bits.view(np.uint8)[: len(extra)] = np.frombuffer(extra, np.uint8)
    bits = bits.astype(np.uint64, copy=False)
    decoder = Decoder(plan.size, reader.take(reader.left, "symbols"), gaps.STATES if model.gaps else 0)
    predictor, tables = Predictor(plan, reference, random), model.tables(plan)
    codes: np.ndarray = np.empty(plan.size, plan.dtype)
    largest = LARGEST if plan.dithered else 2 ** (plan.bits - 1) - 1
    if model.gaps:
        done, used, decoder.at = gaps.decode(
            codes, predictor.operands, predictor.dithered, (LOW, EXTRA), tables.stays, tables.parts, bits, largest,
            decoder.states, decoder.words, gaps.CURVE, gaps.SEGMENTS,
        )  # fmt: skip
    else:
        done, used, decoder.at = fused.decode(
            codes, predictor.operands, predictor.dithered, predictor.float8, predictor.bits, shift, LOW, EXTRA,
            tables.parts, bits, largest, decoder.states, decoder.words, decoder.alone, decoder.often,
        )  # fmt: skip
    if done == fused.NOT_FINITE:
        raise WireFormatError(NOT_FINITE)
    if done == fused.MISFIT:
        raise WireFormatError("a step leads out of the grid, or extra bits are missing; the message is damaged")
    decoder.finish()
    if used + 7 >> 3 != len(extra):
        raise WireFormatError("extra bits are left over; the message is damaged")
    return codes


def predicted(plan: "Plan", reference: "Reference", random: bool) -> np.ndarray:
    """The prediction itself, as codes."""
    predictor = Predictor(plan, reference, random)
    codes: np.ndarray = np.empty(plan.size, plan.dtype)
    for start in range(0, plan.size, PIECE):
        pred, _ = predictor(start, min(start + PIECE, plan.size))
        if plan.dithered:
            codes[start : start + pred.size] = pred
        else:
            kernels.from_ranks(pred, plan.bits - 1, codes[start : start + pred.size])
    return codes
