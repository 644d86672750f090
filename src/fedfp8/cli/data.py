"""`fedfp8 data list|fetch|check|partition`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedfp8.errors import ConfigError

if TYPE_CHECKING:
    from fedfp8.data import PartitionReport

__all__ = ["register"]

Name = Annotated[str, typer.Argument(help="cifar10, cifar100, speech_commands, ... (see `fedfp8 data list`).")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with one folder per data set; default $FEDFP8_DATA, else the cache.")
]
SHOWN = 20  # clients printed in full; --csv has all of them


def register(app: typer.Typer) -> None:
    data = typer.Typer(no_args_is_help=True, help="Data sets: which there are, fetching, checking, and partitions.")
    data.command("list")(list_all)
    data.command()(fetch)
    data.command()(check)
    data.command()(partition)
    app.add_typer(data, name="data")


def list_all(data_dir: DataDir = None) -> None:
    """All data sets, and where each was found."""
    from fedfp8.data import list_datasets

    items = list_datasets(data_dir)
    for item in items:
        typer.echo(f"{item.name:<16} {item.about}\n{'':<16} {item.found or 'not found'}")
    if not all(item.found for item in items):
        typer.echo("To get one: fedfp8 data fetch NAME. For one you have: --data-dir DIR or FEDFP8_DATA=DIR.")


def fetch(name: Name, data_dir: DataDir = None) -> None:
    """Download a data set's parquet files from the Hugging Face hub."""
    from fedfp8 import data

    typer.echo(f"{name} is in {data.fetch(name, data_dir)}")


def check(name: Name, data_dir: DataDir = None) -> None:
    """Decode a data set again and compare it with all that is known about it: counts, classes, shapes, checksums."""
    from fedfp8 import data

    found = data.check(name, data_dir)
    fewest, most = found.per_class
    lines = {
        "folder": found.folder,
        "examples": f"{found.train:,} training, {found.test:,} test",
        "classes": f"{len(found.classes)}, {fewest:,} to {most:,} training examples each",
        "speakers": f"{found.groups:,}" if found.groups else "",
        "input": " x ".join(map(str, found.input_shape)),
        "verified": found.verified,
    }
    typer.echo(f"{name}: complete and as it should be")
    for key, value in lines.items():
        if value:
            typer.echo(f"  {key:<9} {value}")
    for file, size, digest in found.files:
        typer.echo(f"  {digest}  {size:>12,}  {file}")


def partition(
    name: Annotated[str, typer.Argument(help="A preset, e.g. lenet-cifar10-dir: the partition its clients get.")],
    seed: Annotated[int, typer.Option(help="The run's seed.")] = 0,
    data_dir: DataDir = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="e.g. --set data.partition=dirichlet-class"),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw sizes and label mix into this .png, .pdf or .svg.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table of all clients and classes here.")] = None,
) -> None:
    """Who gets what: examples and label mix of every client, as a table and a picture."""
    from fedfp8.data import draw_partition, partition_report
    from fedfp8.fl import preset, with_settings
    from fedfp8.fl.federation import build
    from fedfp8.fl.settings import parse_assignment

    if picture is not None and picture.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--picture {picture} must end in .png, .pdf or .svg")
    chosen = dict(parse_assignment(item) for item in settings or [])
    if data_dir is not None:
        chosen["data.dir"] = str(data_dir)
    federation = build(with_settings(preset(name), {**chosen, "seed": seed}))
    parts: Any = federation.clients
    report = partition_report([part.rows for part in parts], parts[0].data[1])
    show(report)
    if picture is not None:
        draw_partition(report, picture)
        typer.echo(f"picture: {picture}")
    if csv is not None:
        csv.write_text(as_csv(report))
        typer.echo(f"table: {csv}")


def show(report: "PartitionReport") -> None:
    typer.echo("client  examples  classes  examples of each class")
    for row in report.rows[:SHOWN]:
        typer.echo(f"{row.client:>6}  {row.examples:>8,}  {row.classes:>7}  {mix(row.counts)}")
    if len(report.rows) > SHOWN:
        typer.echo(f"... and {len(report.rows) - SHOWN:,} more clients (--csv FILE has all)")
    typer.echo(str(report))


def mix(counts: tuple[int, ...]) -> str:
    """All classes if there are few, else the most frequent ones."""
    if len(counts) <= 12:
        return " ".join(f"{count:>4}" for count in counts)
    order = sorted(range(len(counts)), key=lambda c: -counts[c])[:8]
    return " ".join(f"{c}:{counts[c]}" for c in order if counts[c]) + " ..."


def as_csv(report: "PartitionReport") -> str:
    lines = [",".join(["client", "examples", "classes", *report.classes])]
    lines += [",".join(map(str, [row.client, row.examples, row.classes, *row.counts])) for row in report.rows]
    return "\n".join(lines) + "\n"
