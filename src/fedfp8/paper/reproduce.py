"""Run what a table or figure needs: skip what is done, resume what was interrupted, then draw everything anew."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfp8 import fl
from fedfp8.paper.estimate import seconds_per_round
from fedfp8.paper.figure3 import run_figure3
from fedfp8.paper.jobs import Job, set_length
from fedfp8.paper.paper_tables import paper_runs, write_paper_table
from fedfp8.paper.report import write_report
from fedfp8.paper.sizes import measure_sizes
from fedfp8.paper.tables import Table, duration_text
from fedfp8.paper.theory import run_theory

__all__ = ["Clock", "plan_table", "run_computed", "run_job", "run_jobs"]

OnRound = Callable[[Job], Callable[[dict[str, Any]], None]]  # for a job, what it calls after every round


@dataclass
class Clock:
    """How much of a plan is done and how long the rest will take.

    Starts from estimates; once rounds have been run, their real time corrects all of them by a common factor. The first
    round starts the workers, too, so its time says nothing of the others.
    """

    per_round: Mapping[Job, float]
    spent: float = 0.0  # real seconds of the rounds run now, without the first
    timed: float = 0.0  # what these were estimated to take
    over: float = 0.0  # the same with the first
    reached: dict[Job, int] = field(default_factory=dict)

    def round(self, job: Job, line: Mapping[str, Any]) -> None:
        if line["round"] > self.reached.get(job, job.done):
            if self.reached:
                self.spent += float(line["seconds"]["total"])
                self.timed += self.per_round[job]
            self.over += self.per_round[job]
            self.reached[job] = int(line["round"])

    @property
    def total(self) -> float:
        """Estimated seconds of all that was to do at the start."""
        return sum(max(0, job.rounds - job.done) * seconds for job, seconds in self.per_round.items())

    @property
    def left(self) -> float:
        factor = self.spent / self.timed if self.timed > 0 else 1.0
        return factor * max(0.0, self.total - self.over)


def clock_for(jobs: Sequence[Job], workers: int) -> Clock:
    todo = [job for job in jobs if job.status != "done"]
    return Clock({job: seconds or 0.0 for job, seconds in seconds_per_round(todo, workers).items()})


def plan_table(jobs: Sequence[Job], workers: int) -> Table:
    """What would be run, and how long it would take here."""
    todo = [job for job in jobs if job.status != "done"]
    estimates = seconds_per_round(todo, workers)
    body, total = [], 0.0
    for job in jobs:
        seconds = estimates.get(job)
        left = max(0, job.rounds - job.done)
        total += left * (seconds or 0.0)
        text = "–" if job.status == "done" else "data set missing" if seconds is None else duration_text(left * seconds)
        each = f"{seconds:.1f} s" if seconds else "–"
        config = job.config
        body.append(
            [config.preset, config.method, str(config.seed), job.status, f"{job.done}/{job.rounds}", each, text]
        )
    note = (
        f"In all about {duration_text(total)} ({total / 3600:.1f} hours) with {workers} workers, from a few timed "
        "training steps and test pieces on this machine as it is now; coding and aggregation add a few percent."
    )
    return Table("", ["cell", "method", "seed", "status", "rounds", "a round", "time left"], body, (note,))


def run_jobs(
    experiment: str,
    jobs: Sequence[Job],
    out: Path,
    *,
    workers: int,
    on_round: OnRound | None = None,
    device: str | None = None,
) -> bool:
    """Run the jobs and write the table; False if Ctrl-C stopped it (what is there is written all the same)."""
    complete = True
    with fl.Pool(workers, device) as pool:
        for job in jobs:
            if job.status != "done":
                complete = run_job(job, pool, on_round=on_round(job) if on_round else None)
            if not complete:
                break
            measure_sizes(job.folder)
    write_paper_table(experiment, paper_runs(out), out)
    write_report(out)
    return complete


def run_job(
    job: Job,
    pool: fl.Pool,
    *,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    overwrite: bool = False,
) -> bool:
    """Run or resume one job; False if Ctrl-C stopped it."""
    if overwrite or job.status == "new":
        history = fl.run(job.config, out=job.folder, workers=pool, on_round=on_round, overwrite=overwrite)
    else:
        set_length(job.folder, job.rounds)
        history = fl.resume(job.folder, workers=pool, on_round=on_round)
    return bool(history.summary["finished"])


def run_computed(experiment: str, out: Path) -> dict[str, Any]:
    """Figure 3 or the theory experiment: compute it, write its JSON, draw everything; returns the data."""
    begin = time.perf_counter()
    data: dict[str, Any] = run_figure3() if experiment == "figure3" else dict(run_theory())
    data["seconds"] = time.perf_counter() - begin
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{experiment}.json").write_text(json.dumps(data) + "\n")
    write_report(out)
    return data
