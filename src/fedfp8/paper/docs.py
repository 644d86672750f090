"""The tables of the documentation that are made of the records: `fedfp8 report results --docs PAGE`. No torch.

A page has places for them:

    <!-- records:begin --> ... <!-- records:end -->               every cell of the paper, with its command
    <!-- summary:begin --> ... <!-- summary:end -->               accuracy and gain of UQ and DQ, cell by cell
    <!-- curves CELL ROUND ROUND ... --> ... <!-- curves:end -->  accuracy round by round, method beside method

One evaluation moves by some tenths of a point, so a table of curves also has the mean of all evaluations in the second
half of a run, and how far that is from FP32's of the same seed and rounds.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedfp8.errors import ConfigError
from fedfp8.paper.compare import Row, base_of, compare, ordered, spread_of
from fedfp8.paper.paper import CELLS, TABLES, not_preset
from fedfp8.paper.paper_tables import Groups, departures_of
from fedfp8.paper.plots import name_of
from fedfp8.paper.records import RunRecord, longest, settings_text
from fedfp8.paper.tables import NONE, NOT_LEARNED, Table, duration_text, gain_text, spread_text

__all__ = ["curve_table", "docs_tables", "machine_of", "refreshed", "summary_table", "update_docs"]

RECORDS = re.compile(r"(<!-- records:begin -->\n).*?(?=<!-- records:end -->)", re.S)
SUMMARY = re.compile(r"(<!-- summary:begin -->\n).*?(?=<!-- summary:end -->)", re.S)
CURVES = re.compile(r"(<!-- curves (\S+)((?: \d+)+) -->\n).*?(?=<!-- curves:end -->)", re.S)
Pair = tuple[RunRecord, RunRecord]  # a run, and the FP32 run that it is measured against


def update_docs(path: Path, groups: Groups) -> None:
    """Put the tables of the records into the places that a Markdown file has for them."""
    text = path.read_text()
    if not any(place.search(text) for place in (RECORDS, SUMMARY, CURVES)):
        raise ConfigError(
            f"{path} has no place for a table; put the lines <!-- records:begin --> and <!-- records:end -->, <!-- "
            "summary:begin --> and <!-- summary:end -->, or <!-- curves CELL ROUND ROUND ... --> and <!-- curves:end "
            "-->, where it belongs"
        )
    path.write_text(refreshed(text, groups))


def refreshed(text: str, groups: Groups) -> str:
    """A page with its tables made anew."""

    def curves(found: re.Match[str]) -> str:
        table = curve_table(groups.get(found[2], ()), [int(number) for number in found[3].split()])
        return f"{found[1]}\n{table.markdown()}\n"

    cells = "\n".join(table.markdown("###") for table in docs_tables(groups))
    text = RECORDS.sub(lambda found: f"{found[1]}\n{cells}\n", text)
    text = SUMMARY.sub(lambda found: f"{found[1]}\n{summary_table(groups).markdown()}\n", text)
    return CURVES.sub(curves, text)


# Every cell of the paper


def docs_tables(groups: Groups) -> list[Table]:
    """Cell, command, paper's number, ours so far, run length, machine, date; a row per cell and variant. Results first,
    then the smoke checks: runs that have not learned yet."""
    header = ["cell", "method", "paper", "ours so far", "run length", "machine", "date", "command"]
    results, smoke = [], []
    for cell in CELLS:
        found = list(zip(compare(groups.get(cell, ())), ordered(groups.get(cell, ())), strict=True))
        methods = [*TABLES["table1"].methods, *(row.method for row, _ in found)]
        for method in dict.fromkeys(methods):
            chosen = [(row, variant.runs) for row, variant in found if row.method == method]
            results += [_docs_line(cell, method, row, runs) for row, runs in chosen if row.learned]
            smoke += [_docs_line(cell, method, row, runs) for row, runs in chosen if not row.learned]
            if not chosen:
                results.append(_docs_line(cell, method, None, ()))
    notes = [line for cell in CELLS for line in departures_of(cell, groups.get(cell, ()))]
    tables = [Table("", header, results, notes)]
    return [*tables, Table("Smoke checks: these ran, and have not learned yet", header, smoke)] if smoke else tables


def _docs_line(cell: str, method: str, row: Row | None, runs: Sequence[RunRecord]) -> list[str]:
    known = [table.numbers[cell] for table in TABLES.values() if cell in table.numbers]
    paper = next((numbers[method].text() for numbers in known if method in numbers), NONE)
    experiment = next((t.name for t in TABLES.values() if method in t.methods and cell in t.numbers), "table1")
    parts = row.label.split(":")[1:] if row else []
    own = [part for part in parts if "=" in part and part.partition("=")[0] != "round.count"]
    asked = ":".join([method, *own])
    methods = asked if method == "fp32" else f"fp32,{asked}"
    command = f"`fedfp8 reproduce {experiment} --only {cell} --methods {methods}{_options(cell, row, runs, own)}`"
    if row is None:
        return [cell, method, paper, "not run yet", NONE, NONE, NONE, command]
    gains = f"{gain_text(row.gain_raw)} raw, {gain_text(row.gain)} sent" if row.comparable else NOT_LEARNED
    ours = f"{spread_text(row.accuracy, 100)} / {gains}"
    length = f"{row.rounds} rounds, {duration_text(row.seconds / len(runs))}" + _rest(runs)
    return [cell, row.label, paper, ours, length, machine_of(runs), runs[-1].date, command]


def _options(cell: str, row: Row | None, runs: Sequence[RunRecord], own: Sequence[str]) -> str:
    """What to add to the command for runs like these: length, seeds, and settings that are neither the preset's nor the
    method's `own`."""
    if row is None:
        return ""
    known = {"round.count"} | {part.partition("=")[0] for part in own}
    changed = {k: ours for run in runs for k, ours in not_preset(cell, run.config).items() if k not in known}
    settings = "".join(f" --set {text}" for text in settings_text(changed))
    return f" --rounds {row.rounds} --seeds {','.join(str(run.seed) for run in runs)}{settings}"


def _rest(runs: Sequence[RunRecord]) -> str:
    return "" if all(run.finished for run in runs) else " (goes on)"


def machine_of(runs: Iterable[RunRecord]) -> str:
    """The processors the runs say they were made on."""
    found = sorted({str(run.summary.get("machine", {}).get("cpu", "")) for run in runs} - {""})
    return ", ".join(found) or NONE


# Curves


def summary_table(groups: Groups) -> Table:
    """UQ and DQ beside FP32: the longest runs of every cell in which FP32 and one of them have learned; in a row of
    their own those with settings of their own."""
    header = ["cell", "rounds", "seeds", "FP32", "UQ beside it", "UQ's gain", "DQ beside it", "DQ's gain", "start sent"]
    body = []
    for cell in CELLS:
        runs = [run for run in longest(groups.get(cell, ())) if len(run.points) > 1]
        rows = {row.label: (row, v.runs) for row, v in zip(compare(runs), ordered(runs), strict=True) if row.comparable}
        own = dict.fromkeys(label.partition(":")[2] for label, (row, _) in rows.items() if row.method in ("uq", "dq"))
        for settings in own if "fp32" in rows else ():
            asked = {method: f"{method}:{settings}".rstrip(":") for method in ("uq", "dq")}
            found = {method: rows[label] for method, label in asked.items() if label in rows}
            body.append(_summary_line(", ".join(filter(None, [cell, settings])), {"fp32": rows["fp32"]} | found))
    return Table("", header, body)


def _summary_line(name: str, found: Mapping[str, tuple[Row, Sequence[RunRecord]]]) -> list[str]:
    base, fp32 = found["fp32"]
    line = [name, _uneven({method: row.rounds for method, (row, _) in found.items()})]
    line.append(_uneven({method: len(row.seeds) for method, (row, _) in found.items()}))
    line.append(f"{spread_text(base.accuracy, 100)} %")
    for method in ("uq", "dq"):
        row, own = found.get(method, (None, ()))
        line += [_beside(own, fp32), gain_text(row.gain) if row else NONE]
    return [*line, gain_text(found["dq"][0].gain_with_start) if "dq" in found else NONE]


def _uneven(counts: Mapping[str, int]) -> str:
    """How many rounds or seeds, and which methods have fewer: "300 (UQ 121)"."""
    most = max(counts.values())
    fewer = [f"{method.upper()} {count}" for method, count in counts.items() if count < most]
    return f"{most} ({', '.join(fewer)})" if fewer else str(most)


def curve_table(runs: Sequence[RunRecord], rounds: Sequence[int]) -> Table:
    """A row for each variant of a cell that has learned; numbers are means over its seeds."""
    header = ["", "seeds", *map(str, rounds), "second half", "beside FP32", "bits down / up", "fewer bytes", "gain"]
    fp32 = [run for run in runs if run.method == "fp32"]
    found = zip(compare(runs), ordered(runs), strict=True)
    body = [_line(row, variant.runs, fp32, rounds) for row, variant in found if row.learned]
    return Table("", [*header, "gain, start sent"], body)


def _line(row: Row, runs: Sequence[RunRecord], fp32: list[RunRecord], rounds: Sequence[int]) -> list[str]:
    pairs = [(run, base) for run in runs if (base := base_of(run, fp32)) is not None]
    name = f"**{name_of(row.label)}**" if row.method == "dq" else name_of(row.label)
    return [
        name,
        ", ".join(str(seed) for seed in row.seeds),
        *(_accuracy([p.value for run in runs for p in run.points if p.round == n], len(runs)) for n in rounds),
        spread_text(spread_of(_late(run, run.rounds) for run in runs), 100),
        _beside(runs, fp32) if row.method != "fp32" else NONE,
        f"{_bits(pairs, 'bytes_down')} / {_bits(pairs, 'bytes_up')}" if pairs else NONE,
        f"{statistics.fmean(map(_fewer, pairs)):.1f}×" if pairs else NONE,
        gain_text(row.gain, row.comparable),
        gain_text(row.gain_with_start, row.comparable) if row.gain_with_start else NONE,
    ]


def _accuracy(values: list[float], seeds: int) -> str:
    """Empty where a seed did not get that far."""
    return f"{100 * statistics.fmean(values):.1f}" if len(values) == seeds else ""


def _beside(runs: Iterable[RunRecord], fp32: Sequence[RunRecord]) -> str:
    """How far the second half of runs is from FP32's."""
    value = spread_of(_apart((run, base)) for run in runs if (base := base_of(run, fp32)) is not None)
    return NONE if value is None else f"{'+' if value.mean >= 0 else ''}{spread_text(value, 100)}"


def _late(run: RunRecord, rounds: int) -> float:
    """The mean of the evaluations in the second half of so many rounds."""
    return statistics.fmean(p.value for p in run.points if rounds / 2 <= p.round <= rounds)


def _apart(pair: Pair) -> float:
    rounds = min(run.rounds for run in pair)
    return _late(pair[0], rounds) - _late(pair[1], rounds)


def _fewer(pair: Pair) -> float:
    """FP32's bytes over the run's, of as many rounds."""
    rounds = min(run.rounds for run in pair)
    own, base = (next(line["bytes_total"] for line in run.history if line["round"] == rounds) for run in pair)
    return float(base / own)


def _bits(pairs: Iterable[Pair], way: str) -> str:
    """Per weight: a message of FP32 has 32."""

    def each(run: RunRecord) -> float:
        return float(getattr(run, way)) / sum(len(line["clients"]) for line in run.history)

    return f"{statistics.fmean(32 * each(run) / each(base) for run, base in pairs):.3g}"
