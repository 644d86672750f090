"""What is in a payload: sizes, modes and bits per weight, tensor by tensor. No code is decoded and no reference needed.

A payload without its layout section says nothing of tensors; `inspect` then needs the receiver's layout for the rows.
"""

from dataclasses import asdict, dataclass
from typing import Any

from fedfp8.model.layout import Layout
from fedfp8.model.quantized import QuantState
from fedfp8.model.rounding import ROUNDINGS
from fedfp8.wire import codec
from fedfp8.wire.container import Header, Reader, checked_body, verified
from fedfp8.wire.message import read_plain, records

__all__ = ["Inspection", "Row", "inspect"]


@dataclass(frozen=True)
class Row:
    """One tensor, or small ones that are coded together. `bytes`: of its own record; `value`: a range's number."""

    name: str
    kind: str
    mode: str
    elements: int
    bytes: int
    step: float | None = None
    value: float | None = None

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class Inspection:
    """``str()`` is a table for a terminal, ``to_dict()`` the same for JSON."""

    header: Header
    size: int
    rows: tuple[Row, ...] | None  # None: the payload carries no layout and none was given

    @property
    def elements(self) -> int:
        return sum(row.elements for row in self.rows or ())

    @property
    def bits_per_weight(self) -> float:
        """Of the whole payload, over all its elements."""
        return 8 * self.size / self.elements if self.elements else 0.0

    def to_dict(self) -> dict[str, Any]:
        head = asdict(self.header)
        head["layout_fingerprint"] = self.header.layout_fingerprint.hex()
        named = [fingerprint.hex() for fingerprint in self.header.reference_fingerprints]
        head["reference_fingerprint"], head["reference_fingerprints"] = named[0] if named else None, named
        rows = None
        if self.rows is not None:
            rows = [{**asdict(row), "bits_per_weight": row.bits_per_weight} for row in self.rows]
        totals = {"elements": self.elements, "bits_per_weight": self.bits_per_weight}
        return {**head, "bytes": self.size, **totals, "tensors": rows}

    def __str__(self) -> str:
        head = self.header
        reference = ", ".join(named.hex() for named in head.reference_fingerprints) or "none"
        place = f", place {head.place} of {head.strata}" if head.strata > 1 else ""
        lines = [
            f"fedfp8 payload, version {head.version}{' (a change)' if head.change else ''}: {self.size:,} bytes, "
            f"rounding {head.rounding}, seed {head.seed}{place}",
            f"layout {head.layout_fingerprint.hex()}{' (included)' if head.has_layout else ''}, reference {reference}",
        ]
        if self.rows is None:
            return "\n".join([*lines, "no layout in the payload: give the model's layout to see its tensors"])
        width = max([len(row.name) for row in self.rows] + [6])
        lines += ["", f"{'tensor':<{width}} {'kind':<8}{'mode':<20}{'elements':>12}{'bytes':>12}{'bits':>8}"]
        for row in self.rows:
            note = f"  = {row.value:.6g}" if row.value is not None else f"  step {row.step:.4g}" if row.step else ""
            lines.append(
                f"{row.name:<{width}} {row.kind:<8}{row.mode:<20}{row.elements:>12,}{row.bytes:>12,}"
                f"{row.bits_per_weight:>8.3f}{note}"
            )
        total = f"{self.elements:>12,}{self.size:>12,}{self.bits_per_weight:>8.3f}"
        return "\n".join([*lines, f"{'payload':<{width}} {'':<28}{total}"])


def inspect(payload: bytes, layout: Layout | None = None) -> Inspection:
    """Version, fingerprints and, tensor by tensor, mode, size and bits per weight of a payload."""
    head, _ = verified(payload)
    if layout is None and not head.has_layout:
        return Inspection(head, len(payload), None)
    head, layout, reader = checked_body(payload, layout)
    q = read_plain(head, layout, reader)
    rows = _coded_rows(q, len(head.reference_fingerprints), reader)
    for spec in q.form:
        if spec.kind not in ROUNDINGS[head.rounding].kinds:
            tensor = q.rest[spec.name]
            value = float(tensor) if spec.kind == "range" and spec.size == 1 else None
            rows[spec.name] = Row(spec.name, spec.kind, "as is", spec.size, tensor.nbytes, None, value)
    reader.finish()
    return Inspection(head, len(payload), tuple(rows[spec.name] for spec in q.form if spec.name in rows))


def _coded_rows(q: QuantState, references: int, reader: Reader) -> dict[str, Row]:
    """By name; tensors that are coded together by the name of the first."""
    rows = {}
    before = reader.position
    for plan, mode, _ in records(q, (), reader):
        used, before = reader.position - before, reader.position
        step = plan.step if plan.dithered and plan.parts == (plan.spec,) else None
        name = "nothing" if mode is None else codec.mode_name(mode, references)
        rows[plan.parts[0].name] = Row(plan.name, plan.spec.kind, name, plan.size, used, step)
    return rows
