"""Figure 3, Figure 4 and the theory figure, drawn from JSON and run records. Needs matplotlib, not torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfp8.errors import extra
from fedfp8.paper.compare import compare, curves_of, gains_of
from fedfp8.paper.plots import COLUMN, PAPER, STYLES, add_legend, draw_curves, new_figure, save
from fedfp8.paper.records import RunRecord

__all__ = ["draw_figure3", "draw_figure4", "draw_theory"]

PAGE = 7.16  # inches, both columns
NEAREST, STOCHASTIC = STYLES["bq"], STYLES["uq"]


def draw_figure4(groups: Mapping[str, Sequence[RunRecord]], path: Path) -> list[Path]:
    """Accuracy against communicated bytes, a panel per cell, with the gains."""
    columns = min(len(groups), 3)
    rows = -(-len(groups) // columns)
    width = COLUMN if columns == 1 else PAGE
    figure, panels = new_figure(width, 0.35 + 2.35 * rows, rows, columns)
    for axes in panels.flat[len(groups) :]:
        axes.set_axis_off()
    for axes, (cell, runs) in zip(panels.flat, groups.items(), strict=False):
        curves = curves_of(runs)
        draw_curves(axes, curves, gains_of(curves, compare(runs)), cell)
        axes.set_xlabel(axes.get_xlabel().replace("communicated bytes, both directions", "communicated"))
    add_legend(figure, columns=2 if columns == 1 else 5)
    return save(figure, path)


def draw_figure3(data: Mapping[str, Any], path: Path) -> list[Path]:
    """Weights, FP8 weights, errors, errors of the average of K models; uniform above, truncated normal below."""
    with extra("plots"):
        from matplotlib import rc_context

    with rc_context(PAPER):
        figure, panels = new_figure(PAGE, 3.4, 2, 4)
        for row, (name, case) in zip(panels, data["distributions"].items(), strict=True):
            for axes, key in zip(row, ("weights", "quantized", "error", "error_of_average"), strict=True):
                _histograms(axes, case[key])
            row[0].set_ylabel(f"{name}\ndensity")
            row[1].set_ylabel("share of weights")
        average = f"(d) average of K={data['clients']}"
        titles = ("(a) FP32 weights", "(b) FP8 weights", "(c) quantization error", average)
        labels = ("w", "Q(w)", "Q(w) − w", "mean of Q(w) − w")
        for above, below, title, label in zip(*panels, titles, labels, strict=True):
            above.set_title(title)
            below.set_xlabel(label)
        add_legend(figure, columns=3)
    return save(figure, path)


def _histograms(axes: Any, histograms: Mapping[str, Any]) -> None:
    """A density for continuous values, a line per grid value for quantized ones."""
    from matplotlib.ticker import MaxNLocator

    styles = {"nearest": NEAREST, "stochastic": STOCHASTIC}
    names = {"nearest": "deterministic (nearest)", "stochastic": "stochastic"}
    for rounding, data in histograms.items():
        style, label = styles.get(rounding, STYLES["fp32"]), names.get(rounding, "unquantized")
        if "values" in data:
            width = 1.6 if rounding == "nearest" else 0.5
            axes.vlines(data["values"], 0, data["share"], color=style.color, linewidth=width)
        else:
            axes.stairs(
                data["density"], data["edges"], color=style.color, linestyle=style.line, linewidth=0.9, label=label
            )
            axes.stairs(data["density"], data["edges"], color=style.color, alpha=0.12, fill=True)
        if "rms" in data:
            place = (0.98, 0.96 if rounding == "nearest" else 0.85)
            text = f"rms {data['rms']:.4f}"
            axes.text(*place, text, transform=axes.transAxes, ha="right", va="top", fontsize=6, color=style.color)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, symmetric=True))


def draw_theory(data: Mapping[str, Any], path: Path) -> list[Path]:
    """(a) gap against rounds by mantissa bits, (b) its floor, unbiased and biased, (c) drift and its bound."""
    with extra("plots"):
        from matplotlib import rc_context

    runs = {
        kind: [run for run in data["runs"] if run["communication"] == kind]
        for kind in ("none", "stochastic", "nearest")
    }
    with rc_context(PAPER):
        figure, panels = new_figure(PAGE, 2.5, 1, 3)
        _gaps(panels[0, 0], runs)
        _floors(panels[0, 1], runs, float(data["exponent"]))
        _drifts(panels[0, 2], runs["stochastic"])
    return save(figure, path)


def _gaps(axes: Any, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    from matplotlib import colormaps

    colors = colormaps["viridis"]([0.0, 0.22, 0.44, 0.66, 0.85])
    for color, run in zip(colors, runs["stochastic"], strict=False):
        axes.plot(run["rounds"], run["gaps"], color=color, linewidth=1.0, label=f"m = {run['mantissa_bits']}")
    for run in runs["none"]:
        axes.plot(run["rounds"], run["gaps"], color="black", linewidth=1.0, linestyle=":", label="FP32")
    axes.set_yscale("log")
    axes.set_xlabel("round t")
    axes.set_ylabel(r"$F(Q_{\mathrm{rand}}(w_t)) - F(w_*)$")
    axes.set_title("(a) objective gap, UQ")
    axes.legend(ncols=2, fontsize=6.5, handlelength=1.4, columnspacing=1.0)


def _floors(axes: Any, runs: Mapping[str, Sequence[Mapping[str, Any]]], exponent: float) -> None:
    for kind, style, label in (("nearest", NEAREST, "BQ, biased"), ("stochastic", STOCHASTIC, "UQ, unbiased")):
        bits, floors = [r["mantissa_bits"] for r in runs[kind]], [r["floor"] for r in runs[kind]]
        axes.plot(bits, floors, color=style.color, marker=style.marker, linestyle=style.line, markersize=4, label=label)
    unbiased = runs["stochastic"]
    middle = unbiased[len(unbiased) // 2]
    rate = [middle["floor"] * run["step"] / middle["step"] for run in unbiased]
    axes.plot(
        [r["mantissa_bits"] for r in unbiased], rate, color="#777777", linestyle=":", label=r"$\propto S$ (Thm 1)"
    )
    for run in runs["none"]:
        axes.axhline(run["floor"], color="black", linewidth=0.8, linestyle="--", label="FP32, same rounds")
    axes.set_yscale("log")
    axes.set_xticks([r["mantissa_bits"] for r in unbiased])
    axes.set_xlabel("mantissa bits m")
    axes.set_ylabel("gap, mean of last third")
    axes.set_title(f"(b) floor; UQ falls as $S^{{{exponent:.2f}}}$")
    axes.legend(fontsize=6.5, loc="lower left", bbox_to_anchor=(0, 0.07), handlelength=2.2)


def _drifts(axes: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    bits = [run["mantissa_bits"] for run in runs]
    axes.plot(bits, [run["bound"] for run in runs], color="#777777", linestyle=":", marker="_", label="Lemma 1's bound")
    moved = [(run["mantissa_bits"], run["drift_max"]) for run in runs if run["drift_max"] > 0]
    style = STOCHASTIC
    if moved:
        axes.plot(*zip(*moved, strict=True), color=style.color, marker=style.marker, label=r"largest $V_t$ met")
    axes.set_yscale("log")
    low = axes.get_ylim()[0]
    for run in runs:
        if run["drift_max"] == 0:  # no weight left its grid cell during any local training
            axes.annotate("0", (run["mantissa_bits"], low), ha="center", va="bottom", fontsize=7, color=style.color)
    axes.set_xticks(bits)
    axes.set_xlabel("mantissa bits m")
    axes.set_ylabel(r"drift $V_t$")
    axes.set_title("(c) drift and its bound, UQ")
    axes.legend(fontsize=6.5, loc="center right")
