"""The `fedfp8` command: subcommands that parse, call one function, and print. No logic lives here."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from fedfp8.errors import Fedfp8Error

__all__ = ["app", "main"]

app = typer.Typer(
    name="fedfp8",
    help="Federated learning in 8-bit floating point: accuracy against bytes, from one command.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from fedfp8 import __version__

        print(f"fedfp8 {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What every subcommand shares: nothing but the version."""


def main() -> None:
    """Entry point. An error of ours is one clear message and exit code 1, never a traceback."""
    from fedfp8.cli import commands

    commands.register(app)
    try:
        app(prog_name="fedfp8")
    except Fedfp8Error as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {str(error).replace('[', chr(92) + '[')}")
        sys.exit(1)
