"""What tests of several packages share."""

from fedfp8.fp8 import Format

# Every format there is: 2 to 5 exponent bits, 4 to 8 bits in all
FORMATS = [Format(e, m) for e in range(2, 6) for m in range(6) if 4 <= 1 + e + m <= 8]
