"""The paper's tables with ours beside them. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedfp8.paper.compare import Row, compare
from fedfp8.paper.paper import CELLS, TABLES, PaperTable, Reported, deviations
from fedfp8.paper.plots import name_of
from fedfp8.paper.records import RunRecord, by_cell, find_runs
from fedfp8.paper.tables import NONE, NOT_LEARNED, Table, gain_text, spread_text
from fedfp8.text import size_text

__all__ = ["Groups", "departures_of", "paper_runs", "paper_table", "write_paper_table"]

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
        departures += departures_of(cell, runs)
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


def departures_of(cell: str, runs: Sequence[RunRecord]) -> list[str]:
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
