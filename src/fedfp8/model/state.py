"""A model's values: what both ends reason about. How they are rounded to be sent is in `quantized.py`."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import numpy as np
import torch

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import rms
from fedfp8.fp8.many import batches, hashed_sum_many, largest_many, rms_many
from fedfp8.fp8.measure import largest
from fedfp8.model.layout import Layout, TensorSpec

__all__ = ["State", "Values"]


class Values(Mapping[str, torch.Tensor]):
    """Named tensors in the order of a layout: float kinds float32, integers in their dtype; CPU, contiguous."""

    layout: Layout

    def __iter__(self) -> Iterator[str]:
        return (spec.name for spec in self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    @cached_property
    def fingerprint(self) -> bytes:
        """8 bytes that stand for all values (blake2b over the tensors' bytes)."""
        digest = hashlib.blake2b(self.layout.fingerprint, digest_size=8)
        for tensor in self.values():
            digest.update(tensor.view(-1).numpy().data if tensor.numel() else b"")
        return digest.digest()

    @cached_property
    def quick_fingerprint(self) -> bytes:
        """The same at the speed of memory: tells models apart that differ by accident, not by design."""
        return hashlib.blake2b(self.layout.fingerprint + self._sums().tobytes(), digest_size=8).digest()

    def _sums(self) -> np.ndarray:
        """Of every tensor, a number that stands for its bytes."""
        return hashed_sum_many(list(self.values())).astype("<u8", copy=False)

    def rms(self, name: str) -> float:
        """Root mean square of a tensor."""
        return rms(self[name])

    def joined(self, specs: Sequence[TensorSpec]) -> torch.Tensor:
        """The elements of some tensors, one after the other."""
        return torch.cat([self[spec.name].view(-1) for spec in specs])


@dataclass(frozen=True, eq=False)
class State(Values):
    """Tensors that are there."""

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
