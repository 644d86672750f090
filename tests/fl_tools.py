"""What the tests of the engine share: a run that takes a second, and how two histories are compared."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfp8.fl import Config, preset
from fedfp8.fl.client import Assignment, Reply
from fedfp8.fl.federation import Federation, build
from fedfp8.fl.pool import Executor
from fedfp8.fl.simulate import Record, Server, run_round
from fedfp8.fl.wires import server_link
from fedfp8.link import ServerLink
from fedfp8.nn import state_of

TINY = {
    "clients.count": 6, "clients.fraction": 0.5, "local.epochs": 0, "local.steps": 2, "local.batch_size": 10,
    "data.limit": 240, "data.test_limit": 100,
}  # fmt: skip
CLI = [sys.executable, "-c", "from fedfp8.cli import main; main()"]


def tiny(method: str = "uq", rounds: int = 3, **settings: Any) -> Config:
    """Six clients of 40 digits, three a round, two steps each."""
    base = {key.replace(".", "__"): value for key, value in TINY.items()}
    return preset("digits", method, **(base | {"round__count": rounds} | settings))


def own_tiny(method: str = "uq", rounds: int = 3, **settings: Any) -> Config:
    """The same for a test's own model and data."""
    base = {"clients__fraction": 0.5, "local__epochs": 0, "local__steps": 2, "local__batch_size": 10}
    return preset("own", method, **(base | {"round__count": rounds} | settings))


def comparable(rounds: list[dict[str, Any]], *dropped: str) -> list[dict[str, Any]]:
    """A history without what may differ between equal runs."""
    return [{k: v for k, v in line.items() if k not in ("seconds", *dropped)} for line in rounds]


def models(rounds: list[dict[str, Any]]) -> list[Any]:
    """What the lossless stage and the cache must not change."""
    return [(line["model"], line.get("accuracy"), line.get("loss"), line["train_loss"]) for line in rounds]


def command(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """The command line in a process group of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*CLI, *arguments], env=environment, start_new_session=True, **(pipes | options))


def settings_of(**more: Any) -> list[str]:
    """TINY as --set options."""
    return [part for key, value in (TINY | more).items() for part in ("--set", f"{key}={value}")]


class Inline:
    """Workers in this process that let a test see, and spoil, every reply."""

    def __init__(self, config: Config, federation: Federation, folder: Path) -> None:
        self.notes: list[str] = []
        self.executor = Executor(config, federation, folder)
        self.down: list[bytes] = []
        self.up: list[bytes] = []

    def train(self, assignments: Iterator[Assignment]) -> Iterator[Reply]:
        for assignment in assignments:
            self.down.append(assignment.payload)
            reply = self.changed(assignment, self.executor(assignment))
            self.up.append(reply.payload)
            yield reply

    def changed(self, assignment: Assignment, reply: Reply) -> Reply:
        return reply


def start(config: Config, folder: Path, federation: Federation | None = None) -> tuple[Federation, Server, ServerLink]:
    federation = federation or build(config)
    initial = state_of(federation.network(config))
    return federation, Server(0, initial), server_link(config, federation, initial, folder)


def first_assignment(server: Server, link: ServerLink, client: int, cohort: tuple[int, ...] = ()) -> Assignment:
    """What `client` is told in round 1."""
    round = link.open(server.state, cohort or (client,))
    return Assignment(1, client, round.payload(client), round.orders(client))


def rounds_with(
    workers: Inline, config: Config, federation: Federation, server: Server, link: ServerLink, count: int
) -> tuple[Server, list[Record]]:
    records = []
    for _ in range(count):
        server, record = run_round(server, config, federation, workers, link)
        records.append(record)
    return server, records


class Touchy(nn.Module):
    """A network that minds certain inputs: 1000 raises, 2000 ends its process."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = float(x.max())
        if largest == 2000:
            os._exit(9)
        if largest == 1000:
            raise RuntimeError("a value of 1000")
        return self.layer(x)


def own_data(clients: int = 4, examples: int = 12, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, examples, 5, generator=g)
    return [(part, part[:, :3].argmax(1)) for part in x]
