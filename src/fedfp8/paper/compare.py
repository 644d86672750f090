"""Methods side by side: a row per variant over its seeds, as JSON, Markdown, CSV and a plot. No torch."""

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedfp8.paper.plots import NAMES, Curve, accuracy_against_bytes, name_of
from fedfp8.paper.records import (
    ACCURACY,
    Gain,
    Metric,
    Point,
    RunRecord,
    Variant,
    gain_between,
    read_run,
    variants,
)
from fedfp8.paper.tables import Table, gain_text, spread_text
from fedfp8.text import size_text

__all__ = [
    "Comparison",
    "Row",
    "compare",
    "comparison_table",
    "curves_of",
    "gains_of",
    "ordered",
    "spread_of",
    "write_comparison",
]

ORDER = tuple(NAMES)


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (None for one value) and number of values."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Row:
    """A variant of a method over its seeds. Accuracies are 0..1 (or the runs' other metric); `gain` is measured on
    recorded bytes, `gain_raw` without the lossless stage (the paper's definition). Both are None where FP32 or the raw
    size is missing, and where either side has not learned yet (`comparable` is False then)."""

    method: str
    label: str
    metric: Metric
    seeds: list[int]
    rounds: int  # of the shortest run
    planned: int
    accuracy: Spread
    accuracy_best: Spread
    accuracy_sent: Spread | None
    bytes: Spread
    bytes_down: Spread
    bytes_up: Spread
    learned: bool  # every seed of the variant
    comparable: bool  # and the FP32 runs it is compared with
    gain: Spread | None
    gain_raw: Spread | None
    gain_with_start: Spread | None  # as if clients had been sent the initial model that they built themselves
    seconds: float

    @property
    def finished(self) -> bool:
        return self.rounds >= self.planned

    @property
    def name(self) -> str:
        return name_of(self.label)


def ordered(runs: Iterable[RunRecord]) -> list[Variant]:
    """The variants among runs with an evaluated round, in the order of the paper."""
    return variants((run for run in runs if run.points), ORDER)


def compare(runs: Iterable[RunRecord]) -> list[Row]:
    """One row per variant, in the order of the paper; runs without an evaluated round are left out."""
    found = ordered(runs)
    fp32 = [run for variant in found if variant.method == "fp32" for run in variant.runs]
    return [_row(variant, fp32) for variant in found]


def base_of(run: RunRecord, fp32: Iterable[RunRecord]) -> RunRecord | None:
    """The FP32 run that a gain is measured against: of the same seed, in the fewest other settings."""

    def differences(base: RunRecord) -> int:
        return sum(base.settings.get(key) != value for key, value in run.settings.items())

    return min((base for base in fp32 if base.seed == run.seed), key=differences, default=None)


def _row(variant: Variant, fp32: list[RunRecord]) -> Row:
    runs, metric = variant.runs, variant.runs[0].metric
    bases = [base_of(run, fp32) for run in runs]
    pairs = [(base, run) for base, run in zip(bases, runs, strict=True) if base is not None]
    learned = all(run.learned for run in runs)
    comparable = learned and all(base.learned for base, _ in pairs)
    complete = comparable and len(pairs) == len(runs)
    return Row(
        method=variant.method,
        label=variant.label,
        metric=metric,
        seeds=[run.seed for run in runs],
        rounds=min(run.rounds for run in runs),
        planned=max(run.planned for run in runs),
        accuracy=_known(run.accuracy for run in runs),
        accuracy_best=_known(run.best for run in runs),
        accuracy_sent=spread_of(run.accuracy_sent for run in runs),
        bytes=_known(run.bytes_total for run in runs),
        bytes_down=_known(run.bytes_down for run in runs),
        bytes_up=_known(run.bytes_up for run in runs),
        learned=learned,
        comparable=comparable,
        gain=_gain(((base.points, run.points) for base, run in pairs), metric) if complete else None,
        gain_raw=_gain(((base.raw_points, run.raw_points) for base, run in pairs), metric) if complete else None,
        gain_with_start=_gain(((base.points, run.start_points) for base, run in pairs), metric) if complete else None,
        seconds=sum(run.seconds for run in runs),
    )


def _gain(pairs: Iterable[tuple[list[Point], list[Point]]], metric: Metric) -> Spread | None:
    found = [gain_between(base, method, metric) for base, method in pairs]
    return spread_of(gain.gain if gain else None for gain in found)


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """None unless every value is known: a mean over some of the seeds would not be the mean of the row."""
    known = list(values)
    if not known or any(value is None for value in known):
        return None
    numbers = [float(value) for value in known if value is not None]
    return Spread(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers))


def _known(values: Iterable[float | None]) -> Spread:
    spread = spread_of(values)
    assert spread is not None  # compare() keeps only runs with an evaluated round
    return spread


def comparison_table(rows: Sequence[Row], title: str = "") -> Table:
    """The rows as text: percent, bytes with a unit, gains."""
    metric = rows[0].metric if rows else ACCURACY
    header = ["method", metric.title, "rounds", "seeds", "down", "up", "bytes", "gain", "gain, raw codes"]
    body = [
        [
            row.name,
            spread_text(row.accuracy, metric.scale, metric.digits),
            f"{row.rounds}" if row.finished else f"{row.rounds} of {row.planned}",
            str(len(row.seeds)),
            size_text(row.bytes_down.mean),
            size_text(row.bytes_up.mean),
            size_text(row.bytes.mean),
            gain_text(row.gain, row.comparable),
            gain_text(row.gain_raw, row.comparable),
        ]
        for row in rows
    ]
    notes = [
        f"{row.name}: clients build the initial model themselves. Had it been sent to each of them once, as DQ sends "
        f"models, the gain would be {gain_text(row.gain_with_start, row.comparable)}."
        for row in rows
        if row.gain_with_start is not None
    ]
    return Table(title, header, body, notes)


def curves_of(runs: Iterable[RunRecord]) -> list[Curve]:
    """One curve per variant: mean over its seeds at the rounds that all of them evaluated."""
    return [_curve(variant) for variant in ordered(runs)]


def _curve(variant: Variant) -> Curve:
    found = [{point.round: point for point in run.points} for run in variant.runs]
    common = sorted(set.intersection(*(set(points) for points in found)))
    bytes_ = [statistics.fmean(points[r].bytes for points in found) for r in common]
    values = [statistics.fmean(points[r].value for points in found) for r in common]
    spread = [statistics.stdev(points[r].value for points in found) for r in common] if len(found) > 1 else None
    learned = all(run.learned for run in variant.runs)
    return Curve(variant.label, bytes_, values, spread, learned, variant.runs[0].metric)


def gains_of(curves: Sequence[Curve], rows: Sequence[Row] = ()) -> dict[str, Gain]:
    """The gains the curves show, for a plot; none where either side has not learned yet.

    Numbers are those of the rows, where these are given: means over seeds with their spread.
    """

    def points(curve: Curve) -> list[Point]:
        return [Point(0, a, int(b)) for a, b in zip(curve.values, curve.bytes, strict=True)]

    base = next((curve for curve in curves if curve.method == "fp32" and curve.learned), None)
    if base is None:
        return {}
    others = [curve for curve in curves if curve.method != "fp32" and curve.learned]
    found = {curve.label: gain_between(points(base), points(curve), base.metric) for curve in others}
    spreads = {row.label: row.gain for row in rows if row.gain}
    return {
        label: replace(gain, gain=spreads[label].mean, std=spreads[label].std) if label in spreads else gain
        for label, gain in found.items()
        if gain is not None
    }


@dataclass(frozen=True)
class Comparison:
    """What `write_comparison` wrote."""

    folder: Path
    runs: list[RunRecord]
    rows: list[Row]
    table: Table

    def text(self, width: int = 0) -> str:
        """The table; on a terminal of `width` columns without those that do not fit (compare.md has all)."""
        spare = ("seeds", "gain, raw codes", "rounds", "up", "down") if width else ()
        return self.table.narrowed(width, spare).text()

    @property
    def learned(self) -> bool:
        """Whether there is anything to call a result."""
        return any(row.learned for row in self.rows)


def write_comparison(folder: Path, runs: Iterable[RunRecord | Path]) -> Comparison:
    """Write compare.json, compare.md, compare.csv and compare.png/.pdf of runs (records or run folders) of a preset."""
    records = [run if isinstance(run, RunRecord) else read_run(run) for run in runs]
    rows, curves = compare(records), curves_of(records)
    title = ", ".join(sorted({run.cell for run in records}))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.json").write_text(json.dumps(_as_json(rows, records, folder), indent=2) + "\n")
    table = comparison_table(rows, title)
    (folder / "compare.md").write_text(table.markdown())
    (folder / "compare.csv").write_text(table.csv())
    accuracy_against_bytes(curves, folder / "compare", gains=gains_of(curves, rows), title=title)
    return Comparison(folder, records, rows, table)


def _as_json(rows: Sequence[Row], runs: Sequence[RunRecord], folder: Path) -> dict[str, Any]:
    """Per label (the method, or a variant of it) plain numbers with their standard deviations beside them."""
    methods = {}
    for row in rows:
        values = asdict(row) | {"finished": row.finished, "metric": row.metric.name}
        for name in (
            "accuracy",
            "accuracy_best",
            "accuracy_sent",
            "bytes",
            "bytes_down",
            "bytes_up",
            "gain",
            "gain_raw",
            "gain_with_start",
        ):
            spread = values.pop(name)
            values[name] = spread["mean"] if spread else None
            values[f"{name}_std"] = spread["std"] if spread else None
        chosen = next(variant.runs for variant in ordered(runs) if variant.label == row.label)
        values |= {"preset": chosen[0].cell, "runs": [os.path.relpath(run.path, folder) for run in chosen]}
        methods[values.pop("label")] = values
    return methods
