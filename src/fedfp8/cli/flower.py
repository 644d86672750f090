import typer


def register(app: typer.Typer) -> None:
    """Nothing yet."""
