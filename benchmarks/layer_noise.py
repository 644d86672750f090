"""What DQ's noise costs, layer by layer: the numbers behind the steps of docs/method.md.

    python benchmarks/layer_noise.py runs/lenet-cifar10-iid/dq-seed0 --data-dir DATA

Takes the server's model of a run and prints for every weight: its share of all weights, its step down in units of its
root mean square, and by how much the test loss grows if that noise is added to this weight alone (the mean of noise and
its negative, so that the slope of the loss falls out). Then the same for all of them, with and without finer steps for
small layers. With --changes N, N clients train from there: how their changes look as weights and as frequencies, as bits
a weight of real messages and as the error of a cohort's mean, for several kappas.
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fedfp8.fl.checkpoint import RunFolder
from fedfp8.fl.evaluate import evaluate_piece
from fedfp8.fl.federation import Federation, build
from fedfp8.fl.local import learning_rate, local_update
from fedfp8.link.client import quantize_reply
from fedfp8.link.wire import SMALL, Orders, step_factor
from fedfp8.model.frequencies import from_frequencies
from fedfp8.model.quantized import dequantize_state
from fedfp8.model.state import State
from fedfp8.nn import load_state, state_of
from fedfp8.rng import generator
from fedfp8.wire import encode


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


def changes(model: torch.nn.Module, federation: Federation, config, state: State, clients: Iterable[int]):  # type: ignore[no-untyped-def]
    for client in clients:
        load_state(model, state)
        rate = learning_rate(config, 1)
        local_update(model, federation, client, config.local, rate, generator(config.seed, "noise", client))
        yield state_of(model)


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
    weights = [spec for spec in state.layout if spec.kind in ("fp8", "float") and len(spec.shape) > 1]
    largest, total = max(spec.size for spec in weights), sum(spec.size for spec in weights)
    by_inputs = {s.name: min(1.0, step_factor(s.shape, s.size, config.dq.fan_in)) for s in weights}
    by_both = {s.name: step_factor(s.shape, largest, config.dq.fan_in) for s in weights}

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
    if not args.changes:
        return
    locals_ = list(changes(model, federation, config, state, range(args.changes)))
    print("\n| kappa up | bits as weights | error of the mean | bits as frequencies | error of the mean |")
    print("|---|---|---|---|---|")
    names = [spec.name for spec in weights]
    for kappa in (4, 5, 6, 8, 10, 12):
        row = []
        for frequencies in (False, True):
            size, mean = 0, {name: torch.zeros(state[name].shape) for name in names}
            for place, local in enumerate(locals_):
                orders = Orders(
                    "dithered", None, kappa, config.dq.fan_in, 7, place, len(locals_), frequencies=frequencies
                )
                q, _ = quantize_reply(local, state, orders)
                size += len(encode(q))
                got = dequantize_state(q)
                got = from_frequencies(got, state.layout) if frequencies else got
                for name in names:
                    mean[name] += got[name] - (local[name] - state[name])
            # of the mean of N clients, times N: the error of one client if they were independent
            moved = sum(float((one[n] - state[n]).square().sum()) for one in locals_ for n in names)
            error = sum(float(m.square().sum()) for m in mean.values()) / moved
            row += [f"{8 * size / len(locals_) / state.layout.num_elements:.3f}", f"{error:.2f}"]
        print("|", " | ".join([str(kappa), *row]), "|", flush=True)
    print("\nerror: of the mean of these clients, times their number, in units of the mean square of a change")


if __name__ == "__main__":
    main()
