"""Tables as Markdown, CSV and HTML, and the way numbers are written in them. No torch."""

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fedfp8.text import markdown_table

__all__ = ["NOT_LEARNED", "Table", "duration_text", "gain_text", "spread_text"]

NONE = "–"
NOT_LEARNED = "not learned yet"  # in place of a gain: either side is at chance level


class SpreadLike(Protocol):
    @property
    def mean(self) -> float: ...

    @property
    def std(self) -> float | None: ...


@dataclass(frozen=True)
class Table:
    """A titled table of text; `notes` go below it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=tuple)

    def markdown(self, heading: str = "##") -> str:
        lines = [f"{heading} {self.title}", ""] if self.title else []
        lines += [markdown_table(self.header, self.rows)]
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines) + "\n"

    def text(self) -> str:
        """Aligned columns for a terminal, without title and notes; the first column to the left."""
        widths = [max(len(row[i]) for row in [self.header, *self.rows]) for i in range(len(self.header))]

        def line(row: Sequence[str]) -> str:
            cells = [
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            return "  ".join(cells).rstrip()

        return "\n".join([line(self.header), "-" * (sum(widths) + 2 * len(widths) - 2), *map(line, self.rows)])

    def narrowed(self, width: int, spare: Sequence[str]) -> "Table":
        """Without as many of the columns `spare`, the first ones first, as it takes for its text to fit `width`."""
        table = self
        for name in spare:
            if max(map(len, table.text().splitlines())) <= width:
                break
            at = list(table.header).index(name)
            header, *rows = ([*row[:at], *row[at + 1 :]] for row in (table.header, *table.rows))
            table = replace(table, header=header, rows=rows)
        return table

    def csv(self) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.header, *self.rows])
        return out.getvalue()

    def html(self) -> str:
        def cells(row: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

        body = "\n".join(cells(row, "td") for row in self.rows)
        notes = "".join(f"<p class=note>{html.escape(note)}</p>\n" for note in self.notes)
        return (
            f"<div class=scroll><table>\n<thead>{cells(self.header, 'th')}</thead>\n<tbody>\n{body}\n</tbody></table>"
            f"</div>\n{notes}"
        )


def spread_text(value: SpreadLike | None, scale: float = 1.0, digits: int = 1) -> str:
    """``82.1 ± 0.3``; without ± for one value, a dash for none."""
    if value is None:
        return NONE
    text = f"{scale * value.mean:.{digits}f}"
    return text if value.std is None else f"{text} ± {scale * value.std:.{digits}f}"


def gain_text(value: SpreadLike | None, learned: bool = True) -> str:
    """``8.7×``, with the spread between seeds where there are several; in words where nothing was learned yet."""
    if not learned:
        return NOT_LEARNED
    return NONE if value is None else f"{spread_text(value)}×"


def duration_text(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.4 h``, ``12 days``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
