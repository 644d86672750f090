"""`fedfp8 flower run`, `app` and `certs`: the method on Flower's engines."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from fedfp8.cli.run import (
    METHOD_HELP,
    DataDir,
    EvalEvery,
    Name,
    NoLossless,
    Overwrite,
    Preset,
    Rounds,
    Settings,
    Task,
    about,
    configure,
    outcome,
    single,
)
from fedfp8.errors import ConfigError

__all__ = ["register"]

ENGINE_HELP = "grid (in this process), ray (Flower's simulation) or deploy (SuperLink and SuperNodes with TLS here)."
NODES_HELP = "SuperNodes; default one a client (grid, ray) or 2 (deploy). Node p of P serves the clients k mod P = p."
HOST_HELP = "Name or address under which nodes reach the SuperLink; may be repeated."

Config = Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", help="A complete or partial config.")]
Method = Annotated[str | None, typer.Option(help=METHOD_HELP)]
Seed = Annotated[int | None, typer.Option(help="Everything random in the run follows from it.")]
Timeout = Annotated[float, typer.Option(min=1.0, help="Seconds to wait for the replies of a round.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Run on Flower: simulation, deployment, certificates.")
    group.command()(run)
    group.command("app")(write)
    group.command()(certs)
    app.add_typer(group, name="flower")


def run(
    config_file: Config = None,
    preset: Preset = None,
    method: Method = None,
    engine: Annotated[str, typer.Option(help=ENGINE_HELP)] = "ray",
    rounds: Rounds = None,
    seed: Seed = None,
    nodes: Annotated[int, typer.Option(min=0, help=NODES_HELP)] = 0,
    timeout: Timeout = 3600.0,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME-METHOD-seedN-ENGINE.")] = None,
    settings: Settings = None,
    eval_every: EvalEvery = None,
    no_lossless: NoLossless = False,
    overwrite: Overwrite = False,
    task: Task = None,
    name: Name = None,
) -> None:
    """The same run as `fedfp8 run`, to the same bytes, on a Flower engine. A run that is in the folder is continued.

    fedfp8 flower run --preset digits --method dq --engine ray --rounds 5
    """
    given = (method, rounds, seed, data_dir, settings, eval_every, no_lossless)
    config = configure(config_file, preset, *given, task=task, name=name)
    folder = out or Path("runs") / f"{config.name or config.preset}-{config.method}-seed{config.seed}-{engine}"
    flower = _flower("method.launch")
    from fedfp8.paper.records import read_run

    done = read_run(folder).rounds if (folder / "config.toml").exists() and not overwrite else 0
    with single(config, folder, done=done) as (display, job):
        options = {"engine": engine, "nodes": nodes, "timeout": timeout, "overwrite": overwrite}
        display.say(about(config, folder, f"Flower's engine {engine}", done))
        flower.run(config, folder, on_round=display.on_round(job), **options)
    display.say(outcome(read_run(folder).summary, folder))


def write(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the app.")],
    nodes: Annotated[int, typer.Option(min=1, help="SuperNodes of the federation.")],
    out: Annotated[Path, typer.Option(help="Run folder, on the machine where the ServerApp runs.")],
    config_file: Annotated[Path | None, typer.Option("--config", help="A complete or partial config.")] = None,
    preset: Preset = None,
    method: Method = None,
    rounds: Rounds = None,
    seed: Seed = None,
    timeout: Timeout = 3600.0,
    settings: Settings = None,
    task: Task = None,
    name: Name = None,
) -> None:
    """Write a Flower app for a federation that is already running: then `flwr run DIR SUPERLINK --stream`."""
    config = configure(config_file, preset, method, rounds, seed, None, settings, None, False, task=task, name=name)
    typer.echo(_flower("method.launch").write_app(folder, config, out, nodes=nodes, timeout=timeout))


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    hosts: Annotated[list[str] | None, typer.Option("--host", help=HOST_HELP)] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Key pairs to make, one a SuperNode.")] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """A CA, the SuperLink's certificate and one key pair a SuperNode, for TLS and node authentication."""
    for path in (
        _flower("certs").make_certs(folder, hosts or ["127.0.0.1", "localhost"], nodes, overwrite=overwrite).values()
    ):
        typer.echo(path)


def _flower(module: str) -> Any:
    """A module of fedfp8.flower; without the extra, one line that says what to install."""
    try:
        return import_module(f"fedfp8.flower.{module}")
    except ImportError as error:
        raise ConfigError(str(error)) from None
