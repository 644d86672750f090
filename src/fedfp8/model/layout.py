"""What a model consists of, without its values: names, shapes, dtypes, and how each tensor travels.

Both ends of a message agree on a `Layout`; its 8-byte fingerprint stands for it in every payload.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedfp8.errors import WireFormatError
from fedfp8.fp8.format import Format

__all__ = ["KINDS", "Layout", "TensorSpec"]

# fp8: a weight, coded in `format` with the range tensor `range`. float: any other float parameter. Sent as they are:
# range (alpha or beta, always float32), buffer (float buffers; a variance with noise could be negative), integer.
KINDS = ("fp8", "float", "range", "buffer", "integer")
FLOAT_DTYPES = ("float32", "float64", "float16", "bfloat16")
INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: str = "float"
    format: Format | None = None
    range: str | None = None

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    def __post_init__(self) -> None:
        allowed = INTEGER_DTYPES if self.kind == "integer" else ("float32",) if self.kind == "range" else FLOAT_DTYPES
        if self.kind not in KINDS or self.dtype not in allowed:
            raise ValueError(
                f"tensor {self.name!r}: kind {self.kind!r} with dtype {self.dtype!r}; {self.kind} allows {allowed}"
            )
        if (self.kind == "fp8") != (self.format is not None and self.range is not None):
            raise ValueError(f"tensor {self.name!r}: format and range belong to kind 'fp8' and to no other")
        if any(not isinstance(n, int) or n < 0 for n in self.shape) or self.size >= 2**32:
            raise ValueError(
                f"tensor {self.name!r}: shape {self.shape}; sizes must be >= 0 and fewer than 2**32 elements in all"
            )


@dataclass(frozen=True, eq=False)
class Layout:
    """An ordered list of tensors with unique names."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        kinds = {spec.name: spec.kind for spec in self.tensors}
        if len(kinds) != len(self.tensors):
            raise ValueError("a layout names a tensor twice; names must be unique")
        for spec in self.tensors:
            if spec.range is not None and kinds.get(spec.range) != "range":
                raise ValueError(f"tensor {spec.name!r}: its range {spec.range!r} is not a range tensor of the layout")

    def __eq__(self, other: object) -> bool:  # not tensor by tensor: what follows from a layout is looked up by it
        return isinstance(other, Layout) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def num_elements(self) -> int:
        return sum(spec.size for spec in self.tensors)

    def with_format(self, format: Format | None) -> "Layout":
        """The same model with every FP8 weight in another format, or (None) in float32."""
        if format is None:
            changed = [
                replace(s, kind="float", format=None, range=None) if s.kind == "fp8" else s for s in self.tensors
            ]
        else:
            changed = [replace(s, format=format) if s.kind == "fp8" else s for s in self.tensors]
        return Layout(tuple(changed))

    def to_bytes(self) -> bytes:
        """Canonical bytes: compact JSON, one row [name, shape, dtype, kind, format, range] a tensor."""
        rows = [[s.name, list(s.shape), s.dtype, s.kind, s.format and s.format.name, s.range] for s in self.tensors]
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Layout":
        """The inverse of :meth:`to_bytes`; anything else raises WireFormatError."""
        try:
            return cls(tuple(_spec(row) for row in json.loads(data)))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise WireFormatError(f"layout section is damaged: {error}; ask the sender for the message again") from None

    @cached_property
    def fingerprint(self) -> bytes:
        return hashlib.blake2b(self.to_bytes(), digest_size=8).digest()


def _spec(row: Any) -> TensorSpec:
    name, shape, dtype, kind, format, range = row
    if not isinstance(name, str) or not isinstance(shape, list) or not all(type(n) is int for n in shape):
        raise ValueError(f"row {str(row)[:80]!r} is not a tensor")
    return TensorSpec(name, tuple(shape), dtype, kind, None if format is None else Format.parse(format), range)
