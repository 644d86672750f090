"""`fedfp8 run`, `resume`, `compare` and `demo`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedfp8.cli.display import Display
from fedfp8.errors import ConfigError
from fedfp8.machine import cores
from fedfp8.text import size_text

if TYPE_CHECKING:
    from fedfp8.paper.jobs import Job

__all__ = ["register"]

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
Config = Any  # fedfp8.fl.Config; imported late so that `fedfp8 --help` does not wait for torch

PRESET_HELP = "What to train on what: digits (default), or a cell of the paper's Table 1 such as lenet-cifar10-iid."
METHODS_HELP = (
    "Comma-separated; fp32 is what gains are measured against. A method may have settings of its own, as in "
    "dq:dq.kappa_up=16, and is then a variant with its own row."
)
METHOD_HELP = "fp32, bq (nearest), uq (stochastic, default), uq+ (with ServerOptimize), dq (dithered, ours)."
SET_HELP = (
    "Any setting as section.field=value, e.g. --set dq.kappa_up=4; may be repeated. All of them: fedfp8 settings."
)

Preset = Annotated[str | None, typer.Option(help=PRESET_HELP)]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds to run; default: the preset's.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Processes that train clients; default: one a core. 0: none.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the data sets (see `fedfp8 data list`).")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET_HELP)]
EvalEvery = Annotated[int | None, typer.Option(min=1, help="Evaluate on the test set every so many rounds.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run that is already in the folder.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per round, and nothing else, on standard output.")]
KeepPayloads = Annotated[
    int | None,
    typer.Option(min=1, metavar="ROUND", help="Keep the messages of this round in RUN/payloads (fedfp8 inspect)."),
]
Task = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Your own task: a function that returns a fedfp8.Task, or a dict."),
]
Name = Annotated[
    str | None, typer.Option(help="What tables and plots call it; default: the preset, or the task's own.")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu (default), cuda, mps, or several such as cuda:0,cuda:1.")]
NoLossless = Annotated[bool, typer.Option("--no-lossless", help="Raw codes on the wire, as in the paper.")]


def register(app: typer.Typer) -> None:
    app.command()(run)
    app.command()(resume)
    app.command()(compare)
    app.command()(demo)


def run(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="A complete or partial config.")
    ] = None,
    preset: Preset = None,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    rounds: Rounds = None,
    seed: Annotated[int | None, typer.Option(help="Everything random in the run follows from it.")] = None,
    workers: Workers = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME-METHOD-seedN.")] = None,
    settings: Settings = None,
    eval_every: EvalEvery = None,
    no_lossless: NoLossless = False,
    overwrite: Overwrite = False,
    keep_payloads: KeepPayloads = None,
    as_json: Json = False,
    task: Task = None,
    name: Name = None,
    device: Device = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard scalars to OUT/tb.")
    ] = False,
) -> None:
    """One federated run: accuracy and bytes, round by round.

    fedfp8 run --preset digits --method dq --rounds 40 --out runs/dq
    """
    options = (method, rounds, seed, data_dir, settings, eval_every, no_lossless, keep_payloads)
    config = configure(config_file, preset, *options, task=task, name=name)
    folder = out or Path("runs") / f"{config.name or config.preset}-{config.method}-seed{config.seed}"
    train(config, folder, workers, overwrite=overwrite, tensorboard=tensorboard, as_json=as_json, device=device)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The run folder.")],
    rounds: Annotated[int | None, typer.Option(min=1, help="Go on to this many rounds; default: as planned.")] = None,
    workers: Workers = None,
    as_json: Json = False,
    device: Device = None,
) -> None:
    """Continue an interrupted run, to the same bytes as if it had not been interrupted; or go on past its end."""
    if rounds is not None:
        from fedfp8.paper.jobs import set_length

        set_length(folder, rounds)
    train(None, folder, workers, as_json=as_json, device=device)


def compare(
    preset: Preset = None,
    methods: Annotated[str, typer.Option(help=METHODS_HELP)] = "fp32,bq,uq,uq+,dq",
    rounds: Rounds = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated; results are means over them.")] = "0",
    workers: Workers = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all runs, table, plot and report; default runs/compare-NAME.")
    ] = None,
    settings: Settings = None,
    eval_every: EvalEvery = None,
    no_lossless: NoLossless = False,
    overwrite: Overwrite = False,
    keep_payloads: KeepPayloads = None,
    as_json: Json = False,
    task: Task = None,
    name: Name = None,
    device: Device = None,
) -> None:
    """Several methods on the same data: a table, a plot and a report. Finished runs are not repeated.

    fedfp8 compare --methods fp32,dq,dq:dq.kappa_up=16 --seeds 0,1,2
    """
    names, numbers = split(methods), seed_list(seeds)
    if not names or not numbers:
        raise ConfigError(
            f"--methods {methods!r} --seeds {seeds!r}; give lists such as --methods fp32,dq --seeds 0,1,2"
        )
    plan = []
    for seed in numbers:
        for label in names:
            method, *own = label.split(":")
            chosen = [*(settings or []), *own]
            options = (preset, method, rounds, seed, data_dir, chosen, eval_every, no_lossless, keep_payloads)
            plan.append((configure(None, *options, task=task, name=name), label if own else ""))
    folder = out or Path("runs") / f"compare-{plan[0][0].name or plan[0][0].preset}"
    compare_all(plan, folder, workers, overwrite, as_json, device)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs, the table, the plot and report.html.")] = Path(
        "runs/demo"
    ),
    rounds: Rounds = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """FP32, BQ, UQ, UQ+ and DQ on real handwritten digits with non-iid clients; about two minutes on two cores."""
    if not as_json:
        typer.echo("Five ways to train one network on the handwritten digits of 20 clients that each see few classes,")
        typer.echo("and what each of them sends. Every byte below was really encoded, sent, decoded and counted.\n")
    from fedfp8.fl import with_settings

    configs = [
        configure(None, "digits", m, rounds, 0, None, None, None, False) for m in ("fp32", "bq", "uq", "uq+", "dq")
    ]
    plan = [(with_settings(c, {"round.keep_payloads": c.round.count}), "") for c in configs]
    compare_all(plan, out, workers, True, as_json)


def seed_list(text: str) -> list[int]:
    """``"0,1,2"`` -> [0, 1, 2]"""
    try:
        return [int(item) for item in split(text)]
    except ValueError:
        raise ConfigError(f"--seeds {text!r} are not whole numbers; give e.g. --seeds 0,1,2") from None


def split(text: str) -> list[str]:
    """The items of a comma-separated list."""
    return [item.strip() for item in text.split(",") if item.strip()]


def configure(
    file: Path | None,
    preset: str | None,
    method: str | None,
    rounds: int | None,
    seed: int | None,
    data_dir: Path | None,
    settings: list[str] | None,
    eval_every: int | None,
    no_lossless: bool,
    keep_payloads: int | None = None,
    *,
    task: str | None = None,
    name: str | None = None,
) -> Config:
    """Preset, then config file, then method, then single settings; what comes later wins."""
    from fedfp8.fl import preset as named
    from fedfp8.fl import with_method, with_settings
    from fedfp8.fl.checkpoint import read_config
    from fedfp8.fl.settings import parse_assignment
    from fedfp8.fl.task import OWN, complete

    if task is not None and preset not in (None, OWN):
        raise ConfigError(f"both --task {task} and --preset {preset} were given; a task has its own model and data")
    if file is not None and preset is not None:
        raise ConfigError(f"both a config file ({file}) and --preset {preset} were given; choose one to start from")
    config = read_config(file) if file is not None else named(preset or (OWN if task else "digits"))
    if method is not None or file is None:
        config = with_method(config, method or "uq")
    chosen = dict(parse_assignment(item) for item in settings or [])
    options = {
        "round.count": rounds,
        "seed": seed,
        "data.dir": None if data_dir is None else str(data_dir.resolve()),
        "round.eval_every": eval_every,
        "wire.lossless": False if no_lossless else None,
        "round.keep_payloads": keep_payloads,
        "task": task,
        "name": name,
    }
    return complete(with_settings(config, {k: v for k, v in options.items() if v is not None} | chosen))


@contextmanager
def resumable(hint: str) -> Iterator[None]:
    """After a second Ctrl-C, which stops at once, say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\nStopped at once; the round in progress is lost. {hint}", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def single(config: Config, folder: Path, *, done: int = 0, as_json: bool = False) -> "Iterator[tuple[Display, Job]]":
    """The display of a plan with one run, and that run."""
    from fedfp8.paper.jobs import Job
    from fedfp8.paper.reproduce import Clock

    job = Job(config, folder, done)
    hint = f"Continue with: fedfp8 resume {folder}"
    with resumable(hint), Display(Clock({job: 1.0}), as_json=as_json) as display:
        yield display, job


def train(
    config: Config | None,
    folder: Path,
    workers: int | None,
    *,
    overwrite: bool = False,
    tensorboard: bool = False,
    as_json: bool = False,
    device: str | None = None,
) -> None:
    """Run or resume (config None) one folder, and say what came out."""
    from fedfp8 import fl
    from fedfp8.fl.checkpoint import RunFolder
    from fedfp8.paper.records import read_run

    known, count = config or RunFolder(folder).config, cores() if workers is None else workers
    done = 0 if config else read_run(folder).rounds
    with single(known, folder, done=done, as_json=as_json) as (display, job):
        display.say(about(known, folder, f"{count} workers" if count else "in this process", done))
        on_round = display.on_round(job)
        if tensorboard or (config is None and (folder / "tb").exists()):  # also a run that began with --tensorboard
            on_round = scalars(folder, on_round)
        if config is None:
            history = fl.resume(folder, workers=count, device=device, on_round=on_round)
        else:
            history = fl.run(config, out=folder, workers=count, device=device, overwrite=overwrite, on_round=on_round)
    display.say(outcome(history.summary, folder))
    if not history.summary["finished"]:
        reached = history.summary["rounds"]
        typer.echo(f"Stopped after round {reached}. Continue with: fedfp8 resume {folder}", err=True)
        raise typer.Exit(INTERRUPTED)


def about(config: Config, folder: Path, how: str, done: int = 0) -> str:
    """What is about to happen, in a sentence. how: on what, such as "2 workers"."""
    from fedfp8.fl.config import cohort_size

    clients = config.clients
    if config.data.partition == "group":
        cohort = f"{100 * clients.fraction:g} % of the clients"
    else:
        cohort = f"{cohort_size(config, clients.count)} of {clients.count} clients"
    run = f"{config.name or config.preset}, method {config.method}, seed {config.seed}"
    if done >= config.round.count:
        return f"{run}: all {done} rounds are done; go on past them with: fedfp8 resume {folder} --rounds N"
    rounds = f"rounds {done + 1} to {config.round.count}" if done else f"{config.round.count} rounds"
    return f"{run}: {rounds} with {cohort} each, {how}; records in {folder}"


def outcome(values: dict[str, Any], folder: Path) -> str:
    """The summary of a run for people."""
    from fedfp8.paper.records import Metric

    metric = values.get("metric") or {"name": "accuracy", "value": values.get("accuracy", 0.0)}
    result = f"{metric['name']} {Metric(metric['name']).text(metric['value'])}"
    return (
        f"\n{values.get('name', values['preset'])} / {values['method']}: {result} after {values['rounds']} rounds, "
        f"{size_text(values['bytes_down'])} down + {size_text(values['bytes_up'])} up = "
        f"{size_text(values['bytes_total'])} ({values['bits_per_weight_down']:.2f} and "
        f"{values['bits_per_weight_up']:.2f} bits per weight)\nrecords: {folder}"
    )


def scalars(folder: Path, then: Any) -> Any:
    """An on_round that also writes TensorBoard scalars."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("--tensorboard needs the tensorboard package: pip install tensorboard") from None
    from fedfp8.paper.records import metric_name, sent_value_of, value_of

    writer: Any = None

    def on_round(line: dict[str, Any]) -> None:
        nonlocal writer
        if writer is None:  # not before the folder is this run's
            writer = SummaryWriter(str(folder / "tb"), purge_step=line["round"])
        values = {key: line.get(key) for key in ("loss", "train_loss", "bytes_down", "bytes_up", "bytes_total")}
        metric = metric_name(line)
        values |= {metric: value_of(line), f"{metric}_sent": sent_value_of(line)}
        for name, value in values.items():
            if value is not None:
                writer.add_scalar(name, value, line["round"])
        writer.flush()
        then(line)

    return on_round


def compare_all(
    plan: list[tuple[Config, str]],
    folder: Path,
    workers: int | None,
    overwrite: bool,
    as_json: bool,
    device: str | None = None,
) -> None:
    """Run all configs (each with the name of its variant), every one in its own folder, then write the report."""
    from fedfp8.fl import Pool
    from fedfp8.paper.jobs import find_job
    from fedfp8.paper.report import write_report
    from fedfp8.paper.reproduce import Clock, run_job
    from fedfp8.paper.sizes import measure_sizes

    jobs = [find_job(config, folder, variant, overwrite=overwrite) for config, variant in plan]
    count, clock = cores() if workers is None else workers, Clock(dict.fromkeys(jobs, 1.0))
    hint = f"The same command {'begins anew' if overwrite else 'again continues where it was'} ({folder})."
    with resumable(hint), Display(clock, as_json=as_json) as display, Pool(count, device) as pool:
        complete = all(run_job(job, pool, on_round=display.on_round(job), overwrite=overwrite) for job in jobs)
    if not complete:
        typer.echo(f"Stopped. {hint}", err=True)
        raise typer.Exit(INTERRUPTED)
    for job in jobs:
        measure_sizes(job.folder)  # of raw FP8 messages, for the gain without the lossless stage
    report = write_report(folder, [job.folder for job in jobs])
    if not as_json:
        width = display.console.width if display.live else 0
        typer.echo(f"\n{report.comparisons[0].text(width)}\n\n{report.headline}")
        typer.echo(f"report: {report.path}   plot: {folder / 'compare.png'}")
        typer.echo(f"table: {folder / 'compare.md'}   records: {folder / 'compare.json'}")
