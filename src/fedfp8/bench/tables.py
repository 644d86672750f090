"""The tables of docs/benchmarks.md by name: those of the package, and the scripts of benchmarks/ where they are."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fedfp8.bench.timing import machine
from fedfp8.errors import ConfigError, RunError

__all__ = ["TABLES", "chosen", "keep", "measure", "rows_of", "with_circumstances"]

TABLES = {
    "numerics": "the FP8 functions against copying memory",
    "round": "the engine beyond training: overhead of a round, server memory, ServerOptimize",
    "step": "an FP8 training step against a float one",
    "wire": "rate and speed of the wire format",
    "input": "the input pipeline's share of a step, and partitions",
}
INSIDE = ("numerics", "round")  # measured by the package itself
SCRIPTS = Path(__file__).parents[3] / "benchmarks"  # of the repository, if this is one


def chosen(only: str, scripts: Path = SCRIPTS) -> list[str]:
    """The tables asked for; without a wish all that can be measured here."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise ConfigError(f"unknown table {', '.join(map(repr, unknown))}; choose from {', '.join(TABLES)}")
    there = [name for name in TABLES if name in INSIDE or _script(name, scripts).exists()]
    missing = [name for name in names if name not in there]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} needs the scripts of the repository's benchmarks/ folder; there is no {scripts}, so "
            "run it from a clone"
        )
    return names or there


def _script(name: str, scripts: Path) -> Path:
    return scripts / f"bench_{name}.py"


def measure(name: str, scripts: Path = SCRIPTS) -> Any:
    """The JSON of a table: a list of rows, or several such lists by name."""
    if name in INSIDE:
        from fedfp8.bench import engine, numerics

        return numerics.run() if name == "numerics" else engine.run()
    done = subprocess.run([sys.executable, str(_script(name, scripts)), "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RunError(f"{_script(name, scripts)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def rows_of(content: Any) -> list[list[dict[str, Any]]]:
    """The lists of rows in what `measure` gave."""
    lists = content.values() if isinstance(content, dict) else [content]
    return [rows for rows in lists if isinstance(rows, list)]


def with_circumstances(content: Any) -> dict[str, Any]:
    """Machine, versions, date and commit beside the numbers."""
    return {"machine": machine() | {"commit": commit()}, "tables": content}


def keep(name: str, content: Any, folder: Path) -> Path:
    """Write one table with its circumstances."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(with_circumstances({name: content}), indent=1) + "\n")
    return path


def commit() -> str:
    """Of the repository the package is in, with + if it was changed since; empty outside of one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent)]
        found = subprocess.run([*command, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*command, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except OSError:
        return ""
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")
