"""What a user would take instead of us, on the same federation in one run: the same cohorts, the same local training in
float, only the wire differs. Every message is bytes that the receiver decodes, and what it decodes is what is trained
from or averaged.

    OMP_NUM_THREADS=1 python benchmarks/peers.py --preset digits --rounds 20 --seeds 0 --out benchmarks/results
    OMP_NUM_THREADS=1 python benchmarks/peers.py --preset lenet-cifar10-iid --data-dir DATA --workers 2 --out DIR
    python benchmarks/peers.py --docs docs/peers.md

The wires are in peer_codecs.py; zstandard and NNCodec join where they are installed (peers-requirements.txt). Each wire
is kept in --work as it is done, and the same command goes on from there. --docs puts the kept tables into the page.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import re
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
from fedfp8.bench.tables import RESULTS, with_machine
from fedfp8.errors import ConfigError, Fedfp8Error
from fedfp8.fl import Config, preset, to_dict
from fedfp8.fl.evaluate import evaluate_piece
from fedfp8.fl.federation import Federation, build
from fedfp8.fl.local import learning_rate, local_update
from fedfp8.fl.memory import keep_freed_memory
from fedfp8.fl.simulate import sample
from fedfp8.paper.records import RunRecord, gain_between
from fedfp8.paper.tables import NOT_LEARNED
from fedfp8.rng import derive_seed, generator
from peer_codecs import OURS, WIRES, Peer, Shapes, tensors, vector

# The federation

Run = tuple[list[dict], dict[str, list[float]]]  # or a list of the two, as JSON has it


def shapes_of(model: nn.Module) -> Shapes:
    state = model.state_dict()
    if other := [name for name, tensor in state.items() if tensor.dtype != torch.float32]:
        raise ConfigError(f"tensor {other[0]!r} is not float32; the peers here send float32 models only")
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
        sizes = {client: federation.size(client) for client in cohort}
        model, total = peer.close((mean / weight).astype(np.float32), sizes), total + down + up
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
    found["gain"], found["gain_at"], found["gain_std"] = gain(done["FP32"], runs, config)
    found["bytes_of_dq"], *_ = gain(runs, done[OURS], config)
    for number in (10, 20, config.round.count):
        values = [line["accuracy"] for history, _ in runs for line in history if line["round"] == number]
        found |= {f"accuracy_{number}": statistics.mean(values)} if values else {}
    for what in ("encode_up", "decode_up", "encode_down", "decode_down"):
        median = statistics.median(t for _, seconds in runs for t in seconds[what])
        found[f"{what}_mbps"] = 4e-6 * weights / max(median, 1e-9)
    return found


def gain(base: list[Run], method: list[Run], config: Config) -> tuple[float | None, float | None, float | None]:
    """The method's gain over the base by the paper's definition, the accuracy at which it is taken (means over seeds),
    and the gain's standard deviation, if there are several seeds. No gain where either side is at chance."""
    pairs = [
        [RunRecord(Path(), to_dict(config), history, {}, {}, {}) for history, _ in pair]
        for pair in zip(base, method, strict=True)
    ]
    gains = [gain_between(one.points, other.points) for one, other in pairs]
    if not all(record.learned for pair in pairs for record in pair) or None in gains:
        return None, None, None
    values = [g.gain for g in gains]
    spread = statistics.stdev(values) if len(values) > 1 else None
    return statistics.mean(values), statistics.mean(g.value for g in gains), spread


def markdown(rows: list[dict]) -> str:
    def shown(r: dict) -> dict[str, str]:
        found = {"wire": r["wire"], "bytes up": f"{r['bytes_up']:,.0f}", "bytes down": f"{r['bytes_down']:,.0f}"}
        spread = f" ± {r['gain_std']:.2f}" if r.get("gain_std") else ""
        found["gain over FP32"] = NOT_LEARNED if r["gain"] is None else f"{r['gain']:.2f}{spread}"
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
    for key in [key for key, value in ours.items() if isinstance(value, float) and key not in ("gain_at", "gain_std")]:
        sign = -1 if key.startswith("bytes") else 1  # fewer bytes, more of all else
        better = [r for r in rows if "ours" not in r["wire"] and r[key] and sign * r[key] > sign * ours[key]]
        if better:
            better.sort(key=lambda r: -sign * r[key])
            names = "; ".join(f"{r['wire']} {number(key, r[key])}" for r in better)
            found.append(f"- {words(key)}: DQ {number(key, ours[key])}, better are {names}")
    return found


def words(key: str) -> str:
    known = {"gain": "gain over FP32", "bytes_of_dq": "bytes to the same accuracy, in units of DQ's"}
    text = key.replace("accuracy_", "accuracy at round ").replace("_mbps", ", MB/s").replace("_", " ")
    return known.get(key, text)


def number(key: str, value: float) -> str:
    if key.startswith("accuracy"):
        return f"{100 * value:.1f} %"
    return f"{value:.2f}" if key in ("gain", "bytes_of_dq") else f"{value:,.0f}"


# Running it, wire by wire


def file_name(name: str) -> str:
    """UQ and UQ+ must stay apart."""
    return re.sub("[^0-9a-zA-Z+-]+", "_", name)


def measure_one(job: tuple[Config, str, Path | None]) -> Run | str:
    """One wire with one seed, or why it is missing; from the file where it was kept, if it has been done before."""
    config, name, folder = job
    file = None if folder is None else folder / f"{file_name(name)}-seed{config.seed}.json"
    if file is not None and file.exists():
        kept = json.loads(file.read_text())
        if kept["config"] != json.loads(json.dumps(to_dict(config))):
            raise ConfigError(f"{file} is of other settings; give another --work, or delete it")
        return kept["run"]
    torch.set_num_threads(1)
    keep_freed_memory()  # as the engine's workers do
    federation = build(config)
    shapes = shapes_of(federation.model)
    try:
        peer = WIRES[name](shapes, vector(federation.network(config).state_dict()))
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    begin, processor = time.perf_counter(), time.process_time()
    found = run(peer, config, federation, shapes)
    last, seconds = found[0][-1], time.perf_counter() - begin
    each = [1 / config.round.count * spent for spent in (seconds, time.process_time() - processor)]
    said = f"{last['bytes_total']:,} bytes, {last['accuracy']:.1%}, {each[0]:.1f} s a round ({each[1]:.1f} of a core)"
    print(f"seed {config.seed}, {name}: {said}", file=sys.stderr, flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"config": to_dict(config), "seconds": seconds, "run": found}) + "\n")
        part.replace(file)
    return found


def measure(
    config: Config, seeds: Iterable[int], names: Iterable[str], work: Path | None = None, workers: int = 1
) -> tuple[list[dict], dict[str, str], int]:
    """(rows, why peers are missing, weights of the model)."""
    jobs = [(replace(config, seed=seed), name, work) for seed in seeds for name in names]
    if workers > 1:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            results = pool.map(measure_one, jobs, chunksize=1)
    else:
        results = [measure_one(job) for job in jobs]
    done: dict[str, list] = defaultdict(list)
    skipped = {}
    for (_, name, _), result in zip(jobs, results, strict=True):
        if isinstance(result, str):
            skipped[name] = result
        else:
            done[name].append(result)
    weights = int(sum(np.prod(shape) for shape in shapes_of(build(config).model).values()))
    return [row(name, done, config, weights) for name in done], skipped, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="digits", help="digits or lenet-cifar10-iid")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, help="local epochs; default: the preset's")
    parser.add_argument("--seeds", default="0", help="e.g. 0,1,2")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--only", default="", help="FP32, DQ and the wires whose names match this regular expression")
    parser.add_argument("--workers", type=int, default=1, help="wires that run at the same time; speeds want 1")
    parser.add_argument(
        "--work", type=Path, help="where wires are kept as they are done; default: runs/peers-PRESET-ROUNDS"
    )
    parser.add_argument("--out", type=Path, help="folder for peers-PRESET[-ONLY].json")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="measure nothing; put the kept tables into this page")
    given = parser.parse_args()
    if given.docs:
        update_docs(given.docs)
        return
    config = preset(given.preset, "fp32", round__count=given.rounds, round__eval_every=1, data__dir=given.data_dir)
    if given.epochs:
        config = replace(config, local=replace(config.local, epochs=given.epochs))
    names = [name for name in WIRES if re.search(given.only, name) or name in ("FP32", OURS)]
    work = given.work or Path("runs") / f"peers-{given.preset}-{given.rounds}"
    load, seeds = os.getloadavg()[0], [int(seed) for seed in given.seeds.split(",")]
    rows, skipped, weights = measure(config, seeds, names, work, given.workers)
    content = with_machine(rows, load)
    content["machine"] |= versions()
    content |= {"preset": given.preset, "rounds": given.rounds, "seeds": seeds, "workers": given.workers}
    content["epochs"] = config.local.epochs
    content |= {"weights": weights, "skipped": skipped}
    print(section(content))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        name = file_name(f"peers-{given.preset}" + (f"-{given.only}" if given.only else ""))
        (given.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


# The page

MARKS = re.compile(r"(<!-- peers:begin -->\n).*?(?=<!-- peers:end -->)", re.S)


def section(content: dict) -> str:
    """A kept table as the page has it: where peers are better, then all wires."""
    about = content["machine"]
    better = "\n".join(beaten(content["rows"])) or "nowhere"
    skipped = "".join(f"\nSkipped: {name} ({reason}).\n" for name, reason in content["skipped"].items())
    seeds = ", ".join(map(str, content["seeds"]))
    versions = ", ".join(
        f"{name} {about[name]}" for name in ("python", "torch", "numpy", "zstandard", "nncodec") if name in about
    )
    busy = float(about["load"].split()[-1]) > int(about["cores"]) / 2 + content.get("workers", 1)
    epochs = f" with {content['epochs']} local epochs" if "epochs" in content else ""
    return f"""### {content["preset"]}, {content["rounds"]} rounds{epochs}, seeds {seeds}

Where a peer is better than DQ without a shared start:

{better}

{markdown(content["rows"])}
{skipped}
A message in FP32 has {4 * content["weights"]:,} bytes. Measured {about["date"]} on {about["processor"]}, \
{about["cores"]} cores, load {about["load"]}{" (speeds are preliminary)" if busy else ""}; {versions}; \
commit {about["commit"]}.
"""


def sections(folder: Path = RESULTS) -> str:
    """All kept tables, the larger task first."""
    files = sorted(folder.glob("peers-*.json"), key=lambda file: ("digits" in file.name, file.name))
    return "\n".join(section(json.loads(file.read_text())) for file in files)


def update_docs(page: Path) -> None:
    text = page.read_text()
    if len(MARKS.findall(text)) != 1:
        raise ConfigError(f"{page} must hold <!-- peers:begin --> and <!-- peers:end --> once each")
    page.write_text(MARKS.sub(lambda found: f"{found[1]}\n{sections()}\n", text))


def versions() -> dict[str, str]:
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: found[name] for name in ("fedfp8", "numpy", "zstandard", "nncodec") if name in found}


if __name__ == "__main__":
    try:
        main()
    except Fedfp8Error as error:
        sys.exit(f"error: {error}")
