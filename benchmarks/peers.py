"""What a user would take instead of us, on the same federation in one run: the same cohorts, the same local training in
float, only the wire differs. Every message is bytes that the receiver decodes, and what it decodes is what is trained
from or averaged.

    OMP_NUM_THREADS=1 python benchmarks/peers.py --preset digits --rounds 20 --seeds 0 --out benchmarks/results
    OMP_NUM_THREADS=1 python benchmarks/peers.py --preset lenet-cifar10-iid --data-dir DATA --out benchmarks/results

The wires are in peer_codecs.py; zstandard and NNCodec join where they are installed (peers-requirements.txt).
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedfp8.bench import table
from fedfp8.bench.tables import with_circumstances
from fedfp8.fl import Config, preset, to_dict
from fedfp8.fl.evaluate import evaluate_piece
from fedfp8.fl.federation import Federation, build
from fedfp8.fl.local import learning_rate, local_update
from fedfp8.fl.simulate import sample
from fedfp8.paper.records import RunRecord, gain_between
from fedfp8.rng import derive_seed, generator
from peer_codecs import OURS, WIRES, Peer, Shapes, tensors, vector

# The federation

Run = tuple[list[dict], dict[str, list[float]]]


def shapes_of(model: nn.Module) -> Shapes:
    state = model.state_dict()
    if other := [name for name, tensor in state.items() if tensor.dtype != torch.float32]:
        raise SystemExit(f"tensor {other[0]!r} is not float32; the peers here send float32 models only")
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def run(peer: Peer, config: Config, federation: Federation, shapes: Shapes) -> Run:
    """(history as `RunRecord` has it, processor seconds of every call by direction and side)."""
    network = federation.network(config)
    model, total, seconds = vector(network.state_dict()), 0, defaultdict(list)

    def timed(what: str, call: Callable[..., Any], *given: Any) -> Any:
        begin = time.process_time()
        found = call(*given)
        seconds[what].append(time.process_time() - begin)
        return found

    history = [{"round": 0, "accuracy": accuracy(network, federation), "bytes_total": 0, "clients": []}]
    for number in range(1, config.round.count + 1):
        cohort = sample(config, federation.eligible(config), number)
        peer.open(model, cohort, derive_seed(config.seed, "peer", number))
        mean, weight, down, up = np.zeros(len(model)), 0, 0, 0
        for client in cohort:
            message = timed("encode_down", peer.down, client)
            received = timed("decode_down", peer.read_down, message, client)
            network.load_state_dict(tensors(received, shapes))
            rate, bits = learning_rate(config, number), generator(config.seed, "train", number, client)
            local_update(network, federation, client, config.local, rate, bits)
            reply = timed("encode_up", peer.up, vector(network.state_dict()), received, client)
            mean += federation.size(client) * timed("decode_up", peer.read_up, reply, client).astype(np.float64)
            weight, down, up = weight + federation.size(client), down + len(message), up + len(reply)
        model, total = (mean / weight).astype(np.float32), total + down + up
        line = {"round": number, "clients": cohort, "bytes_down": down, "bytes_up": up, "bytes_total": total}
        if number % config.round.eval_every == 0 or number == config.round.count:
            network.load_state_dict(tensors(model, shapes))
            line["accuracy"] = accuracy(network, federation)
        history.append(line)
    return history, seconds


def accuracy(network: nn.Module, federation: Federation) -> float:
    found = [evaluate_piece(network, federation, piece) for piece in range(federation.pieces)]
    return sum(value for value, *_ in found) / sum(weight for _, weight, *_ in found)


# The table


def row(name: str, done: dict[str, list[Run]], config: Config, weights: int) -> dict:
    """Means over the seeds. Bytes are those of a message; speeds are medians over them, in MB of float32 a second."""
    runs = done[name]
    messages = sum(len(line["clients"]) for history, _ in runs for line in history)
    totals = [sum(line.get(key, 0) for history, _ in runs for line in history) for key in ("bytes_up", "bytes_down")]
    found: dict[str, Any] = {"wire": name, "bytes_up": totals[0] / messages, "bytes_down": totals[1] / messages}
    found["gain"], found["gain_at"] = gain(done["FP32"], runs, config)
    found["bytes_of_dq"], _ = gain(runs, done[OURS], config)
    for number in (10, 20, config.round.count):
        values = [line["accuracy"] for history, _ in runs for line in history if line["round"] == number]
        found |= {f"accuracy_{number}": statistics.mean(values)} if values else {}
    for what in ("encode_up", "decode_up", "encode_down", "decode_down"):
        median = statistics.median(t for _, seconds in runs for t in seconds[what])
        found[f"{what}_mbps"] = 4e-6 * weights / max(median, 1e-9)
    return found


def gain(base: list[Run], method: list[Run], config: Config) -> tuple[float, float] | tuple[None, None]:
    """(the method's gain over the base, the accuracy at which it is taken) by the paper's definition; not at chance."""
    pairs = [
        [RunRecord(Path(), to_dict(config), history, {}, {}, {}) for history, _ in pair]
        for pair in zip(base, method, strict=True)
    ]
    if not all(record.learned for pair in pairs for record in pair):
        return None, None
    gains = [gain_between(one.points, other.points) for one, other in pairs]
    return statistics.mean(g.gain for g in gains), statistics.mean(g.value for g in gains)


def markdown(rows: list[dict]) -> str:
    def shown(r: dict) -> dict[str, str]:
        found = {"wire": r["wire"], "bytes up": f"{r['bytes_up']:,.0f}", "bytes down": f"{r['bytes_down']:,.0f}"}
        found["gain over FP32"] = "not learned yet" if r["gain"] is None else f"{r['gain']:.2f}"
        found["at accuracy"] = "" if r["gain_at"] is None else f"{100 * r['gain_at']:.1f} %"
        found["bytes of DQ"] = "" if r["bytes_of_dq"] is None else f"{r['bytes_of_dq']:.2f} x"
        found |= {f"round {k.partition('_')[2]}": f"{100 * v:.1f} %" for k, v in r.items() if k.startswith("accuracy")}
        found |= {f"{side} MB/s": f"{r[f'{side}_up_mbps']:,.0f}" for side in ("encode", "decode")}
        return found

    return table([shown(r) for r in rows])


def beaten(rows: list[dict]) -> list[str]:
    """Where peers are better than DQ without a shared start, best first."""
    ours = next(r for r in rows if r["wire"] == OURS)
    found = []
    for key in [key for key, value in ours.items() if isinstance(value, float) and key != "gain_at"]:
        sign = -1 if key.startswith("bytes") else 1  # fewer bytes, more of all else
        better = [r for r in rows if "ours" not in r["wire"] and r[key] and sign * r[key] > sign * ours[key]]
        if better:
            better.sort(key=lambda r: -sign * r[key])
            names = "; ".join(f"{r['wire']} {r[key]:.4g}" for r in better)
            found.append(f"- {key}: DQ {ours[key]:.4g}, better are {names}")
    return found


def measure(config: Config, seeds: Iterable[int], names: Iterable[str]) -> tuple[list[dict], dict[str, str], int]:
    """(rows, why peers are missing, weights of the model)."""
    done: dict[str, list] = defaultdict(list)
    skipped: dict[str, str] = {}
    for seed in seeds:
        seeded = replace(config, seed=seed)
        federation = build(seeded)
        shapes, start = shapes_of(federation.model), vector(federation.network(seeded).state_dict())
        for name in names:
            try:
                peer = WIRES[name](shapes, start)
            except ImportError as error:
                skipped[name] = f"{type(error).__name__}: {error}"
                continue
            done[name].append(run(peer, seeded, federation, shapes))
            last = done[name][-1][0][-1]
            print(f"seed {seed}, {name}: {last['bytes_total']:,} bytes, {last['accuracy']:.1%}", file=sys.stderr)
    return [row(name, done, config, len(start)) for name in done], skipped, len(start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="digits", help="digits or lenet-cifar10-iid")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", default="0", help="e.g. 0,1,2")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--only", default="", help="FP32, DQ and the wires whose names contain this")
    parser.add_argument("--out", type=Path, help="folder for peers-PRESET[-ONLY].json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = preset(given.preset, "fp32", round__count=given.rounds, round__eval_every=1, data__dir=given.data_dir)
    names = [name for name in WIRES if given.only in name or name in ("FP32", OURS)]
    load = os.getloadavg()
    rows, skipped, weights = measure(config, [int(seed) for seed in given.seeds.split(",")], names)
    better = beaten(rows)
    print("Where a peer is better than DQ (without a shared start):\n\n" + ("\n".join(better) or "nowhere"))
    print(f"\n{markdown(rows)}\n")
    for name, reason in skipped.items():
        print(f"skipped: {name} ({reason})")
    busy = max(load[0], os.getloadavg()[0]) > len(os.sched_getaffinity(0)) / 2
    print(f"load before {load[0]:.1f}, after {os.getloadavg()[0]:.1f}" + (": speeds are preliminary" if busy else ""))
    if given.out:
        content = with_circumstances(rows)
        content["machine"] |= {"load": f"{load[0]:.1f} to {os.getloadavg()[0]:.1f}"} | versions()
        content |= {"command": sys.argv, "weights": weights, "better_than_dq": better, "skipped": skipped}
        name = f"peers-{given.preset}" + (f"-{given.only}" if given.only else "")
        (given.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def versions() -> dict[str, str]:
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: found[name] for name in ("fedfp8", "numpy", "zstandard", "nncodec") if name in found}


if __name__ == "__main__":
    main()
