"""Mode raw: every code in the same number of bits, packed low bit first. 8 bits are plain bytes.

FP8 codes take `format.bits` bits. Dithered integers take as few as the largest needs: one byte says how many (0 to 32),
then each integer is stored as zigzag (0, -1, 1, -2, ... become 0, 1, 2, 3, ...).
"""

import numpy as np

from fedfp8.errors import WireFormatError
from fedfp8.wire.kernels import extremes

__all__ = ["pack", "pack_signed", "packed_size", "signed_size", "unpack", "unpack_signed"]


def packed_size(count: int, bits: int) -> int:
    return (count * bits + 7) // 8


def pack(values: np.ndarray, bits: int) -> bytes:
    """uint8 (bits <= 8) or uint32 values below 2**bits."""
    if bits == 8 * values.itemsize:
        return values.tobytes()
    shifts = np.arange(bits, dtype=values.dtype)
    pieces = []
    for start in range(0, values.size, 1 << 16):  # in pieces, as the bits take a byte each for a moment
        piece = values[start : start + (1 << 16)]
        pieces.append(np.packbits((piece[:, None] >> shifts & 1).astype(np.uint8), bitorder="little"))
    return b"".join(p.tobytes() for p in pieces)


def unpack(data: memoryview, count: int, bits: int, dtype: type) -> np.ndarray:
    if len(data) != packed_size(count, bits):
        raise WireFormatError(f"{len(data)} bytes do not hold {count} codes of {bits} bits")
    out: np.ndarray = np.zeros(count, dtype=dtype)
    if bits == 8 * out.itemsize:
        out[:] = np.frombuffer(data, dtype=dtype, count=count)
        return out
    shifts: np.ndarray = np.arange(bits, dtype=dtype)
    for start in range(0, count, 1 << 16):
        here = min(1 << 16, count - start)
        first = start * bits // 8
        raw = np.frombuffer(data, np.uint8, packed_size(here, bits), first)
        one = np.unpackbits(raw, count=here * bits, bitorder="little").reshape(here, bits)
        out[start : start + here] = np.bitwise_or.reduce(one.astype(dtype) << shifts, axis=1) if bits else 0
    if count * bits % 8 and np.frombuffer(data, np.uint8)[-1] >> (count * bits % 8):
        raise WireFormatError("the unused bits of the last byte are not 0; the message is damaged")
    return out


def signed_size(count: int, low: int, high: int) -> int:
    """Length of ``pack_signed`` of so many integers between two others."""
    return 1 + packed_size(count, _signed_bits(low, high))


def _signed_bits(low: int, high: int) -> int:
    return max(2 * high, -2 * low - 1).bit_length()


def pack_signed(k: np.ndarray) -> bytes:
    bits = _signed_bits(*extremes(k))
    zigzag = (k.astype(np.int64) << 1 ^ k.astype(np.int64) >> 63).astype(np.uint32)
    return bytes([bits]) + pack(zigzag, bits)


def unpack_signed(data: memoryview, count: int) -> np.ndarray:
    bits = data[0] if len(data) else 255
    if bits > 32:
        raise WireFormatError(f"raw integers of {bits} bits; at most 32 are possible; the message is damaged")
    zigzag = unpack(data[1:], count, bits, np.uint32)
    return (zigzag >> 1).astype(np.int32) ^ -(zigzag & 1).astype(np.int32)
