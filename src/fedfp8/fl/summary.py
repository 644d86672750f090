"""What a run came to, in one small dict: the numbers tables are made of."""

import json
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fedfp8.fl.config import Config
from fedfp8.machine import processor
from fedfp8.model.state import State

__all__ = ["Summary", "metric_of", "summarize"]


@dataclass(frozen=True)
class Summary:
    values: dict[str, Any]

    def to_json(self) -> bytes:
        return json.dumps(self.values, indent=2).encode() + b"\n"


def metric_of(line: dict[str, Any]) -> dict[str, Any] | None:
    """The metric of an evaluated history line: name, value, direction, and the value of the model that is sent."""
    if "metric" in line or "accuracy" not in line:
        return line.get("metric")
    return {"name": "accuracy", "value": line["accuracy"], "higher_is_better": True}  # as version 0.1.0 wrote it


def summarize(history: list[dict[str, Any]], config: Config, state: State) -> Summary:
    """Totals and last values over a history; the metric is the last evaluated one."""
    evaluated = [metric for line in history if (metric := metric_of(line))]
    metric, best = evaluated[-1], max if evaluated[-1]["higher_is_better"] else min
    metric = metric | {"best": best(m["value"] for m in evaluated)}
    rounds = [line for line in history if line["round"] > 0]
    messages = sum(len(line["clients"]) for line in rounds)
    weights = sum(spec.size for spec in state.layout if spec.kind in ("fp8", "float"))
    down, up = (sum(line[key] for line in rounds) for key in ("bytes_down", "bytes_up"))
    values = {
        "preset": config.preset,
        "name": config.name or config.preset,
        "method": config.method,
        "seed": config.seed,
        "rounds": history[-1]["round"],
        "finished": history[-1]["round"] >= config.round.count,
        "metric": metric,
        **({"accuracy": metric["value"], "accuracy_best": metric["best"]} if metric["name"] == "accuracy" else {}),
        "bytes_down": down,
        "bytes_up": up,
        "bytes_total": down + up,
        "bits_per_weight_down": 8 * down / max(messages * weights, 1),
        "bits_per_weight_up": 8 * up / max(messages * weights, 1),
        "parameters": weights,
        "rejected": sum(len(line["rejected"]) for line in rounds),
        "seconds": sum(line["seconds"]["total"] for line in history),
        "cache": history[-1].get("cache"),
        "start": _start(history, down + up),
        "machine": {"cpu": processor(), "python": platform.python_version()},
        "date": datetime.now(UTC).date().isoformat(),
    }
    return Summary(values)


def _start(history: list[dict[str, Any]], total: int) -> dict[str, Any] | None:
    """Bytes that clients did not need because they built the initial model themselves, apart from those they did."""
    if (each := history[0].get("start_bytes")) is None:
        return None
    clients = len({client for line in history for client in line["clients"]})
    return {"clients": clients, "bytes_each": each, "bytes_total_if_sent": total + clients * each}
