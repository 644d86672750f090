"""`fedfp8 inspect`, `models`, `presets`, `settings` and `bench`."""

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedfp8.errors import ConfigError, WireFormatError

if TYPE_CHECKING:
    from fedfp8.model.layout import Layout

__all__ = ["register"]

LAYOUT_HELP = (
    "Whose tensors these are, if the message does not say so itself: a run folder, or a network of `fedfp8 models`, "
    "with its number of classes if it is not 10 (lenet:100)."
)
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


def register(app: typer.Typer) -> None:
    app.command()(inspect)
    app.command()(models)
    app.command()(presets)
    app.command()(settings)
    app.command()(bench)


def inspect(
    payload: Annotated[Path, typer.Argument(metavar="PAYLOAD", help="A file with one fedfp8 message.")],
    layout: Annotated[str | None, typer.Option(metavar="RUN|MODEL", help=LAYOUT_HELP)] = None,
    as_json: Json = False,
) -> None:
    """What is in a message: sizes, coding modes and bits per weight, tensor by tensor. Says if it is damaged.

    fedfp8 inspect runs/dq/payloads/round-40/up-client3.bin --layout runs/dq
    """
    from fedfp8.fl.payloads import pick
    from fedfp8.wire import inspect as look

    try:
        data = payload.read_bytes()
    except OSError as error:
        raise WireFormatError(f"{payload} cannot be read: {error.strerror}; give the path of a payload file") from None
    layouts = layouts_of(layout) if layout else []
    try:
        result = look(data)
    except WireFormatError as error:
        raise WireFormatError(f"{payload} is not a whole fedfp8 message: {error}") from None
    if layouts:
        try:
            result = look(data, pick(layouts, data))
        except WireFormatError as error:
            raise WireFormatError(f"{payload} is not a message of --layout {layout}: {error}") from None
    typer.echo(json.dumps(result.to_dict(), indent=2) if as_json else str(result))
    if result.rows is None and not as_json:
        typer.echo("(--layout RUN, the folder of the run it is from, or --layout MODEL, one of `fedfp8 models`)")


def layouts_of(name: str) -> "list[Layout]":
    """What messages of a run folder, or of a network in FP8 or in float, may be laid out like."""
    return layouts_of_run(Path(name)) if (Path(name) / "config.toml").exists() else layouts_of_model(name)


def layouts_of_run(folder: Path) -> "list[Layout]":
    from fedfp8.fl.checkpoint import read_config
    from fedfp8.fl.payloads import message_layouts
    from fedfp8.link.store import read_state

    try:
        state = json.loads((folder / "checkpoint" / "state.json").read_text())
    except OSError:
        raise ConfigError(f"--layout {folder}: the run has no checkpoint to take the layout from") from None
    layout = read_state(folder / "checkpoint" / state["model"]).layout
    return message_layouts(read_config(folder / "config.toml"), layout)


def layouts_of_model(name: str) -> "list[Layout]":
    from fedfp8.models import MODELS, build
    from fedfp8.nn import layout_of, prepare

    model, _, classes = name.partition(":")
    if model not in MODELS or not (classes or "10").isdecimal():
        raise ConfigError(
            f"--layout {name} is neither a run folder nor one of {', '.join(MODELS)}; give e.g. lenet:100"
        )
    plain = build(model, int(classes or 10), seed=0)
    return [layout_of(prepare(build(model, int(classes or 10), seed=0))), layout_of(plain)]


def models() -> None:
    """The networks and their parameter counts, beside those the paper gives."""
    from fedfp8.models import table

    show(table())


def presets() -> None:
    """The presets and what they set."""
    from fedfp8.fl import PRESETS

    for name, values in PRESETS.items():
        text = "  ".join(f"{k}={v}" for k, v in values.items()) or "your own model and data: fedfp8 run --task"
        typer.echo(f"{name:26} {text}")


def settings(
    part: Annotated[str, typer.Argument(metavar="[PART]", help="Only keys that contain this, e.g. dq or local.")] = "",
    preset: Annotated[str, typer.Option(help="Show the values of this preset.")] = "digits",
    method: Annotated[str, typer.Option(help="Show the values of this method.")] = "uq",
    as_json: Json = False,
) -> None:
    """Every setting: key (for --set and config files), value and meaning."""
    from fedfp8.fl import preset as named
    from fedfp8.fl.describe import describe

    found = [setting for setting in describe(named(preset, method)) if part in setting.key]
    if not found:
        raise ConfigError(f"no setting contains {part!r}; `fedfp8 settings` lists all of them")
    if as_json:
        typer.echo(json.dumps([vars(setting) for setting in found], indent=2))
        return
    console = Console()
    for setting in found:
        line = f"{setting.key + ' = ' + json.dumps(setting.value):<34} {setting.meaning}"
        typer.echo(textwrap.fill(line, console.width, subsequent_indent=" " * 35) if console.is_terminal else line)


def bench(
    only: Annotated[str, typer.Option(metavar="TABLE,...", help="Only these tables; default: all there are.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A trial on little data: its numbers mean nothing.")] = False,
    as_json: Json = False,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where each table is kept as TABLE.json; in a clone benchmarks/results."),
    ] = None,
    docs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PAGE",
            exists=True,
            dir_okay=False,
            help="Measure nothing; put the kept tables between the markers of this page; may be repeated.",
        ),
    ] = None,
) -> None:
    """Measure the tables of docs/benchmarks.md on this machine (ten minutes), or put the kept ones into pages.

    numerics, training, round, server, scale and known come with the package; the others need a clone of the repository.
    """
    from fedfp8.bench import tables

    if docs:
        typer.echo(f"put: {', '.join(tables.update_docs(docs, keep or tables.RESULTS))}")
        return
    folder = tables.RESULTS if keep is None and not quick and tables.SCRIPTS.exists() else keep
    found = []
    for name in tables.chosen(only):
        typer.echo(f"\n{name}: {tables.TABLES[name].about}", err=as_json)
        found.append(tables.measure(name, quick=quick))
        if not as_json:
            show(tables.shown(name, found[-1]["rows"]))
        if folder is not None:
            typer.echo(f"kept: {tables.keep(found[-1], folder)}", err=as_json)
    if as_json:
        typer.echo(json.dumps(found, indent=2))


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*("" if v is None else f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()))
    Console().print(table)
