"""The tables of docs/benchmarks.md by name: what measures each, its JSON and its Markdown. One table, one file."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfp8.bench import engine, million, numerics, scale
from fedfp8.bench.timing import machine, table
from fedfp8.errors import ConfigError, RunError

__all__ = ["RESULTS", "TABLES", "Table", "chosen", "keep", "markdown", "measure", "read", "update_docs", "with_machine"]

Row = dict[str, Any]
SCRIPTS = Path(__file__).parents[3] / "benchmarks"  # of the repository, if this is one
RESULTS = SCRIPTS / "results"


@dataclass(frozen=True)
class Table:
    about: str
    measure: Callable[[bool], list[Row]]  # quick, a trial on little data -> rows
    columns: Mapping[str, str]  # those that are shown: key of a row -> heading
    script: str = ""  # of benchmarks/, if it needs one
    arrange: Callable[[list[Row]], list[Row]] = list  # rows as the table has them


def script(
    name: str, quick: str, rows: Callable[[Any], list[Row]] = list, *, into_file: bool = False
) -> dict[str, Any]:
    """A table measured by benchmarks/bench_`name`.py; `quick`: its arguments for a trial, `rows`: from its JSON."""

    def run(is_quick: bool) -> list[Row]:
        path = SCRIPTS / f"bench_{name}.py"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.json"
            command = [sys.executable, str(path), "--json", *([str(file)] if into_file else [])]
            done = subprocess.run([*command, *(quick.split() if is_quick else [])], capture_output=True, text=True)
            if done.returncode != 0:
                raise RunError(f"{path} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
            return rows(json.loads(file.read_text() if into_file else done.stdout))

    return {"measure": run, "script": f"bench_{name}.py"}


TABLES = {
    "numerics": Table(
        "The FP8 functions in units of copying memory",
        lambda quick: [
            row for n in ((1 << 12, 1 << 14) if quick else numerics.SIZES)
            for row in numerics.run_size(n, turns=1 if quick else 31)
        ],
        {}, arrange=numerics.by_size,
    ),
    "training": Table(
        "Forward and backward of `fake_quantize` against autograd through the textbook formula",
        lambda quick: numerics.run_training(turns=1 if quick else 31),
        {"name": "what", "size": "elements", "microseconds": "µs", "ratio": "times faster", "budget": "budget"},
    ),
    "step": Table(
        "An FP8 training step against a float one, batch 50, one thread",
        columns={
            "model": "model", "float_ms": "float step, ms", "ratio": "FP8 / float", "budget": "budget",
            "cpu_ratio": "the same in processor time", "memory_ratio": "memory, FP8 / float",
        },
        **script("step", "--no-memory lenet", lambda rows: [r | {"ok": r["ratio"] <= r["budget"]} for r in rows]),
    ),
    "input": Table(
        "Picking and augmenting a batch, beside the float step that it feeds",
        columns={"model": "model", "input_ms": "input, ms", "step_ms": "float step, ms", "share": "input / step"},
        **script("input", "--repeats 1", lambda content: list(content["input"])),
    ),
    "wire": Table(
        "The coder: bits per weight beside the empirical conditional entropy, speed in MB of codes a second",
        columns={
            "pair": "what is coded", "bits": "bits per weight", "entropy": "entropy",
            "budget_used": "of the allowed excess", "encode": "encode", "decode": "decode",
        },
        **script("wire", "--elements 4096"),
    ),
    "link": Table(
        "The links, a million weights: MB of float32 weights a second, everything included",
        columns={
            "wire": "wire", "code, MB/s": "server codes", "client decode, MB/s": "client decodes",
            "client code, MB/s": "client codes", "decode, MB/s": "server decodes",
            "server memory, bytes a weight": "server memory, bytes a weight",
        },
        **script("link", "--weights 20000", lambda content: [r for r in content["rows"] if "code, MB/s" in r]),
    ),
    "round": Table(
        "The embedded engine beyond training: overhead of a LeNet round, server memory, ServerOptimize",
        lambda quick: engine.run(rounds=1, methods=("dq",)) if quick else engine.run(rounds=5),
        {"name": "what", "value": "measured", "unit": "unit", "budget": "budget"},
    ),
    "flower": Table(
        "A round that is almost all engine: embedded, in-process Grid, Flower on Ray",
        columns={"case": "case", "engine": "engine", "start_s": "first round after, s", "round_ms": "a round, ms",
                 "ratio": "of embedded"},
        **script("flower", "--rounds 5", lambda content: [
            {"case": case, "engine": name, "start_s": r["start"], "round_ms": 1e3 * r["round"], "ratio": r["ratio"]}
            for case, engines in content.items() for name, r in engines.items()
        ], into_file=True),
    ),
    "wrapper": Table(
        "What the two lines add to a Flower app: processor time, memory, bytes",
        columns={
            "case": "model", "weights": "weights", "tensors": "tensors", "ratio": "processor time, FP8 / plain",
            "ms_per_client_and_million": "ms more per client and million weights",
            "ms_per_client_and_tensor": "and tensor",
            "more_bytes_of_memory_a_weight": "bytes of memory more a weight", "times_fewer_bytes": "times fewer bytes",
        },
        **script("flower_wrapper", "--rounds 1 --cases many",
                 lambda content: [{"case": case} | row for case, row in content.items()], into_file=True),
    ),
    "server": Table(
        "Server work per client and million weights: milliseconds of one core",
        lambda quick: scale.server_rows(quick=quick),
        {"wire": "wire", "code_ms": "model coded", "decode_ms": "reply decoded", "add_ms": "added to the mean",
         "total_ms": "together", "budget": "budget", "bits_down": "bits per weight down", "bits_up": "up"},
    ),
    "scale": Table(
        "Federations by size: the server's processor seconds of a round beyond training, and its memory",
        lambda quick: scale.scale_rows(quick=quick),
        {"model": "model", "weights": "weights", "clients": "clients", "cohort": "in a round", "seconds": "s a round",
         "ms_per_client": "ms a client", "memory_mb": "memory, MB", "history_mb": "models on disk, MB",
         "holding": "clients that hold a model", "bits_down": "bits per weight down", "bits_up": "up"},
    ),
    "known": Table(
        "What it costs to know a client, whatever the model",
        lambda quick: scale.known_rows(quick=quick),
        {"clients": "clients", "memory_bytes": "bytes of memory", "json_bytes": "bytes of checkpoint",
         "traffic_bytes": "bytes of memory a visit, in `traffic`",
         "round_us": "µs of a round", "save_us": "µs of a checkpoint"},
    ),
}  # fmt: skip


def chosen(only: str) -> list[str]:
    """The tables asked for; without a wish all that can be measured here."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in TABLES]:
        raise ConfigError(f"unknown table {', '.join(map(repr, unknown))}; choose from {', '.join(TABLES)}")
    there = [name for name, t in TABLES.items() if not t.script or (SCRIPTS / t.script).exists()]
    if missing := [name for name in names if name not in there]:
        raise ConfigError(
            f"{', '.join(missing)} needs the scripts of the repository's benchmarks/ folder; there is no {SCRIPTS}, so "
            "run it from a clone"
        )
    return names or there


def measure(name: str, *, quick: bool = False) -> dict[str, Any]:
    """The rows of a table with machine, versions, date, commit and load."""
    load, begin = os.getloadavg()[0], time.perf_counter()
    rows = TABLES[name].measure(quick)
    return {"table": name, "quick": quick, "seconds": round(time.perf_counter() - begin, 1)} | with_machine(rows, load)


def with_machine(rows: list[Row], load: float) -> dict[str, Any]:
    """Rows, and all that a reader needs to judge them. load: the machine's before measuring."""
    about = machine() | {"commit": commit(), "load": f"{load:.1f} to {os.getloadavg()[0]:.1f}"}
    return {"machine": about, "rows": rows}


def keep(content: dict[str, Any], folder: Path) -> Path:
    """Write what `measure` gave as TABLE.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{content['table']}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    path = folder / f"{name}.json"
    if not path.exists():
        raise RunError(f"there is no {path}; `fedfp8 bench --only {name} --keep {folder}` measures it")
    content: dict[str, Any] = json.loads(path.read_text())
    if content.get("quick"):
        raise RunError(f"{path} is of a trial (--quick), not a measurement; measure again without --quick")
    return content


def commit() -> str:
    """Of the repository the package is in, with + if it was changed since; empty outside of one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent)]
        found = subprocess.run([*command, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run(
            [*command, "status", "--porcelain", "-uno", "--", "src"], capture_output=True, text=True
        )
    except OSError:
        return ""
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")


# Markdown

MARK = re.compile(r"(<!-- bench:(?!end )(\w+) -->\n).*?(?=<!-- bench:end -->)", re.S)


def shown(name: str, rows: list[Row]) -> list[dict[str, str]]:
    """Rows as text under the table's headings."""
    arranged = TABLES[name].arrange(rows)
    columns = TABLES[name].columns or {key: key for key in arranged[0] if key != "ok"}
    return [{heading: _text(key, row) for key, heading in columns.items()} for row in arranged]


def _text(key: str, row: Row) -> str:
    value = row.get(key)
    if value is None:
        return ""
    missed = ": **missed**" if key == "budget" and row.get("ok") is False else ""
    if isinstance(value, float):
        value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return (f"{value:,}" if isinstance(value, int) else str(value)) + missed


def markdown(name: str, folder: Path = RESULTS) -> str:
    """A kept table, and what it was measured on; `million` follows from two of them."""
    parts = ["scale", "known"] if name == "million" else [name]
    if not all((folder / f"{part}.json").exists() for part in parts):
        return f"Not measured yet: `fedfp8 bench --only {','.join(parts)}`.\n"
    if name == "million":
        return million.markdown(*(read(part, folder)["rows"] for part in parts))
    content = read(name, folder)
    about = content["machine"]
    versions = ", ".join(f"{part} {about[part]}" for part in ("python", "torch", "numba"))
    where = f"{about['processor']}, {about['cores']} cores, load {about['load']}"
    line = f"Measured {about['date']} in {content['seconds']:.0f} s on {where}; {versions}; commit {about['commit']}."
    return f"{table(shown(name, content['rows']))}\n\n{line}\n"


def update_docs(pages: Iterable[Path], folder: Path = RESULTS) -> list[str]:
    """Put the kept tables between the markers of pages; returns the names of the tables that were put."""
    put = []
    for page in pages:
        text = page.read_text()
        names = [name for _, name in MARK.findall(text)]
        if not names:
            raise ConfigError(f"{page} has no lines <!-- bench:TABLE --> and <!-- bench:end --> to put tables between")
        page.write_text(MARK.sub(lambda found: f"{found[1]}\n{markdown(found[2], folder)}\n", text))
        put += names
    return put
