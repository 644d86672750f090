"""Which file holds which subcommand. Each has ``register(app)``."""

from importlib import import_module

import typer

__all__ = ["register"]

MODULES = ("run", "reproduce", "data", "flower", "tools", "export")


def register(app: typer.Typer) -> None:
    for name in MODULES:
        import_module(f"fedfp8.cli.{name}").register(app)
