"""The lossy step: what is sent instead of a model's values.

`quantize_state` turns a `State` into a `QuantState`, integers and a few floats, by one of the roundings of
`rounding.py`; `dequantize_state` gives the values the receiver works with, and `Remade` gives them one by one. How a
QuantState becomes bytes is the business of `wire` and changes no value.

Every message has its own seed and every tensor its own random bits, so rounding errors are independent. Small tensors
are one tensor, in units of their steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import rms
from fedfp8.fp8.many import batches, hashed_sum_many
from fedfp8.fp8.parallel import dither_keys
from fedfp8.fp8.quantizers import MOST_STEPS, STEP_MIN
from fedfp8.model.frequencies import Frequencies, from_frequencies, layout_of_frequencies, steps_of_frequencies
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.rounding import ROUNDINGS, Draw, Item
from fedfp8.model.state import State, Values
from fedfp8.rng import derive_seed

__all__ = [
    "QuantState",
    "Remade",
    "Small",
    "dequantize_form",
    "dequantize_state",
    "describe",
    "quantize_as",
    "quantize_state",
    "tensor_seed",
]

SMALL = 1 << 10  # elements; smaller tensors may be coded together


@dataclass(frozen=True, eq=False)
class QuantState:
    """What crosses the network, before it is bytes. `codes` are flat; `steps` are of dithered codes (0.0: all zero)."""

    layout: Layout
    rounding: str
    seed: int
    codes: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    rest: dict[str, torch.Tensor] = field(default_factory=dict)
    place: int = 0  # of the sender among the `strata` of a cohort that shares its random bits (dithered only)
    strata: int = 1
    change: bool = False  # codes are of local - received, and what is in `rest` is absolute (dithered only)
    together: bool = False  # small tensors are quantized and coded as one, in units of their steps (dithered only)
    frequencies: bool = False  # kernels travel as frequencies: codes and steps are of those (dithered only)

    @cached_property
    def form(self) -> Layout:
        """The tensors that travel: those of the layout, or their frequencies."""
        return layout_of_frequencies(self.layout) if self.frequencies else self.layout

    def formed(self, values: Values) -> Values:
        """`values` of the layout as the tensors that travel, if they are not yet."""
        return Frequencies(values) if self.frequencies and values.layout != self.form else values

    def restored(self, state: State) -> State:
        """The inverse: what travelled as tensors of the layout."""
        return from_frequencies(state, self.layout) if self.frequencies else state

    def batches(self) -> Iterator[Sequence[tuple[int, TensorSpec]]]:
        """The coded tensors and their indices, some at a time, but for those that are one."""
        small = {spec.name for one in self.small for spec in one.specs}
        return batches([pair for pair in self.coded if pair[1].name not in small], lambda pair: pair[1].size)

    def item(self, index: int, spec: TensorSpec, tensor: torch.Tensor) -> Item:
        """All that is known of tensor `index`, with its values or codes."""
        alpha = None if spec.range is None else self.rest[spec.range]
        return spec, tensor, alpha, self.steps.get(spec.name, 0.0), self.draw(index)

    @property
    def coded(self) -> list[tuple[int, TensorSpec]]:
        """The tensors that travel as codes, with their indices."""
        kinds = ROUNDINGS[self.rounding].kinds
        return [(index, spec) for index, spec in enumerate(self.form) if spec.kind in kinds]

    @cached_property
    def small(self) -> "tuple[Small, ...]":
        """The tensors that are one: the small vectors, whose steps are finer, and the other small ones."""
        found = [pair for pair in self.coded if self.together and pair[1].size < SMALL]
        kinds = [[pair for pair in found if (len(pair[1].shape) < 2) == vectors] for vectors in (True, False)]
        return tuple(Small(pairs) for pairs in kinds if pairs)

    def draw(self, index: int) -> Draw:
        """The random bits of tensor `index`."""
        return Draw(tensor_seed(self.seed, index), self.place, self.strata)


class Small:
    """Small tensors of a message that are one tensor: their elements in units of their steps, one after the other.

    A model of hundreds of them is quantized and coded in one go, and they share what a coded tensor costs.
    """

    def __init__(self, pairs: Sequence[tuple[int, TensorSpec]]) -> None:
        self.index = pairs[0][0]  # it stands in the place of the first of them
        self.specs = tuple(spec for _, spec in pairs)
        self.sizes = [spec.size for spec in self.specs]
        kind = "vectors" if len(self.specs[0].shape) < 2 else "tensors"
        self.spec = TensorSpec(f"{len(self.specs)} small {kind}", (sum(self.sizes),), "float32", "float")

    def steps(self, q: QuantState) -> torch.Tensor:
        """Of every element."""
        return self._spread([q.steps[spec.name] for spec in self.specs])

    def per_step(self, q: QuantState) -> torch.Tensor:
        """Of every element, one over its step; 0 where that is 0."""
        return self._spread([1.0 / step if (step := q.steps[spec.name]) else 0.0 for spec in self.specs])

    def _spread(self, numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64).float().repeat_interleave(torch.tensor(self.sizes))

    def quantize(self, q: QuantState, values: Values) -> dict[str, torch.Tensor]:
        flat = values.joined(self.specs) * self.per_step(q)
        codes = ROUNDINGS[q.rounding].quantize(self.spec, flat, None, 1.0, q.draw(self.index))
        return dict(zip((spec.name for spec in self.specs), codes.split(self.sizes), strict=True))

    def dequantize(self, q: QuantState, codes: Mapping[str, torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([codes[spec.name].int() for spec in self.specs])
        return ROUNDINGS[q.rounding].dequantize(self.spec, flat, None, 1.0, q.draw(self.index)) * self.steps(q)

    def parts(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views by name."""
        return {s.name: part.view(s.shape) for s, part in zip(self.specs, flat.split(self.sizes), strict=True)}


@lru_cache(maxsize=4096)
def tensor_seed(seed: int, index: int) -> int:
    """The seed of the random bits of tensor `index` of a message."""
    return derive_seed(seed, "tensor", index)


def describe(
    state: State,
    *,
    seed: int = 0,
    rounding: str = "stochastic",
    step: "float | Mapping[str, float] | None" = None,
    step_of: str = "weights",
    reference: State | None = None,
    place: int = 0,
    strata: int = 1,
    change: bool = False,
    together: bool = False,
    frequencies: bool = False,
) -> QuantState:
    """All of a quantized state but its codes.

    For "dithered", `step` is a multiple of each tensor's rms, or of the rms of its change against `reference` with
    ``step_of="update"``, or a mapping name -> absolute step. place and strata are those of :func:`fedfp8.dither`.
    change: marks `state` as one of differences; nothing is subtracted here. together: tensors below SMALL elements
    share their random bits and are coded as one. frequencies: kernels travel as frequencies, with steps that follow
    from theirs.
    """
    if rounding not in ROUNDINGS:
        raise QuantizationError(f"rounding is {rounding!r}; it must be one of {', '.join(ROUNDINGS)}")
    rule = ROUNDINGS[rounding]
    if (step is not None) != rule.has_steps:
        raise QuantizationError(
            f"step={step!r} with rounding={rounding!r}; a step belongs to 'dithered', which needs one"
        )
    if not rule.has_steps and (place, strata, change, together, frequencies) != (0, 1, False, False, False):
        raise QuantizationError(
            f"place={place}, strata={strata}, change={change}, together={together}, frequencies={frequencies} with "
            f"rounding={rounding!r}; they belong to 'dithered'"
        )
    dither_keys(seed, place, strata)  # refuses places that do not exist, even where every tensor is zero
    q = QuantState(
        state.layout, rounding, seed, place=place, strata=strata, change=change, together=together,
        frequencies=frequencies,
    )  # fmt: skip
    q.rest.update({spec.name: state[spec.name] for spec in state.layout if spec.kind not in rule.kinds})
    if rule.has_steps:
        coded = [spec for spec in state.layout if spec.kind in rule.kinds]
        steps = {spec.name: _step(spec, state, step, step_of, reference) for spec in coded}
        steps = steps_of_frequencies(steps, state) if frequencies else steps
        q.steps.update(short_steps(steps) if together else steps)
    return q


def short_steps(steps: Mapping[str, float]) -> dict[str, float]:
    """Steps as messages with small tensors have them: the next float32 of which the upper 16 bits are enough."""
    bits = np.array(list(steps.values()), np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
    return dict(zip(steps, rounded.tolist(), strict=True))


def quantize_state(state: State, **how: Any) -> QuantState:
    """Quantize a whole state; the arguments are those of `describe`."""
    return quantize_as(describe(state, **how), state)


def quantize_as(q: QuantState, state: State) -> QuantState:
    """`q` with the codes of `state`, which it describes, or of the same as the tensors that travel."""
    found, values = dict[str, torch.Tensor](), q.formed(state)
    for batch in q.batches():
        items = [q.item(index, spec, values[spec.name].view(-1)) for index, spec in batch]
        codes = ROUNDINGS[q.rounding].quantize_batch(items)
        found.update(zip((spec.name for _, spec in batch), codes, strict=True))
    for small in q.small:
        found |= small.quantize(q, values)
    q.codes.update({spec.name: found[spec.name] for _, spec in q.coded})
    return q


class Remade(Values):
    """What travelled, made tensor by tensor when it is asked for: a reference that takes little memory.

    source: the values that are quantized on the way; None: the codes are in `q`, in integers of any width. sums: what
    is known of the values' fingerprint, and room for what is found; None: `fingerprint` is theirs.
    """

    def __init__(
        self,
        q: QuantState,
        source: Values | None = None,
        sums: dict[str, int] | None = None,
        fingerprint: bytes | None = None,
    ) -> None:
        self.q, self.layout, self._known = q, q.form, sums
        self.source = None if source is None else q.formed(source)
        self._index = {spec.name: (index, spec) for index, spec in q.coded}
        if fingerprint is not None:
            self.__dict__["quick_fingerprint"] = fingerprint

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._index:
            return self.q.rest[name]
        if name in self._small:
            return self._small[name]
        index, spec = self._index[name]
        rule = ROUNDINGS[self.q.rounding]
        if self.source is not None:
            flat = rule.receive_batch([self.q.item(index, spec, self.source[name].view(-1))])[0]
        else:
            flat = rule.dequantize(*self.q.item(index, spec, self.q.codes[name]))
        tensor = flat.view(spec.shape)
        self._hash({name: tensor})
        return tensor

    def joined(self, specs: Sequence[TensorSpec]) -> torch.Tensor:
        for small, flat in self._joined:
            if small.specs == specs:
                return flat
        return super().joined(specs)

    @cached_property
    def _joined(self) -> list[tuple[Small, torch.Tensor]]:
        """Small tensors are made all at once, and stay."""
        q, source = self.q, self.source
        return [(s, s.dequantize(q, q.codes if source is None else s.quantize(q, source))) for s in q.small]

    @cached_property
    def _small(self) -> dict[str, torch.Tensor]:
        return {name: part for small, flat in self._joined for name, part in small.parts(flat).items()}

    def _hash(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._known is not None and (new := [name for name in tensors if name not in self._known]):
            self._known.update(zip(new, hashed_sum_many([tensors[name] for name in new]).tolist(), strict=True))

    def _sums(self) -> np.ndarray:
        if self._known is None:
            return super()._sums()
        self._hash(self.q.rest | self._small)
        for name in self:
            if name not in self._known:
                self[name]
        return np.array([self._known[name] for name in self], "<u8")


def dequantize_state(q: QuantState, *, consume: bool = False) -> State:
    """The values the receiver works with. consume: the codes are taken from `q`, so that both are never in memory."""
    return q.restored(dequantize_form(q, consume=consume))


def dequantize_form(q: QuantState, *, consume: bool = False) -> State:
    """The same in the form that travelled."""
    rule, found = ROUNDINGS[q.rounding], dict(q.rest)
    take = q.codes.pop if consume else q.codes.__getitem__
    for batch in q.batches():
        items = [q.item(index, spec, take(spec.name)) for index, spec in batch]
        for (_, spec), flat in zip(batch, rule.dequantize_batch(items), strict=True):
            found[spec.name] = flat.view(spec.shape)
    for small in q.small:
        found |= small.parts(small.dequantize(q, {spec.name: take(spec.name) for spec in small.specs}))
    return State(q.form, {spec.name: found[spec.name] for spec in q.form})


def _step(
    spec: TensorSpec,
    state: State,
    step: "float | Mapping[str, float] | None",
    step_of: str,
    reference: State | None,
) -> float:
    """The absolute float32 step of one tensor; 0.0 for a tensor that is all zero or empty."""
    tensor, largest = state[spec.name], state.largest(spec.name)
    if largest == 0.0:
        return 0.0
    if not np.isfinite(largest):
        raise QuantizationError(
            f"tensor {spec.name!r} holds NaN or Inf; only finite values can be sent: check the training step"
        )
    if isinstance(step, Mapping):
        if spec.name not in step:
            raise QuantizationError(f"no step for tensor {spec.name!r}; a dict of steps must name every float tensor")
        if not step[spec.name] > 0:  # 0.0 would be read as "all zero" and drop the tensor
            raise QuantizationError(f"step of tensor {spec.name!r} is {step[spec.name]}; an absolute step must be > 0")
        return float(np.float32(step[spec.name]))
    assert step is not None
    if not step > 0:
        raise QuantizationError(f"step is {step}; it must be > 0, a multiple of each tensor's rms such as 0.3")
    if step_of == "update":
        if reference is None:
            raise QuantizationError("step_of='update' needs the reference that the update is measured against")
        moved = rms(tensor - reference[spec.name])
        # A tensor that did not move is predicted exactly whatever the step: a fine one keeps it in place.
        wanted = float(step) * (moved if moved > 0 else rms(tensor) / 1024)
    elif step_of == "weights":
        wanted = float(step) * rms(tensor)
    else:
        raise QuantizationError(f"step_of is {step_of!r}; it must be 'weights' or 'update'")
    # Weights that decayed to almost nothing (1e-38) get the finest step there is: an error of 2**-101 harms no model.
    return float(np.float32(max(wanted, largest / MOST_STEPS, STEP_MIN)))
