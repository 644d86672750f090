"""`fedfp8 run`, `resume`, `compare` and `demo`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fedfp8.cli.display import Display, megabytes
from fedfp8.errors import ConfigError

__all__ = ["register"]

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
Config = Any  # fedfp8.fl.Config; imported late so that `fedfp8 --help` does not wait for torch

PRESET_HELP = "What to train on what: digits, or a cell of the paper's Table 1 such as lenet-cifar10-iid."
METHOD_HELP = "fp32, bq (nearest), uq (stochastic), uq+ (with ServerOptimize), dq (dithered, ours)."
SET_HELP = (
    "Any setting as section.field=value, e.g. --set dq.kappa_up=4; may be repeated. All of them: config.toml of a run."
)

Preset = Annotated[str | None, typer.Option(help=PRESET_HELP)]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds to run; default: the preset's.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Processes that train clients; default: one a core. 0: none.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the data sets (see `fedfp8 data list`).")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET_HELP)]
EvalEvery = Annotated[int | None, typer.Option(min=1, help="Evaluate on the test set every so many rounds.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run that is already in the folder.")]
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
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/PRESET-METHOD-seedN.")] = None,
    settings: Settings = None,
    eval_every: EvalEvery = None,
    no_lossless: NoLossless = False,
    overwrite: Overwrite = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard scalars to OUT/tb.")
    ] = False,
) -> None:
    """One federated run: accuracy and bytes, round by round.

    fedfp8 run --preset digits --method dq --rounds 40 --out runs/dq
    """
    config = configure(config_file, preset, method, rounds, seed, data_dir, settings, eval_every, no_lossless)
    folder = out or Path("runs") / f"{config.preset}-{config.method}-seed{config.seed}"
    train(config, folder, workers, overwrite=overwrite, tensorboard=tensorboard)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The run folder.")],
    workers: Workers = None,
) -> None:
    """Continue an interrupted run, to the same bytes as if it had not been interrupted."""
    train(None, folder, workers)


def compare(
    preset: Preset = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated; fp32 is what gains are measured against.")
    ] = "fp32,bq,uq,uq+,dq",
    rounds: Rounds = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated; results are means over them.")] = "0",
    workers: Workers = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all runs, table and plot; default runs/compare-PRESET.")
    ] = None,
    settings: Settings = None,
    eval_every: EvalEvery = None,
    no_lossless: NoLossless = False,
    overwrite: Overwrite = False,
) -> None:
    """Several methods on the same data: a table and an accuracy-against-bytes plot. Finished runs are not repeated."""
    names = [m.strip() for m in methods.split(",") if m.strip()]
    numbers = [s.strip() for s in seeds.split(",") if s.strip()]
    if not names or not numbers or not all(s.isdecimal() for s in numbers):
        raise ConfigError(
            f"--methods {methods!r} --seeds {seeds!r}; give lists such as --methods fp32,dq --seeds 0,1,2"
        )
    configs = [
        configure(None, preset, m, rounds, int(s), data_dir, settings, eval_every, no_lossless)
        for s in numbers
        for m in names
    ]
    folder = out or Path("runs") / f"compare-{configs[0].preset}"
    compare_all(configs, folder, workers, overwrite)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs, the table and the plot.")] = Path("runs/demo"),
    rounds: Rounds = None,
    workers: Workers = None,
) -> None:
    """FP32, BQ, UQ, UQ+ and DQ on real handwritten digits with non-iid clients; about two minutes on two cores."""
    typer.echo("Five ways to train one network on the handwritten digits of 20 clients that each see few classes,")
    typer.echo("and what each of them sends. Every byte below was really encoded, sent, decoded and counted.\n")
    configs = [
        configure(None, "digits", m, rounds, 0, None, None, None, False) for m in ("fp32", "bq", "uq", "uq+", "dq")
    ]
    compare_all(configs, out, workers, overwrite=True)


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
) -> Config:
    """Preset, then config file, then method, then single settings; what comes later wins."""
    from fedfp8.fl import preset as named
    from fedfp8.fl import with_method, with_settings
    from fedfp8.fl.checkpoint import read_config
    from fedfp8.fl.settings import parse_assignment

    if file is not None and preset is not None:
        raise ConfigError(f"both a config file ({file}) and --preset {preset} were given; choose one to start from")
    config = read_config(file) if file is not None else named(preset or "digits")
    if method is not None or file is None:
        config = with_method(config, method or "uq")
    chosen = dict(parse_assignment(item) for item in settings or [])
    options = {
        "round.count": rounds,
        "seed": seed,
        "data.dir": None if data_dir is None else str(data_dir.resolve()),
        "round.eval_every": eval_every,
        "wire.lossless": False if no_lossless else None,
    }
    return with_settings(config, {k: v for k, v in options.items() if v is not None} | chosen)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train(
    config: Config | None, folder: Path, workers: int | None, *, overwrite: bool = False, tensorboard: bool = False
) -> None:
    """Run or resume (config None) one folder, and say what came out."""
    with Display() as display:
        history = one_run(display, config, folder, workers, overwrite=overwrite, tensorboard=tensorboard)
        values = history.summary
        display.say(
            f"\n{values['preset']} / {values['method']}: accuracy [bold]{100 * values['accuracy']:.2f} %[/] after "
            f"{values['rounds']} rounds, {megabytes(values['bytes_down'])} down + {megabytes(values['bytes_up'])} up = "
            f"{megabytes(values['bytes_total'])} ({values['bits_per_weight_down']:.2f} and "
            f"{values['bits_per_weight_up']:.2f} bits a weight)\nrecords: {folder}"
        )
    if not values["finished"]:
        typer.echo(f"Stopped after round {values['rounds']}. Continue with: fedfp8 resume {folder}", err=True)
        raise typer.Exit(INTERRUPTED)


def one_run(
    display: Display,
    config: Config | None,
    folder: Path,
    workers: int | None,
    *,
    overwrite: bool = False,
    tensorboard: bool = False,
) -> Any:
    from fedfp8 import fl
    from fedfp8.fl.checkpoint import RunFolder

    known = config or RunFolder(folder).config
    display.begin(known.method, known.round.count)
    workers = cores() if workers is None else workers
    resumed_log = config is None and (folder / "tb").exists()  # a run that began with --tensorboard
    on_round = scalars(folder, display.round) if tensorboard or resumed_log else display.round
    if config is None:
        return fl.resume(folder, workers=workers, on_round=on_round)
    return fl.run(config, out=folder, workers=workers, overwrite=overwrite, on_round=on_round)


def scalars(folder: Path, then: Any) -> Any:
    """An on_round that also writes TensorBoard scalars."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("--tensorboard needs the tensorboard package: pip install tensorboard") from None
    writer: Any = None

    def on_round(line: dict[str, Any]) -> None:
        nonlocal writer
        if writer is None:  # not before the folder is this run's
            writer = SummaryWriter(str(folder / "tb"), purge_step=line["round"])
        for name in ("accuracy", "accuracy_sent", "loss", "train_loss", "bytes_down", "bytes_up", "bytes_total"):
            if line.get(name) is not None:
                writer.add_scalar(name, line[name], line["round"])
        writer.flush()
        then(line)

    return on_round


def compare_all(configs: list[Config], folder: Path, workers: int | None, overwrite: bool) -> None:
    """Run all configs, each in its own folder, then write the table and the plot."""
    from fedfp8.fl.checkpoint import RunFolder
    from fedfp8.paper.compare import write_comparison
    from fedfp8.paper.sizes import measure_sizes

    runs = []
    with Display() as display:
        for config in configs:
            path = folder / config.preset / f"{config.method}-seed{config.seed}"
            runs.append(path)
            started = not overwrite and (path / "config.toml").exists()
            if started and RunFolder(path).config != config:
                raise ConfigError(f"{path} holds a run with other settings; choose another --out or use --overwrite")
            history = one_run(display, None if started else config, path, workers, overwrite=overwrite)
            if not history.summary["finished"]:
                typer.echo(f"Stopped. The same command again continues where it was ({folder}).", err=True)
                raise typer.Exit(INTERRUPTED)
    for path in runs:
        measure_sizes(path)  # of raw FP8 messages, for the gain without the lossless stage
    comparison = write_comparison(folder, runs)
    typer.echo(comparison.text)
    typer.echo(
        f"\ntable: {folder / 'compare.md'}   plot: {folder / 'compare.png'}   records: {folder / 'compare.json'}"
    )
