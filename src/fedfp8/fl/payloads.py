"""Keeping the messages of a round to look at: RUN/payloads/round-N/{down,up}-clientK.bin, and what they hold.

`Keeper` stands between the round and whoever trains the clients, and sees every message go by. ``tensors.json`` has the
bits per weight of every tensor, each way, as a mean over the messages of the last round that was kept.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from fedfp8.errors import Fedfp8Error
from fedfp8.fl.client import Reply, Task
from fedfp8.fl.simulate import Workers
from fedfp8.fl.store import write_atomic
from fedfp8.model.layout import Layout
from fedfp8.wire import inspect

__all__ = ["Keeper", "write_tensors"]


class Keeper:
    """Workers whose messages of the given rounds are kept in a folder."""

    def __init__(self, workers: Workers, folder: Path, rounds: Collection[int]) -> None:
        self.workers, self.folder, self.rounds, self.notes = workers, folder, rounds, workers.notes

    def train(self, tasks: Iterator[Task]) -> Iterator[Reply]:
        kept: list[int] = []  # the round, once a task has said so
        for reply in self.workers.train(self._down(tasks, kept)):
            if kept and reply.payload:
                write_atomic(self._path(kept[0], "up", reply.client), reply.payload)
            yield reply

    def _down(self, tasks: Iterator[Task], kept: list[int]) -> Iterator[Task]:
        for task in tasks:
            if task.round in self.rounds:
                kept[:] = [task.round]
                path = self._path(task.round, "down", task.client)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, task.payload)
            yield task

    def _path(self, round: int, way: str, client: int) -> Path:
        return self.folder / f"round-{round}" / f"{way}-client{client}.bin"


def write_tensors(folder: Path, layout: Layout) -> None:
    """``tensors.json`` of a folder of kept payloads; messages that cannot be read (rejected ones) are left out."""
    rounds = sorted(int(path.name.removeprefix("round-")) for path in folder.glob("round-*"))
    if not rounds:
        return
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {"down": [], "up": []})
    elements: dict[str, int] = {}
    for file in sorted((folder / f"round-{rounds[-1]}").glob("*.bin")):
        try:
            rows = inspect(file.read_bytes(), layout).rows or ()
        except Fedfp8Error:
            continue
        for row in rows:
            elements[row.name] = row.elements
            found[row.name][file.name.partition("-")[0]].append(row.bits_per_weight)
    tensors = {
        name: {"elements": elements[name]} | {way: sum(b) / len(b) if b else 0.0 for way, b in bits.items()}
        for name, bits in found.items()
    }
    write_atomic(folder / "tensors.json", json.dumps({"round": rounds[-1], "tensors": tensors}).encode() + b"\n")
