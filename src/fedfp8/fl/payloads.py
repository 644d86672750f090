"""Keeping the messages of a round to look at: RUN/payloads/round-N/{down,up}-clientK.bin, and what they hold.

`Keeper` stands between the round and whoever trains the clients, and sees every message go by. ``tensors.json`` has the
bits per weight of every tensor, each way, as a mean over the messages of the last round that was kept.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedfp8.errors import Fedfp8Error
from fedfp8.fl.client import Assignment, Reply
from fedfp8.fl.config import Config
from fedfp8.fl.federation import FP32
from fedfp8.fl.simulate import Workers
from fedfp8.fl.wires import wire_for
from fedfp8.link.store import write_atomic
from fedfp8.model.frequencies import tensor_of
from fedfp8.model.layout import Layout
from fedfp8.wire import header, inspect

__all__ = ["keep_payloads", "message_layouts", "pick", "write_tensors"]


class Keeper:
    """Workers whose messages of one round are kept in a folder."""

    def __init__(self, workers: Workers, folder: Path, round: int) -> None:
        self.workers, self.folder, self.round, self.notes = workers, folder, round, workers.notes
        self._kept = False  # whether the round now running is the one

    def train(self, assignments: Iterator[Assignment]) -> Iterator[Reply]:
        for reply in self.workers.train(map(self._down, assignments)):
            if self._kept and reply.payload:
                write_atomic(self._path("up", reply.client), reply.payload)
            yield reply

    def _down(self, assignment: Assignment) -> Assignment:
        self._kept = assignment.round == self.round
        if self._kept:
            path = self._path("down", assignment.client)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, assignment.payload)
        return assignment

    def _path(self, way: str, client: int) -> Path:
        return self.folder / f"round-{self.round}" / f"{way}-client{client}.bin"


def keep_payloads(workers: Workers, run: Path, round: int) -> Workers:
    """`workers`, with the messages of `round` kept in RUN/payloads; 0: as they are."""
    return Keeper(workers, run / "payloads", round) if round else workers


def message_layouts(config: Config, layout: Layout) -> list[Layout]:
    """The layouts that messages of a run have: the model's own, and those of links with another format."""
    wire = wire_for(config, config.qat.format if config.prepared else FP32)
    return [layout, wire.layout_down(layout), wire.layout_up(layout)]


def pick(layouts: list[Layout], payload: bytes) -> Layout:
    """The one the message names; the first if it names none of them, so that reading it fails."""
    wanted = header(payload).layout_fingerprint
    return next((layout for layout in layouts if layout.fingerprint == wanted), layouts[0])


def write_tensors(folder: Path, layouts: list[Layout]) -> None:
    """``tensors.json`` of a folder of kept payloads; messages that cannot be read (rejected ones) are left out."""
    rounds = sorted(int(path.name.removeprefix("round-")) for path in folder.glob("round-*"))
    if not rounds:
        return
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {"down": [], "up": []})
    elements: dict[str, int] = {}
    for file in sorted((folder / f"round-{rounds[-1]}").glob("*.bin")):
        try:
            data = file.read_bytes()
            rows = inspect(data, pick(layouts, data)).rows or ()
        except Fedfp8Error:
            continue
        sizes: dict[str, int] = defaultdict(int)
        bits: dict[str, float] = defaultdict(float)
        for row in rows:  # the frequencies of a tensor are one
            sizes[tensor_of(row.name)] += row.elements
            bits[tensor_of(row.name)] += row.elements * row.bits_per_weight
        elements |= sizes
        for name, size in sizes.items():
            found[name][file.name.partition("-")[0]].append(bits[name] / max(size, 1))
    tensors = {
        name: {"elements": elements[name]} | {way: sum(b) / len(b) if b else 0.0 for way, b in bits.items()}
        for name, bits in found.items()
    }
    write_atomic(folder / "tensors.json", json.dumps({"round": rounds[-1], "tensors": tensors}).encode() + b"\n")
