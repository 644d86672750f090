"""The link layer: what a server and a client spend on exchanging a model, and what the server remembers.

    python benchmarks/bench_link.py [--weights 1000000] [--json]
    python benchmarks/bench_link.py --large 100000000

Times are processor time, which other work on the machine disturbs least.

- server: milliseconds per client and million weights, downlink coded given what the client holds, uplink decoded and
  moved into the server's frame (budget: 20), and per direction in MB/s of float32 weights (budget: 100);
- client: the same for decoding a model and coding a reply;
- memory of the server beyond the program's own model, in bytes a weight of a model of 11M (budget: 16): what is live
  while messages are coded and replies decoded, its clients in another process (Linux);
- memory and disk of the server for 10 and for 10,000 logical clients;
- `--large`: one client of a large model for two rounds, step by step: seconds, bytes sent, and the memory of the
  process, which is server, client and the program's own model together (Linux).
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedfp8 import ClientLink, ServerLink

COHORT, ROUNDS = 10, 4


def model(weights: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Shaped like LeNet: most of the weights in one matrix of 1,600 inputs."""
    rows = max(weights // 1600, 1)
    return {"fc1.weight": torch.randn(rows, 1600, generator=generator) * 0.03, "fc1.bias": torch.zeros(rows)}


def moved(state: dict[str, torch.Tensor], size: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {n: t + size * torch.randn(t.shape, generator=generator) for n, t in state.items()}


def exchange(weights: int, wire: str) -> dict[str, float]:
    """Medians over clients and rounds after the first, in seconds."""
    generator = torch.Generator().manual_seed(0)
    state = model(weights, generator)
    server, clients = ServerLink(wire, seed=1), [ClientLink() for _ in range(COHORT)]
    times: dict[str, list[float]] = {"code": [], "decode": [], "client decode": [], "client code": []}
    for round in range(ROUNDS):
        server.open(state, range(COHORT))
        for name, client in enumerate(clients):
            marks = [time.process_time()]

            def lap(what: str, marks: list[float] = marks, round: int = round) -> None:
                marks.append(time.process_time())
                if round:
                    times[what].append(marks[-1] - marks[-2])

            message = server.message(name)
            lap("code")
            received = client.receive(message)
            lap("client decode")
            local = moved(received, 0.002, generator)
            marks.append(time.process_time())
            reply = client.reply(local)
            lap("client code")
            server.receive(name, reply)
            lap("decode")
        state = moved(state, 0.002, generator)
    return {what: statistics.median(found) for what, found in times.items()}


def layers(count: int, side: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {f"layer{n}.weight": torch.randn(side, side, generator=generator) * 0.03 for n in range(count)}


def serve_clients(pipe: Connection) -> None:
    torch.set_num_threads(1)
    clients: defaultdict[str, ClientLink] = defaultdict(ClientLink)
    generator = torch.Generator().manual_seed(0)
    while (given := pipe.recv()) is not None:
        name, message = given
        pipe.send(clients[name].reply(moved(clients[name].receive(message), 0.002, generator)))


def peak(wire: str, count: int = 44, side: int = 500) -> float:
    """The most memory in five rounds of four clients, in bytes a weight, without the program's model.

    Freed blocks go back to the system (MALLOC_MMAP_THRESHOLD_ must be small), so this is what is live. Pages of the
    history's files, which are mapped and which the system may drop at any time, are not counted.
    """
    ours, theirs = multiprocessing.Pipe()
    others = multiprocessing.get_context("spawn").Process(target=serve_clients, args=(theirs,), daemon=True)
    others.start()
    generator, found = torch.Generator().manual_seed(0), 0
    for size in (8, side):  # a small model first: kernels are loaded
        state, server, found = layers(count, size, generator), ServerLink(wire, seed=1), 0
        before, seen, done = memory("RssAnon"), [0], threading.Event()

        def look(seen: list[int] = seen, done: threading.Event = done) -> None:
            while not done.wait(0.001):
                seen.append(memory("RssAnon"))

        watch = threading.Thread(target=look)
        watch.start()
        for _ in range(5):  # in the fourth a client holds as many models as it ever will
            server.open(state, ["a", "b", "c", "d"])
            for name in ["a", "b", "c", "d"]:
                ours.send((f"{name} {size}", server.message(name)))
                server.receive(name, ours.recv())
            for tensor in state.values():
                tensor += 0.002 * torch.randn(tensor.shape, generator=generator)
        done.set()
        watch.join()
        found = max(seen) - before
    ours.send(None)
    return found / (count * side**2)


def measured_peak(wire: str) -> float:
    command = [sys.executable, __file__, "--peak", wire]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def remembered(clients: int, weights: int) -> dict[str, float]:
    """After a round of all of them: kilobytes of JSON and megabytes of models on disk."""
    server = ServerLink("dq", seed=1)
    round = server.open(model(weights, torch.Generator().manual_seed(0)), range(clients))
    round.confirmed.update(range(clients))
    server.close()
    return {"kB of who holds what": len(json.dumps(server.meta())) / 1e3, "MB of models": server.history.size() / 1e6}


def large(weights: int) -> Iterator[dict[str, Any]]:
    """Two rounds with one client, a row a step."""
    generator = torch.Generator().manual_seed(0)
    state = layers(max(weights // 1000**2, 1), 1000, generator)
    weights = len(state) * 1000**2
    server, client = ServerLink("dq", seed=1), ClientLink(packed=())
    row: dict[str, Any] = {}

    @contextmanager
    def step(name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, marks = memory("VmRSS"), (time.process_time(), time.perf_counter())
        yield
        row.clear()
        row.update({"step": name, "processor seconds": time.process_time() - marks[0]})
        row["seconds"] = time.perf_counter() - marks[1]
        row["peak memory, bytes a weight"] = memory("VmHWM") / weights
        row["above what it was before"] = (memory("VmHWM") - before) / weights

    for number in (1, 2):
        with step(f"round {number}: open"):
            server.open(state, ["one"])
        yield row
        with step(f"round {number}: server codes"):
            message = server.message("one")
        yield row | {"MB": len(message) / 1e6}
        with step(f"round {number}: client decodes"):
            local = client.receive(message)
        yield row
        for tensor in local.values():
            tensor += 0.002 * torch.randn(tensor.shape, generator=generator)
        with step(f"round {number}: client codes"):
            reply = client.reply(local)
        yield row | {"MB": len(reply) / 1e6}
        del local
        with step(f"round {number}: server decodes"):
            state = server.receive("one", reply)
        yield row


def memory(field: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--large", type=int, metavar="WEIGHTS", help="one client of a model this large, step by step")
    parser.add_argument("--peak", metavar="WIRE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        print(peak(arguments.peak))
        return
    if arguments.large:
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)
        for row in large(arguments.large):
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        return
    rows: list[dict[str, Any]] = []
    for wire in ("dq", "fp8"):
        times, megabytes = exchange(arguments.weights, wire), 4 * arguments.weights / 1e6
        per_million = 1e3 * (times["code"] + times["decode"]) / (arguments.weights / 1e6)
        speeds = {f"{what}, MB/s": megabytes / seconds for what, seconds in times.items()}
        rows.append({"wire": wire, "server, ms per client and million weights": per_million} | speeds)
        rows[-1]["server memory, bytes a weight"] = measured_peak(wire)
    rows += [{"clients": n} | remembered(n, arguments.weights) for n in (10, 10_000)]
    if arguments.json:
        print(json.dumps({"load": os.getloadavg(), "rows": rows}, indent=1))
        return
    print(f"load {os.getloadavg()[0]:.1f}")
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
