"""Everything that can be drawn from the records in a folder, and one self-contained report.html. No torch.

Comparisons go into the folders of their runs, the paper's tables, Figure 3, Figure 4, the theory figure and the report
into the folder itself. The report has its pictures inside, so it opens from disk without a network.
"""

import base64
import html
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedfp8.errors import RunError
from fedfp8.paper.compare import by_method, write_comparison
from fedfp8.paper.figures import draw_figure3, draw_figure4, draw_theory
from fedfp8.paper.paper import TABLES, deviations
from fedfp8.paper.paper_tables import Groups, machine_of, paper_runs, write_paper_table
from fedfp8.paper.plots import NAMES
from fedfp8.paper.records import RunRecord, find_runs, grouped
from fedfp8.paper.tables import NONE, Table, duration_text, size_text

__all__ = ["export_records", "write_report"]

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 74rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd; } h3 { font-size: 1.05rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #e4e4e4; text-align: left; } td { white-space: nowrap; } th { background: #f5f5f5; }
img { max-width: 100%; height: auto; display: block; margin: 1rem 0; } .column { width: 34rem; } .page { width: 68rem; }
.note { color: #555; font-size: .85rem; max-width: 60rem; } summary { cursor: pointer; margin: .3rem 0; }
"""  # noqa: E501


@dataclass(frozen=True)
class Section:
    title: str
    body: str  # HTML


def write_report(folder: Path) -> Path:
    """Redraw everything in `folder` from its records and write ``report.html``; returns its path.

    Raises:
        RunError: there are no records in it.
    """
    runs = find_runs(folder)
    cells = paper_runs(folder)
    sections = [_table(name, cells, folder) for name in TABLES if name != "figure4" and _wanted(name, cells, folder)]
    sections += [_experiment(folder, name) for name in ("figure3", "theory") if (folder / f"{name}.json").exists()]
    drawable = {cell: found for cell, found in cells.items() if len({run.method for run in found if run.points}) > 1}
    if drawable:
        draw_figure4(drawable, folder / "figure4")
        sections.append(Section(TABLES["figure4"].title, _image(folder / "figure4.png", "page")))
    sections += [_cell(parent, cell, found) for (parent, cell), found in grouped(runs).items()]
    if not sections:
        raise RunError(
            f"{folder} has no records: no run folders (config.toml, history.jsonl), no figure3.json, no theory.json"
        )
    path = folder / "report.html"
    path.write_text(_page(folder, runs, sections), encoding="utf-8")
    return path


def _wanted(name: str, cells: Groups, folder: Path) -> bool:
    """A table is drawn if it was asked for before, or if a method other than FP32 of one of its cells was run."""
    table = TABLES[name]
    ran = {(cell, run.method) for cell, found in cells.items() for run in found}
    own = set(table.methods) - {"fp32"}
    return (folder / f"{name}.json").exists() or any((c, m) in ran for c in table.cells for m in own)


def _table(name: str, cells: Groups, folder: Path) -> Section:
    table = write_paper_table(name, cells, folder)
    return Section(table.title, table.html())


def _experiment(folder: Path, name: str) -> Section:
    data = json.loads((folder / f"{name}.json").read_text())
    if name == "figure3":
        draw_figure3(data, folder / name)
        return Section("Figure 3: quantization errors, alone and averaged", _image(folder / "figure3.png", "page"))
    draw_theory(data, folder / name)
    text = (
        f"FedAvg-UQ on L2-regularised softmax regression on handwritten digits ({data['dimension']} weights, "
        f"{data['settings']['clients']} clients, {data['settings']['rounds']} rounds). The floor of the objective gap "
        f"falls as S to the power {data['exponent']:.2f}, S the largest grid step (Theorem 1: at most S, about 2^-m)."
    )
    return Section("Theory: objective gap, its floor, and drift", _image(folder / "theory.png", "page") + _note(text))


def _cell(folder: Path, cell: str, runs: Sequence[RunRecord]) -> Section:
    comparison = write_comparison(folder, runs)
    departures = sorted({item for run in runs for item in deviations(cell, run.config)})
    said = f"Departs from the paper's setup: {'; '.join(departures)}." if departures else ""
    rounds = "".join(
        f"<details><summary>{html.escape(NAMES.get(run.method, run.method))}, seed {run.seed}: {run.rounds} of "
        f"{run.planned} rounds, {duration_text(run.seconds)}</summary>{_rounds(run).html()}</details>\n"
        for chosen in by_method(runs).values()
        for run in chosen
    )
    about = _note(f"{said} Machine: {machine_of(runs)}. Last round: {max(run.date for run in runs)}.")
    return Section(cell, comparison.table.html() + about + _image(folder / "compare.png", "column") + rounds)


def _rounds(run: RunRecord) -> Table:
    """The evaluated rounds of a run."""
    header = ["round", "accuracy (%)", "accuracy of the model sent (%)", "loss", "bytes so far", "clients", "rejected"]
    body = [
        [
            str(line["round"]),
            f"{100 * line['accuracy']:.2f}",
            f"{100 * line['accuracy_sent']:.2f}" if "accuracy_sent" in line else NONE,
            f"{line['loss']:.4f}" if line.get("loss") is not None else NONE,
            size_text(line["bytes_total"]),
            str(len(line["clients"])),
            str(len(line["rejected"])),
        ]
        for line in run.history
        if line.get("accuracy") is not None
    ]
    return Table("", header, body)


def _note(text: str) -> str:
    return f"<p class=note>{html.escape(text.strip())}</p>\n"


def _image(path: Path, kind: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img class={kind} alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">\n'


def _page(folder: Path, runs: Sequence[RunRecord], sections: Sequence[Section]) -> str:
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    what = (
        f"{len(runs)} runs, {sum(run.rounds for run in runs):,} rounds, {duration_text(sum(r.seconds for r in runs))}"
    )
    body = "".join(f"<h2>{html.escape(section.title)}</h2>\n{section.body}" for section in sections)
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        "<meta name=viewport content='width=device-width, initial-scale=1'>\n"
        f"<title>fedfp8 report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>fedfp8 report</h1>\n"
        f"{_note(f'Drawn from the records in {folder.resolve().name}/ ({what}) on {made}.')}{body}</body>\n</html>\n"
    )


def export_records(folder: Path, target: Path) -> list[Path]:
    """Copy the small files of every run (no checkpoints) and of the experiments, keeping the folders' structure."""
    copied = []
    files = [run.path / name for run in find_runs(folder) for name in RECORDS]
    files += [folder / f"{name}.json" for name in ("figure3", "theory")]
    for file in files:
        if file.exists():
            copied.append(target / file.relative_to(folder))
            copied[-1].parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copied[-1])
    return copied


RECORDS = ("config.toml", "history.jsonl", "summary.json", "sizes.json")
