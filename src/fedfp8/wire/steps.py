"""Modes reference and same: codes as steps from a prediction that both sides can make.

The prediction is the reference on the new grid, rounded with the message's own random bits: a weight that did not move
gives exactly the predicted code, and one that moved does unless it crossed its own known threshold. Without a reference
(mode static of the uniform grid) the reference is 0 everywhere, and the random bits alone still help.

    data = [coefficients of a mix,] shape << 5 | shift, scale, number of bytes of extra bits, extra bits, rANS states
           and words

`shift`: low bits of every step that are sent as they are, for updates of hundreds of cells.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfp8.errors import WireFormatError
from fedfp8.fp8.format import Format
from fedfp8.fp8.grid import grid_for
from fedfp8.fp8.parallel import dither_keys, random_keys
from fedfp8.wire import kernels, search
from fedfp8.wire.container import Reader, varint
from fedfp8.wire.mix import Mix
from fedfp8.wire.model import BUCKET, EXTRA, LOW, SCALES, SHAPES, TOKENS, costs_of, narrow_of, prior_of
from fedfp8.wire.stream import FIRST_BLOCK, PIECE, Decoder, Encoder, Tables, pieces

if TYPE_CHECKING:
    from fedfp8.wire.codec import Plan, Reference

__all__ = ["decode", "encode", "fit", "has_ranks", "predicted", "sample"]

GAIN = 1 << 8  # a count weighs as much as this prior mass of 2**16: the prior is worth 256 observations
FIT = 1 << 12  # elements on which shape and scale are chosen; at most a piece
SPANS = 8  # of a large tensor that they are taken from, from version 2 on: its first rows may not be like the others
LARGEST = 1 << 30  # dithered integers beyond this go raw
NOTHING = np.zeros(PIECE, np.float32)  # what stands for a reference where there is none
NOT_FINITE = "the reference, or the mix of them, holds NaN or Inf; use another one, or none"
FARTHEST = np.float32(2.0**22)  # references are cut here, in cells: beyond any code, within int32


class Predictor:
    """Predictions and contexts, piece by piece, in scratch arrays that are used again."""

    def __init__(self, plan: "Plan", reference: "Reference | Mix | None", random: bool) -> None:
        self.plan, self.reference, self.random = plan, reference, random
        self.rms = 0.0 if reference is None else reference.rms
        self.keys = random_keys(plan.seed)
        if plan.dithered:
            self.keys = dither_keys(plan.seed, plan.place, plan.strata, plan.turn)
        self.constants = self._uniform() if plan.dithered else self._float()

    def _uniform(self) -> tuple[Any, ...]:
        return np.float32(1.0 / self.plan.step), FARTHEST, np.float32(self.rms / 2), np.float32(self.rms * 1.5)

    def _float(self) -> tuple[Any, ...]:
        format = self.plan.spec.format
        assert format is not None
        g = grid_for(self.plan.alpha, format, self.plan.name)
        drop = max(2**format.exponent_bits - 16, 0)
        rounding = g.scale_in, g.top, g.lowest, g.magic, g.spread, g.per_level
        return *rounding, g.shift, g.offset, g.sign_shift, drop

    @cached_property
    def scratch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """pred, ctx, values: of a piece."""
        n = min(self.plan.size, PIECE)
        return np.empty(n, np.int32), np.empty(n, np.uint16), np.empty(n, np.int32)

    def given(self, start: int, stop: int) -> np.ndarray:
        """The reference's values, at most a piece of them."""
        if self.reference is None:
            return NOTHING[: stop - start]
        return self.reference.piece(start, stop)

    def __call__(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        ref, n = self.given(start, stop), stop - start
        pred, ctx = self.scratch[0][:n], self.scratch[1][:n]
        if self.plan.dithered:
            bad = kernels.predict_uniform(ref, start, pred, ctx, *self.constants, *self.keys)
        else:
            bad = kernels.predict_float(ref, start, self.random, pred, ctx, *self.constants, *self.keys)
        if bad:
            raise WireFormatError(NOT_FINITE)
        return pred, ctx

    def ranks(self, codes: np.ndarray) -> np.ndarray:
        """What is predicted: signed ranks of FP8 codes; dithered integers as they are."""
        if self.plan.dithered:
            return codes
        out = self.scratch[2][: codes.size]
        kernels.ranks(codes, self.plan.bits - 1, out)
        return out


def has_ranks(plan: "Plan", codes: np.ndarray) -> bool:
    """False for what no quantizer makes: the code of -0, which has no rank of its own, or integers beyond LARGEST."""
    if plan.dithered:
        return -LARGEST <= int(codes.min()) and int(codes.max()) <= LARGEST
    return not bool((codes == 1 << plan.bits - 1).any())


@dataclass(frozen=True)
class StepModel:
    """What the sender says about the steps of a tensor."""

    shape: int
    scale: int
    shift: int

    def tables(self, plan: "Plan", *, decodes: bool = True) -> Tables:
        tables = _tables(plan.format, self.shape, self.scale, decodes)
        return tables if plan.size <= FIRST_BLOCK else tables.copy()  # a single block leaves them as they are


@lru_cache(maxsize=64)
def _tables(format: Format | None, shape: int, scale: int, decodes: bool) -> Tables:
    """Before any symbol is seen; kept, up to 200 KB each, for the tensors and rounds that begin with the same."""
    return Tables(*prior_of(format, shape, scale), GAIN, decodes=decodes)


def encode(plan: "Plan", codes: np.ndarray, fitted: "Fit") -> bytes:
    """The data; none if every code is as predicted from a single reference."""
    predictor, model = fitted.predictor, fitted.model
    mix = predictor.reference.to_bytes() if isinstance(predictor.reference, Mix) else b""
    narrow = narrow_of(plan.format, model.scale)
    encoder, extra, moved = Encoder(model.tables(plan, decodes=False), plan.size), _Bits(plan.size), False
    for piece in pieces(plan.size):
        tok, ctx = _tokens(predictor, codes, piece.start, piece.stop, narrow, model.shift, extra)
        moved = moved or bool(tok.any())
        encoder.push(piece, tok, ctx)
    if predictor.reference is not None and not mix and not moved and not model.shift:
        return b""
    bits = extra.finish()
    head = bytes([model.shape << 5 | model.shift, model.scale]) + varint(len(bits))
    return mix + head + bits + encoder.finish()


class _Bits:
    """Extra bits, low bit first, in 64-bit words; whole words are moved out before every piece."""

    def __init__(self, count: int) -> None:
        self.done: list[bytes] = []
        self.buffer = np.zeros(min(count, PIECE) + 2, np.uint64)  # a word an element, and one that is not full
        self.at = np.zeros(1, np.int64)

    def room(self) -> None:
        """Make room for another piece."""
        whole = int(self.at[0]) >> 6
        if not whole:
            return
        self.done.append(self.buffer[:whole].astype("<u8").tobytes())
        self.buffer[0] = self.buffer[whole]
        self.buffer[1 : whole + 1] = 0
        self.at[0] &= 63

    @property
    def count(self) -> int:
        return int(self.at[0]) + 8 * sum(map(len, self.done))

    def finish(self) -> bytes:
        last = self.buffer[: (int(self.at[0]) >> 6) + 1].astype("<u8").tobytes()[: int(self.at[0]) + 7 >> 3]
        return b"".join([*self.done, last])


def _tokens(
    predictor: Predictor, codes: np.ndarray, start: int, stop: int, narrow: np.ndarray, shift: int, extra: _Bits
) -> tuple[np.ndarray, np.ndarray]:
    pred, ctx = predictor(start, stop)
    tok = np.empty(stop - start, np.uint8)
    extra.room()
    values = predictor.ranks(codes[start:stop])
    kernels.tokenise(values, pred, ctx, narrow, shift, BUCKET, LOW, EXTRA, tok, extra.buffer, extra.at)
    return tok, ctx


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
    reference, costs, spans = predictor.reference, costs_of(None), sample(predictor.plan)
    starts, length = np.array([a for a, _ in spans]), spans[0][1] - spans[0][0]
    if isinstance(reference, Mix):
        whole, ref = False, np.concatenate([reference.piece(a, b) for a, b in spans])
    else:
        whole, ref = reference is not None, NOTHING if reference is None else reference.values
    while True:
        missing, bad, cost, shape, scale, shift = search.fit_uniform(
            ref, whole, codes, starts, length, BUCKET, LOW, EXTRA, costs.table, costs.made, *predictor.constants,
            *predictor.keys,
        )  # fmt: skip
        if bad:
            raise WireFormatError(NOT_FINITE)
        if missing < 0:
            return cost, StepModel(shape, SCALES[scale], shift)
        costs.make(missing)


def _fit_float(predictor: Predictor, codes: np.ndarray) -> tuple[int, StepModel]:
    plan, costs = predictor.plan, costs_of(predictor.plan.format)
    extra, counts = _Bits(FIT), np.zeros(costs.table.shape[2], np.int32)
    for a, b in sample(plan):
        tok, ctx = _tokens(predictor, codes, a, b, np.zeros(256, np.bool_), 0, extra)
        counts += np.bincount((ctx & 0xFF).astype(np.int64) * TOKENS + tok, minlength=counts.size).astype(np.int32)
    while (found := search.cheapest(counts, costs.table, costs.made))[0] >= 0:
        costs.make(found[0])
    _, cost, shape, scale = found
    return cost + 256 * extra.count, StepModel(shape, SCALES[scale], 0)


def sample(plan: "Plan") -> list[tuple[int, int]]:
    """Where choices are made: the first elements (version 1), or of a large tensor as many in SPANS equal distances."""
    if plan.version == 1 or plan.size <= 2 * FIT:
        return [(0, min(plan.size, FIT))]
    length = FIT // SPANS
    starts = [i * (plan.size - length) // (SPANS - 1) for i in range(SPANS)]
    return [(start, start + length) for start in starts]


def _distance(predictor: Predictor, codes: np.ndarray) -> int:
    """How far the first codes are from their predictions: the sum of |step|, large ones cut."""
    n = min(codes.size, FIT)
    pred, _ = predictor(0, n)
    return int(np.minimum(np.abs(predictor.ranks(codes[:n]) - pred), 8).sum())


def decode(plan: "Plan", data: memoryview, reference: "Reference | Mix | None", random: bool) -> np.ndarray:
    reader = Reader(data, "coded steps")
    head, scale = reader.take(2, "shape and scale")
    shape, shift = head >> 5, head & 31
    if shape >= len(SHAPES) or scale not in SCALES or (shift and not plan.dithered) or shift > 26:
        raise WireFormatError(f"shape {shape}, shift {shift}, scale {scale} are not possible; the message is damaged")
    extra = reader.take(reader.varint("number of extra bytes", 8 * plan.size + 8), "extra bits")
    bits, at = np.zeros(len(extra) // 8 + 3, "<u8"), np.zeros(1, np.int64)
    bits.view(np.uint8)[: len(extra)] = np.frombuffer(extra, np.uint8)
    bits = bits.astype(np.uint64, copy=False)
    tables = StepModel(shape, scale, shift).tables(plan)
    decoder = Decoder(tables, plan.size, reader.take(reader.left, "symbols"))
    predictor = Predictor(plan, reference, random)
    codes: np.ndarray = np.empty(plan.size, plan.dtype)
    largest = LARGEST if plan.dithered else 2 ** (plan.bits - 1) - 1
    tok = np.empty(min(plan.size, PIECE), np.uint8)
    for piece in pieces(plan.size):
        start, stop = piece.start, piece.stop
        pred, ctx = predictor(start, stop)
        decoder.pull(piece, ctx, tok[: stop - start])
        values = codes[start:stop] if plan.dithered else predictor.scratch[2][: stop - start]
        good = kernels.detokenise(tok[: stop - start], pred, ctx, shift, LOW, EXTRA, bits, at, largest, values)
        if not good:
            raise WireFormatError("a step leads out of the grid, or extra bits are missing; the message is damaged")
        if not plan.dithered:
            kernels.from_ranks(values, plan.bits - 1, codes[start:stop])
    decoder.finish()
    if int(at[0]) + 7 >> 3 != len(extra):
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
