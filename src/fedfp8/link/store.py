"""Models on disk: safetensors with their layout, written whole or not at all, and checked when read.

And messages in somebody else's memory, about a byte a weight: larger than a payload, and ten times faster.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fedfp8.errors import RunError, WireFormatError
from fedfp8.model.layout import Layout
from fedfp8.model.state import QuantState, State

__all__ = ["pack_message", "read_state", "unpack_message", "write_atomic", "write_state"]

DAMAGED = "what was kept of the last model is damaged; it counts as lost"
WIDTHS = (torch.int8, torch.int16, torch.int32)  # of the codes of a tensor: the first that holds them all


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


def pack_message(q: QuantState) -> bytes:
    """A message as bytes that need no reference, for `unpack_message` on the same machine."""
    parts, widths = [], []
    for spec in q.layout:
        tensor = q.rest[spec.name] if spec.name in q.rest else q.codes[spec.name]
        if spec.name in q.codes and tensor.dtype == torch.int32:
            tensor = _narrow(tensor)
        widths.append(str(tensor.dtype).removeprefix("torch."))
        parts.append(tensor.contiguous().view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    meta = {
        "layout": q.layout.to_bytes().decode(), "rounding": q.rounding, "seed": q.seed, "place": q.place,
        "strata": q.strata, "steps": {n: s.hex() for n, s in q.steps.items()}, "rest": list(q.rest), "dtypes": widths,
    }  # fmt: skip
    text = json.dumps(meta, separators=(",", ":")).encode()
    head = len(text).to_bytes(4, "little") + text
    return b"".join([_checksum(head), head, *parts])


def _checksum(head: "bytes | memoryview") -> bytes:
    """Of what says how to read the rest. The values have their fingerprint: a model that is damaged is another one."""
    return hashlib.blake2b(head, digest_size=8).digest()


def _narrow(codes: torch.Tensor) -> torch.Tensor:
    from fedfp8.fp8 import kernels

    for width in WIDTHS[:-1]:
        small = torch.empty(codes.shape, dtype=width)
        if kernels.narrow(codes.numpy(), small.numpy()):
            return small
    return codes


def unpack_message(data: bytes) -> QuantState:
    body = memoryview(data)[8:]
    position = 4 + int.from_bytes(body[:4], "little")
    if _checksum(body[:position]) != data[:8]:
        raise WireFormatError(DAMAGED)
    meta = json.loads(bytes(body[4:position]))
    layout, rest = Layout.from_bytes(meta["layout"].encode()), set(meta["rest"])
    steps = {name: float.fromhex(step) for name, step in meta["steps"].items()}
    q = QuantState(layout, meta["rounding"], meta["seed"], steps=steps, place=meta["place"], strata=meta["strata"])
    for spec, name in zip(layout, meta["dtypes"], strict=True):
        dtype = getattr(torch, name)
        end = position + spec.size * dtype.itemsize
        if end > len(body):
            raise WireFormatError(DAMAGED)
        values = np.frombuffer(body[position:end], np.uint8)
        if spec.name in rest:
            q.rest[spec.name] = torch.from_numpy(values.view(name).copy()).view(spec.shape)
        elif dtype in WIDTHS:
            q.codes[spec.name] = torch.from_numpy(values.view(name).astype(np.int32))
        else:
            q.codes[spec.name] = torch.from_numpy(values.copy())
        position = end
    return q
