"""What a running plan shows: a line per run on a terminal, a short line per round elsewhere, or JSON lines."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedfp8.paper.records import Metric, metric_name, value_of
from fedfp8.paper.tables import duration_text
from fedfp8.text import size_text

if TYPE_CHECKING:
    from fedfp8.paper.jobs import Job
    from fedfp8.paper.reproduce import Clock

__all__ = ["Display", "fitted"]

BAR = 10  # columns
LINES = 12  # runs that keep their line on the terminal; of more only the current one is shown


def fitted(parts: Sequence[str], width: int) -> str:
    """Parts in order of their importance, as many as fit; the first ones are never left out but the first shortened."""
    needed, more = list(parts[:4]), list(parts[4:])
    while more and len("  ".join([*needed, *more])) > width:
        more.pop()
    over = len("  ".join(needed)) - width
    if over > 0:
        needed[0] = needed[0][: max(4, len(needed[0]) - over - 1)] + "…"
    return "  ".join([*needed, *more])


class Display:
    """Shows the runs of a plan, one after the other.

    with Display(clock) as display:
        fl.run(config, on_round=display.on_round(job))
    """

    def __init__(
        self, clock: "Clock", *, as_json: bool = False, quiet: float = 0.0, console: Console | None = None
    ) -> None:
        """quiet: where no terminal is, at least so many seconds between two lines of a run."""
        self.clock, self.as_json, self.quiet = clock, as_json, quiet
        self.jobs: list[Job] = list(clock.per_round)
        self.console = console or Console()
        self.live = self.console.is_terminal and not as_json
        self._said = float("-inf")
        self._values: dict[str, str] = {}  # the last known result of every run
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            BarColumn(bar_width=BAR), TextColumn("{task.description}"), console=self.console, disable=not self.live
        )

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def label(self, job: "Job") -> str:
        """What tells the run from the others of the plan: place, preset, variant and seed as far as they differ."""
        several = {
            "place": len(self.jobs) > 1,
            "preset": len({j.config.preset for j in self.jobs}) > 1,
            "seed": len({j.config.seed for j in self.jobs}) > 1,
        }
        parts = [
            f"{self.jobs.index(job) + 1}/{len(self.jobs)}" if several["place"] else "",
            job.config.preset if several["preset"] else "",
            job.label,
            f"seed {job.config.seed}" if several["seed"] else "",
        ]
        return " ".join(filter(None, parts))

    def on_round(self, job: "Job") -> Callable[[dict[str, Any]], None]:
        """What a run of this job calls after every round."""
        return lambda line: self.round(job, line)

    def round(self, job: "Job", line: dict[str, Any]) -> None:
        self.clock.round(job, line)
        if self.as_json:
            sys.stdout.write(json.dumps({"run": job.name, **line}) + "\n")
            sys.stdout.flush()
            return
        if (value := value_of(line)) is not None:
            name = metric_name(line)
            self._values[job.name] = f"{name} {Metric(name).text(value)}"
        for problem in [f"client {r['client']} rejected: {r['reason']}" for r in line["rejected"]] + line["notes"]:
            self.warn(f"{self.label(job)}, round {line['round']}: {problem}")
        self._show(job, line)

    def _show(self, job: "Job", line: dict[str, Any]) -> None:
        last = line["round"] == job.rounds
        left = f"{duration_text(self.clock.left)} left" if self.clock.timed else ""
        parts = [
            self.label(job),
            f"{'' if self.live else 'round '}{line['round']}/{job.rounds}",
            self._values.get(job.name, "accuracy –"),
            "done" if last else left,
            f"{size_text(line['bytes_total'])} sent",
        ]
        parts = [part for part in parts if part]
        if self.live:
            text = fitted(parts, self.console.width - BAR - 2)
            self._progress.update(self._task(job), completed=line["round"], description=text)
            return
        now = time.monotonic()
        if last or now - self._said >= self.quiet:
            self._said = now
            typer.echo(fitted(parts, 100))

    def _task(self, job: "Job") -> TaskID:
        if job.name not in self._tasks:
            if len(self.jobs) > LINES:
                for old in self._tasks.values():
                    self._progress.update(old, visible=False)
            self._tasks[job.name] = self._progress.add_task("", total=job.rounds)
        return self._tasks[job.name]

    def warn(self, text: str) -> None:
        """A problem, for people: above the lines of a terminal, else on standard error."""
        if self.live:
            self._progress.console.print(text, style="yellow", highlight=False, markup=False)
        else:
            typer.echo(text, err=True)

    def say(self, text: str) -> None:
        """A remark for people; silent where a program reads."""
        if self.live:
            self._progress.console.print(text, highlight=False, markup=False)
        elif not self.as_json:
            typer.echo(text)
