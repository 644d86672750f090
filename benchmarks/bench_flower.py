"""What an engine costs a round: embedded, in-process Grid and Flower's Ray simulation on the same workload, in one run.

Clients make one minibatch each (local.steps=1), so a round is almost all engine. The embedded engine runs before and
after Ray, so that a machine busy with something else shows. Start-up (processes, imports, first kernels) is apart.

    python benchmarks/bench_flower.py [--rounds 30] [--json FILE]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedfp8.fl import preset, run
from fedfp8.flower import run as run_on_flower

WARM = 3  # rounds that still start workers and load kernels

CASES = {
    "digits, K=20, C=0.25, 38k weights": {"name": "digits", "clients__count": 20, "clients__fraction": 0.25},
    "digits, K=100, C=0.1, 38k weights": {"name": "digits", "clients__count": 100, "clients__fraction": 0.1},
}


def measure(start: Callable[[Path, Callable[[dict[str, Any]], None]], Any]) -> dict[str, Any]:
    """Seconds before the first round is done, and the median seconds of a round's training and aggregation."""
    begin, first, rounds = time.perf_counter(), [], []

    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == 1:
            first.append(time.perf_counter() - begin)
        if line["round"] > WARM:
            rounds.append(line["seconds"]["train"] + line["seconds"]["server"])

    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder) / "run", on_round)
        history = (Path(folder) / "run/history.jsonl").read_text().splitlines()
    return {"start": first[0], "round": statistics.median(rounds), "model": json.loads(history[-1])["model"]}


def bench(settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    options = dict(settings)
    config = preset(
        options.pop("name"),
        "dq",
        round__count=rounds,
        round__eval_every=rounds,
        local__epochs=0,
        local__steps=1,
        **options,
    )

    def embedded(out: Path, on_round: Any) -> None:
        run(config, out=out, workers=2, on_round=on_round)

    def flower(engine: str) -> Callable[[Path, Any], None]:
        return lambda out, on_round: run_on_flower(config, out, engine=engine, on_round=on_round)

    results = {
        "embedded": measure(embedded),
        "grid": measure(flower("grid")),
        "ray": measure(flower("ray")),
        "embedded again": measure(embedded),
    }
    assert len({r["model"] for r in results.values()}) == 1, "engines disagree"
    mean = statistics.mean(results[k]["round"] for k in ("embedded", "embedded again"))
    for result in results.values():
        result["ratio"] = result["round"] / mean
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name, settings in CASES.items():
        results[name] = bench(settings, arguments.rounds)
        print(name)
        for engine, r in results[name].items():
            times = f"first round after {r['start']:5.1f} s, round {1000 * r['round']:8.1f} ms"
            print(f"  {engine:<15} {times}   x{r['ratio']:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
