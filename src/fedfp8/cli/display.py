"""What a running job shows: a live line per run on a terminal, one JSON line a round otherwise."""

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Display", "megabytes"]


def megabytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


class Display:
    """Shows runs one after the other. ``with Display() as d: d.begin("uq", rounds); run(..., on_round=d.round)``"""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.live = self.console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description:<12}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self._task: Any = None
        self._label = ""
        self._accuracy = "-"

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, label: str, rounds: int) -> None:
        self._label, self._accuracy = label, "-"
        if self.live:
            self._task = self._progress.add_task(label, total=rounds, status="starting")

    def round(self, line: dict[str, Any]) -> None:
        """A finished round: moves the bar, or prints the record as JSON with the run's label."""
        if not self.live:
            sys.stdout.write(json.dumps({"run": self._label, **line}) + "\n")
            sys.stdout.flush()
            return
        if "accuracy" in line:
            self._accuracy = f"{100 * line['accuracy']:.1f} %"
        status = (
            f"accuracy {self._accuracy:>6}  down {megabytes(line['bytes_down']):>7}  "
            f"up {megabytes(line['bytes_up']):>7}  total {megabytes(line['bytes_total']):>7}"
        )
        self._progress.update(self._task, completed=line["round"], status=status)
        for problem in [f"client {r['client']} rejected: {r['reason']}" for r in line["rejected"]] + line["notes"]:
            self._progress.console.print(f"[yellow]round {line['round']}:[/] {problem}", highlight=False)

    def say(self, text: str) -> None:
        """A remark for people; silent where a program reads."""
        if self.live:
            self._progress.console.print(text, highlight=False)
