"""FP8 numerics against `copy_`, torch's float8, the textbook formula and (if installed) Brevitas; see README.md.

python benchmarks/bench_numerics.py [--json] [--sizes 65536 1048576 16777216] [--turns 31]
"""

import argparse

from _timing import report
from fedfp8.bench import numerics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(numerics.SIZES), help="elements per tensor")
    parser.add_argument("--turns", type=int, default=31, help="turns; more of them smooth a busy machine")
    arguments = parser.parse_args()
    report(numerics.run(tuple(arguments.sizes), turns=arguments.turns), as_json=arguments.json)


if __name__ == "__main__":
    main()
