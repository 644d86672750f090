"""A model's values, and the lossy step: what is sent instead of them.

`State` is what both ends reason about: named float32 (and integer) tensors. `quantize_state` turns it into a
`QuantState`, integers and a few floats, by one of the roundings of `rounding.py`; `dequantize_state` gives the values
the receiver works with. How a QuantState becomes bytes is the business of `wire` and changes no value.

Every message has its own seed and every tensor its own random bits, so rounding errors are independent.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import rms
from fedfp8.fp8.many import batches, hashed_sum_many, largest_many, rms_many
from fedfp8.fp8.measure import largest
from fedfp8.fp8.parallel import dither_keys
from fedfp8.fp8.quantizers import STEP_MIN
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.rounding import ROUNDINGS, Draw, Item
from fedfp8.rng import derive_seed

__all__ = ["QuantState", "State", "dequantize_state", "quantize_state", "received_state", "tensor_seed"]


@dataclass(frozen=True, eq=False)
class State(Mapping[str, torch.Tensor]):
    """Named tensors in the order of a layout: float kinds float32, integers in their dtype; CPU, contiguous."""

    layout: Layout
    tensors: dict[str, torch.Tensor]
    _rms: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _largest: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if list(self.tensors) != [spec.name for spec in self.layout]:
            missing = {s.name for s in self.layout} ^ set(self.tensors)
            raise QuantizationError(
                f"a state's tensors must be those of its layout, in its order; they differ in {sorted(missing)}"
            )
        for spec in self.layout:
            tensor = self.tensors[spec.name]
            wanted = getattr(torch, spec.dtype) if spec.kind == "integer" else torch.float32
            if tuple(tensor.shape) != spec.shape or tensor.dtype != wanted or not tensor.is_contiguous():
                raise QuantizationError(
                    f"tensor {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}; "
                    f"the layout wants contiguous {wanted} {spec.shape}"
                )

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def fingerprint(self) -> bytes:
        """8 bytes that stand for all values (blake2b over the tensors' bytes)."""
        digest = hashlib.blake2b(self.layout.fingerprint, digest_size=8)
        for tensor in self.tensors.values():
            digest.update(tensor.view(-1).numpy().data if tensor.numel() else b"")
        return digest.digest()

    @cached_property
    def quick_fingerprint(self) -> bytes:
        """The same at the speed of memory: tells models apart that differ by accident, not by design."""
        sums = hashed_sum_many(list(self.tensors.values())).astype("<u8", copy=False)
        return hashlib.blake2b(self.layout.fingerprint + sums.tobytes(), digest_size=8).digest()

    def rms(self, name: str) -> float:
        """Root mean square of a tensor; computed once, since every message given this state asks for it."""
        if not self._rms:
            self._rms.update(self._measured(rms, rms_many))  # at once: others may be asking
        return self._rms[name]

    def largest(self, name: str) -> float:
        """Largest magnitude of a tensor, Inf or NaN if it holds one; computed once, too."""
        if not self._largest:
            self._largest.update(self._measured(largest, largest_many))
        return self._largest[name]

    def _measured(
        self, one: Callable[[torch.Tensor], float], many: Callable[[Sequence[torch.Tensor]], list[float]]
    ) -> dict[str, float]:
        """A number for every tensor that is not of integers: small ones together, large ones one by one."""
        found: dict[str, float] = {}
        for batch in batches([spec for spec in self.layout if spec.kind != "integer"], attrgetter("size")):
            tensors = [self.tensors[spec.name] for spec in batch]
            numbers = many(tensors) if len(batch) > 1 else [one(tensors[0])]
            found.update(zip((spec.name for spec in batch), numbers, strict=True))
        return found

    def with_layout(self, layout: Layout) -> "State":
        """The same tensors under a layout that differs in formats only."""
        return self if layout.fingerprint == self.layout.fingerprint else State(layout, self.tensors)


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

    def batches(self) -> Iterator[Sequence[tuple[int, TensorSpec]]]:
        """The coded tensors and their indices, some at a time: small ones are quantized together."""
        kinds = ROUNDINGS[self.rounding].kinds
        coded = [(index, spec) for index, spec in enumerate(self.layout) if spec.kind in kinds]
        return batches(coded, lambda pair: pair[1].size)

    def item(self, index: int, spec: TensorSpec, tensor: torch.Tensor) -> Item:
        """All that is known of tensor `index`, with its values or codes."""
        alpha = None if spec.range is None else self.rest[spec.range]
        return spec, tensor, alpha, self.steps.get(spec.name, 0.0), self.draw(index)

    def draw(self, index: int) -> Draw:
        """The random bits of tensor `index`."""
        return Draw(tensor_seed(self.seed, index), self.place, self.strata)


@lru_cache(maxsize=4096)
def tensor_seed(seed: int, index: int) -> int:
    """The seed of the random bits of tensor `index` of a message."""
    return derive_seed(seed, "tensor", index)


def quantize_state(
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
    received: bool = False,
) -> QuantState:
    """Quantize a whole state.

    For "dithered", `step` is a multiple of each tensor's rms, or of the rms of its change against `reference` with
    ``step_of="update"``, or a mapping name -> absolute step. place and strata are those of :func:`fedfp8.dither`.
    change: marks `state` as one of differences; nothing is subtracted here. received: values in the place of codes, for
    `received_state`.
    """
    if rounding not in ROUNDINGS:
        raise QuantizationError(f"rounding is {rounding!r}; it must be one of {', '.join(ROUNDINGS)}")
    rule = ROUNDINGS[rounding]
    if (step is not None) != rule.has_steps:
        raise QuantizationError(
            f"step={step!r} with rounding={rounding!r}; a step belongs to 'dithered', which needs one"
        )
    if not rule.has_steps and (place, strata, change) != (0, 1, False):
        raise QuantizationError(
            f"place={place}, strata={strata}, change={change} with rounding={rounding!r}; they belong to 'dithered'"
        )
    dither_keys(seed, place, strata)  # refuses places that do not exist, even where every tensor is zero
    q = QuantState(state.layout, rounding, seed, place=place, strata=strata, change=change)
    q.rest.update({spec.name: state[spec.name] for spec in state.layout if spec.kind not in rule.kinds})
    for batch in q.batches():
        if rule.has_steps:
            q.steps.update({spec.name: _step(spec, state, step, step_of, reference) for _, spec in batch})
        items = [q.item(index, spec, state[spec.name].view(-1)) for index, spec in batch]
        made = rule.receive_batch(items) if received else rule.quantize_batch(items)
        q.codes.update(zip((spec.name for _, spec in batch), made, strict=True))
    return q


def received_state(state: State, **how: Any) -> State:
    """``dequantize_state(quantize_state(state, ...))`` in one pass where there is one."""
    q = quantize_state(state, received=True, **how)
    found = q.rest | {spec.name: q.codes[spec.name].view(spec.shape) for spec in q.layout if spec.name in q.codes}
    return State(q.layout, {spec.name: found[spec.name] for spec in q.layout})


def dequantize_state(q: QuantState, *, consume: bool = False) -> State:
    """The values the receiver works with. consume: the codes are taken from `q`, so that both are never in memory."""
    rule, found = ROUNDINGS[q.rounding], dict(q.rest)
    take = q.codes.pop if consume else q.codes.__getitem__
    for batch in q.batches():
        items = [q.item(index, spec, take(spec.name)) for index, spec in batch]
        for (_, spec), flat in zip(batch, rule.dequantize_batch(items), strict=True):
            found[spec.name] = flat.view(spec.shape)
    return State(q.layout, {spec.name: found[spec.name] for spec in q.layout})


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
    return float(np.float32(max(wanted, largest / 2**19, STEP_MIN)))
