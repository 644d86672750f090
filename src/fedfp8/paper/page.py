"""report.html: one file that opens from disk, without a network. Text, tables and data here; page.js draws the plots.

A section per group of runs: what came out in a sentence, the table, accuracy against bytes or rounds (hover for values,
methods to switch on and off), bits per weight, the settings, who took part, what was rejected, where the time went.
"""

import base64
import html
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedfp8.paper.compare import Comparison, base_of, compare, curves_of, ordered
from fedfp8.paper.docs import machine_of
from fedfp8.paper.paper import deviations
from fedfp8.paper.plots import name_of, styles_of
from fedfp8.paper.records import RunRecord, Variant, gain_between, longest, sent_value_of, settings_text, value_of
from fedfp8.paper.tables import NONE, Table, duration_text, spread_text
from fedfp8.text import size_text

__all__ = ["Section", "cell_section", "image", "note", "page", "sentence"]

HERE = Path(__file__).parent
GAIN = (
    "Gain: take the highest test accuracy that both FP32 and the method reach. The gain is the number of bytes FP32 "
    "had sent, both directions, when it first got there, divided by the number the method had sent. Bytes are the "
    "lengths of real messages, not a formula. “Raw codes” counts one byte a weight instead, as the paper does, without "
    "the lossless stage. No gain is given where either side is still at chance level."
)
PHASES = ("train", "server", "evaluate", "other")
MANY = 120  # clients; more are drawn by how often they took part instead of one by one


@dataclass(frozen=True)
class Section:
    title: str
    body: str  # HTML
    data: Mapping[str, Any] = field(default_factory=dict)  # for page.js


def sentence(comparison: Comparison) -> str:
    """What a group of runs came to: the largest gain of its longest runs, or why there is none."""
    runs = longest(comparison.runs)
    rows = compare(runs)
    row = max(
        (r for r in rows if r.gain and r.method != "fp32"), key=lambda r: r.gain.mean if r.gain else 0, default=None
    )
    if row is None or row.gain is None:
        if not rows:
            return "No round has been evaluated yet."
        if not comparison.learned:
            return "Nothing has learned yet: every run is still at chance level."
        return f"{rows[0].metric.name.capitalize()} so far: " + ", ".join(
            f"{r.name} {r.metric.text(r.accuracy.mean)}" for r in rows
        )
    times = f"{row.name} needed {spread_text(row.gain)} times fewer bytes than FP32 to reach "
    if len(row.seeds) > 1:
        return times + f"the same {row.metric.name} (mean over {len(row.seeds)} seeds)."
    run = next(v.runs[0] for v in ordered(runs) if v.label == row.label)
    base = base_of(run, [r for r in runs if r.method == "fp32" and r.points])
    gain = gain_between(base.points, run.points, row.metric) if base else None
    assert gain is not None  # the row has one
    reached = f"{row.metric.text(gain.value)} {row.metric.name}"
    return times + f"{reached}: {size_text(gain.method.bytes)} instead of {size_text(gain.base.bytes)}."


def cell_section(comparison: Comparison, *, result: bool = True) -> Section:
    """Everything about a group of runs; its result in a sentence only if the headline does not say it already."""
    runs, found = comparison.runs, ordered(comparison.runs)
    parts = [
        f"<p class=result>{html.escape(sentence(comparison))}</p>\n" if result else "",
        comparison.table.html(),
        _plots(comparison.folder / "compare.png"),
        _settings(runs, found),
        _details("Bits per weight, tensor by tensor", _tensors(found)),
        _details("Who took part", _participation(runs)),
        _details(f"Rejected updates: {_rejected_count(runs)}", _rejected(runs)),
        _details("Where the time went", _times(found)),
        *(_details(_run_title(run), _rounds(run).html()) for run in runs),
    ]
    title = comparison.table.title if comparison.learned else f"Smoke check: {comparison.table.title}"
    return Section(title, "".join(parts), _data(comparison, found))


def _run_title(run: RunRecord) -> str:
    length = f"{run.rounds} of {run.planned} rounds, {duration_text(run.seconds)}"
    return f"Rounds of {name_of(run.label)}, seed {run.seed}: {length}"


def _plots(picture: Path) -> str:
    """Where page.js draws; readers without JavaScript get the picture."""
    return (
        "<div class=plots>\n<div class=controls></div>\n<div class='plot main'></div>\n<div class='plot bits'></div>\n"
        f"<noscript>{image(picture, 'column')}</noscript>\n</div>\n"
    )


def _data(comparison: Comparison, found: Sequence[Variant]) -> dict[str, Any]:
    """The numbers behind the plots, mean over seeds."""
    curves = {curve.label: curve for curve in curves_of(run for variant in found for run in variant.runs)}
    styles = styles_of([variant.label for variant in found])
    metric = found[0].runs[0].metric if found else None
    series = []
    for variant in found:
        curve = curves[variant.label]
        series.append(
            {
                "label": variant.label, "name": name_of(variant.label), "color": styles[variant.label].color,
                "learned": curve.learned, "seeds": len(variant.runs), "round": _common_rounds(variant),
                "bytes": list(curve.bytes), "value": list(curve.values), "spread": curve.spread and list(curve.spread),
                "bits": _bits(variant.runs[0]),
            }
        )  # fmt: skip
    about = {"name": metric.name, "percent": metric.percent, "title": metric.title} if metric else {}
    return {"title": comparison.table.title, "metric": about, "series": series}


def _common_rounds(variant: Variant) -> list[int]:
    return sorted(set.intersection(*({point.round for point in run.points} for run in variant.runs)))


def _bits(run: RunRecord) -> dict[str, list[float]]:
    """Bits per weight of the messages of every round, each way; empty if the number of weights was not recorded."""
    weights = run.summary.get("parameters")
    lines = [line for line in run.history if line["round"] > 0 and line["clients"]] if weights else []
    return {
        "round": [line["round"] for line in lines],
        "down": [8 * line["bytes_down"] / len(line["clients"]) / weights for line in lines if weights],
        "up": [8 * line["bytes_up"] / len(line["clients"]) / weights for line in lines if weights],
    }


def _training(about: Mapping[str, Any]) -> str:
    """What was trained, in a sentence; of a Flower app with FP8(strategy) we know the exchange only."""
    if "local" not in about:
        return "A Flower app, trained by its own code."
    local, cohort = about["local"], f"{100 * about['clients']['fraction']:g} % of them a round"
    work = f"{local['steps']} steps" if local["steps"] else f"{local['epochs']} epochs"
    return (
        f"{about['model']['name']} on {about['data']['name']}, partition {about['data']['partition']}, "
        f"{about['clients']['count']} clients, {cohort}, {work} of batches of {local['batch_size']} with "
        f"{local['optimizer']} {local['lr']:g}."
    )


def _settings(runs: Sequence[RunRecord], found: Sequence[Variant]) -> str:
    """The run in a sentence, where it departs from the paper, and every setting."""
    cell = runs[0].cell
    said = (
        f"{_training(runs[0].config)} Seeds {', '.join(sorted({str(run.seed) for run in runs}))}. "
        f"Machine: {machine_of(runs)}. Last round: {max(run.date for run in runs)}."
    )
    if departures := sorted({item for run in runs for item in deviations(cell, run.config)}):
        said += f" Departs from the paper's setup: {'; '.join(departures)}."
    keys = list(dict.fromkeys(key for variant in found or () for key in variant.runs[0].settings))
    text = {v.label: dict(t.split("=", 1) for t in settings_text(v.runs[0].settings)) for v in found}
    body = [[key, *(text[v.label].get(key, NONE) for v in found)] for key in keys]
    table = Table("", ["setting", *(v.label for v in found)], body)
    return note(said) + _details("All settings", table.html())


def _tensors(found: Sequence[Variant]) -> str:
    """From the messages that a run kept (`--keep-payloads`): bits per weight of every tensor, down and up."""
    kept = {v.label: run.tensors for v in found for run in v.runs[:1] if run.tensors}
    if not kept:
        return note("Not recorded: a run with --keep-payloads ROUND keeps the messages of a round and measures them.")
    names = list(dict.fromkeys(name for tensors in kept.values() for name in tensors["tensors"]))
    header = ["tensor", "weights"] + [f"{label} {way}" for label in kept for way in ("down", "up")]

    def cells(name: str) -> list[str]:
        rows = [tensors["tensors"].get(name) for tensors in kept.values()]
        size = next(f"{row['elements']:,}" for row in rows if row)
        return [name, size, *(f"{row[way]:.3f}" if row else NONE for row in rows for way in ("down", "up"))]

    rounds = sorted({str(tensors["round"]) for tensors in kept.values()})
    return Table("", header, [cells(name) for name in names]).html() + note(
        f"Mean over the messages of round {', '.join(rounds)}."
    )


def _participation(runs: Sequence[RunRecord]) -> str:
    """Bars: how often each client took part, or, of many clients, how many took part how often. Cohorts follow from the
    seed, so the longest run stands for all."""
    run = max(runs, key=lambda run: run.rounds)
    counts = Counter(client for line in run.history for client in line["clients"])
    if not counts:
        return note("No round has been run.")
    count = run.config.get("clients", {}).get("count", 0)  # 0: a Flower app, whose nodes are known by what they did
    known = 0 if run.config.get("data", {}).get("partition") == "group" else int(count)
    total = max(known, max(counts) + 1)  # a partition by group has as many clients as groups
    if total <= MANY:
        bars = {str(client): counts.get(client, 0) for client in range(total)}
        what = "client, and the number of rounds it took part in"
    else:
        often = Counter(counts.values())
        bars = {str(times): often.get(times, 0) for times in range(1, max(often) + 1)}
        what = "number of rounds, and how many clients took part in so many"
    tallest = max(bars.values())
    drawn = "".join(
        f"<i style='--h:{count / tallest:.4f}' title='{html.escape(name)}: {count}'></i>"
        for name, count in bars.items()
    )
    ends = list(bars)
    return (
        f"<div class=bars role=img aria-label='{what}'>{drawn}</div>\n<div class=ends><span>{ends[0]}</span>"
        f"<span>{ends[-1]}</span></div>\n"
        + note(
            f"A bar per {what} (highest: {tallest}). {len(counts)} clients took part in {run.rounds} rounds of the run "
            f"with seed {run.seed}."
        )
    )


def _rejected_count(runs: Sequence[RunRecord]) -> int:
    return sum(len(line.get("rejected", ())) for run in runs for line in run.history)


def _rejected(runs: Sequence[RunRecord], shown: int = 50) -> str:
    body = [
        [name_of(run.label), str(run.seed), str(line["round"]), str(item["client"]), str(item["reason"])]
        for run in runs
        for line in run.history
        for item in line.get("rejected", ())
    ]
    if not body:
        return note("None: every update that came back could be used.")
    rest = note(f"... and {len(body) - shown} more, in history.jsonl.") if len(body) > shown else ""
    return Table("", ["method", "seed", "round", "client", "reason"], body[:shown]).html() + rest


def _times(found: Sequence[Variant]) -> str:
    """A bar per variant, its phases side by side."""
    spent = {variant.label: _phases(variant.runs) for variant in found}
    longest = max((sum(phases.values()) for phases in spent.values()), default=0.0) or 1.0
    lines = []
    for label, phases in spent.items():
        bar = "".join(
            f"<i class={name} style='width:{100 * seconds / longest:.2f}%' title='{name}: {seconds:.1f} s'></i>"
            for name, seconds in phases.items()
        )
        said = ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in phases.items() if seconds >= 0.5)
        title = f"<b>{html.escape(name_of(label))}</b> {html.escape(said)}"
        lines.append(f"<p class=time>{title}<span class=phases>{bar}</span></p>\n")
    return "".join(lines)


def _phases(runs: Iterable[RunRecord]) -> dict[str, float]:
    sums = dict.fromkeys(PHASES, 0.0)
    for line in (line for run in runs for line in run.history):
        seconds = line.get("seconds", {})
        named = {name: float(seconds.get(name, 0.0)) for name in PHASES[:-1]}
        for name, value in named.items():
            sums[name] += value
        sums["other"] += max(0.0, float(seconds.get("total", 0.0)) - sum(named.values()))
    return sums


def _rounds(run: RunRecord) -> Table:
    """The evaluated rounds of a run."""
    metric = run.metric
    header = ["round", metric.title, f"{metric.title} of the model sent", "loss", "bytes so far", "clients", "rejected"]
    body = [
        [
            str(line["round"]),
            f"{metric.scale * (value_of(line) or 0.0):.4g}",
            NONE if (sent := sent_value_of(line)) is None else f"{metric.scale * sent:.4g}",
            f"{line['loss']:.4f}" if line.get("loss") is not None else NONE,
            size_text(line["bytes_total"]),
            str(len(line["clients"])),
            str(len(line.get("rejected", ()))),
        ]
        for line in run.history
        if value_of(line) is not None
    ]
    return Table("", header, body)


def _details(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>\n{body}</details>\n"


def note(text: str) -> str:
    return f"<p class=note>{html.escape(text.strip())}</p>\n"


def image(path: Path, kind: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img class={kind} alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">\n'


def page(folder: Path, runs: Sequence[RunRecord], said: str, sections: Sequence[Section]) -> str:
    """The whole file."""
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    what = (
        f"{len(runs)} runs, {sum(run.rounds for run in runs):,} rounds, {duration_text(sum(r.seconds for r in runs))}"
    )
    body = "".join(
        f"<section id=s{i}>\n<h2>{html.escape(section.title)}</h2>\n{section.body}</section>\n"
        for i, section in enumerate(sections)
    )
    data = json.dumps({f"s{i}": s.data for i, s in enumerate(sections) if s.data.get("series")}).replace("</", "<\\/")
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        "<meta name=viewport content='width=device-width, initial-scale=1'>\n<link rel=icon href='data:,'>\n"
        f"<title>fedfp8 report: {html.escape(folder.resolve().name)}</title>\n"
        f"<style>\n{(HERE / 'page.css').read_text()}</style>\n</head>\n<body>\n"
        "<header><h1>fedfp8 report</h1><button id=theme type=button>dark / light</button></header>\n"
        f"<p class=headline>{html.escape(said)}</p>\n"
        f"{note(f'Drawn from the records in {folder.resolve().name}/ ({what}) on {made}.')}"
        f"<details class=about><summary>What “gain” means</summary>{note(GAIN)}</details>\n{body}"
        f"<script type=application/json id=data>{data}</script>\n"
        f"<script>\n{(HERE / 'page.js').read_text()}</script>\n</body>\n</html>\n"
    )
