"""What the engine costs beyond the training it is for: time of a round, memory of the server, ServerOptimize.

Engine overhead of a round is all that is not LocalUpdate: quantizing, encoding, decoding and moving bytes on both
sides, aggregating, the checkpoint, and waiting. It is measured in two ways. In processor seconds, of the server and of
all workers, less those of LocalUpdate: this holds on a busy machine too. In time: the round, less the clients' training
spread evenly over the workers; this includes waiting, and whatever else the machine does.

Images are random, of CIFAR's shape: timing does not depend on what is in the pictures.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedfp8 import models
from fedfp8.bench.timing import interleave
from fedfp8.fl import Config, preset
from fedfp8.fl.aggregate import WeightedMean
from fedfp8.fl.checkpoint import RunFolder
from fedfp8.fl.client import Assignment, Reply
from fedfp8.fl.config import ServerConfig
from fedfp8.fl.federation import Federation, from_tensors
from fedfp8.fl.pool import Pool
from fedfp8.fl.repeatable import one_thread
from fedfp8.fl.server_opt import server_optimize
from fedfp8.fl.simulate import Server, Workers, run_round
from fedfp8.fl.wires import server_link
from fedfp8.fp8 import quantize
from fedfp8.model.quantized import dequantize_state, quantize_state
from fedfp8.model.state import State
from fedfp8.nn import prepare, state_of
from fedfp8.rng import generator

__all__ = ["optimize_rows", "overhead_rows", "run", "server_memory_rows"]

Row = dict[str, Any]
OVERHEAD_BUDGET, MEMORY_BUDGET, PASSES_BUDGET = 5.0, 5.0, 60.0
WARM_UP = 2  # rounds: kernels are loaded, and clients come to have references


def run(*, rounds: int = 9, methods: tuple[str, ...] = ("fp32", "uq", "dq")) -> list[Row]:
    """All rows: name, value, unit, budget, ok."""
    rows = [row for m in methods for row in overhead_rows(m, rounds)] + overhead_rows("uq", rounds, lossless=False)
    return rows + server_memory_rows() + optimize_rows()


def federation_of(config: Config, clients: int, examples: int) -> Federation:
    rng = generator(0, "bench", "engine")
    data = [
        (torch.randn(examples, 3, 32, 32, generator=rng), torch.randint(10, (examples,), generator=rng))
        for _ in range(clients)
    ]
    return from_tensors(config, models.build("lenet", 10, seed=0), data, data[0])


class Counted:
    """Workers that add up the processor seconds of LocalUpdate."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.training, self.notes = workers, 0.0, workers.notes

    def train(self, assignments: Iterator[Assignment]) -> Iterator[Reply]:
        for reply in self.workers.train(assignments):
            self.training += reply.training
            yield reply


def overhead_rows(
    method: str, rounds: int = 9, *, workers: int = 2, steps: int = 10, lossless: bool = True
) -> list[Row]:
    """LeNet, ten clients of `steps` steps a round: overhead in percent of training, medians over rounds.

    lossless=False has no entropy coder in it: what is left is the engine proper.
    """
    config = preset(
        "lenet-cifar10-iid", method, local__epochs=0, local__steps=steps, clients__fraction=1.0, wire__lossless=lossless
    )
    federation = federation_of(config, clients=10, examples=50 * steps)
    by_processor, by_time, training = [], [], []
    with tempfile.TemporaryDirectory() as path, RunFolder.create(Path(path), config) as folder:
        server = Server(0, state_of(federation.network(config)))
        link = server_link(config, federation, server.state, folder.models)
        with Pool(workers).begin(config, federation, folder.models) as pool:
            for index in range(WARM_UP + rounds):
                counted, before, begin = Counted(pool), processor_seconds(pool), time.perf_counter()
                server, record = run_round(server, config, federation, counted, link)
                folder.save(server, link, {})
                elapsed, used = time.perf_counter() - begin, processor_seconds(pool) - before
                if record.rejected:
                    raise RuntimeError(f"the measurement is void, updates were rejected: {record.rejected[0]}")
                if index >= WARM_UP:
                    by_processor.append(100 * (used / counted.training - 1))
                    by_time.append(100 * (elapsed * workers / counted.training - 1))
                    training.append(counted.training)
    name = f"overhead of a round, {method}" + ("" if lossless else " with raw codes")
    return [
        row(f"{name}, processor seconds", statistics.median(by_processor), "% of training", OVERHEAD_BUDGET),
        row(f"{name}, time", statistics.median(by_time), "% of training", None),
        row(f"training in a round, {method}", statistics.median(training), "processor seconds", None),
    ]


def processor_seconds(pool: Pool) -> float:
    """Of this process and of the pool's workers, so far."""
    tick = os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    for process, _ in pool._processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / tick
    return total


def server_memory_rows(small: int = 10, large: int = 200, rounds: int = 3) -> list[Row]:
    """Largest resident memory of the server process with cohorts of two sizes, each in a process of its own."""
    peaks = {}
    for cohort in (small, large):
        code = f"from fedfp8.bench.engine import peak_of_server; peak_of_server({cohort}, {large}, {rounds})"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        peaks[cohort] = json.loads(done.stdout)
    growth = 100 * (peaks[large] / peaks[small] - 1)
    shown = [row(f"server memory, cohort of {n}", peak / 2**20, "MB", None) for n, peak in peaks.items()]
    return [*shown, row(f"server memory, {large} for {small} clients", growth, "% more", MEMORY_BUDGET)]


def peak_of_server(cohort: int, clients: int, rounds: int) -> None:
    """Prints the peak in bytes; the main function of a process, which must not be shared with anything else."""
    config = preset(
        "lenet-cifar10-iid",
        "uq",
        local__epochs=0,
        local__steps=1,
        local__batch_size=4,
        clients__fraction=cohort / clients,
    )
    federation = federation_of(config, clients, examples=4)
    with tempfile.TemporaryDirectory() as path, RunFolder.create(Path(path), config) as folder:
        server = Server(0, state_of(federation.network(config)))
        link = server_link(config, federation, server.state, folder.models)
        with Pool(1).begin(config, federation, folder.models) as pool:
            for _ in range(rounds):
                server, _ = run_round(server, config, federation, pool, link)
                folder.save(server, link, {})
    status = Path("/proc/self/status").read_text()
    print(1024 * int(status.partition("VmHWM:")[2].split()[0]))


def optimize_rows(turns: int = 5) -> list[Row]:
    """ServerOptimize on ResNet18 in units of one quantize pass over its weights, for two cohorts."""
    with one_thread():
        state = state_of(prepare(models.build("resnet18", 10, seed=0)))
        means = {clients: _cohort_mean(state, clients) for clients in (3, 30)}
        coded = [(state[s.name], float(state[s.range]), s.format) for s in state.layout if s.range and s.format]
        calls: dict[str, Any] = {"pass": lambda: [quantize(w, alpha, format) for w, alpha, format in coded]}
        for clients, mean in means.items():
            calls[str(clients)] = lambda mean=mean: server_optimize(mean, ServerConfig(optimize=True), 1)
        timings = interleave(calls, turns=turns, warmup=1)
    weights = sum(w.numel() for w, _, _ in coded)
    rows = [
        row(
            f"ServerOptimize, {weights:,} weights, {n} clients",
            1 / timings.speed(str(n), "pass"),
            "passes",
            PASSES_BUDGET,
        )
        for n in means
    ]
    return [*rows, row("one quantize pass", 1e3 * timings.median("pass"), "ms", None)]


def _cohort_mean(state: State, clients: int) -> WeightedMean:
    """Of models near `state`, with ranges that differ by some percent."""
    mean = WeightedMean(state.layout)
    for k in range(clients):
        scale = 1 + 0.05 * (k % 3)
        near = {s.name: state[s.name] * scale if s.kind == "range" else state[s.name] for s in state.layout}
        sent = quantize_state(State(state.layout, near), seed=k, rounding="stochastic")
        mean.add(dequantize_state(sent), weight=1.0 + k % 2)
    return mean


def row(name: str, value: float, unit: str, budget: float | None) -> Row:
    ok = None if budget is None else value <= budget
    return {"name": name, "value": round(value, 2), "unit": unit, "budget": budget, "ok": ok}
