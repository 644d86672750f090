"""The paper's tables with ours beside them, and the list of cells for docs/reproduce.md. No torch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedfp8.errors import ConfigError
from fedfp8.paper.compare import Row, compare, ordered
from fedfp8.paper.paper import CELLS, TABLES, PaperTable, Reported, changes, deviations
from fedfp8.paper.plots import name_of
from fedfp8.paper.records import RunRecord, by_cell, find_runs
from fedfp8.paper.tables import NONE, NOT_LEARNED, Table, duration_text, gain_text, spread_text
from fedfp8.text import size_text

__all__ = ["docs_tables", "paper_runs", "paper_table", "update_docs", "write_paper_table"]

BEGIN, END = "<!-- records:begin -->", "<!-- records:end -->"
Groups = Mapping[str, Sequence[RunRecord]]  # cell -> runs

HEADER = (
    "model", "data", "setting", "method", "paper: accuracy (%)", "ours: accuracy (%)", "paper: gain",
    "ours: gain, raw FP8", "ours: gain, lossless stage", "rounds (paper)", "seeds", "bytes",
)  # fmt: skip
NOTES = (
    "Ours: mean over seeds ± sample standard deviation (none for one seed), at the last evaluated round. Gain: bytes "
    "FP32 needed for the highest accuracy both reach, divided by the method's, first evaluated round at or above it. "
    "No gain where either side is at chance level. "
    '"Raw FP8" is the paper\'s definition, with message sizes as measured without the lossless stage; the other one '
    'and "bytes" are what was sent.',
)


def paper_runs(folder: Path) -> Groups:
    """The runs in a folder that belong to cells of the paper."""
    return by_cell(run for run in find_runs(folder) if run.cell in CELLS)


def paper_table(table: PaperTable, groups: Groups) -> Table:
    """Every cell and method of the paper; in Table 1, where gains are, also every further method that was run.

    Runs that have not learned yet are smoke checks, not results: they are listed in a note.
    """
    body: list[list[str]] = []
    departures: list[str] = []
    smoke: list[str] = []
    for cell in table.cells:
        runs = list(groups.get(cell, ()))
        rows = compare(runs)
        further = [row.method for row in rows if row.method not in table.methods] if table.name == "table1" else []
        for method in dict.fromkeys([*table.methods, *further]):
            paper = table.numbers[cell].get(method)
            chosen: list[Row | None] = [row for row in rows if row.method == method]
            body += [_line(cell, method, paper, row) for row in chosen or [None]]
        smoke += [f"{cell} {row.label} ({_smoke(row)})" for row in rows if not row.learned]
        departures += _departures(cell, runs)
    listed = [f"Smoke checks, which ran but have not learned yet: {'; '.join(smoke)}."] if smoke else []
    return Table(table.title, HEADER, body, (*NOTES, *listed, *departures))


def _smoke(row: Row) -> str:
    return f"{spread_text(row.accuracy, 100)} % after {row.rounds} rounds"


def _line(cell: str, method: str, paper: Reported | None, ours: Row | None) -> list[str]:
    about = CELLS[cell]
    reported = f"{paper.accuracy:.1f} ± {paper.std:.1f}" if paper else NONE
    gain = f"{paper.gain:.1f}×" if paper and paper.gain else NONE
    planned = 500 if cell.endswith("-speaker") else 1000
    if ours is None:
        measured = [NONE, gain, NONE, NONE, f"0 ({planned})", "0", NONE]
    else:
        measured = [
            spread_text(ours.accuracy, 100) if ours.learned else NOT_LEARNED, gain,
            gain_text(ours.gain_raw, ours.comparable), gain_text(ours.gain, ours.comparable),
            f"{ours.rounds} ({planned})", str(len(ours.seeds)), size_text(ours.bytes.mean),
        ]  # fmt: skip
    return [about.model, about.data, about.setting, name_of(ours.label if ours else method), reported, *measured]


def _departures(cell: str, runs: Sequence[RunRecord]) -> list[str]:
    """What a cell's runs do otherwise than the paper, once per distinct list; the rounds have their own column."""
    found: dict[str, list[str]] = {}
    for run in runs:
        items = [item for item in deviations(cell, run.config) if not item.startswith("round.count")]
        if items:
            found.setdefault("; ".join(items), []).append(f"{run.label} seed {run.seed}")
    return [f"{cell} ({', '.join(who)}): {what}." for what, who in found.items()]


def write_paper_table(name: str, groups: Groups, folder: Path) -> Table:
    """Write ``<name>.md``, ``.csv`` and ``.json`` into `folder`."""
    table = paper_table(TABLES[name], groups)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(table.markdown("#"))
    (folder / f"{name}.csv").write_text(table.csv())
    (folder / f"{name}.json").write_text(json.dumps(_as_json(TABLES[name], groups), indent=2) + "\n")
    return table


def _as_json(table: PaperTable, groups: Groups) -> dict[str, Any]:
    cells = {}
    for cell in table.cells:
        runs = list(groups.get(cell, ()))
        cells[cell] = {
            "paper": {method: asdict(number) for method, number in table.numbers[cell].items()},
            "ours": {row.label: asdict(row) for row in compare(runs)},
            "deviations": sorted({item for run in runs for item in deviations(cell, run.config)}),
        }
    return {"table": table.name, "title": table.title, "cells": cells}


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
    notes = [line for cell in CELLS for line in _departures(cell, groups.get(cell, ()))]
    tables = [Table("", header, results, notes)]
    return [*tables, Table("Smoke checks: these ran, and have not learned yet", header, smoke)] if smoke else tables


def _docs_line(cell: str, method: str, row: Row | None, runs: Sequence[RunRecord]) -> list[str]:
    known = [table.numbers[cell] for table in TABLES.values() if cell in table.numbers]
    paper = next((numbers[method].text() for numbers in known if method in numbers), NONE)
    experiment = next((t.name for t in TABLES.values() if method in t.methods and cell in t.numbers), "table1")
    methods = "fp32" if method == "fp32" else f"fp32,{method}"
    command = f"`fedfp8 reproduce {experiment} --only {cell} --methods {methods}{_options(cell, row, runs)}`"
    if row is None:
        return [cell, method, paper, "not run yet", NONE, NONE, NONE, command]
    gains = f"{gain_text(row.gain_raw)} raw, {gain_text(row.gain)} sent" if row.comparable else NOT_LEARNED
    ours = f"{spread_text(row.accuracy, 100)} / {gains}"
    length = f"{row.rounds} rounds, {duration_text(row.seconds / len(runs))}" + _rest(runs)
    return [cell, row.label, paper, ours, length, machine_of(runs), runs[-1].date, command]


def _options(cell: str, row: Row | None, runs: Sequence[RunRecord]) -> str:
    """What to add to the command for runs like these: length, seeds, and settings that are not the paper's or ours."""
    if row is None:
        return ""
    changed = {k: ours for run in runs for k, (ours, _) in changes(cell, run.config).items() if k != "round.count"}
    sets = [f"{key}={str(value).lower()}" for key, value in changed.items()]
    known = {*changed, "round.count"}
    sets += [part for part in row.label.split(":")[1:] if "=" in part and part.partition("=")[0] not in known]
    settings = "".join(f" --set {text}" for text in sets)
    return f" --rounds {row.rounds} --seeds {','.join(str(run.seed) for run in runs)}{settings}"


def _rest(runs: Sequence[RunRecord]) -> str:
    return "" if all(run.finished for run in runs) else " (goes on)"


def machine_of(runs: Iterable[RunRecord]) -> str:
    """The processors the runs say they were made on."""
    found = sorted({str(run.summary.get("machine", {}).get("cpu", "")) for run in runs} - {""})
    return ", ".join(found) or NONE


def update_docs(path: Path, groups: Groups) -> None:
    """Replace what is between the markers of a Markdown file by the table of the records."""
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError(f"{path} must hold the lines {BEGIN} and {END} once each; the table goes between them")
    before, rest = text.split(BEGIN)
    tables = "\n".join(table.markdown("###") for table in docs_tables(groups))
    path.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{rest.split(END)[1]}")
