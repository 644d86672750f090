"""Methods side by side: a row per method from the records of its seeds, as JSON, Markdown, CSV and a plot. No torch."""

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedfp8.paper.plots import NAMES, Curve, accuracy_against_bytes
from fedfp8.paper.records import Gain, Point, RunRecord, gain_between, read_run
from fedfp8.paper.tables import Table, gain_text, size_text, spread_text

__all__ = ["Comparison", "Row", "compare", "comparison_table", "curves_of", "gains_of", "write_comparison"]

ORDER = list(NAMES)


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (None for one value) and number of values."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Row:
    """A method over its seeds. Accuracies are 0..1; `gain` is measured on recorded bytes, `gain_raw` without the
    lossless stage (the paper's definition); None where FP32 or the raw size is missing."""

    method: str
    seeds: list[int]
    rounds: int  # of the shortest run
    planned: int
    accuracy: Spread
    accuracy_best: Spread
    accuracy_sent: Spread | None
    bytes: Spread
    bytes_down: Spread
    bytes_up: Spread
    gain: Spread | None
    gain_raw: Spread | None
    seconds: float

    @property
    def finished(self) -> bool:
        return self.rounds >= self.planned


def compare(runs: Iterable[RunRecord]) -> list[Row]:
    """One row per method, in the order of the paper; runs without an evaluated round are left out."""
    usable = [run for run in runs if run.points]
    fp32 = {run.seed: run for run in usable if run.method == "fp32"}
    return [_row(method, chosen, fp32) for method, chosen in by_method(usable).items()]


def by_method(runs: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    found: dict[str, list[RunRecord]] = {}
    for run in sorted(runs, key=lambda run: (_rank(run.method), run.method, run.seed)):
        found.setdefault(run.method, []).append(run)
    return found


def _rank(method: str) -> int:
    return ORDER.index(method) if method in ORDER else len(ORDER)


def _row(method: str, runs: list[RunRecord], fp32: dict[int, RunRecord]) -> Row:
    pairs = [(fp32[run.seed], run) for run in runs if run.seed in fp32]
    return Row(
        method=method,
        seeds=[run.seed for run in runs],
        rounds=min(run.rounds for run in runs),
        planned=max(run.planned for run in runs),
        accuracy=_known(run.accuracy for run in runs),
        accuracy_best=_known(run.best for run in runs),
        accuracy_sent=_spread(run.accuracy_sent for run in runs),
        bytes=_known(run.bytes_total for run in runs),
        bytes_down=_known(run.bytes_down for run in runs),
        bytes_up=_known(run.bytes_up for run in runs),
        gain=_gain((base.points, run.points) for base, run in pairs),
        gain_raw=_gain((base.raw_points, run.raw_points) for base, run in pairs),
        seconds=sum(run.seconds for run in runs),
    )


def _gain(pairs: Iterable[tuple[list[Point], list[Point]]]) -> Spread | None:
    found = [gain_between(base, method) for base, method in pairs]
    return _spread(gain.gain if gain else None for gain in found)


def _spread(values: Iterable[float | None]) -> Spread | None:
    """None unless every value is known: a mean over some of the seeds would not be the mean of the row."""
    known = list(values)
    if not known or any(value is None for value in known):
        return None
    numbers = [float(value) for value in known if value is not None]
    return Spread(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers))


def _known(values: Iterable[float | None]) -> Spread:
    spread = _spread(values)
    assert spread is not None  # compare() keeps only runs with an evaluated round
    return spread


def comparison_table(rows: Sequence[Row], title: str = "") -> Table:
    """The rows as text: percent, bytes with a unit, gains."""
    header = ["method", "accuracy (%)", "rounds", "seeds", "down", "up", "bytes", "gain", "gain, raw codes"]
    body = [
        [
            NAMES.get(row.method, row.method),
            spread_text(row.accuracy, 100),
            f"{row.rounds}" if row.finished else f"{row.rounds} of {row.planned}",
            str(len(row.seeds)),
            size_text(row.bytes_down.mean),
            size_text(row.bytes_up.mean),
            size_text(row.bytes.mean),
            gain_text(row.gain),
            gain_text(row.gain_raw),
        ]
        for row in rows
    ]
    return Table(title, header, body)


def curves_of(runs: Iterable[RunRecord]) -> list[Curve]:
    """One curve per method: mean over its seeds at the rounds that all of them evaluated."""
    return [_curve(method, chosen) for method, chosen in by_method(run for run in runs if run.points).items()]


def _curve(method: str, runs: list[RunRecord]) -> Curve:
    found = [{point.round: point for point in run.points} for run in runs]
    common = sorted(set.intersection(*(set(points) for points in found)))
    bytes_ = [statistics.fmean(points[r].bytes for points in found) for r in common]
    accuracy = [statistics.fmean(points[r].accuracy for points in found) for r in common]
    spread = [statistics.stdev(points[r].accuracy for points in found) for r in common] if len(found) > 1 else None
    return Curve(method, bytes_, accuracy, spread)


def gains_of(curves: Sequence[Curve]) -> dict[str, Gain]:
    """The gains the curves themselves show, for the arrows of a plot."""

    def points(curve: Curve) -> list[Point]:
        return [Point(0, a, int(b)) for a, b in zip(curve.accuracy, curve.bytes, strict=True)]

    base = next((curve for curve in curves if curve.method == "fp32"), None)
    others = [curve for curve in curves if base is not None and curve is not base]
    found = {curve.method: gain_between(points(base), points(curve)) for curve in others if base is not None}
    return {method: gain for method, gain in found.items() if gain is not None}


@dataclass(frozen=True)
class Comparison:
    """What `write_comparison` wrote."""

    rows: list[Row]
    table: Table

    @property
    def text(self) -> str:
        """The table for a terminal."""
        return self.table.text()


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
    accuracy_against_bytes(curves, folder / "compare", gains=gains_of(curves), title=title)
    return Comparison(rows, table)


def _as_json(rows: Sequence[Row], runs: Sequence[RunRecord], folder: Path) -> dict[str, Any]:
    """Per method plain numbers under the names the records use, with their standard deviations beside them."""
    methods = {}
    for row in rows:
        values = asdict(row) | {"finished": row.finished}
        for name in (
            "accuracy",
            "accuracy_best",
            "accuracy_sent",
            "bytes",
            "bytes_down",
            "bytes_up",
            "gain",
            "gain_raw",
        ):
            spread = values.pop(name)
            values[name] = spread["mean"] if spread else None
            values[f"{name}_std"] = spread["std"] if spread else None
        chosen = [run for run in runs if run.method == row.method]
        values |= {"preset": chosen[0].cell, "runs": [os.path.relpath(run.path, folder) for run in chosen]}
        methods[values.pop("method")] = values
    return methods
