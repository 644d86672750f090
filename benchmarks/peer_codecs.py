"""The wires that benchmarks/peers.py compares: what a user would take instead of us, and ours.

A `Codec` turns a vector of float32 weights into bytes and back; the receiver knows the model's shapes, nothing else. A
`Peer` is a codec for each direction. The peers' codecs are written here from their papers, in numpy: their bytes are
exact, their speeds are those of this code. zlib, bz2, zstandard and NNCodec are the real ones.
"""

import bz2
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from unittest.mock import MagicMock

import numpy as np
import torch

from fedfp8 import ClientLink, ServerLink
from fedfp8.fl.aggregate import WeightedMean
from fedfp8.fl.config import ServerConfig
from fedfp8.fl.server_opt import server_optimize
from fedfp8.link.arrays import fp8_part, ranges_of, tensors_of
from fedfp8.model.state import State
from fedfp8.rng import derive_seed

__all__ = ["OURS", "WIRES", "Codec", "Fitted", "Ours", "Peer", "Shapes", "Vector", "tensors", "vector"]

Vector = np.ndarray  # all float32 weights of a model, one after the other
Shapes = dict[str, tuple[int, ...]]
OURS = "DQ (ours)"  # what peers are compared with: without a shared start, as they have none


def vector(state: dict[str, torch.Tensor]) -> Vector:
    return torch.cat([tensor.detach().reshape(-1) for tensor in state.values()]).numpy()


def tensors(x: Vector, shapes: Shapes) -> dict[str, torch.Tensor]:
    pieces = torch.from_numpy(np.array(x)).split([int(np.prod(shape)) for shape in shapes.values()])
    return {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


# Codecs


class Codec:
    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.n = sum(int(np.prod(shape)) for shape in shapes.values())

    def encode(self, x: Vector, seed: int) -> bytes:
        raise NotImplementedError

    def decode(self, data: bytes) -> Vector:
        raise NotImplementedError


class Float32(Codec):
    def encode(self, x: Vector, seed: int) -> bytes:
        return x.astype("<f4").tobytes()

    def decode(self, data: bytes) -> Vector:
        return np.frombuffer(data, "<f4")


class Float16(Codec):
    def encode(self, x: Vector, seed: int) -> bytes:
        return x.astype("<f2").tobytes()

    def decode(self, data: bytes) -> Vector:
        return np.frombuffer(data, "<f2").astype(np.float32)


class Zlib(Float32):
    """Any lossless compressor of the float32 bytes."""

    compress: Callable[[bytes], bytes] = staticmethod(zlib.compress)
    decompress: Callable[[bytes], bytes] = staticmethod(zlib.decompress)

    def encode(self, x: Vector, seed: int) -> bytes:
        return self.compress(super().encode(x, seed))

    def decode(self, data: bytes) -> Vector:
        return super().decode(self.decompress(data))


class Bz2(Zlib):
    compress, decompress = staticmethod(bz2.compress), staticmethod(bz2.decompress)


class Zstandard(Zlib):
    def __init__(self, shapes: Shapes) -> None:
        import zstandard

        super().__init__(shapes)
        self.compress, self.decompress = zstandard.compress, zstandard.decompress


class Int8(Codec):
    """Nearest of 255 levels in blocks of 4096, each with its largest value as a float32."""

    block = 4096

    def encode(self, x: Vector, seed: int) -> bytes:
        rows = blocks(x, self.block)
        scale = np.abs(rows).max(1).astype("<f4")
        codes = np.rint(rows * (127 / np.where(scale > 0, scale, 1))[:, None]).astype(np.int8)
        return scale.tobytes() + codes.tobytes()[: self.n]

    def decode(self, data: bytes) -> Vector:
        scale = np.frombuffer(data, "<f4", -(-self.n // self.block))
        rows = blocks(np.frombuffer(data, np.int8, offset=scale.nbytes), self.block)
        return (rows * (scale / 127)[:, None]).ravel()[: self.n].astype(np.float32)


class Qsgd(Codec):
    """QSGD (Alistarh et al. 2017) with 4 bits: a sign and stochastic rounding to one of 8 levels, in blocks of 512 that
    are scaled by their largest value, as in the paper's experiments. Packed plainly, two weights a byte."""

    block, levels = 512, 7

    def encode(self, x: Vector, seed: int) -> bytes:
        rows = blocks(x, self.block)
        scale = np.abs(rows).max(1).astype("<f4")
        draw = np.random.default_rng(seed).random(rows.shape, np.float32)
        level = np.floor(np.abs(rows) * (self.levels / np.where(scale > 0, scale, 1))[:, None] + draw)
        codes = np.minimum(level, self.levels).astype(np.uint8) | (rows < 0).astype(np.uint8) << 3
        return scale.tobytes() + pack(codes.ravel()[: self.n], 4)

    def decode(self, data: bytes) -> Vector:
        scale = np.frombuffer(data, "<f4", -(-self.n // self.block))
        codes = blocks(unpack(data[scale.nbytes :], 4, self.n), self.block)
        value = np.where(codes & 8, -1.0, 1.0) * (codes & 7) * (scale / self.levels)[:, None]
        return value.ravel()[: self.n].astype(np.float32)


class Drive(Codec):
    """DRIVE (Vargaftik et al. 2021; EDEN at 1 bit is the same): random signs and a Hadamard transform in blocks, then a
    sign bit a coordinate and a float32 scale a block, |x|² / |Rx|_1, that makes the estimate unbiased. The seed of the
    rotation travels along."""

    block = 1024

    def encode(self, x: Vector, seed: int) -> bytes:
        rows = blocks(x, self.block)
        turned = hadamard(rows * self._signs(rows.shape, seed))
        size = np.abs(turned).sum(1)
        scale = (np.square(rows, dtype=np.float64).sum(1) / np.where(size > 0, size, 1)).astype("<f4")
        return seed.to_bytes(8, "little") + scale.tobytes() + np.packbits(turned < 0).tobytes()

    def decode(self, data: bytes) -> Vector:
        scale = np.frombuffer(data, "<f4", -(-self.n // self.block), offset=8)
        bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=8 + scale.nbytes)).reshape(len(scale), self.block)
        rows = hadamard((1.0 - 2.0 * bits) * scale[:, None])
        return (rows * self._signs(rows.shape, int.from_bytes(data[:8], "little"))).ravel()[: self.n].astype(np.float32)

    def _signs(self, shape: tuple[int, ...], seed: int) -> Vector:
        return 1.0 - 2.0 * np.random.default_rng(seed).integers(0, 2, shape)


class TopK(Codec):
    """The 1 % largest: their places in as few whole bits as the model needs, and their float32 values."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__(shapes)
        self.k, self.width = max(1, self.n // 100), (self.n - 1).bit_length()

    def encode(self, x: Vector, seed: int) -> bytes:
        places = np.sort(np.argpartition(np.abs(x), -self.k)[-self.k :])
        return x[places].astype("<f4").tobytes() + pack(places, self.width)

    def decode(self, data: bytes) -> Vector:
        found = np.zeros(self.n, np.float32)
        found[unpack(data[4 * self.k :], self.width, self.k)] = np.frombuffer(data, "<f4", self.k)
        return found


class NNCodec(Codec):
    """ISO/IEC 15938-17 in Fraunhofer HHI's implementation, with its default settings but for qp: a step of 2^(qp / 4).

    It imports torchvision, cv2 and h5py for its example applications; its codec uses none of them.
    """

    def __init__(self, shapes: Shapes, qp: int = -32) -> None:
        import nncodec  # noqa: F401  an ImportError, where it is missing, before the placeholders

        for name in ("torchvision", "cv2", "h5py"):
            if name not in sys.modules and find_spec(name) is None:
                sys.modules[name] = MagicMock()
        from nncodec import nn as codec

        super().__init__(shapes)
        self.codec, self.settings = codec, {"qp": qp, "verbose": False}

    def encode(self, x: Vector, seed: int) -> bytes:
        named = {name: t.numpy().copy() for name, t in tensors(x, self.shapes).items()}
        with tempfile.TemporaryDirectory() as folder:  # it also writes what it returns
            return bytes(self.codec.encode(named, self.settings | {"results": folder}))

    def decode(self, data: bytes) -> Vector:
        found = self.codec.decode(bytearray(data), self.settings)
        return np.concatenate([np.asarray(found[name], np.float32).ravel() for name in self.shapes])


def blocks(x: Vector, size: int) -> Vector:
    """As rows of `size`, the last filled up with zeros."""
    return np.pad(x, (0, -len(x) % size)).reshape(-1, size)


def pack(values: Vector, width: int) -> bytes:
    """Integers of `width` bits, one after the other."""
    bits = values[:, None] >> np.arange(width, dtype=values.dtype) & 1
    return np.packbits(bits.astype(np.uint8)).tobytes()


def unpack(data: bytes, width: int, count: int) -> Vector:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count * width).reshape(count, width)
    return bits @ (1 << np.arange(width, dtype=np.int64))


def hadamard(rows: Vector) -> Vector:
    """The orthonormal Walsh-Hadamard transform of each row; its own inverse."""
    size, half = rows.shape[1], 1
    while half < size:
        pairs = rows.reshape(len(rows), -1, 2, half)
        rows = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(rows.shape)
        half *= 2
    return rows / np.sqrt(size)


# Wires: both directions of a round


class Peer:
    """The model down with one codec, the client's change (change=False: its model) up with another.

    feedback: a client keeps what the codec lost of its change and adds it to its next one.
    """

    def __init__(self, down: Codec, up: Codec, *, change: bool = True, feedback: bool = False) -> None:
        self.codecs, self.change, self.feedback = (down, up), change, feedback
        self.lost: dict[int, Vector] = defaultdict(lambda: np.zeros(up.n, np.float32))

    def open(self, model: Vector, cohort: list[int], seed: int) -> None:
        """A round begins; what follows is of it."""
        self.model, self.seed = model, seed

    def down(self, client: int) -> bytes:
        return self.codecs[0].encode(self.model, derive_seed(self.seed, "down", client))

    def read_down(self, data: bytes, client: int) -> Vector:
        return self.codecs[0].decode(data)

    def up(self, local: Vector, received: Vector, client: int) -> bytes:
        value = local - received if self.change else local
        if self.feedback:
            value = value + self.lost[client]
        data = self.codecs[1].encode(value, derive_seed(self.seed, "up", client))
        if self.feedback:
            self.lost[client] = value - self.codecs[1].decode(data)
        return data

    def read_up(self, data: bytes, client: int) -> Vector:
        """What the server averages: the client's model, where it sent its change as seen from the server's."""
        value = self.codecs[1].decode(data)
        return self.model + value if self.change else value

    def close(self, mean: Vector, sizes: dict[int, int]) -> Vector:
        """The server's next model, made of the mean of what the clients sent; sizes: of their data."""
        return mean


class Ours(Peer):
    """`ServerLink` and a `ClientLink` for each client, as a user has them."""

    def __init__(self, shapes: Shapes, wire: str, start: Vector | None = None, history: int = 40) -> None:
        self.shapes = shapes
        given = None if start is None else tensors(start, shapes)
        self.server = ServerLink(wire, seed=0, start=given, history=history)
        self.clients: dict[int, ClientLink] = defaultdict(lambda: ClientLink(start=given))

    def open(self, model: Vector, cohort: list[int], seed: int) -> None:
        self.server.open(tensors(model, self.shapes), cohort)

    def down(self, client: int) -> bytes:
        return self.server.message(client)

    def read_down(self, data: bytes, client: int) -> Vector:
        return vector(self.clients[client].receive(data))

    def up(self, local: Vector, received: Vector, client: int) -> bytes:
        return self.clients[client].reply(tensors(local, self.shapes))

    def read_up(self, data: bytes, client: int) -> Vector:
        return vector(self.server.receive(client, data))


class Fitted(Ours):
    """UQ+: UQ, and the server fits weights and ranges to the mean of the clients' models (ServerOptimize)."""

    def open(self, model: Vector, cohort: list[int], seed: int) -> None:
        super().open(model, cohort, seed)
        self.seed, self.replies = seed, dict[int, State]()

    def read_up(self, data: bytes, client: int) -> Vector:
        state = self.server.round.receive(client, data)
        self.replies[client] = fp8_part(state)
        return vector(tensors_of(state))

    def close(self, mean: Vector, sizes: dict[int, int]) -> Vector:
        total = WeightedMean(self.replies[min(sizes)].layout)
        for client, state in self.replies.items():
            total.add(state, sizes[client])
        fitted, _ = server_optimize(total, ServerConfig(optimize=True), derive_seed(self.seed, "server"))
        self.server.ranges = {name: alpha for name, (_, alpha) in ranges_of(fitted).items()}
        return vector(tensors(mean, self.shapes) | tensors_of(fitted))


WIRES: dict[str, Callable[[Shapes, Vector], Peer]] = {
    "FP32": lambda s, w: Peer(Float32(s), Float32(s), change=False),
    "FP16": lambda s, w: Peer(Float16(s), Float16(s)),
    "int8 in blocks": lambda s, w: Peer(Int8(s), Int8(s)),
    "zlib on FP32": lambda s, w: Peer(Zlib(s), Zlib(s), change=False),
    "bz2 on FP32": lambda s, w: Peer(Bz2(s), Bz2(s), change=False),
    "zstandard on FP32": lambda s, w: Peer(Zstandard(s), Zstandard(s), change=False),
    "NNCodec (qp -32, its default)": lambda s, w: Peer(NNCodec(s), NNCodec(s)),
    "NNCodec qp -24, feedback up": lambda s, w: Peer(NNCodec(s, -24), NNCodec(s, -24), feedback=True),
    "NNCodec qp -20, feedback up": lambda s, w: Peer(NNCodec(s, -20), NNCodec(s, -20), feedback=True),
    "NNCodec qp -18, feedback up": lambda s, w: Peer(NNCodec(s, -18), NNCodec(s, -18), feedback=True),
    "NNCodec qp -32 down, -40 and feedback up": lambda s, w: Peer(NNCodec(s), NNCodec(s, -40), feedback=True),
    "NNCodec qp -28 down, -36 and feedback up": lambda s, w: Peer(NNCodec(s, -28), NNCodec(s, -36), feedback=True),
    "QSGD 4 bit up, FP32 down": lambda s, w: Peer(Float32(s), Qsgd(s)),
    "QSGD 4 bit up, FP16 down": lambda s, w: Peer(Float16(s), Qsgd(s)),
    "DRIVE 1 bit up, FP16 down": lambda s, w: Peer(Float16(s), Drive(s)),
    "DRIVE 1 bit up, int8 down": lambda s, w: Peer(Int8(s), Drive(s)),
    "top-k 1 % up, FP16 down": lambda s, w: Peer(Float16(s), TopK(s), feedback=True),
    "UQ (ours)": lambda s, w: Ours(s, "fp8"),
    "UQ+ (ours)": lambda s, w: Fitted(s, "fp8"),
    OURS: lambda s, w: Ours(s, "dq"),
    "DQ with start (ours)": lambda s, w: Ours(s, "dq", start=w),
}
