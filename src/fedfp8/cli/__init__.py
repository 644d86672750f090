"""The `fedfp8` command: subcommands that parse, call one function, and print. No logic lives here."""

import sys

import typer
from rich.console import Console

from fedfp8.errors import Fedfp8Error

__all__ = ["app", "main"]

app = typer.Typer(
    name="fedfp8",
    help="Federated learning in 8-bit floating point: accuracy against bytes, from one command.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point. An error of ours is one clear message and exit code 1, never a traceback."""
    from fedfp8.cli import commands

    commands.register(app)
    try:
        app()
    except Fedfp8Error as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {str(error).replace('[', chr(92) + '[')}")
        sys.exit(1)
