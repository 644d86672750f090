"""The run folder: config.toml, history.jsonl, summary.json, checkpoint/.

Written so that a crash at any moment loses at most the round in progress.

After a round the server's model is written under the round's name, its history line is appended, and then state.json is
replaced in one step: it names the model file and the length of the history, so whatever a crash left behind it is
ignored.
"""

import fcntl
import json
import os
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfp8.errors import RunError
from fedfp8.fl.config import Config, from_dict
from fedfp8.fl.describe import to_toml
from fedfp8.fl.presets import from_file
from fedfp8.fl.simulate import Server
from fedfp8.link import ServerLink
from fedfp8.link.store import read_state, write_atomic, write_state

__all__ = ["RunFolder", "read_config", "write_config"]


def read_config(path: Path) -> Config:
    """A Config from a TOML file, complete or partial."""
    return from_file(_read_toml(path))


def write_config(path: Path, config: Config) -> None:
    """A complete config with what every setting means; `read_config` takes it again."""
    write_atomic(path, to_toml(config).encode())


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"{path} cannot be read as a config: {reason}; give a TOML file as in a run folder") from None


@dataclass
class RunFolder:
    """One process at a time: `create` and `open` lock the folder until `close`, or the end of the process."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: Config, *, overwrite: bool = False) -> "RunFolder":
        """A new run folder; an old run in it is only replaced if `overwrite`."""
        if not overwrite and any((path / name).exists() for name in ("config.toml", "history.jsonl", "checkpoint")):
            raise RunError(
                f"{path} holds a run already; continue it with `fedfp8 resume {path}`, choose another --out, or "
                "replace it with --overwrite"
            )
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path} cannot be made a run folder: {error.strerror}; choose another --out") from None
        folder.lock()
        # The checkpoint first: it must never point into a history that is gone.
        for stale in ("checkpoint/state.json", "history.jsonl", "summary.json", "sizes.json"):
            (path / stale).unlink(missing_ok=True)
        shutil.rmtree(path / "payloads", ignore_errors=True)
        write_config(path / "config.toml", config)
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        folder = cls(path)
        _ = folder.config  # or an error that says what is wrong with it
        folder.lock()
        return folder

    def lock(self) -> None:
        """Two runs in one folder would destroy each other's files."""
        self._lock = open(self.path / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RunError(f"{self.path} is in use by another fedfp8 process; wait for it or stop it") from None

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def config(self) -> Config:
        if not (self.path / "config.toml").exists():
            raise RunError(
                f"{self.path} is not a run folder (no config.toml); start one with `fedfp8 run --out {self.path}`"
            )
        return from_dict(_read_toml(self.path / "config.toml"))

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def models(self) -> Path:
        """The link's history: the server's models that clients may still hold something made from."""
        return self.checkpoint / "models"

    @property
    def model_path(self) -> Path:
        """Where the model under evaluation is put for the workers."""
        return self.checkpoint / "evaluate.safetensors"

    def save(self, server: Server, link: ServerLink, line: dict[str, Any] | None) -> None:
        """Commit a round: model, history line, then the one file that makes both count."""
        self.checkpoint.mkdir(exist_ok=True)
        model = f"server-{server.round:06d}.safetensors"
        write_state(self.checkpoint / model, server.state)
        with open(self.path / "history.jsonl", "ab") as history:
            if line is not None:
                history.write(json.dumps(line).encode() + b"\n")
            history.flush()
            os.fsync(history.fileno())
            length = history.tell()
        state = {
            "round": server.round,
            "model": model,
            "fingerprint": server.state.fingerprint.hex(),
            "history_bytes": length,
            "link": link.meta(),
        }
        write_atomic(self.checkpoint / "state.json", json.dumps(state).encode())
        link.history.clean()
        for old in self.checkpoint.glob("server-*.safetensors*"):
            if old.name != model:
                old.unlink()

    def load(self, link: ServerLink | None = None) -> Server | None:
        """The server as last saved, and what its link remembers, with the history cut to match; None if nothing was."""
        path, history = self.checkpoint / "state.json", self.path / "history.jsonl"
        if not path.exists():
            history.unlink(missing_ok=True)  # a crash before the first checkpoint
            return None
        try:
            state = json.loads(path.read_text())
            if link is not None:
                link.load_meta(state["link"])
            round_, length = int(state["round"]), int(state["history_bytes"])
            model, fingerprint = self.checkpoint / str(state["model"]), state["fingerprint"]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise RunError(f"{path} is damaged: {error}; start the run anew with --overwrite") from None
        written = read_state(model)
        if written.fingerprint.hex() != fingerprint:
            raise RunError(f"{model} is damaged: its values are not those saved; start the run anew with --overwrite")
        if not history.exists() or history.stat().st_size < length:
            raise RunError(f"{history} is shorter than when it was saved; restore it, or start anew with --overwrite")
        os.truncate(history, length)
        return Server(round_, written)

    def history(self) -> list[dict[str, Any]]:
        path = self.path / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
