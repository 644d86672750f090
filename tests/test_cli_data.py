"""`fedfp8 data list|fetch|check|partition`."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fedfp8.cli.data import register
from fedfp8.errors import ConfigError, DataError


def data(*arguments: str) -> str:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, ["data", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_list_says_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    text = data("list", "--data-dir", str(tmp_path))
    assert "comes with scikit-learn" in text
    assert text.count("not found") == text.count("\n") // 2 - 1  # all but the digits
    assert text.splitlines()[-1].startswith("To get one: fedfp8 data fetch NAME.")


def test_check_counts(tmp_path: Path) -> None:
    assert "1,437 training, 360 test" in data("check", "digits")
    with pytest.raises(DataError, match="cifar10"):
        data("check", "cifar10", "--data-dir", str(tmp_path))


def test_fetch_of_what_need_not_be_fetched() -> None:
    with pytest.raises(DataError, match="come with scikit-learn"):
        data("fetch", "digits")


def test_partition_as_table_picture_and_csv(tmp_path: Path) -> None:
    picture, csv = tmp_path / "mix.png", tmp_path / "mix.csv"
    options = ["--set", "clients.count=25", "--picture", str(picture), "--csv", str(csv), "--seed", "3"]
    text = data("partition", "digits", *options)
    assert "25 clients, 1,437 examples" in text and "... and 5 more clients" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [line.split(",") for line in csv.read_text().splitlines()]
    assert rows[0] == ["client", "examples", "classes", *map(str, range(10))] and len(rows) == 26
    assert all(sum(map(int, row[3:])) == int(row[1]) for row in rows[1:])
    with pytest.raises(ConfigError, match="must end in"):
        data("partition", "digits", "--picture", str(tmp_path / "mix.txt"))
