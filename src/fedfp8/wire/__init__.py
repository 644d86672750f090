"""The wire format: a QuantState as bytes and back, losslessly. Specified in docs/wire-format.md.

Knows layouts and quantized states, nothing of networks. Everything here is deterministic: equal input, equal bytes.
"""

from fedfp8.wire.container import CHECKSUM, VERSION, Header, header
from fedfp8.wire.inspection import Inspection, inspect
from fedfp8.wire.message import decode, encode

__all__ = ["CHECKSUM", "VERSION", "Header", "Inspection", "decode", "encode", "header", "inspect"]
