"""The run folder: config.toml, history.jsonl, summary.json, checkpoint/.

Written so that a crash at any moment loses at most the round in progress.

After a round the server's model is written under the round's name, its history line is appended, and then state.json is
replaced in one step: it names the model file and the length of the history, so whatever a crash left behind it is
ignored.
"""

import fcntl
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedfp8.errors import RunError
from fedfp8.fl.broadcast import Server
from fedfp8.fl.config import Config, from_dict, to_dict
from fedfp8.fl.store import ModelStore, read_state, write_atomic, write_state

__all__ = ["RunFolder", "read_config"]


def read_config(path: Path) -> Config:
    """A Config from a TOML file."""
    try:
        return from_dict(tomllib.loads(path.read_text()))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise RunError(f"{path} cannot be read as a config: {error}") from None


@dataclass
class RunFolder:
    path: Path

    @classmethod
    def create(cls, path: Path, config: Config, *, overwrite: bool = False) -> "RunFolder":
        """A new run folder; an old run in it is only replaced if `overwrite`."""
        if (path / "config.toml").exists() and not overwrite:
            raise RunError(
                f"{path} holds a run already; continue it with `fedfp8 resume {path}`, choose another --out, or "
                "replace it with --overwrite"
            )
        folder = cls(path)
        path.mkdir(parents=True, exist_ok=True)
        folder.lock()
        for stale in ("history.jsonl", "summary.json", "checkpoint/state.json"):
            (path / stale).unlink(missing_ok=True)
        write_atomic(path / "config.toml", tomli_w.dumps(to_dict(config)).encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        if not (path / "config.toml").exists():
            raise RunError(f"{path} is not a run folder (no config.toml); start one with `fedfp8 run --out {path}`")
        folder = cls(path)
        folder.lock()
        return folder

    def lock(self) -> None:
        """Two runs in one folder would destroy each other's files."""
        self._lock = open(self.path / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"{self.path} is in use by another fedfp8 process; wait for it or stop it") from None

    @property
    def config(self) -> Config:
        return read_config(self.path / "config.toml")

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def store(self) -> ModelStore:
        return ModelStore(self.checkpoint / "sent")

    @property
    def model_path(self) -> Path:
        """Where the model under evaluation is put for the workers."""
        return self.checkpoint / "evaluate.safetensors"

    def save(self, server: Server, line: dict[str, Any] | None) -> None:
        """Commit a round: model, history line, then the one file that makes both count."""
        self.checkpoint.mkdir(exist_ok=True)
        model = f"server-{server.round:06d}.safetensors"
        write_state(self.checkpoint / model, server.state)
        with open(self.path / "history.jsonl", "ab") as history:
            if line is not None:
                history.write(json.dumps(line).encode() + b"\n")
            history.flush()
            length = history.tell()
        state = {
            "round": server.round,
            "model": model,
            "history_bytes": length,
            "received": {str(k): f.hex() for k, f in server.received.items()},
            "sent": {f.hex(): r for f, r in server.sent.items()},
        }
        write_atomic(self.checkpoint / "state.json", json.dumps(state).encode())
        self.store.keep_only(server.sent)
        for old in self.checkpoint.glob("server-*.safetensors*"):
            if old.name != model:
                old.unlink()

    def load(self) -> Server | None:
        """The server as last saved, with the history cut to match; None if no round was saved yet."""
        path = self.checkpoint / "state.json"
        if not path.exists():
            return None
        try:
            state = json.loads(path.read_text())
            received = {int(k): bytes.fromhex(f) for k, f in state["received"].items()}
            sent = {bytes.fromhex(f): r for f, r in state["sent"].items()}
            round_, model, length = state["round"], state["model"], state["history_bytes"]
        except (ValueError, KeyError, AttributeError) as error:
            raise RunError(f"{path} is damaged: {error}; start the run anew with --overwrite") from None
        with open(self.path / "history.jsonl", "ab") as history:
            history.truncate(length)
        store = self.store
        sent = {f: r for f, r in sent.items() if store.path(f).exists()}
        return Server(round_, read_state(self.checkpoint / model), received, sent)

    def history(self) -> list[dict[str, Any]]:
        path = self.path / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
