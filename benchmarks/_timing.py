"""What the scripts of this folder share: the clock of the installed package, and how results are printed and kept."""

import json
from typing import Any

from fedfp8.bench import Timings, interleave, machine, table

__all__ = ["Timings", "interleave", "machine", "report"]


def report(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Machine and rows, as JSON or as a markdown table; says which budgets were missed."""
    if as_json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return
    print("  ".join(f"{name}: {value}" for name, value in machine().items()) + "\n\n" + table(rows))
    missed = [row for row in rows if row["ok"] is False]
    for row in missed:
        print(f"\nbelow budget: {row['name']} at {row['size']:,}: {row['ratio']} < {row['budget']}")
