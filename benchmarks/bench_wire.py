"""Rate and speed of the wire format: bits per weight beside the empirical conditional entropy, and MB/s of codes.

    python benchmarks/bench_wire.py [--elements N] [--json]          synthetic pairs and speed
    python benchmarks/bench_wire.py --run DIR                        real pairs, from a run folder of method uq

The entropy is that of the step from the prediction with known random bits, given (16 exponents | 3 classes of
|reference|) x
16 places in the cell. It is counted on the coded tensor itself, so it is too low by about (cells - contexts) / (2 ln 2)
bits (Miller and Madow): `entropy` is the plain count, `corrected` adds that back. The budget is 3 % + 200 bytes over
the plain one. Speeds are CPU time of one thread, one code counted as one byte, best of several runs.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfp8 import E4M3, Format, quantize, wire
from fedfp8.fl.checkpoint import RunFolder
from fedfp8.fl.federation import build
from fedfp8.fl.local import learning_rate, local_update
from fedfp8.fl.wires import server_link, wire_for
from fedfp8.link.history import Entry, quantize_down
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import QuantState, dequantize_state, quantize_state
from fedfp8.model.state import State
from fedfp8.nn import load_state, state_of
from fedfp8.rng import generator
from fedfp8.wire import codec, rawbits, steps, stream

MOVES = (0.001, 0.005, 0.02, 0.05, 0.1)  # of the weights' std
ALPHAS = (1.0, 1.003, 1.2)
STEPS = (0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0)  # of the rms of the change


def one(tensor: torch.Tensor, alpha: float, format: Format = E4M3) -> State:
    """A model of one weight and its range."""
    weight = TensorSpec("w", tuple(tensor.shape), "float32", "fp8", format, "alpha")
    layout = Layout((weight, TensorSpec("alpha", (), "float32", "range")))
    return State(layout, {"w": tensor.contiguous(), "alpha": torch.tensor(alpha)})


def synthetic(n: int, seed: int = 0) -> Iterator[tuple[str, QuantState, State]]:
    """The pairs of the budget: N(0,1) weights, FP8 and dithered."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, generator=g)
    alpha = float(w.abs().max())
    received = quantize(w, alpha, rounding="stochastic", seed=1)
    for move in MOVES:
        new = received + move * torch.randn(n, generator=g)
        for factor in ALPHAS:
            q = quantize_state(one(new, alpha * factor), seed=7, rounding="stochastic")
            yield f"fp8, move {move}, alpha x {factor}", q, one(received, alpha)
    new = received + 0.05 * torch.randn(n, generator=g)
    for kappa in STEPS:
        q = quantize_state(one(new, alpha), seed=7, rounding="dithered", step={"w": 0.05 * kappa})
        yield f"dithered, step {kappa} rms of the change", q, one(received, alpha)


def entropy(plan: codec.Plan, codes: np.ndarray, random: bool = True) -> tuple[float, float]:
    """(plain, corrected) empirical entropy, in bits for the whole tensor."""
    predictor = steps.Predictor(plan, plan.references[0] if plan.references else None, random)
    contexts, moves = [], []
    for piece in stream.pieces(plan.size):
        pred, ctx = predictor(piece.start, piece.stop)
        step = predictor.ranks(codes[piece.start : piece.stop]).astype(np.int64) - pred
        context, flip = (ctx & 0xFF).astype(np.int64), ctx >> 15 == 1
        if plan.dithered:  # 32 folded places back to 16 plain ones
            place = np.where(flip, 31 - context % 16, context % 16) // 2
            context = context // 16 * 16 + place
        else:
            step = np.where(flip, -step, step)
        contexts.append(context)
        moves.append(step)
    symbols, index = np.unique(np.concatenate(moves), return_inverse=True)
    table = np.bincount(np.concatenate(contexts) * len(symbols) + index, minlength=256 * len(symbols))
    table = table.reshape(-1, len(symbols)).astype(float)
    total = table.sum(1, keepdims=True)
    used = table > 0
    plain = -float((table[used] * np.log2((table / np.maximum(total, 1))[used])).sum())
    return plain, plain + (int(used.sum()) - int((total > 0).sum())) / (2 * math.log(2))


def rates(q: QuantState, reference: State) -> Iterator[dict[str, Any]]:
    """Per coded tensor: bits a weight, entropy, and the share of the allowed excess that is used."""
    for plan in codec.plans(q, [reference]):
        if plan.empty:
            continue
        codes = q.codes[plan.name].numpy()
        mode, data = codec.encode(plan, codes, True)
        plain, corrected = entropy(plan, codes, plan.random and not mode & codec.NO_RANDOM_BITS)
        bits = 8 * (len(data) + 1 + len(wire.container.varint(len(data))))
        yield {
            "tensor": plan.name,
            "elements": plan.size,
            "mode": codec.mode_name(mode),
            "bits": bits / plan.size,
            "entropy": plain / plan.size,
            "corrected": corrected / plan.size,
            "budget_used": (bits - plain) / (0.03 * plain + 1600),
        }


def best_time(run: Callable[[], Any], times: int = 9) -> float:
    found = []
    for _ in range(times):
        start = time.thread_time()
        run()
        found.append(time.thread_time() - start)
    return min(found)


def speed(plan: codec.Plan, codes: np.ndarray) -> dict[str, float]:
    mode, data = codec.encode(plan, codes, True)
    decoded = codec.decode(plan, mode, memoryview(data))
    assert np.array_equal(decoded, codes)  # equal work before any timing
    return {
        "encode": plan.size / best_time(lambda: codec.encode(plan, codes, True)) / 1e6,
        "decode": plan.size / best_time(lambda: codec.decode(plan, mode, memoryview(data))) / 1e6,
    }


def static_speed(q: QuantState) -> dict[str, float]:
    codes = q.codes["w"].numpy()
    data = memoryview(stream.encode_bytes(codes, 8))
    assert np.array_equal(stream.decode_bytes(data, codes.size, 8), codes)
    return {
        "encode": codes.size / best_time(lambda: stream.encode_bytes(codes, 8)) / 1e6,
        "decode": codes.size / best_time(lambda: stream.decode_bytes(data, codes.size, 8)) / 1e6,
        "raw": codes.size / best_time(lambda: rawbits.pack(codes, 8)) / 1e6,
    }


def real_pairs(path: Path) -> Iterator[tuple[str, QuantState, State]]:
    """The next round of a run of FP8FedAvg-UQ: one client's update given what it received, and what is sent down given
    what clients of earlier rounds still hold."""
    with RunFolder.open(path) as folder:
        config, federation = folder.config, build(folder.config)
        model, client = federation.network(config), federation.eligible(config)[0]
        link = server_link(config, federation, state_of(model), folder.models)
        server = folder.load(link)
        assert server is not None, f"{path} has no checkpoint"
        wire, round = wire_for(config, federation.formats[client]), server.round + 1
        older = {server.round - number: link.history.sent(number, wire, 0) for number in link.history.entries}
    entry = Entry(round, server.state.fingerprint, 1, 1)
    down = quantize_down(server.state, entry, wire, 0, config.seed)
    received = dequantize_state(down)
    load_state(model, received)
    rng = generator(config.seed, "train", round, client)
    local_update(model, federation, client, config.local, learning_rate(config, round), rng)
    trained = state_of(model)
    yield "up, fp8", quantize_state(trained, seed=7), received
    for kappa in STEPS:
        q = quantize_state(trained, seed=7, rounding="dithered", step=kappa, step_of="update", reference=received)
        yield f"up, dithered, step {kappa} rms of the change", q, received
    for age in sorted(older)[:: max(len(older) // 3, 1)]:
        reference = older[age]
        yield f"down, fp8, given the model of {age + 1} rounds ago", down, reference
        q = quantize_state(server.state, seed=7, rounding="dithered", step=0.3)
        yield f"down, dithered, step 0.3 rms of the weights, {age + 1} rounds", q, reference


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--run", type=Path, help="a run folder whose checkpoint and data give real pairs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, q, reference in real_pairs(args.run) if args.run else synthetic(args.elements):
        for row in rates(q, reference):
            if args.run is None:
                row.update(speed(next(codec.plans(q, [reference])), q.codes["w"].numpy()))
            rows.append({"pair": name, **row})
    if args.run is None:
        rows.append({"pair": "static, one byte a symbol", **static_speed(next(synthetic(args.elements))[1])})
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()))


if __name__ == "__main__":
    main()
