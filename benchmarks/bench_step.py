"""A training step in FP8 beside the same step in float: time and peak memory, for the paper's networks.

    python benchmarks/bench_step.py [--json] [--compile] [--no-memory] [model ...]
    python benchmarks/bench_step.py [--json] --calls

Time: both models take turns, step by step, in one process on one thread; a row gives the median float step and
the median of the ratios of neighbouring steps, so that other load on the machine hits both sides. A step is
zero_grad, forward, cross-entropy, backward, SGD. Both sides use the same memory format, each of the two formats
is tried for the image models, and the one in which *float* is faster is reported. "cpu" is the same ratio in CPU
time of the process: on a shared machine it leaves out waiting for a core, though not for memory.

--compile adds the FP8 step with the model under `torch.compile` (inductor; needs a C++ compiler, and minutes), against
the float step in eager mode and against the float step compiled too. Without a compiler it is left out, and said so.

--calls: what one call of the operator that graphs hold (`torch.ops.fedfp8.fake_quantize`) costs beside the function
that eager code calls, on 1,000 elements, in processor time.

Memory: each side runs in a process of its own; what counts is the highest resident size during a step, less
what was resident before the model was built (interpreter, torch, compiled kernels). Linux only. "memory" is what
is live: large blocks go back to the system when freed (MALLOC_MMAP_THRESHOLD_). "rss" is the same under glibc's
default, where holes in the heap count too; they vary from run to run, on either side.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fedfp8.fl.memory import keep_freed_memory
from fedfp8.fp8 import E4M3, fake_quantize
from fedfp8.fp8.ste import gradients, like
from fedfp8.models import MODELS, build
from fedfp8.nn import prepare

# Batch 50 is the paper's; the budgets are ours.
BATCH = 50
BUDGET = {"lenet": 1.15, "resnet18": 1.3, "matchboxnet": 1.5, "kwt1": 1.5}
MEMORY_BUDGET = 1.3
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
CALL_BUDGET = 10.0  # microseconds
STEPS = {"lenet": 41, "resnet18": 7, "matchboxnet": 31, "kwt1": 15}


def make_step(name: str, fp8: bool, memory_format: torch.memory_format, compiled: bool = False) -> Callable[[], None]:
    """One training step of a model as a function; everything it needs is made here."""
    shape = MODELS[name].input_shape
    model: nn.Module = build(name, 10, seed=0)
    if fp8:
        prepare(model, input_range=4.0)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(BATCH, *shape, generator=g), torch.randint(0, 10, (BATCH,), generator=g)
    model = model.to(memory_format=memory_format)
    if x.dim() == 4:
        x = x.contiguous(memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    forward = torch.compile(model, fullgraph=True) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()

    return step


def time_steps(
    name: str, memory_format: torch.memory_format, steps: int, compiled: tuple[bool, bool] = (False, False)
) -> tuple[float, float, float]:
    """(median float step in seconds, median ratio FP8 / float, the same in CPU time), taking turns.

    compiled: whether the float and the FP8 model are.
    """
    plain, fp8 = (make_step(name, side, memory_format, compiled[side]) for side in (False, True))
    for step in (plain, fp8, plain, fp8):  # warm up: kernels, allocator, oneDNN primitives
        step()
    floats, ratios, cpu_ratios = [], [], []
    for _ in range(steps):
        wall, cpu = [], []
        for step in (plain, fp8):
            start, cpu_start = time.perf_counter(), time.process_time()
            step()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
        floats.append(wall[0])
        ratios.append(wall[1] / wall[0])
        cpu_ratios.append(cpu[1] / cpu[0])
    return statistics.median(floats), statistics.median(ratios), statistics.median(cpu_ratios)


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def _peak(name: str, fp8: bool, result: Any) -> None:
    torch.set_num_threads(1)
    warm = make_step("digits", True, torch.contiguous_format)
    warm()  # loads the compiled kernels
    before = _status("VmRSS")
    step = make_step(name, fp8, torch.contiguous_format)
    step()
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the highest resident size starts again from here
    step()
    result.put(_status("VmHWM") - before)


def peak_memory(name: str, fp8: bool, *, live: bool = True) -> int:
    """Bytes that a step of this model needs at its highest point, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    result = context.SimpleQueue()
    process = context.Process(target=_peak, args=(name, fp8, result))
    if live:
        os.environ[THRESHOLD] = "65536"  # read by the C library when the process starts
    try:
        process.start()
    finally:
        os.environ.pop(THRESHOLD, None)
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"measuring the memory of {name} failed with exit code {process.exitcode}")
    return int(result.get())


def run(
    names: list[str] | None = None, *, steps: int | None = None, memory: bool = True, compiled: bool = False
) -> list[dict[str, Any]]:
    """One row a network; `steps` overrides how many pairs of steps are timed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()  # as the engine's workers do; both sides of every ratio run in this process
    try:
        return [_row(name, steps or STEPS[name], memory, compiled) for name in names or list(BUDGET)]
    finally:
        torch.set_num_threads(threads)


def _row(name: str, steps: int, memory: bool, compiled: bool) -> dict[str, Any]:
    formats = {"contiguous": torch.contiguous_format}
    if any(isinstance(module, nn.Conv2d) for module in build(name, 10).modules()):
        formats["channels_last"] = torch.channels_last
    timed = {label: time_steps(name, f, steps) for label, f in formats.items()}
    best = min(timed, key=lambda label: timed[label][0])
    row = {
        "model": name,
        "batch": BATCH,
        "format": best,
        "float_ms": round(1e3 * timed[best][0], 2),
        "ratio": round(timed[best][1], 3),
        "cpu_ratio": round(timed[best][2], 3),
        "budget": BUDGET[name],
        "ratios": {label: round(ratio, 3) for label, (_, ratio, _) in timed.items()},
    }
    if compiled:
        for label, sides in {"compiled_ratio": (False, True), "both_compiled_ratio": (True, True)}.items():
            row[label] = round(time_steps(name, formats[best], steps, sides)[1], 3)
    if memory and sys.platform == "linux":
        plain, fp8 = (peak_memory(name, side) for side in (False, True))
        rss = [peak_memory(name, side, live=False) for side in (False, True)]
        row |= {
            "float_mb": round(plain / 1e6, 1),
            "memory_ratio": round(fp8 / plain, 3),
            "rss_ratio": round(rss[1] / rss[0], 3),
            "memory_budget": MEMORY_BUDGET,
        }
    return row


def calls(repeats: int = 200, size: int = 1000) -> list[dict[str, Any]]:
    """A call of the operator beside one of the function: forward, and the backward that it stands for."""
    x, g, alpha = torch.randn(size), torch.ones(size), torch.tensor(0.9)
    operator, backward = torch.ops.fedfp8.fake_quantize, torch.ops.fedfp8.fake_quantize_backward
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "forward": (lambda: fake_quantize(x, alpha), lambda: operator(x, alpha, 4, 3, None)),
        "backward": (
            lambda: like(alpha, gradients(x, g, alpha.item(), E4M3, "nearest", None)[1]),
            lambda: backward(g, x, alpha, 4, 3, None),
        ),
    }
    rows = []
    with torch.no_grad():
        for name, pair in pairs.items():
            timed = [[_microseconds(call) for call in pair] for _ in range(repeats)][repeats // 10 :]
            direct, through = (statistics.median(column) for column in zip(*timed, strict=True))
            more = statistics.median(b - a for a, b in timed)
            row = {"call": name, "function_us": round(direct, 1), "operator_us": round(through, 1)}
            rows.append(row | {"more_us": round(more, 1), "budget": CALL_BUDGET})
    return rows


def _microseconds(call: Callable[[], Any], times: int = 20) -> float:
    start = time.process_time_ns()
    for _ in range(times):
        call()
    return (time.process_time_ns() - start) / (1e3 * times)


def has_compiler() -> bool:
    """Whether `torch.compile` finds a C++ compiler."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def main() -> None:
    parser = argparse.ArgumentParser(description="FP8 training step against the float step")
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(BUDGET)}; default: all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compile", action="store_true", help="the compiled step too")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--calls", action="store_true", help="only the cost of a call of the operator")
    args = parser.parse_args()
    if args.calls:
        torch.set_num_threads(1)
        found = calls()
        lines = (
            "{call}: function {function_us} µs, operator {operator_us} µs, {more_us} more (budget {budget})".format(
                **row
            )
            for row in found
        )
        print(json.dumps(found, indent=2) if args.json else "\n".join(lines))
        return
    if args.compile and not has_compiler():
        print("no C++ compiler here (g++, clang++ or $CXX): the compiled step is left out", file=sys.stderr)
        args.compile = False
    rows = run(args.models or None, memory=not args.no_memory, compiled=args.compile)
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    columns = ("float ms", 9), ("FP8/float", 10), ("cpu", 6), ("budget", 7), ("memory", 7), ("rss", 6)
    print(f"{'model':12} {'format':14}", *(f"{title:>{width}}" for title, width in columns))
    for r in rows:
        timed = f"{r['float_ms']:9.1f} {r['ratio']:10.3f} {r['cpu_ratio']:6.3f} {r['budget']:7.2f}"
        memory = f"{r['memory_ratio']:7.2f} {r['rss_ratio']:6.2f}" if "memory_ratio" in r else "      -      -"
        print(f"{r['model']:12} {r['format']:14} {timed} {memory}")
        if "compiled_ratio" in r:
            against = f"float {r['compiled_ratio']:.3f}, compiled float {r['both_compiled_ratio']:.3f}"
            print(f"{'':12} compiled FP8 against {against}")


if __name__ == "__main__":
    main()
