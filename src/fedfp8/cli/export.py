"""`fedfp8 export`: the model of a run as plain weights."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command()(export)


def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The safetensors file to write.")],
    rounded: Annotated[bool, typer.Option("--rounded", help="Weights rounded to their FP8 values.")] = False,
) -> None:
    """The model of a run as float weights under the names of its own class, without FP8 ranges.

    fedfp8 export runs/dq -o model.safetensors, then safetensors.torch.load_model(model, "model.safetensors")
    """
    from fedfp8.fl.export import export_model

    typer.echo(f"written: {out} ({export_model(folder, out, rounded=rounded)} tensors)")
