"""The engine: overhead of a LeNet round, server memory against cohort size, ServerOptimize; see docs/benchmarks.md.

OMP_NUM_THREADS=1 python benchmarks/bench_round.py [--json] [--rounds 9] [--methods fp32 uq dq]
"""

import argparse
import json

from fedfp8.bench import engine, machine, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=9, help="rounds whose median is taken")
    parser.add_argument("--methods", nargs="+", default=["fp32", "uq", "dq"], help="whose rounds are measured")
    arguments = parser.parse_args()
    rows = engine.run(rounds=arguments.rounds, methods=tuple(arguments.methods))
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return
    print("  ".join(f"{name}: {value}" for name, value in machine().items()) + "\n\n" + table(rows))
    for missed in (row for row in rows if row["ok"] is False):
        print(f"\nover budget: {missed['name']}: {missed['value']} > {missed['budget']} {missed['unit']}")


if __name__ == "__main__":
    main()
