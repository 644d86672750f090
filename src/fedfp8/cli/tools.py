"""`fedfp8 inspect`, `models`, `presets` and `bench`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedfp8.errors import WireFormatError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command()(inspect)
    app.command()(models)
    app.command()(presets)
    app.command()(bench)


def inspect(
    payload: Annotated[Path, typer.Argument(metavar="PAYLOAD", help="A file with one fedfp8 message.")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """What is in a message: sizes, coding modes and bits per weight, tensor by tensor."""
    from fedfp8.wire import inspect as look

    try:
        data = payload.read_bytes()
    except OSError as error:
        raise WireFormatError(f"{payload} cannot be read: {error.strerror}; give the path of a payload file") from None
    result = look(data)
    typer.echo(json.dumps(result.to_dict(), indent=2) if as_json else str(result))


def models() -> None:
    """The networks and their parameter counts, beside those the paper gives."""
    from fedfp8.models import table

    rows = table()
    shown = Table(*rows[0].keys())
    for row in rows:
        shown.add_row(*(f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()))
    Console().print(shown)


def presets() -> None:
    """The presets and what they set."""
    from fedfp8.fl import PRESETS

    for name, settings in PRESETS.items():
        typer.echo(f"{name:26} " + "  ".join(f"{k}={v}" for k, v in settings.items()))


def bench(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Speed of the kernels on this machine, as ratios to a memory copy measured in the same run."""
    from fedfp8.bench import numerics

    rows = numerics.run()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    shown = Table(*rows[0].keys())
    for row in rows:
        shown.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(shown)
