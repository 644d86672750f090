"""What runs left behind, read back without torch: the numbers of every table and plot start here.

A run folder holds ``config.toml``, ``history.jsonl`` (one object per round, ``bytes_total`` cumulative),
``summary.json`` and, once measured, ``sizes.json`` (bytes of a message without the lossless stage). Bytes are always
the lengths of real payloads, never a formula.

The communication gain (the paper's section 5.3): with A the highest test accuracy that both runs reach, the cumulative
bytes at which FP32 first has an evaluated accuracy >= A, divided by the same for the method. No interpolation. Round 0,
the untrained model, has cost nothing and does not count.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from fedfp8.errors import RunError

__all__ = [
    "Gain",
    "Point",
    "RunRecord",
    "by_cell",
    "communication_gain",
    "find_runs",
    "grouped",
    "points_of",
    "read_run",
]

History = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Point:
    """An evaluated round: accuracy in 0..1 and all bytes that were sent until then, both directions."""

    round: int
    accuracy: float
    bytes: int


@dataclass(frozen=True)
class Gain:
    """How many times fewer bytes a method needed than FP32 to reach `accuracy`."""

    gain: float
    accuracy: float
    base: Point  # where FP32 got there
    method: Point  # where the method got there


def points_of(history: History, totals: Sequence[int] | None = None) -> list[Point]:
    """The evaluated rounds of a history, without round 0; `totals` replaces its cumulative bytes, line by line."""
    sums = totals or [int(line["bytes_total"]) for line in history]
    return [
        Point(int(line["round"]), float(line["accuracy"]), total)
        for line, total in zip(history, sums, strict=True)
        if line.get("accuracy") is not None and line["round"] > 0
    ]


def communication_gain(fp32_history: History, method_history: History) -> Gain | None:
    """The gain of a method over FP32 from the lines of two histories; None if either has no evaluated round."""
    return gain_between(points_of(fp32_history), points_of(method_history))


def gain_between(fp32: Sequence[Point], method: Sequence[Point]) -> Gain | None:
    if not fp32 or not method:
        return None
    accuracy = min(max(p.accuracy for p in fp32), max(p.accuracy for p in method))
    base = next(p for p in fp32 if p.accuracy >= accuracy)
    other = next(p for p in method if p.accuracy >= accuracy)
    return Gain(base.bytes / other.bytes, accuracy, base, other)


@dataclass(frozen=True)
class RunRecord:
    """One run folder."""

    path: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    sizes: dict[str, Any]

    @property
    def cell(self) -> str:
        return str(self.config["preset"])

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def rounds(self) -> int:
        return int(self.history[-1]["round"]) if self.history else 0

    @property
    def planned(self) -> int:
        return int(self.config["round"]["count"])

    @property
    def finished(self) -> bool:
        return self.rounds >= self.planned

    @cached_property
    def points(self) -> list[Point]:
        return points_of(self.history)

    @cached_property
    def raw_points(self) -> list[Point]:
        """The same with the bytes that the messages have without the lossless stage; empty if not known.

        Raw FP8 and float32 messages have the same size in every round, which ``sizes.json`` holds as measured on a
        real message of the run. Every sampled client counts once each way.
        """
        down, up = self.sizes.get("down_raw"), self.sizes.get("up_raw")
        if down is None or up is None:
            return []
        totals, total = [], 0
        for line in self.history:
            total += len(line["clients"]) * (int(down) + int(up))
            totals.append(total)
        return points_of(self.history, totals)

    @property
    def accuracy(self) -> float | None:
        """Test accuracy at the last evaluated round."""
        return self.points[-1].accuracy if self.points else None

    @property
    def best(self) -> float | None:
        return max((p.accuracy for p in self.points), default=None)

    @property
    def accuracy_sent(self) -> float | None:
        """The same for the quantized model that is actually sent, where that was evaluated."""
        found = [line["accuracy_sent"] for line in self.history if line["round"] > 0 and "accuracy_sent" in line]
        return float(found[-1]) if found else None

    @property
    def bytes_down(self) -> int:
        return sum(int(line["bytes_down"]) for line in self.history)

    @property
    def bytes_up(self) -> int:
        return sum(int(line["bytes_up"]) for line in self.history)

    @property
    def bytes_total(self) -> int:
        return int(self.history[-1]["bytes_total"]) if self.history else 0

    @property
    def seconds(self) -> float:
        return sum(float(line.get("seconds", {}).get("total", 0.0)) for line in self.history)

    @property
    def date(self) -> str:
        """Day of the last round: as noted in sizes.json, else that of the file."""
        written = datetime.fromtimestamp((self.path / "history.jsonl").stat().st_mtime, UTC)
        return str(self.sizes.get("date") or written.date().isoformat())


def read_run(path: Path) -> RunRecord:
    """Read a run folder, finished or not."""
    try:
        config = tomllib.loads((path / "config.toml").read_text())
    except FileNotFoundError:
        raise RunError(f"{path} is not a run folder: it has no config.toml") from None
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{path / 'config.toml'} is not valid TOML: {error}") from None
    return RunRecord(path, config, _history(path), _json(path / "summary.json"), _json(path / "sizes.json"))


def find_runs(folder: Path) -> list[RunRecord]:
    """All runs in `folder` and below that have at least started, in order of their paths.

    Raises:
        RunError: `folder` does not exist.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; give one that `fedfp8 run`, `compare` or `reproduce` has written")
    found = sorted(file.parent for file in folder.rglob("config.toml") if (file.parent / "history.jsonl").exists())
    return [run for run in map(read_run, found) if run.history]


def grouped(runs: Iterable[RunRecord]) -> dict[tuple[Path, str], list[RunRecord]]:
    """Runs that are to be compared with each other: in the same folder, of the same preset."""
    groups: dict[tuple[Path, str], list[RunRecord]] = {}
    for run in runs:
        groups.setdefault((run.path.parent, run.cell), []).append(run)
    return groups


def by_cell(runs: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs by preset, for the paper's tables.

    Raises:
        RunError: two runs of the same preset, method and seed; a table has one place for them.
    """
    cells: dict[str, list[RunRecord]] = {}
    seen: dict[tuple[str, str, int], Path] = {}
    for run in runs:
        key = (run.cell, run.method, run.seed)
        if key in seen:
            raise RunError(
                f"{seen[key]} and {run.path} are both {run.cell}, {run.method}, seed {run.seed}; report on a folder "
                "that holds only one of them"
            )
        seen[key] = run.path
        cells.setdefault(run.cell, []).append(run)
    return cells


def _history(path: Path) -> list[dict[str, Any]]:
    """The committed lines: a crash may leave more behind, which state.json does not count."""
    file = path / "history.jsonl"
    data = file.read_bytes() if file.exists() else b""
    committed = _json(path / "checkpoint" / "state.json").get("history_bytes")
    lines = (data if committed is None else data[: int(committed)]).split(b"\n")[:-1]  # the last one has no end yet
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise RunError(f"{file} is damaged: {error}; restore it, or run again with --overwrite") from None


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}; delete it and run the command again") from None
