"""A mix of all references of a message as the reference of a dithered tensor: the sum of coefficient * reference.

Two models that are each some way off, in directions of their own, are together nearer than either of them: the
prediction gains what their errors do not share. The coefficients travel with the tensor, 4 bytes each.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfp8.errors import WireFormatError
from fedfp8.wire import kernels
from fedfp8.wire.container import AGAIN, Reader

if TYPE_CHECKING:
    from fedfp8.wire.codec import Plan, Reference

__all__ = ["LARGEST", "Mix", "fit_mix", "products", "read_mix"]

LARGEST = 16.0  # magnitude of a coefficient
DEPENDENT = 2.0**-32  # share of a reference's square that the others must leave; below it they do not tell it apart


@dataclass(frozen=True)
class Mix:
    """Two or three references and their coefficients, which are float32 numbers."""

    references: "tuple[Reference, ...]"
    coefficients: tuple[float, ...]

    @property
    def rms(self) -> float:
        """About: exact for references that differ by a factor, and they are nearly the same. Cut within float32."""
        return min(abs(sum(c * r.rms for c, r in zip(self.coefficients, self.references, strict=True))), 2.0**126)

    @property
    def operands(self) -> tuple[Any, ...]:
        """For kernels: three arrays, their coefficients, and how many of them count."""
        more = 3 - len(self.references)
        return *_three(self.references), *self.coefficients, *[0.0] * more, len(self.references)

    def to_bytes(self) -> bytes:
        return np.array(self.coefficients, "<f4").tobytes()


def _three(references: "tuple[Reference, ...]") -> tuple[np.ndarray, ...]:
    """The values of two or three references; the first again in the place of a third."""
    return tuple(references[i % len(references)].values for i in range(3))


def read_mix(references: "tuple[Reference, ...]", data: memoryview) -> tuple[Mix, memoryview]:
    """(mix, what follows) of a tensor's data."""
    if len(references) < 2:
        raise WireFormatError(f"a mix of {len(references)} references; it takes two or three; {AGAIN}")
    reader = Reader(data, "mix")
    coefficients = tuple(np.frombuffer(reader.take(4 * len(references), "coefficients"), "<f4").tolist())
    if not all(abs(c) <= LARGEST for c in coefficients):
        raise WireFormatError(f"coefficients {coefficients}; they are finite and at most {LARGEST:g}; {AGAIN}")
    return Mix(references, coefficients), reader.take(reader.left, "steps")


def products(plan: "Plan", codes: np.ndarray, spans: tuple[np.ndarray, int]) -> list[list[float]]:
    """Of the references, and of what the receiver will have, which is the last: sums of products over the sample.

    Sums in a fixed order of products that are exact: the same on every machine.
    """
    count = len(plan.references)
    sums = np.zeros((count + 1, count + 1))
    wanted = codes, *spans, np.float32(plan.step), *plan.keys
    kernels.products(*_three(plan.references), count, *wanted, sums)
    return [[float(sums[min(i, j), max(i, j)]) for j in range(count + 1)] for i in range(count + 1)]


def fit_mix(plan: "Plan", sums: list[list[float]]) -> Mix | None:
    """Least squares of what the receiver will have on the references; None if they cannot be mixed."""
    solved = _solved([list(row) for row in sums[:-1]])
    if solved is None or not all(abs(c) <= LARGEST for c in solved):
        return None
    return Mix(plan.references, tuple(float(np.float32(c)) for c in solved))


def _solved(rows: list[list[float]]) -> list[float] | None:
    """Of the normal equations [Gram matrix | right side]; None if references depend on each other."""
    n, squares = len(rows), [row[i] for i, row in enumerate(rows)]
    for i in range(n):
        if not rows[i][i] > DEPENDENT * squares[i]:
            return None
        for j in range(i + 1, n):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [q - factor * p for p, q in zip(rows[i], rows[j], strict=True)]
    found = [0.0] * n
    for i in reversed(range(n)):
        found[i] = (rows[i][n] - sum(rows[i][j] * found[j] for j in range(i + 1, n))) / rows[i][i]
    return found
