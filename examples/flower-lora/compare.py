"""Adapters sent plain and in few bits, side by side: loss and bytes, in this process, without Ray.

    python examples/flower-lora/compare.py [--rounds 10] [--clients 2 10] [--adapters lora dora] [--dtypes float32 ...]

Needs ``pip install "fedfp8[flower]" transformers peft``. Bytes are those of all Arrays of all messages. The random bits
of the coded runs are new in every run, so their loss differs a little from time to time.
"""

import argparse
import itertools
import json
import logging
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import torch

from fedfp8.flower import LocalGrid

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def settings_with(**changes: Any) -> dict[str, Any]:
    return tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"] | changes


def run(**changes: Any) -> tuple[dict[str, int], list[float]]:
    """(bytes down and up, test loss before training and after every round) of the app with these settings."""
    from lora_app import client, server

    settings = settings_with(**changes)
    with tempfile.TemporaryDirectory() as folder:
        settings["out"] = f"{folder}/losses.json"
        grid = LocalGrid(client.app, settings["clients"], settings)
        grid.serve(server.app, settings)
        found = json.loads(Path(settings["out"]).read_text())
    return grid.bytes, [found[str(r)] for r in range(settings["num-rounds"] + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 10])
    parser.add_argument("--adapters", nargs="+", default=["lora", "dora"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other settings of pyproject.toml")
    given = parser.parse_args()
    from lora_app.task import floor, network

    others = tomllib.loads("\n".join(given.set))
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(f"{given.rounds} rounds; the best possible loss is {floor:.3f}")
    print("| adapters | dtype | clients | weights | wire | loss, start -> end | bits a weight, down / up | bytes | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for adapter, dtype, clients in itertools.product(given.adapters, given.dtypes, given.clients):
        plain = 0
        for wire in ("plain", "dq"):
            chosen = {"adapter": adapter, "dtype": dtype, "clients": clients, "wire": wire} | others
            size, losses = run(**chosen, **{"num-rounds": given.rounds})
            settings = settings_with(**chosen)
            weights = sum(tensor.numel() for tensor in network(settings)[1].values())
            messages = given.rounds * max(2, int(clients * settings["fraction"]))
            down, up = (8 * size[way] / (messages * weights) for way in ("down", "up"))
            total = sum(size.values())
            plain = plain or total
            print(
                f"| {adapter} | {dtype} | {clients} | {weights:,} | {wire} | {losses[0]:.3f} -> {losses[-1]:.3f} "
                f"| {down:.2f} / {up:.2f} | {total:,} | {plain / total:.1f} times less |",
                flush=True,
            )


if __name__ == "__main__":
    main()
