"""What runs left behind, read back without torch: the numbers of every table and plot start here.

A run folder holds ``config.toml``, ``history.jsonl`` (one object per round, ``bytes_total`` cumulative),
``summary.json`` and, once measured, ``sizes.json`` (bytes of a message without the lossless stage). Bytes are always
the lengths of real payloads, never a formula.

The communication gain (the paper's section 5.3): with A the highest test accuracy that both runs reach, the cumulative
bytes at which FP32 first has an evaluated accuracy >= A, divided by the same for the method. No interpolation. Round 0,
the untrained model, has cost nothing and does not count.

A gain between runs that guess says nothing, so a run must have *learned* first. With C classes and n test examples, the
accuracy of a model that guesses has mean p = 1/C and standard deviation at most s = sqrt(p (1 - p) / n); a run has
learned once its best accuracy is above p + 5 s (a chance of less than one in a million), at least 1.5 p, and above that
of its own untrained model. Where C or n is not known (own data, another metric) only the last condition is left.
"""

import json
import math
import os
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
    "Metric",
    "Point",
    "RunRecord",
    "Variant",
    "by_cell",
    "communication_gain",
    "find_runs",
    "grouped",
    "longest",
    "points_of",
    "read_run",
    "settings_text",
    "variants",
]

History = Sequence[Mapping[str, Any]]

# Classes and test examples of the known data sets; a test compares them with fedfp8.data. Speech Commands has ten words
# (v0.01 as packed here) or 35 (v0.02): with ten the bound is the stricter one.
TEST_SETS = {
    "digits": (10, 360),
    "cifar10": (10, 10_000),
    "cifar100": (100, 10_000),
    "fashion_mnist": (10, 1_000),
    "speech_commands": (10, 2_567),
}


@dataclass(frozen=True)
class Metric:
    """What a run is judged by. Accuracy is 0..1 and shown in percent; anything else is shown as it is."""

    name: str = "accuracy"
    higher_is_better: bool = True

    @property
    def percent(self) -> bool:
        return self.name == "accuracy"

    @property
    def scale(self) -> float:
        return 100.0 if self.percent else 1.0

    @property
    def digits(self) -> int:
        """Behind the point, in tables."""
        return 1 if self.percent else 4

    @property
    def title(self) -> str:
        """For the head of a column or an axis."""
        return "accuracy (%)" if self.percent else self.name

    def text(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self.percent else f"{value:.4g}"

    def better(self, one: float, other: float) -> bool:
        return one > other if self.higher_is_better else one < other

    def best(self, values: Iterable[float]) -> float:
        return max(values) if self.higher_is_better else min(values)

    def worst(self, values: Iterable[float]) -> float:
        return min(values) if self.higher_is_better else max(values)


ACCURACY = Metric()


@dataclass(frozen=True)
class Point:
    """An evaluated round: the metric (accuracy in 0..1) and all bytes that were sent until then, both directions."""

    round: int
    value: float
    bytes: int


@dataclass(frozen=True)
class Gain:
    """How many times fewer bytes a method needed than FP32 to reach `value`."""

    gain: float
    value: float
    base: Point  # where FP32 got there
    method: Point  # where the method got there
    std: float | None = None  # between seeds, where `gain` is their mean


def metric_name(line: Mapping[str, Any]) -> str:
    """What the metric of a history line is called."""
    return str((line.get("metric") or {}).get("name", "accuracy"))


def value_of(line: Mapping[str, Any]) -> float | None:
    """The metric of a history line; None if the round was not evaluated."""
    found = line["metric"]["value"] if line.get("metric") else line.get("accuracy")
    return None if found is None else float(found)


def sent_value_of(line: Mapping[str, Any]) -> float | None:
    """The same of the quantized model that is sent next."""
    found = line["metric"].get("sent") if line.get("metric") else line.get("accuracy_sent")
    return None if found is None else float(found)


def points_of(history: History, totals: Sequence[int] | None = None) -> list[Point]:
    """The evaluated rounds of a history, without round 0; `totals` replaces its cumulative bytes, line by line."""
    sums = totals or [int(line["bytes_total"]) for line in history]
    return [
        Point(int(line["round"]), value, total)
        for line, total in zip(history, sums, strict=True)
        if (value := value_of(line)) is not None and line["round"] > 0
    ]


def communication_gain(fp32_history: History, method_history: History) -> Gain | None:
    """The gain of a method over FP32 from the lines of two histories; None if either has no evaluated round."""
    return gain_between(points_of(fp32_history), points_of(method_history))


def gain_between(fp32: Sequence[Point], method: Sequence[Point], metric: Metric = ACCURACY) -> Gain | None:
    if not fp32 or not method:
        return None
    value = metric.worst(metric.best(p.value for p in points) for points in (fp32, method))
    base, other = (next(p for p in points if not metric.better(value, p.value)) for points in (fp32, method))
    return Gain(base.bytes / other.bytes, value, base, other)


@dataclass(frozen=True)
class RunRecord:
    """One run folder."""

    path: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    sizes: dict[str, Any]
    tensors: dict[str, Any]  # bits per weight of the messages that were kept, by tensor; see fl/payloads.py

    @property
    def cell(self) -> str:
        """What the runs of a comparison have in common: the name given to an own task, else the preset."""
        return str(self.config.get("name") or self.config["preset"])

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def label(self) -> str:
        """The method, or the variant of it that `compare` named the folder after (``dq:dq.kappa_up=16-seed0``)."""
        name = self.path.name.removesuffix(f"-seed{self.seed}")
        return name if name.startswith(f"{self.method}:") else self.method

    @cached_property
    def settings(self) -> dict[str, Any]:
        """``section.field`` -> value of all that makes two runs comparable as seeds of each other.

        Not the seed, not the folder of the data, not what is only looked at, not settings of a method that is not run.
        The number of rounds counts: the mean of a run of 60 and one of 120 is that of nothing.
        """
        flat: dict[str, Any] = {}
        for name, content in self.config.items():
            if isinstance(content, dict):
                flat |= {f"{name}.{key}": value for key, value in content.items()}
            else:
                flat[name] = content
        free = {"preset", "method", "name", "seed", "data.dir", "round.keep_payloads", "round.eval_sent"}
        if not flat.get("task"):  # empty, or of a version that had none
            free.add("task")
        if flat.get("qat.rounding") == "off" or flat.get("qat.ranges") == "learned":  # as versions without it had it
            free.add("qat.ranges")
        if "dithered" not in (flat.get("up.rounding"), flat.get("down.rounding")):
            free |= {key for key in flat if key.startswith("dq.")}
        if flat.get("down.rounding") != "dithered":
            free.add("wire.visits")  # others use the last visit alone
        return {key: value for key, value in flat.items() if key not in free}

    @cached_property
    def metric(self) -> Metric:
        found: dict[str, Any] = next((line["metric"] for line in self.history if line.get("metric")), {})
        return Metric(str(found.get("name", "accuracy")), bool(found.get("higher_is_better", True)))

    @property
    def chance(self) -> float:
        """The accuracy a run must be above to have learned; 0 where classes and test examples are not known."""
        data = self.config.get("data", {})
        if not self.metric.percent or self.config["preset"] == "own" or data.get("name") not in TEST_SETS:
            return 0.0
        classes, examples = TEST_SETS[data["name"]]
        p, n = 1 / classes, data.get("test_limit") or examples
        return max(1.5 * p, p + 5 * math.sqrt(p * (1 - p) / n))

    @property
    def learned(self) -> bool:
        """Whether the best round is clearly better than guessing, and than the untrained model."""
        if self.best is None or (self.metric.percent and self.best <= self.chance):
            return False
        before = value_of(self.history[0]) if self.history[0]["round"] == 0 else None
        return before is None or self.metric.better(self.best, before)

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

    @cached_property
    def start_points(self) -> list[Point]:
        """The same with the initial model sent once to every client, where clients built it themselves; else empty."""
        each = self.history[0].get("start_bytes") if self.history else None
        if each is None:
            return []
        seen, totals = set[int](), []
        for line in self.history:
            seen.update(line["clients"])
            totals.append(int(line["bytes_total"]) + len(seen) * int(each))
        return points_of(self.history, totals)

    @property
    def accuracy(self) -> float | None:
        """Test accuracy (or the run's other metric) at the last evaluated round."""
        return self.points[-1].value if self.points else None

    @property
    def best(self) -> float | None:
        return self.metric.best(p.value for p in self.points) if self.points else None

    @property
    def accuracy_sent(self) -> float | None:
        """The same for the quantized model that is actually sent, where that was evaluated."""
        found = [value for line in self.history if line["round"] > 0 and (value := sent_value_of(line)) is not None]
        return found[-1] if found else None

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
        """Day of the last round: as noted in the records, else (those of 0.1.0) that of the file."""
        written = datetime.fromtimestamp((self.path / "history.jsonl").stat().st_mtime, UTC)
        return str(self.sizes.get("date") or self.summary.get("date") or written.date().isoformat())


def read_run(path: Path) -> RunRecord:
    """Read a run folder, finished or not."""
    try:
        config = tomllib.loads((path / "config.toml").read_text())
    except FileNotFoundError:
        raise RunError(f"{path} is not a run folder: it has no config.toml") from None
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{path / 'config.toml'} is not valid TOML: {error}") from None
    files = (_json(path / name) for name in ("summary.json", "sizes.json", "payloads/tensors.json"))
    return RunRecord(path, config, _history(path), *files)


def find_runs(folder: Path) -> list[RunRecord]:
    """All runs in `folder` and below that have at least started, in order of their paths.

    Raises:
        RunError: `folder` does not exist.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; give one that `fedfp8 run`, `compare` or `reproduce` has written")
    found = sorted(file.parent for file in folder.rglob("config.toml") if (file.parent / "history.jsonl").exists())
    return [run for run in map(read_run, found) if run.history]


@dataclass(frozen=True)
class Variant:
    """Runs that are seeds of one another: one method, one label, the same settings, every seed once."""

    method: str
    label: str  # the method's name, and what sets this variant apart: "dq", "dq:dq.kappa_up=16"
    runs: tuple[RunRecord, ...]  # by seed


def variants(runs: Iterable[RunRecord], order: Sequence[str] = ()) -> list[Variant]:
    """Runs by label and settings, methods in `order`. Runs of different settings are never seeds of each other: where a
    label is not enough to tell them apart, it gets the settings in which they differ, or else their folders."""
    labels: dict[str, list[RunRecord]] = {}
    for run in sorted(runs, key=lambda run: (rank(run.method, order), run.label, run.seed, run.path)):
        labels.setdefault(run.label, []).append(run)
    return [variant for label, chosen in labels.items() for variant in _split(label, chosen)]


def rank(method: str, order: Sequence[str]) -> tuple[int, str]:
    return (order.index(method) if method in order else len(order), method)


def _split(label: str, runs: list[RunRecord]) -> list[Variant]:
    kinds: list[list[RunRecord]] = []
    for run in runs:
        same = next((kind for kind in kinds if kind[0].settings == run.settings), None)
        kinds.append([run]) if same is None else same.append(run)
    keys = {key for kind in kinds for key in kind[0].settings}
    differing = {key for key in keys if len({str(kind[0].settings.get(key)) for kind in kinds}) > 1}
    found = []
    for kind in kinds:
        name = ":".join([label, *settings_text({k: v for k, v in kind[0].settings.items() if k in differing})])
        if len({run.seed for run in kind}) == len(kind):
            found.append(Variant(kind[0].method, name, tuple(kind)))
            continue
        common = os.path.commonpath([run.path for run in kind])  # the same seed twice: two folders, not two seeds
        found += [Variant(run.method, f"{name}:{os.path.relpath(run.path, common)}", (run,)) for run in kind]
    return found


def longest(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Of runs that differ only in how long they are to be, those of the length that has got farthest."""
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        others = {key: value for key, value in run.settings.items() if key != "round.count"}
        found.setdefault(f"{run.label} {others}", []).append(run)
    lengths = [max(kind, key=lambda run: run.rounds).planned for kind in found.values()]
    return [run for kind, length in zip(found.values(), lengths, strict=True) for run in kind if run.planned == length]


def settings_text(settings: Mapping[str, Any]) -> list[str]:
    """``["dq.kappa_up=16", "wire.lossless=false"]``, as `--set` takes them."""

    def text(value: Any) -> str:
        return (
            str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
        )

    return [f"{key}={text(value)}" for key, value in settings.items()]


def grouped(runs: Iterable[RunRecord], folder: Path) -> dict[tuple[Path, str], list[RunRecord]]:
    """Runs that are to be compared with each other: in the same folder, of the same preset. The folder is never above
    `folder`, so that what is drawn from a single run folder stays inside it."""
    groups: dict[tuple[Path, str], list[RunRecord]] = {}
    for run in runs:
        groups.setdefault((folder if run.path == folder else run.path.parent, run.cell), []).append(run)
    return groups


def by_cell(runs: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs by preset, for the paper's tables."""
    cells: dict[str, list[RunRecord]] = {}
    for run in runs:
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
