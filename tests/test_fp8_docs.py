"""The tables of docs/numerics.md are those of the code."""

import re
from pathlib import Path

import torch

from fedfp8 import E4M3, Format
from fedfp8.fp8 import hash_uniform

PAGE = (Path(__file__).parent.parent / "docs" / "numerics.md").read_text()


def power(text: str) -> float:
    return 2.0 ** int(text.removeprefix("2^"))


def test_table_of_formats() -> None:
    rows = re.findall(r"^\| (E\dM\d) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 17
    for name, rest in rows:
        format, cells = Format.parse(name), rest.split(" | ")
        grid = format.grid()
        assert (int(cells[0]), int(cells[1]), float(cells[2])) == (format.bits, format.bias, format.top)
        assert power(cells[3]) == float(grid[2**format.mantissa_bits]) and power(cells[4]) == float(grid[1])
        assert float(cells[5]) == float(f"{format.top / float(grid[1]):.4g}")
        assert cells[6] == f"1/{2 ** (format.mantissa_bits + 1)}"


def test_table_of_e4m3() -> None:
    rows = re.findall(r"^\| \*\*(\d+)\*\* \| (.*) \|$", PAGE, re.MULTILINE)
    values = [float(v) for _, row in rows for v in row.split(" | ")]
    assert torch.equal(torch.tensor(values, dtype=torch.float64), E4M3.grid()[:128])


def test_the_random_bits_as_written() -> None:
    seed, n = 12345, 100
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    for i, u in enumerate(hash_uniform(seed, n).tolist()):
        h = (0x9E3779B9 * i + z) % 2**32
        h = (h ^ (h >> 16)) * 0x7FEB352D % 2**32
        h = (h ^ (h >> 15) ^ (z >> 32)) * 0x846CA68B % 2**32
        signed = h - 2**32 if h >= 2**31 else h
        assert u == 1 / 2 + (signed // 2**9) / 2**23
