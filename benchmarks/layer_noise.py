"""What DQ's noise costs, layer by layer: the numbers behind the steps of docs/method.md.

    python benchmarks/layer_noise.py runs/lenet-cifar10-iid/dq-seed0 --data-dir DATA

Takes the server's model of a run and prints for every weight: its share of all weights, its step down in units of its
root mean square, and by how much the test loss grows if that noise is added to this weight alone (the mean of noise and
its negative, so that the slope of the loss falls out). Then the same for all of them, with and without finer steps for
small layers. With --changes N, N clients train from there: how large their changes are by frequency, what noise costs
there, and what changes need as weights and as frequencies, in bits of real messages, for what error of the mean.
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from fedfp8.fl import Config
from fedfp8.fl.checkpoint import RunFolder
from fedfp8.fl.evaluate import evaluate_piece
from fedfp8.fl.federation import Federation, build
from fedfp8.fl.local import learning_rate, local_update
from fedfp8.link.client import quantize_reply
from fedfp8.link.wire import SMALL, Orders, share_of_layers, step_factor
from fedfp8.model.frequencies import Frequencies, from_frequencies
from fedfp8.model.quantized import dequantize_state
from fedfp8.model.state import State, Values
from fedfp8.nn import load_state, state_of
from fedfp8.rng import generator
from fedfp8.wire import encode

CODED = "fp8", "float"


def loss_of(model: torch.nn.Module, federation: Federation, state: State, pieces: int) -> float:
    load_state(model, state)
    found = [evaluate_piece(model, federation, piece) for piece in range(min(pieces, federation.pieces))]
    return sum(loss for *_, loss, _ in found) / sum(examples for *_, examples in found)


def noisy(state: State, steps: Mapping[str, float], seed: int, sign: float) -> State:
    """Uniform noise of a step, as dither makes it."""
    found = dict(state)
    for number, spec in enumerate(state.layout):
        if spec.name in steps:
            g = torch.Generator().manual_seed(1000 * seed + number)
            noise = torch.rand(spec.shape, generator=g) - 0.5
            found[spec.name] = state[spec.name] + sign * steps[spec.name] * noise
    return State(state.layout, found)


def cost(
    model: torch.nn.Module, federation: Federation, state: State, steps: Mapping[str, float], args: argparse.Namespace
) -> str:
    base = loss_of(model, federation, state, args.pieces)
    pairs = [
        sum(loss_of(model, federation, noisy(state, steps, seed, sign), args.pieces) for sign in (1, -1)) / 2 - base
        for seed in range(args.draws)
    ]
    found = torch.tensor(pairs)
    return f"{float(found.mean()):.4f} ± {float(found.std()) / len(pairs) ** 0.5:.4f}"


def trained(model: torch.nn.Module, federation: Federation, config: Config, state: State, client: int) -> State:
    load_state(model, state)
    rate = learning_rate(config, 1)
    local_update(model, federation, client, config.local, rate, generator(config.seed, "noise", client))
    return state_of(model)


def difference(one: Values, other: Values) -> State:
    return State(
        one.layout, {s.name: one[s.name] - other[s.name] if s.kind in CODED else one[s.name] for s in one.layout}
    )


def print_curvature(
    model: torch.nn.Module, federation: Federation, state: State, found: list[State], args: argparse.Namespace
) -> None:
    """Of every diagonal of frequencies: mean square of the change, and what noise of one size costs a weight there."""
    there, base = Frequencies(state), loss_of(model, federation, state, args.pieces)
    moved = [Frequencies(difference(one, state)) for one in found]
    print("\n| diagonal | frequencies | mean square of the change | loss a weight by equal noise | ratio |")
    print("|---|---|---|---|---|")
    for spec in there.layout:
        name, _, diagonal = spec.name.partition("~")
        if not diagonal:
            continue
        size = 0.9 * state.rms(name)  # about four times the noise of a download: enough to be seen
        losses = []
        for seed in range(args.draws):
            noise = size * torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed))
            for sign in (1, -1):
                other = State(there.layout, dict(there) | {spec.name: there[spec.name] + sign * noise})
                losses.append(loss_of(model, federation, from_frequencies(other, state.layout), args.pieces) - base)
        square = sum(one.rms(spec.name) ** 2 for one in moved) / len(moved)
        curvature = sum(losses) / len(losses) / spec.size / size**2
        row = [spec.name, str(spec.shape[0]), f"{square:.2e}", f"{curvature:.2e}", f"{curvature / square:.0f}"]
        print("|", " | ".join(row), "|", flush=True)


def print_rates(state: State, found: list[State], fan_in: float) -> None:
    """Bits of real messages against the error of the mean of all clients, as weights and as frequencies."""
    changes = [difference(one, state) for one in found]
    weights = [s.name for s in Frequencies(state).layout if s.kind in CODED and len(s.shape) > 1]
    square = {n: sum(Frequencies(one).rms(n) ** 2 for one in changes) / len(changes) for n in weights}
    sizes = {spec.name: spec.size for spec in Frequencies(state).layout}
    total = sum(square[n] * sizes[n] for n in weights)
    rows: dict[tuple[int, bool], tuple[float, float, float]] = {}
    kappas = 4, 5, 6, 8, 10, 12
    for kappa, as_frequencies in product(kappas, (False, True)):
        size, mean = 0, dict.fromkeys(weights, torch.zeros(()))
        for place, (local, change) in enumerate(zip(found, changes, strict=True)):
            orders = Orders("dithered", None, kappa, fan_in, 7, place, len(found), frequencies=as_frequencies)
            q, _ = quantize_reply(local, state, orders)
            size += len(encode(q))
            got = dequantize_state(q)
            wrong = difference(Frequencies(got), Frequencies(change))
            mean = {n: mean[n] + wrong[n] for n in weights}
        errors = {n: float(mean[n].square().sum()) / len(found) for n in weights}
        bits = 8 * size / len(found) / state.layout.num_elements
        rows[kappa, as_frequencies] = bits, sum(errors.values()) / total, sum(errors[n] * square[n] for n in weights)
    print("\n| kappa up | as weights: bits | error | harm | as frequencies: bits | error | harm |")
    print("|---|---|---|---|---|---|---|")
    for kappa in kappas:
        cells = [
            f"{bits:.3f} | {error:.2f} | {harm / rows[8, False][2]:.2f}"
            for bits, error, harm in (rows[kappa, False], rows[kappa, True])
        ]
        print("|", kappa, "|", " | ".join(cells), "|")
    print(
        "\nerror: of the mean of these clients, times their number, in units of the mean square of a change\n"
        "harm: the same with every frequency's error times the mean square of its change; 1 for weights at kappa 8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--pieces", type=int, default=6, help="of 500 test examples")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--changes", type=int, default=0, metavar="N")
    args = parser.parse_args()
    folder = RunFolder(args.run)
    config, saved = folder.config, folder.load()
    assert saved is not None, "the run has no checkpoint"
    config = replace(config, data=replace(config.data, dir=args.data_dir or config.data.dir))
    federation = build(config)
    model, state = federation.network(config), saved.state
    weights = [spec for spec in state.layout if spec.kind in CODED and len(spec.shape) > 1]
    largest, total = max(spec.size for spec in weights), sum(spec.size for spec in weights)
    by_inputs = {s.name: min(1.0, step_factor(s.shape, s.size, config.dq.fan_in)) for s in weights}
    shared = share_of_layers([spec.shape for spec in weights], config.dq.fan_in, config.dq.depth)
    by_both = {s.name: step_factor(s.shape, largest, config.dq.fan_in, shared) for s in weights}

    def steps(factors: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
        return {name: config.dq.kappa_down * factors[name] * state.rms(name) for name in names}

    print(f"round {saved.round}, test loss {loss_of(model, federation, state, args.pieces):.4f}")
    print("| weight | share of weights | step / rms by inputs alone | loss by it | step / rms | loss by it |")
    print("|---|---|---|---|---|---|")
    for spec in weights:
        row = [f"{100 * spec.size / total:.1f} %"]
        for factors in (by_inputs, by_both):
            added = cost(model, federation, state, steps(factors, [spec.name]), args)
            row += [f"{config.dq.kappa_down * factors[spec.name]:.2f}", added]
        print("|", " | ".join([spec.name, *row]), "|", flush=True)
    row = [cost(model, federation, state, steps(f, by_both), args) for f in (by_inputs, by_both)]
    print(f"| all | 100 % | | {row[0]} | (small: below a {SMALL}th of the largest) | {row[1]} |")
    if args.changes:
        found = [trained(model, federation, config, state, client) for client in range(args.changes)]
        print_curvature(model, federation, state, found, args)
        print_rates(state, found, config.dq.fan_in)


if __name__ == "__main__":
    main()
