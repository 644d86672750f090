"""Small floating-point formats: sign, exponent and mantissa bits, every code finite.

A format with e exponent and m mantissa bits has codes ``sign | exponent | mantissa`` in the low bits of a byte.
Exponent 0 holds the subnormals; no code is spent on Inf or NaN, so the largest exponent holds ordinary numbers and
the standard grid of E4M3 ends at 480, not 448. A range ``alpha`` scales the whole grid by ``alpha / top``: the paper's
real-valued exponent bias b is ``2**e - log2(alpha) + log2(2 - 2**-m) - 1`` (section 3.3), alpha the largest magnitude.
"""

import re
from dataclasses import dataclass

import torch

__all__ = ["E3M4", "E4M3", "E5M2", "Format"]


@dataclass(frozen=True)
class Format:
    """Sign + `exponent_bits` (2 to 5) + `mantissa_bits`, 4 to 8 bits in total."""

    exponent_bits: int
    mantissa_bits: int

    def __post_init__(self) -> None:
        e, m = self.exponent_bits, self.mantissa_bits
        if not (isinstance(e, int) and isinstance(m, int)) or not 2 <= e <= 5 or m < 0 or not 4 <= 1 + e + m <= 8:
            raise ValueError(
                f"Format({e!r}, {m!r}): exponent_bits must be 2 to 5, mantissa_bits >= 0, and sign + exponent + "
                "mantissa 4 to 8 bits in total; e.g. Format(4, 3) or Format(2, 1)"
            )

    @classmethod
    def parse(cls, name: str) -> "Format":
        """``Format.parse("E4M3")``; the inverse of :attr:`name`."""
        match = re.fullmatch(r"[eE](\d+)[mM](\d+)", name)
        if match is None:
            raise ValueError(f"format {name!r} is not of the form 'E4M3' (exponent bits, mantissa bits)")
        return cls(int(match[1]), int(match[2]))

    @property
    def name(self) -> str:
        return f"E{self.exponent_bits}M{self.mantissa_bits}"

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """Exponent bias of the standard grid (the one whose range is :attr:`top`)."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def top(self) -> float:
        """Largest magnitude of the standard grid: 480 for E4M3."""
        return 2.0 ** (2**self.exponent_bits - 1 - self.bias) * (2 - 2.0**-self.mantissa_bits)

    def grid(self) -> torch.Tensor:
        """Values of all ``2**bits`` codes on the standard grid, float64, indexed by code (code for -0 included)."""
        code = torch.arange(2**self.bits, dtype=torch.int64)
        mantissa = (code & (2**self.mantissa_bits - 1)).double()
        exponent = (code >> self.mantissa_bits) & (2**self.exponent_bits - 1)
        unit = torch.pow(2.0, (exponent.clamp(min=1) - self.bias - self.mantissa_bits).double())
        magnitude = (mantissa + (exponent > 0) * 2.0**self.mantissa_bits) * unit
        return torch.where(code >> (self.bits - 1) == 1, -magnitude, magnitude)

    def __repr__(self) -> str:
        return f"Format({self.exponent_bits}, {self.mantissa_bits})"


E4M3 = Format(4, 3)
E5M2 = Format(5, 2)
E3M4 = Format(3, 4)
