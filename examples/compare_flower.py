"""The plain Flower app and the same app after two lines, side by side: accuracy and bytes, without Ray.

    python examples/compare_flower.py [--rounds 15] [--runs 10]

Needs ``pip install "fedfp8[flower,digits]"``; two minutes. The random bits of the wrapped app are new in every run,
so its accuracy differs a little from time to time. Bytes are those of all Arrays of all messages.
"""

import argparse
import json
import logging
import random
import runpy
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fedfp8.flower import LocalGrid

HERE, CLIENTS = Path(__file__).parent, 10
APPS = {"plain FedAvg": "flower-plain", "with the two lines": "flower-quickstart"}


def run(folder: str, rounds: int, seed: int) -> tuple[dict[str, int], list[float]]:
    """(bytes down and up, accuracy after every round) of one run of the app in `folder`."""
    sys.path.insert(0, str(HERE / folder))
    try:
        server, client = (runpy.run_module(f"digits_app.{part}")["app"] for part in ("server", "client"))
    finally:
        sys.path.pop(0)
        for name in [m for m in sys.modules if m.partition(".")[0] == "digits_app"]:
            del sys.modules[name]  # both apps have the same name
    torch.manual_seed(seed)
    random.seed(seed)
    with tempfile.TemporaryDirectory() as out:
        settings: dict[str, Any] = {"nodes": CLIENTS, "num-rounds": rounds, "local-epochs": 2, "lr": 0.05}
        settings["out"] = f"{out}/rounds.json"
        grid = LocalGrid(client, CLIENTS, settings)
        grid.serve(server, settings)
        found = json.loads(Path(settings["out"]).read_text())
    return grid.bytes, [found[str(r)] for r in range(1, rounds + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--runs", type=int, default=10, help="how many runs, each with its own seed, are averaged")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    shown = sorted({max(1, arguments.rounds * part // 3) for part in (1, 2, 3)})
    print(f"{CLIENTS} clients, {arguments.rounds} rounds, mean of {arguments.runs}; accuracy after round {shown}")
    for name, folder in APPS.items():
        runs = [run(folder, arguments.rounds, seed) for seed in range(arguments.runs)]
        accuracy = [f"{100 * statistics.mean(rounds[r - 1] for _, rounds in runs):.1f} %" for r in shown]
        down, up = (statistics.mean(count[way] for count, _ in runs) for way in ("down", "up"))
        messages = arguments.rounds * CLIENTS
        print(
            f"{name:18}  {' / '.join(accuracy)}   a message: {down / messages:,.0f} bytes down, "
            f"{up / messages:,.0f} up   in all {(down + up) / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main()
