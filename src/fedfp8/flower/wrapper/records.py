"""A Flower run as a run folder: config.toml, history.jsonl, summary.json, which `fedfp8 report` draws."""

import json
from pathlib import Path
from typing import Any

import tomli_w
from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedfp8.flower.wrapper.traffic import Phase, Traffic
from fedfp8.link.store import write_atomic

__all__ = ["write_records"]


def write_records(folder: Path, traffic: Traffic, result: Result, method: str, seed: int, seconds: float) -> None:
    """Write what a run cost and what it reached. Runs beside each other in a folder are compared.

    Accuracy and loss are those of `evaluate_fn`, else those that clients reported, by the names of their metrics.
    """
    rounds = max((phase.round for phase in traffic), default=0)
    lines, total = [], 0
    for number in range(rounds + 1):
        phases = [phase for phase in traffic if phase.round == number]
        lines.append(_line(number, phases, result))
        total += lines[-1]["bytes_down"] + lines[-1]["bytes_up"]
        lines[-1] |= {"bytes_total": total, "seconds": {"total": seconds / rounds if number else 0.0}}
    known = [line["accuracy"] for line in lines[1:] if "accuracy" in line]
    summary = {"rounds": rounds, "finished": True, "bytes_total": total, "accuracy": known[-1] if known else None}
    config = {"preset": folder.parent.name, "method": method, "seed": seed, "round": {"count": rounds}}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.toml", tomli_w.dumps(config).encode())
    write_atomic(folder / "history.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    write_atomic(folder / "summary.json", json.dumps(summary, indent=2).encode())


def _line(number: int, phases: list[Phase], result: Result) -> dict[str, Any]:
    line: dict[str, Any] = {
        "round": number,
        "clients": sorted({client for phase in phases for client in phase.clients}),
        "rejected": [rejected for phase in phases for rejected in phase.rejected],
        "bytes_down": sum(phase.down for phase in phases),
        "bytes_up": sum(phase.up for phase in phases),
        "bytes_plain": sum(phase.plain_down + phase.plain_up for phase in phases),
    }
    sources = (result.evaluate_metrics_serverapp, result.evaluate_metrics_clientapp)
    for name in ("accuracy", "loss"):
        found = [value for source in sources for value in _named(source.get(number), name)]
        line |= {name: found[0]} if found else {}
    return line


def _named(metrics: MetricRecord | None, name: str) -> list[float]:
    numbers = {key: value for key, value in (metrics or {}).items() if isinstance(value, int | float)}
    return [float(value) for key, value in numbers.items() if name[:3] in key.lower()]
