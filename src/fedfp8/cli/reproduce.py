"""`fedfp8 reproduce` and `fedfp8 report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedfp8.cli.display import Display
from fedfp8.cli.run import INTERRUPTED, METHODS_HELP, resumable, seed_list, split
from fedfp8.errors import ConfigError
from fedfp8.machine import cores

if TYPE_CHECKING:
    from fedfp8.paper.jobs import Job

__all__ = ["register"]

QUIET = 20.0  # seconds between two lines where no terminal is: these runs are long

Only = Annotated[
    list[str] | None,
    typer.Option(metavar="CELL", help="Only this cell, e.g. lenet-cifar10-iid; may be repeated or comma-separated."),
]
Methods = Annotated[str | None, typer.Option(help=f"Default: the paper's. {METHODS_HELP}")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds of every run; default: the paper's 1000 (or 500).")]
Seeds = Annotated[str, typer.Option(help="Comma-separated; results are means over them. The paper has three.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Processes that train clients; default: one a core.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu (default), cuda, mps, or several such as cuda:0,cuda:1.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the data sets (see `fedfp8 data list`).")]
Out = Annotated[Path, typer.Option(help="Folder for runs (OUT/CELL/METHOD-seedN), tables, plots and report.html.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. --set local.steps=5; may be repeated."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the plan, with estimated hours on this machine.")]


def register(app: typer.Typer) -> None:
    app.command()(reproduce)
    app.command()(report)


def reproduce(
    experiment: Annotated[str, typer.Argument(help="table1, table2, table3, figure3, figure4 or theory.")],
    only: Only = None,
    methods: Methods = None,
    rounds: Rounds = None,
    seeds: Seeds = "0,1,2",
    workers: Workers = None,
    device: Device = None,
    data_dir: DataDir = None,
    out: Out = Path("runs/paper"),
    settings: Settings = None,
    dry_run: DryRun = False,
) -> None:
    """A table or figure of the paper, ours beside the paper's. Skips what is done, resumes what was interrupted.

    fedfp8 reproduce table1 --only lenet-cifar10-iid --rounds 100 --seeds 0
    """
    from fedfp8.paper.paper import ALL, TABLES

    if experiment not in ALL:
        raise ConfigError(f"unknown experiment {experiment!r}; choose one of {', '.join(ALL)}")
    if experiment not in TABLES:
        computed(experiment, out, dry_run)
        return
    from fedfp8.fl.settings import parse_assignment
    from fedfp8.paper.jobs import plan

    jobs = plan(
        experiment,
        out,
        only=split(",".join(only or [])),
        methods=split(methods or ""),
        rounds=rounds,
        seeds=seed_list(seeds),
        data_dir=data_dir,
        settings=dict(parse_assignment(item) for item in settings or []),
    )
    count = cores() if workers is None else workers
    if dry_run:
        from fedfp8.paper.reproduce import plan_table

        table = plan_table(jobs, count)
        typer.echo(f"{table.text()}\n\n{table.notes[0]}")
    else:
        run_plan(experiment, jobs, out, count, device)


def computed(experiment: str, out: Path, dry_run: bool) -> None:
    """Figure 3 and the theory experiment train nothing."""
    if dry_run:
        typer.echo(f"{experiment} trains no network: less than two minutes, no data set needed.")
        return
    from fedfp8.paper.reproduce import run_computed

    data = run_computed(experiment, out)
    if experiment == "theory":
        typer.echo(f"floor of the objective gap falls as S^{data['exponent']:.2f} (S: largest grid step, about 2^-m)")
    typer.echo(f"written: {out / experiment}.png, .pdf, .json and {out / 'report.html'}")


def run_plan(experiment: str, jobs: "list[Job]", out: Path, workers: int, device: str | None = None) -> None:
    from fedfp8.paper.reproduce import clock_for, run_jobs

    done = sum(job.status == "done" for job in jobs)
    typer.echo(f"{len(jobs)} runs, {done} of them done." + (" Timing a few steps ..." if done < len(jobs) else ""))
    with Display(clock_for(jobs, workers), quiet=QUIET) as display, resumable("The same command again continues it."):
        complete = run_jobs(experiment, jobs, out, workers=workers, device=device, on_round=display.on_round)
    if not complete:
        typer.echo("Stopped. The same command again continues where it was.")
    typer.echo(f"written: {out / experiment}.md, .csv, .json and {out / 'report.html'}")
    if not complete:
        raise typer.Exit(INTERRUPTED)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What run, compare or reproduce has written.")],
    docs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PAGE",
            exists=True,
            dir_okay=False,
            help="Also refresh the tables between the markers of this page; may be repeated.",
        ),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Also copy the small records (no checkpoints) into this folder.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="First measure raw message sizes of finished runs that lack them (torch).")
    ] = False,
) -> None:
    """Tables, plots and report.html again from the records, without torch."""
    if measure:
        from fedfp8.paper.sizes import measure_missing

        typer.echo(f"measured {len(measure_missing(folder))} runs")
    from fedfp8.paper.docs import update_docs
    from fedfp8.paper.paper_tables import paper_runs
    from fedfp8.paper.report import export_records, write_report

    written = write_report(folder)
    typer.echo(f"{written.headline}\nwritten: {written.path}")
    if keep is not None:
        typer.echo(f"copied {len(export_records(folder, keep))} files to {keep}")
    for page in docs or ():
        update_docs(page, paper_runs(folder))
        typer.echo(f"refreshed: {page}")
