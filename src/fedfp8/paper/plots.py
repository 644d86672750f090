"""Accuracy against communicated bytes, drawn for a paper's column (Figure 4). Needs matplotlib, not torch.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; markers and line styles stay apart in print
without colour. Every picture is written as PNG and as PDF.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfp8.errors import extra
from fedfp8.paper.records import ACCURACY, Gain, Metric, rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLUMN",
    "NAMES",
    "STYLES",
    "Curve",
    "Style",
    "accuracy_against_bytes",
    "add_legend",
    "draw_curves",
    "name_of",
    "new_figure",
    "save",
]

COLUMN = 3.5  # inches, one column of a two-column paper
PAPER: Any = {  # any: matplotlib lists every known key in the type
    "font.size": 8, "axes.labelsize": 8, "axes.titlesize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "axes.linewidth": 0.6, "lines.linewidth": 1.2, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5, "legend.frameon": False, "pdf.fonttype": 42, "svg.fonttype": "path",
    "svg.hashsalt": "fedfp8",
}  # fmt: skip


@dataclass(frozen=True)
class Style:
    color: str
    marker: str
    line: str


STYLES: dict[str, Style] = {
    "fp32": Style("#000000", "o", "-"),
    "bq": Style("#D55E00", "s", "--"),
    "uq": Style("#0072B2", "^", "-"),
    "uq+": Style("#009E73", "D", "-."),
    "dq": Style("#CC79A7", "v", (0, (4, 1, 1, 1, 1, 1))),  # type: ignore[arg-type]
    "qat-nearest": Style("#E69F00", "P", "--"),
    "qat-stochastic": Style("#56B4E9", "X", ":"),
}
NAMES: dict[str, str] = {
    "fp32": "FP32 FedAvg",
    "bq": "FP8FedAvg-BQ",
    "uq": "FP8FedAvg-UQ",
    "uq+": "FP8FedAvg-UQ+",
    "dq": "FP8FedAvg-DQ (ours)",
    "qat-nearest": "det. QAT",
    "qat-stochastic": "rand. QAT",
}


MORE = ("#7A4B00", "#004D40", "#5D3A9B", "#8F8F00", "#B00020", "#1A5276")  # variants and unknown methods, in turn


def name_of(label: str) -> str:
    """The name of a label: ``uq:round.count=60:local.lr=1`` -> ``FP8FedAvg-UQ, 60 rounds, local.lr=1``."""
    method, *rest = label.split(":")
    parts = [re.sub(r"^round\.count=(\d+)$", r"\1 rounds", part) for part in rest if part]
    return ", ".join([NAMES.get(method, method), *parts])


def styles_of(labels: Sequence[str]) -> dict[str, Style]:
    """The style of every label: a method's own, and one of its own for each variant."""
    others = [label for label in labels if label not in STYLES]
    return {label: STYLES[label] for label in labels if label in STYLES} | {
        label: Style(MORE[i % len(MORE)], "sDP*X<"[i % 6], ("-", "--", "-.", ":")[i % 4])
        for i, label in enumerate(others)
    }


@dataclass(frozen=True)
class Curve:
    """A variant's evaluated rounds, mean over seeds; `spread` is the standard deviation of the metric, if known."""

    label: str
    bytes: Sequence[float]
    values: Sequence[float]  # accuracy: 0..1
    spread: Sequence[float] | None = None
    learned: bool = True
    metric: Metric = ACCURACY

    @property
    def method(self) -> str:
        return self.label.partition(":")[0]


def accuracy_against_bytes(
    curves: Sequence[Curve],
    path: Path,
    *,
    gains: Mapping[str, Gain] | None = None,
    title: str = "",
    width: float = COLUMN,
) -> list[Path]:
    """Draw the curves into ``path`` + .png and .pdf (a suffix of `path` is dropped); returns both paths.

    gains: by method; written into the panel, the largest also drawn as an arrow.
    """
    figure, panels = new_figure(width, 0.75 * width)
    draw_curves(panels[0, 0], curves, gains or {}, title)
    figure.set_figheight(0.75 * width + add_legend(figure, columns=2))
    return save(figure, path)


def draw_curves(axes: Axes, curves: Sequence[Curve], gains: Mapping[str, Gain], title: str = "") -> None:
    from matplotlib import rc_context

    curves = [curve for curve in curves if len(curve.bytes)]
    styles, metric = styles_of([curve.label for curve in curves]), curves[0].metric if curves else ACCURACY
    with rc_context(PAPER):
        unit, name = _unit(max((curve.bytes[-1] for curve in curves), default=1.0))
        for curve in curves:
            _line(axes, curve, styles[curve.label], unit)
        if _wants_log(curves):
            axes.set_xscale("log")
            _plain_log_labels(axes)
        else:
            axes.set_xlim(left=0)
        axes.set_xlabel(f"communicated bytes, both directions ({name})")
        axes.set_ylabel(f"test {metric.title}")
        axes.set_title(title)
        axes.margins(y=0.08)
        _show_gains(axes, gains, styles, metric, unit)


def add_legend(figure: Figure, columns: int) -> float:
    """One legend below all panels, each method once: inside it would hide a curve sooner or later.

    In so many columns, or as many as the figure is wide enough for. Returns its height in inches.
    """
    from matplotlib import rc_context

    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    names = list(NAMES.values())
    found = dict(sorted(found.items(), key=lambda item: rank(item[0].partition(",")[0], names)[0]))
    height = 0.0
    with rc_context(PAPER):
        options: Any = {"loc": "outside lower center"}  # a place that matplotlib's own types do not know
        for fewer in range(columns if found else 0, 0, -1):
            legend = figure.legend(list(found.values()), list(found), ncols=fewer, handlelength=2.8, **options)
            box = legend.get_window_extent()
            height = box.height / figure.dpi
            if fewer == 1 or box.width <= figure.bbox.width:
                break
            legend.remove()
    return height


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of `rows` x `columns` panels in the paper's style, without pyplot: no display, no global state."""
    with extra("plots"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    with rc_context(PAPER):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def save(figure: Figure, path: Path) -> list[Path]:
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    stem = path.with_suffix("") if path.suffix in (".png", ".pdf", ".svg") else path
    written = []
    suffixes: tuple[tuple[str, Any], ...] = ((".png", {"dpi": 220}), (".pdf", {"metadata": {"CreationDate": None}}))
    for suffix, options in suffixes:
        written.append(stem.with_name(stem.name + suffix))
        with rc_context(PAPER):
            figure.savefig(written[-1], **options)
    return written


def _line(axes: Axes, curve: Curve, style: Style, unit: float) -> None:
    scale, name = curve.metric.scale, name_of(curve.label) + ("" if curve.learned else " (not learned yet)")
    x, y = [b / unit for b in curve.bytes], [scale * value for value in curve.values]
    axes.plot(
        x, y, color=style.color, marker=style.marker, linestyle=style.line, label=name, markersize=3.2,
        markevery=max(1, len(x) // 12), markeredgewidth=0,
    )  # fmt: skip
    if curve.spread is not None:
        low, high = ([v + sign * scale * s for v, s in zip(y, curve.spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=style.color, alpha=0.18, linewidth=0)


def _unit(largest: float) -> tuple[float, str]:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= unit:
            return unit, name
    return 1.0, "bytes"


def _wants_log(curves: Sequence[Curve]) -> bool:
    """Where one method ends before another has got anywhere, a linear axis would squeeze it to a line."""
    ends = [curve.bytes[-1] for curve in curves]
    return len(ends) > 1 and max(ends) > 6 * min(ends)


def _plain_log_labels(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 3.0) if high < 1000 * low else (1.0,)))  # or they would meet
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def gain_text(gain: Gain) -> str:
    """``8.7×``, ``8.7 ± 0.3×`` with the spread between seeds."""
    return f"{gain.gain:.1f}×" if gain.std is None else f"{gain.gain:.1f} ± {gain.std:.1f}×"


def _show_gains(
    axes: Axes, gains: Mapping[str, Gain], styles: Mapping[str, Style], metric: Metric, unit: float
) -> None:
    """Every gain beside its method's marker, in the corner that curves leave free; an arrow shows the largest.

    The arrow goes from FP32's point to the method's, at the value that both reach.
    """
    from matplotlib.lines import Line2D

    low, high = axes.get_ylim()
    if gains:
        high += 0.08 * (high - low)  # room for the corner
    if metric.percent:
        high = min(high, 100 + 0.03 * (100 - low))
    axes.set_ylim(low, high)
    if metric.percent:
        axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= 100])
    if not gains:
        return
    shown = sorted(gains.items(), key=lambda item: -item[1].gain)
    label, best = shown[0]
    height = metric.scale * best.value
    axes.annotate(
        "", xy=(best.method.bytes / unit, height), xytext=(best.base.bytes / unit, height),
        arrowprops={"arrowstyle": "->", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0, "color": styles[label].color},
    )  # fmt: skip
    handles = [
        Line2D([], [], color=styles[m].color, marker=styles[m].marker, linestyle="", markersize=4) for m, _ in shown
    ]
    colors = [styles[m].color for m, _ in shown]
    axes.legend(
        handles, [gain_text(gain) for _, gain in shown], labelcolor=colors, title="fewer bytes", title_fontsize=7,
        handlelength=0.8, handletextpad=0.4, labelspacing=0.25, borderpad=0.1, alignment="left",
        loc="upper left" if axes.get_xscale() == "log" else "lower right",
    )  # fmt: skip
