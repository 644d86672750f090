"""The pictures of docs/method.md, drawn from the product's own code.

    python benchmarks/dq_pictures.py                 # cohort-error.svg, rate.svg and references.svg in docs/figures

cohort-error: error of the mean of what a cohort receives, for the same random bits, independent ones, and places.
rate: bits per weight of a downlink against how far weights moved, by what is known of them (computed, not measured).
references: bits per weight of each round's downlink by what the tensors were coded given, on the `digits` preset.
"""

import argparse
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import torch

matplotlib.use("svg")
import matplotlib.pyplot as plt

from fedfp8 import Wire, dither, inspect, undither
from fedfp8.fl import preset
from fedfp8.fl.client import Assignment, Reply
from fedfp8.fl.federation import build
from fedfp8.fl.pool import Executor
from fedfp8.fl.simulate import Server, run_round
from fedfp8.fl.wires import server_link
from fedfp8.model.frequencies import Frequencies
from fedfp8.nn import state_of
from fedfp8.wire import header

STEP = 1.0
COHORTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32)


def error_of_mean(cohort: int, kind: str) -> float:
    """Rms over 65,536 weights of the error of the mean, in steps."""
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)) * 3
    mean = torch.zeros(x.numel(), dtype=torch.float64)
    for client in range(cohort):
        strata = Wire().places(cohort) if kind == "places" else 1
        draw = {"seed": client if kind == "independent" else 0, "place": client % strata, "strata": strata}
        mean += undither(dither(x, STEP, **draw), STEP, **draw).double() / cohort
    return float((mean - x).square().mean().sqrt())


def draw_errors(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    kinds = {"same": "the same bits for all", "independent": "independent bits", "places": "places (DQ)"}
    for kind, label in kinds.items():
        axes.plot(COHORTS, [error_of_mean(n, kind) for n in COHORTS], marker="o", markersize=3, label=label)
    theory = [1 / math.sqrt(12) / min(n, 16) for n in COHORTS]
    axes.plot(COHORTS, theory, ":", color="grey", label="1 / (√12 · min(P, 16))")
    axes.set(xscale="log", yscale="log", xlabel="clients in the round, P", ylabel="rms error of their mean, in steps")
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(path)


def rate(move: float, known: str, cells: int = 64) -> float:
    """Bits per weight of an ideal coder for weights that moved by a Gaussian of `move` steps, given a reference.

    known: "exact" (the reference is the old weight: the shared start), "new bits" (it is the old weight with the error
    of old random bits, and the new ones are others), "same bits" (old and new random bits are the same) or "visits"
    (the best mix of the last three visits, between which weights moved as far; its error taken for Gaussian).
    """
    if known == "visits":
        error = 1 / 12
        for _ in range(2):
            error = (error + move**2) / 12 / (error + move**2 + 1 / 12)
        move, known = math.sqrt(move**2 + error), "exact"
    integers = torch.arange(-16, 17, dtype=torch.float64)
    if known == "same bits":  # only the old integer is known: the old weight is anywhere in its cell
        offsets, spread = torch.tensor([0.5], dtype=torch.float64), True
    else:  # where in a new cell the reference lies is known, too
        offsets, spread = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells, known == "new bits"
    below = integers[None, :] - offsets[:, None]
    chance = cumulative(below + 1, move, spread) - cumulative(below, move, spread)
    return float(-(chance * chance.clamp_min(1e-300).log2()).sum(1).mean())


def cumulative(x: torch.Tensor, move: float, spread: bool) -> torch.Tensor:
    """Distribution function of a Gaussian, or of a Gaussian and an error that is uniform in a cell."""

    def below(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * (1 + torch.erf(x / (move * math.sqrt(2))))

    def area(x: torch.Tensor) -> torch.Tensor:
        return x * below(x) + move * torch.exp(-0.5 * (x / move) ** 2) / math.sqrt(2 * math.pi)

    return area(x + 0.5) - area(x - 0.5) if spread else below(x)


def draw_rates(path: Path) -> None:
    moves = torch.logspace(-2, 0.3, 60).tolist()
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    lines = {
        "exact": "the shared start (no error)",
        "new bits": "the last visit, new random bits",
        "visits": "the last three visits, new random bits (DQ)",
        "same bits": "the last visit, the same random bits",
    }
    for known, label in lines.items():
        axes.plot(moves, [rate(move, known) for move in moves], label=label)
    axes.set(
        xscale="log", xlabel="how far weights moved since, rms, in steps", ylabel="bits per weight", ylim=(0, None)
    )
    axes.set_xticks([0.01, 0.1, 0.3, 1], ["0.01", "0.1", "0.3", "1"])
    axes.legend(frameon=False)
    figure.savefig(path)


class Watching:
    """Workers in this process that look into every payload."""

    notes: list[str] = []  # noqa: RUF012

    def __init__(self, executor: Executor) -> None:
        self.executor, self.bits = executor, defaultdict(float)
        self.weights = 0

    def train(self, assignments: Iterator[Assignment]) -> Iterator[Reply]:
        for assignment in assignments:
            start = self.executor.client.start
            named = [
                "start" if f == Frequencies(start).quick_fingerprint else "a visit"
                for f in header(assignment.payload).reference_fingerprints
            ]
            for row in inspect(assignment.payload, start.layout).rows or ():
                self.bits[given(row.mode, named)] += 8 * row.bytes
                self.weights += row.elements
            yield self.executor(assignment)


def given(mode: str, named: list[str]) -> str:
    """What a tensor of this mode was coded given, with the message's references by name."""
    kind, _, number = mode.partition(",")[0].partition(" ")
    if kind == "mix":
        return "a mix"
    return named[int(number or 1) - 1] if kind in ("reference", "same") else "nothing"


def draw_references(path: Path, rounds: int) -> None:
    config = preset("digits", "dq", round__count=rounds)
    federation = build(config)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(0, state_of(federation.network(config)))
        link = server_link(config, federation, server.state, Path(folder))
        for _ in range(rounds):
            watching = Watching(Executor(config, federation, Path(folder)))
            server, _ = run_round(server, config, federation, watching, link)
            found.append({mode: bits / watching.weights for mode, bits in watching.bits.items()})
    modes = [mode for mode in ("nothing", "start", "a visit", "a mix") if any(mode in x for x in found)]
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.stackplot(range(1, rounds + 1), [[line.get(mode, 0.0) for line in found] for mode in modes], labels=modes)
    axes.set(xlabel="round", ylabel="bits per weight down", xlim=(1, rounds))
    figure.legend(frameon=False, loc="outside upper center", ncols=4, title="coded given")
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw_errors(arguments.out / "cohort-error.svg")
    draw_rates(arguments.out / "rate.svg")
    draw_references(arguments.out / "references.svg", arguments.rounds)
