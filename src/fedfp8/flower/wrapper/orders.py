"""What the server tells `fp8_mod`, and what it tells back: a ConfigRecord ``fedfp8`` that the app never sees.

The server decides everything, so the mod needs no arguments and the two sides cannot disagree. Down: the uplink's
coding and, for every ArrayRecord, the dice of the reply. Up: which models were received and kept, or that a reference
was lost.
"""

from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord

from fedfp8.errors import WireFormatError
from fedfp8.flower.wrapper.arrays import Wire
from fedfp8.fp8 import Format

__all__ = ["RECORD", "Orders"]

RECORD = "fedfp8"


@dataclass(frozen=True)
class Orders:
    """The server's orders for one message."""

    wire: Wire
    step: float  # kappa of the uplink; used if dithered
    lossless: bool
    cache: bool
    number: int  # counts the server's models, so that the client's cache knows old from new
    seeds: dict[str, int] = field(default_factory=dict)  # ArrayRecord -> dice of its reply

    def to_record(self) -> ConfigRecord:
        values: dict[str, Any] = {
            "rounding": self.wire.rounding,
            "format": self.wire.format.name,
            "step": self.step,
            "lossless": self.lossless,
            "cache": self.cache,
            "number": self.number,
            "records": list(self.seeds),
            "seeds": list(self.seeds.values()),
        }
        return ConfigRecord(values | ({"coded": list(self.wire.coded)} if self.wire.coded else {}))

    @classmethod
    def from_record(cls, record: ConfigRecord) -> "Orders":
        try:
            told: dict[str, Any] = dict(record)
            wire = Wire(told["rounding"], Format.parse(told["format"]), tuple(told.get("coded", ())))
            seeds = dict(zip(told["records"], told["seeds"], strict=True))
            return cls(wire, told["step"], told["lossless"], told["cache"], told["number"], seeds)
        except (KeyError, TypeError, ValueError) as error:
            raise WireFormatError(
                f"the server's orders cannot be read ({error}); use the same fedfp8 on both sides"
            ) from None
