"""Models on disk: safetensors with their layout, written whole or not at all.

`ModelStore` is the folder of models that were sent and that clients may still hold. In a simulation it stands for the
disks of all clients at once: every client of a round received the same values, so one file serves them all.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from fedfp8.errors import RunError
from fedfp8.model.layout import Layout
from fedfp8.model.state import State

__all__ = ["ModelStore", "read_state", "write_atomic", "write_state"]


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: readers see the old file or the new one, also after a crash."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_state(path: Path, state: State, *, sync: bool = True) -> None:
    temporary = path.with_name(path.name + ".tmp")
    save_file(state.tensors, temporary, metadata={"layout": state.layout.to_bytes().decode()})
    if sync:
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
    os.replace(temporary, path)


def read_state(path: Path) -> State:
    try:
        with safe_open(path, framework="pt") as file:
            layout = Layout.from_bytes(file.metadata()["layout"].encode())
            return State(layout, {spec.name: file.get_tensor(spec.name) for spec in layout})
    except Exception as error:  # safetensors raises its own kinds
        raise RunError(f"{path} cannot be read as a model: {error}; restore it or start the run anew") from None


class ModelStore:
    """Sent models by fingerprint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._recent: dict[bytes, State] = {}
        self._received: State | None = None

    def path(self, fingerprint: bytes) -> Path:
        return self.folder / f"{fingerprint.hex()}.safetensors"

    def get(self, fingerprint: bytes) -> State | None:
        if self._received is not None and self._received.fingerprint == fingerprint:
            return self._received
        if fingerprint not in self._recent:
            path = self.path(fingerprint)
            if not path.exists():
                return None
            if len(self._recent) >= 2:
                self._recent.pop(next(iter(self._recent)))
            state = read_state(path)
            if state.fingerprint != fingerprint:
                raise RunError(f"{path} is damaged: its values are not those saved; restore it or start the run anew")
            self._recent[fingerprint] = state
        return self._recent[fingerprint]

    def save(self, state: State) -> None:
        if not self.path(state.fingerprint).exists():
            write_state(self.path(state.fingerprint), state, sync=False)

    def put(self, client: int, state: State) -> None:
        """A client keeps what it received. The server saved the same values already; this only spares reading them."""
        self._received = state

    def keep_only(self, fingerprints: Iterable[bytes]) -> None:
        kept = {self.path(f).name for f in fingerprints}
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def size(self, fingerprints: Iterable[bytes]) -> int:
        """Bytes on disk of these models."""
        return sum(self.path(f).stat().st_size for f in fingerprints)
