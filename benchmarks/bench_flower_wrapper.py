"""What the two lines cost: FedAvg plain and in FP8 on the same clients, round by round in turns, in one process.

Clients add a constant to the model, so that a round is almost all wrapper: Flower's own serialization is in both rows.
Seconds are processor time of all threads, which a machine busy with something else disturbs least. Memory is the peak
of a process of its own for each row. Set OMP_NUM_THREADS=1: threads that wait for each other count, too.

    python benchmarks/bench_flower_wrapper.py [--rounds 5] [--cases small,many,large] [--json FILE]
"""

import argparse
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedfp8.flower import FP8, LocalGrid, fp8_mod

CLIENTS = 4
CASES: dict[str, list[tuple[int, ...]]] = {
    "small": [(256, 256)] * 16,
    "many": [(8, 16)] * 300,
    "middle": [(512, 349)] * 62,
    "large": [(1024, 1024)] * 48,
}


def model(case: str) -> ArrayRecord:
    rng = np.random.default_rng(0)
    shapes = enumerate(CASES[case])
    return ArrayRecord({f"layer{n}.weight": Array(rng.normal(size=s).astype(np.float32)) for n, s in shapes})


def client_app(mods: list[Any]) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Any) -> Message:
        rng = np.random.default_rng(context.node_id)
        new = {}
        for name, array in message.content.array_records["arrays"].items():
            values = array.numpy()
            values += 0.01 * rng.standard_normal(values.shape, dtype=np.float32)
            new[name] = Array(values)
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord(new), "metrics": metrics}), reply_to=message)

    return app


def make(kind: str) -> tuple[Strategy, LocalGrid]:
    inner = FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    if kind == "plain":
        return inner, LocalGrid(client_app([]), CLIENTS)
    return FP8(inner, seed=1), LocalGrid(client_app([fp8_mod]), CLIENTS)


def bench(case: str, rounds: int) -> dict[str, Any]:
    arrays, seconds, wall = {}, {"plain": [], "fp8": []}, {"plain": [], "fp8": []}
    pairs = {kind: make(kind) for kind in seconds}
    for number in range(rounds + 2):
        for kind, (strategy, grid) in pairs.items():
            begin, began = time.process_time(), time.perf_counter()
            result = strategy.start(grid, arrays.get(kind) or model(case), num_rounds=1)
            if number >= 2:  # the first whole model, kernels, caches
                seconds[kind].append(time.process_time() - begin)
                wall[kind].append(time.perf_counter() - began)
            arrays[kind] = result.arrays
    weights = sum(int(np.prod(shape)) for shape in CASES[case])
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    extra = (median["fp8"] - median["plain"]) / CLIENTS
    bytes_sent = {kind: sum(grid.bytes.values()) for kind, (_, grid) in pairs.items()}
    return {
        "weights": weights,
        "tensors": len(CASES[case]),
        "load": os.getloadavg()[0],
        **{f"seconds_{kind}": value for kind, value in median.items()},
        **{f"wall_seconds_{kind}": statistics.median(values) for kind, values in wall.items()},
        "ratio": median["fp8"] / median["plain"],
        "ms_per_client_and_million": 1e3 * extra / (weights / 1e6),
        "ms_per_client_and_tensor": 1e3 * extra / len(CASES[case]),
        "times_fewer_bytes": bytes_sent["plain"] / bytes_sent["fp8"],
    }


def memory(case: str, kind: str) -> int:
    """Peak bytes of two rounds in a process of their own."""
    command = [sys.executable, __file__, "--peak", f"{case}/{kind}"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak(case: str, kind: str) -> None:
    strategy, grid = make(kind)
    strategy.start(grid, model(case), num_rounds=2)
    print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="small,many,middle")
    parser.add_argument("--peak")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if arguments.peak:
        peak(*arguments.peak.split("/"))
        return
    results = {}
    for case in arguments.cases.split(","):
        results[case] = bench(case, arguments.rounds)
        peaks = {kind: memory(case, kind) for kind in ("plain", "fp8")}
        results[case]["more_bytes_of_memory_a_weight"] = (peaks["fp8"] - peaks["plain"]) / results[case]["weights"]
        print(case, json.dumps(results[case], indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
