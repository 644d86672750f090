"""The method on Flower's Ray simulation: the bytes of the embedded engine, round by round."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray")
from fedfp8.fl import preset, run

SAME = ("digest_down", "digest_up", "model", "bytes_down", "bytes_up", "clients", "rejected", "accuracy")


def test_same_bytes_as_embedded(tmp_path):
    """Through the command line, in a process of its own: Ray's threads and handlers stay out of the test process."""
    settings = ["clients.count=4", "clients.fraction=0.5", "local.epochs=1"]
    command = ["flower", "run", "--preset", "digits", "--method", "dq", "--engine", "ray", "--rounds", "3"]
    options = [part for setting in settings for part in ("--set", setting)]
    code = "from fedfp8.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command, *options, "--out", str(tmp_path / "ray")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"RAY_TMPDIR": "/tmp"},  # its sockets have a limit of 107 characters
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = [json.loads(line) for line in (tmp_path / "ray/history.jsonl").read_text().splitlines()]
    config = preset("digits", "dq", clients__count=4, clients__fraction=0.5, local__epochs=1, round__count=3)
    want = run(config).rounds
    assert [{k: line[k] for k in SAME} for line in got] == [{k: line[k] for k in SAME} for line in want]
