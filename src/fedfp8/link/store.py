"""Models on disk: safetensors with their layout, written whole or not at all, and checked when read.

And messages in somebody else's memory, about a byte a weight: larger than a payload, and ten times faster.
"""

import hashlib
import json
import os
import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fedfp8.errors import RunError, WireFormatError
from fedfp8.fp8.many import hashed_sum_many
from fedfp8.model.layout import Layout
from fedfp8.model.quantized import QuantState
from fedfp8.model.state import State

__all__ = ["narrow_codes", "pack_message", "read_state", "unpack_message", "write_atomic", "write_state"]

DAMAGED = "what was kept of the last model is damaged; it counts as lost"
HOW = ("rounding", "seed", "place", "strata", "change", "together", "frequencies")  # of a message
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
    if fingerprint is not None and state.quick_fingerprint != fingerprint:
        raise RunError(f"{path} is damaged: its values are not those saved; restore it, or start the run anew")
    return state


def narrow_codes(q: QuantState) -> QuantState:
    """The same message with codes in the narrowest integers: about a byte a weight."""
    return replace(q, codes={n: _narrow(codes) if codes.dtype == WIDTHS[-1] else codes for n, codes in q.codes.items()})


def pack_message(q: QuantState, fingerprint: bytes) -> bytes:
    """A message as bytes that need no reference, for `unpack_message` on the same machine.

    fingerprint: of the values it stands for, so that they need not be made to find out.
    """
    tensors = [q.rest[spec.name] if spec.name in q.rest else q.codes[spec.name] for spec in q.form]
    tensors = [tensor.contiguous().view(-1) for tensor in tensors]
    meta = {
        "layout": q.layout.to_bytes().decode(), "steps": {n: s.hex() for n, s in q.steps.items()},
        "rest": list(q.rest), "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "sums": hashed_sum_many(tensors).tolist(), "fingerprint": fingerprint.hex(),
    } | {key: getattr(q, key) for key in HOW}  # fmt: skip
    text = json.dumps(meta, separators=(",", ":")).encode()
    head = len(text).to_bytes(4, "little") + text
    parts = [tensor.view(torch.uint8).numpy().data if tensor.numel() else b"" for tensor in tensors]
    return b"".join([_checksum(head), head, *parts])


def _checksum(head: "bytes | memoryview") -> bytes:
    """Of what says how to read the rest, which has sums of its own."""
    return hashlib.blake2b(head, digest_size=8).digest()


def _narrow(codes: torch.Tensor) -> torch.Tensor:
    from fedfp8.fp8 import kernels

    for width in WIDTHS[:-1]:
        small = torch.empty(codes.shape, dtype=width)
        if kernels.narrow(codes.numpy(), small.numpy()):
            return small
    return codes


def unpack_message(data: bytes) -> tuple[QuantState, bytes]:
    """(a message that `narrow_codes` made, the fingerprint of its values); its tensors are views of `data`."""
    try:
        return _unpacked(data)
    except (KeyError, TypeError, ValueError, AttributeError):  # kept by another fedfp8
        raise WireFormatError(DAMAGED) from None


def _unpacked(data: bytes) -> tuple[QuantState, bytes]:
    body = memoryview(data)[8:]
    position = 4 + int.from_bytes(body[:4], "little")
    if _checksum(body[:position]) != data[:8]:
        raise WireFormatError(DAMAGED)
    meta = json.loads(bytes(body[4:position]))
    layout, rest = _layout(meta["layout"]), set(meta["rest"])
    steps = {name: float.fromhex(step) for name, step in meta["steps"].items()}
    q = QuantState(layout, steps=steps, **{key: meta[key] for key in HOW})
    everything, tensors = _bytes(body), []
    for spec, name in zip(q.form, meta["dtypes"], strict=True):
        dtype = getattr(torch, name)
        end = position + spec.size * dtype.itemsize
        if end > len(body):
            raise WireFormatError(DAMAGED)
        part = everything[position:end]
        aligned = part.storage_offset() % dtype.itemsize == 0 == part.data_ptr() % dtype.itemsize
        tensors.append((part if aligned else part.clone()).view(dtype))
        if spec.name in rest:
            q.rest[spec.name] = tensors[-1].view(spec.shape)
        else:
            q.codes[spec.name] = tensors[-1]
        position = end
    if hashed_sum_many(tensors).tolist() != meta["sums"]:
        raise WireFormatError(DAMAGED)
    return q, bytes.fromhex(meta["fingerprint"])


def _bytes(data: memoryview) -> torch.Tensor:
    """Bytes that nobody writes to, as a tensor: torch has none that must not be written to, and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.frombuffer(data, dtype=torch.uint8)


@lru_cache(maxsize=8)
def _layout(text: str) -> Layout:
    return Layout.from_bytes(text.encode())
