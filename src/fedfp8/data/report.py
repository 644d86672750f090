"""A partition as a table and as a picture: how many examples each client has, and of which classes."""

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedfp8.data.partitions import Indices
from fedfp8.errors import extra

__all__ = ["ClientRow", "PartitionReport", "draw_partition", "partition_report"]


@dataclass(frozen=True)
class ClientRow:
    """One client: examples in all, different classes, and examples of each class."""

    client: int
    examples: int
    classes: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class PartitionReport:
    """All clients, and what is worth saying about them together."""

    rows: tuple[ClientRow, ...]
    classes: tuple[str, ...]
    smallest: int
    median: float
    largest: int
    classes_median: float  # different classes per client
    skew: float  # mean over clients of the total variation distance to the overall label mix: 0 = iid, up to 1

    def __str__(self) -> str:
        return (
            f"{len(self.rows):,} clients, {sum(r.examples for r in self.rows):,} examples; per client "
            f"{self.smallest:,} / {self.median:g} / {self.largest:,} (smallest / median / largest), "
            f"{self.classes_median:g} of {len(self.classes)} classes (median), label skew {self.skew:.2f}"
        )


def partition_report(parts: Sequence[Indices], labels: ArrayLike, classes: Sequence[str] = ()) -> PartitionReport:
    """Count the labels of every client; `classes` names them (default: their numbers)."""
    y = np.asarray(labels)
    names = tuple(classes) or tuple(str(c) for c in range(int(y.max()) + 1))
    counts = np.stack([np.bincount(y[part], minlength=len(names)) for part in parts])  # [clients, classes]
    sizes, different = counts.sum(axis=1), (counts > 0).sum(axis=1)
    rows = tuple(
        ClientRow(k, int(sizes[k]), int(different[k]), tuple(int(c) for c in counts[k])) for k in range(len(parts))
    )
    return PartitionReport(
        rows=rows,
        classes=names,
        smallest=int(sizes.min()),
        median=float(np.median(sizes)),
        largest=int(sizes.max()),
        classes_median=float(np.median(different)),
        skew=_skew(counts),
    )


def _skew(counts: NDArray[np.int64]) -> float:
    filled = counts[counts.sum(axis=1) > 0]
    mix = filled / filled.sum(axis=1, keepdims=True)
    overall = counts.sum(axis=0) / counts.sum()
    return float(0.5 * np.abs(mix - overall).sum(axis=1).mean())


def draw_partition(report: PartitionReport, path: str | os.PathLike[str], title: str = "") -> None:
    """Picture of a report (PNG, PDF, SVG by suffix): sizes above, share of each class below."""
    with extra("plots"):
        from matplotlib.figure import Figure  # no pyplot: no global state, no display needed
        from matplotlib.ticker import MaxNLocator

    counts = np.array([row.counts for row in report.rows])
    sizes = counts.sum(axis=1)
    share = counts / np.maximum(sizes, 1)[:, None]
    clients = np.arange(len(sizes))
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2.2])
    above.fill_between(
        np.append(clients, len(clients)) - 0.5, np.append(sizes, sizes[-1]), step="post", color="#0072B2"
    )
    above.set_ylabel("examples")
    above.set_ylim(0, sizes.max() * 1.1)
    above.set_title(title or textwrap.fill(str(report), 95), fontsize=8)
    picture = below.imshow(
        share.T, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=max(share.max(), 1e-9)
    )
    below.set_xlabel("client")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.yaxis.set_major_locator(MaxNLocator(integer=True))
    if len(report.classes) <= 35:
        below.set_yticks(range(len(report.classes)), report.classes, fontsize=8 if len(report.classes) <= 12 else 5)
    below.set_ylabel("class")
    figure.colorbar(picture, ax=below, label="share of the client's examples")
    figure.savefig(path, dpi=160)
