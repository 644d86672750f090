"""Models on disk: safetensors with their layout, written whole or not at all, and checked when read."""

import os
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from fedfp8.errors import RunError
from fedfp8.model.layout import Layout
from fedfp8.model.state import State

__all__ = ["read_state", "write_atomic", "write_state"]


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


def read_state(path: Path, fingerprint: bytes | None = None) -> State:
    """The model in a file; with `fingerprint`, refused if its values are not those saved."""
    try:
        with safe_open(path, framework="pt") as file:
            layout = Layout.from_bytes(file.metadata()["layout"].encode())
            state = State(layout, {spec.name: file.get_tensor(spec.name) for spec in layout})
    except Exception as error:  # safetensors raises its own kinds
        raise RunError(f"{path} cannot be read as a model: {error}; restore it or start the run anew") from None
    if fingerprint is not None and state.fingerprint != fingerprint:
        raise RunError(f"{path} is damaged: its values are not those saved; restore it or start the run anew")
    return state
