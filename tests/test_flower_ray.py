"""The method on Flower's Ray simulation: the bytes of the embedded engine, round by round."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from fedfp8.fl import preset, run

SAME = ("digest_down", "digest_up", "model", "bytes_down", "bytes_up", "clients", "rejected", "metric")
ENVIRONMENT = {
    "RAY_TMPDIR": "/tmp",  # its sockets have a limit of 107 characters
    "RAY_memory_monitor_refresh_ms": "0",  # else it kills its workers where other programs fill the memory
    "RAY_worker_niceness": "0",  # else its workers wait for everything else on the machine
}
TASK = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

def loss(model, batch):
    return mse_loss(model(batch[0]), batch[1])

def make():
    torch.manual_seed(0)
    x = torch.randn(2, 20, 2)
    pairs = [(part, part.sum(1, keepdim=True)) for part in x]
    return {"model": nn.Linear(2, 1), "clients": pairs, "test": pairs[0], "loss": loss, "name": "sums"}
"""


def rounds_on_ray(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Through the command line, in a process of its own: Ray's threads and handlers stay out of the test process."""
    command = ["flower", "run", "--method", "dq", "--engine", "ray", "--out", "ray", *arguments]
    done = subprocess.run(
        [sys.executable, "-c", "from fedfp8.cli import main; main()", *command],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        cwd=folder,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return seen(json.loads(line) for line in (folder / "ray/history.jsonl").read_text().splitlines())


def seen(rounds: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: line[key] for key in SAME} for line in rounds]


def test_same_bytes_as_embedded(tmp_path: Path) -> None:
    settings = ["clients.count=4", "clients.fraction=0.5", "local.epochs=1"]
    options = [part for setting in settings for part in ("--set", setting)]
    got = rounds_on_ray(tmp_path, "--preset", "digits", "--rounds", "3", *options)
    config = preset("digits", "dq", clients__count=4, clients__fraction=0.5, local__epochs=1, round__count=3)
    assert got == seen(run(config).rounds)


def test_a_task_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's actors import it from the folder in which the command was given, as `fedfp8 run --task` does."""
    (tmp_path / "my_ray_task.py").write_text(TASK)
    got = rounds_on_ray(tmp_path, "--task", "my_ray_task:make", "--rounds", "2")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert got == seen(run(preset("own", "dq", round__count=2, task="my_ray_task:make")).rounds)
    assert [line["metric"]["name"] for line in got] == ["loss"] * 3
