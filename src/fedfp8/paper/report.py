"""Everything that can be drawn from the records in a folder, and one self-contained report.html. No torch.

Comparisons go into the folders of their runs, the paper's tables, Figure 3, Figure 4, the theory figure and the report
into the folder itself; nothing is ever written outside it. The page is put together in `page`.
"""

import json
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedfp8.errors import RunError
from fedfp8.paper.compare import Comparison, write_comparison
from fedfp8.paper.figures import draw_figure3, draw_figure4, draw_theory
from fedfp8.paper.page import Section, cell_section, image, note, page, sentence
from fedfp8.paper.paper import CELLS, TABLES
from fedfp8.paper.paper_tables import Groups, write_paper_table
from fedfp8.paper.records import RunRecord, by_cell, find_runs, grouped, longest, read_run

__all__ = ["Report", "export_records", "write_report"]


@dataclass(frozen=True)
class Report:
    """What was written: the page, its first sentence, and the comparison of every group of runs."""

    path: Path
    headline: str
    comparisons: list[Comparison]


def write_report(folder: Path, chosen: Sequence[Path] | None = None) -> Report:
    """Redraw everything in `folder` from its records and write ``report.html``.

    chosen: only these run folders, whose comparison then goes into `folder` itself (`fedfp8 compare`); later reports on
    that folder put it there again.

    Raises:
        RunError: there are no records in it.
    """
    runs = find_runs(folder) if chosen is None else [read_run(path) for path in chosen]
    groups = grouped(runs, folder)
    if len(groups) == 1 and (chosen is not None or (folder / "compare.json").exists()):
        groups = {(folder, cell): found for (_, cell), found in groups.items()}
    comparisons = [write_comparison(parent, found) for (parent, _), found in groups.items()]
    comparisons.sort(
        key=lambda c: (not c.learned, -max((row.rounds for row in c.rows), default=0))
    )  # the longest first
    sections = [cell_section(comparison, result=len(comparisons) > 1) for comparison in comparisons]
    cells = by_cell(runs)
    sections += _paper_sections(folder, {cell: cells[cell] for cell in CELLS if cell in cells})
    if not sections:
        raise RunError(
            f"{folder} has no records: no run folders (config.toml, history.jsonl), no figure3.json, no theory.json"
        )
    path = folder / "report.html"
    said = headline(comparisons)
    path.write_text(page(folder, runs, said, sections), encoding="utf-8")
    return Report(path, said, comparisons)


def headline(comparisons: Sequence[Comparison]) -> str:
    """The result in one sentence: that of the first, longest comparison."""
    if not comparisons:
        return "Figures of the paper, computed anew."
    where = f"{comparisons[0].table.title}: " if len(comparisons) > 1 else ""
    return where + sentence(comparisons[0])


def _paper_sections(folder: Path, cells: Groups) -> list[Section]:
    """The paper's tables and figures, as far as there are records for them."""
    tables = [name for name in TABLES if name != "figure4" and _wanted(name, cells, folder)]
    sections = [_table(name, cells, folder) for name in tables]
    learned = {cell: found for cell, found in cells.items() if _methods(found) > 1}
    curves = {cell: [run for run in longest(found) if _is_drawn(run)] for cell, found in learned.items()}
    drawable = {cell: found for cell, found in curves.items() if _methods(found) > 1}
    if drawable:
        draw_figure4(drawable, folder / "figure4")
        said = _not_drawn("they have not learned yet", cells.keys() - learned)
        said += _not_drawn("they were evaluated only once or ran only methods of Table 2", learned.keys() - drawable)
        sections.append(Section(TABLES["figure4"].title, image(folder / "figure4.png", "page") + said))
    sections += [_experiment(folder, name) for name in ("figure3", "theory") if (folder / f"{name}.json").exists()]
    return sections


def _methods(runs: Iterable[RunRecord]) -> int:
    """How many have learned."""
    return len({run.method for run in runs if run.learned})


def _is_drawn(run: RunRecord) -> bool:
    """One evaluation is no curve, and methods of Table 2 send as much as FP32."""
    return len(run.points) > 1 and (run.method == "fp32" or run.method not in TABLES["table2"].methods)


def _not_drawn(why: str, cells: Collection[str]) -> str:
    return note(f"Not drawn, because {why}: {', '.join(sorted(cells))}.") if cells else ""


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
        return Section("Figure 3: quantization errors, alone and averaged", image(folder / "figure3.png", "page"))
    draw_theory(data, folder / name)
    text = (
        f"FedAvg-UQ on L2-regularised softmax regression on handwritten digits ({data['dimension']} weights, "
        f"{data['settings']['clients']} clients, {data['settings']['rounds']} rounds). The floor of the objective gap "
        f"falls as S to the power {data['exponent']:.2f}, S the largest grid step (Theorem 1: at most S, about 2^-m)."
    )
    return Section("Theory: objective gap, its floor, and drift", image(folder / "theory.png", "page") + note(text))


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


RECORDS = ("config.toml", "history.jsonl", "summary.json", "sizes.json", "payloads/tensors.json")
