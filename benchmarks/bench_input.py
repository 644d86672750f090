"""Share of the input pipeline in a training step, and the time of partitions.

    OMP_NUM_THREADS=1 python benchmarks/bench_input.py [--json]

A step is forward, backward and an SGD update of the FP32 model with one thread (the fastest step there is, so the
largest share); the pipeline is picking a batch from the memory-mapped arrays by random index, augmenting and
normalising it. "lenet, a Dataset" is a client of a user's own task instead: single pictures of a torch Dataset, which
turns bytes into floats, collated. Both are timed in turn within one run, in processor time, and medians are compared.
Random arrays of the real shapes: timing does not depend on what is in the pictures.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from fedfp8.data import partition, transform_for
from fedfp8.fl.config import LocalConfig
from fedfp8.fl.examples import Items
from fedfp8.models import build
from fedfp8.rng import generator

CASES = [  # model, data set, features, stored shape, batch
    ("lenet", "cifar10", "", (50_000, 3, 32, 32), 50),
    ("matchboxnet", "speech_commands", "matchboxnet", (18_538, 64, 128), 50),
    ("kwt1", "speech_commands", "kwt", (18_538, 40, 98), 50),
]


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def stored(shape: tuple[int, ...], folder: str) -> torch.Tensor:
    """A memory-mapped array as `load` gives it."""
    rng = np.random.default_rng(0)
    kind = np.uint8 if len(shape) == 4 else np.float16
    file = np.lib.format.open_memmap(f"{folder}/{len(shape)}-{shape[1]}.npy", mode="w+", dtype=kind, shape=shape)
    for start in range(0, len(file), 4096):
        block = file[start : start + 4096]
        block[:] = rng.integers(0, 256, block.shape) if kind == np.uint8 else rng.normal(size=block.shape)
    file.flush()
    return torch.from_numpy(np.load(file.filename, mmap_mode="c"))


class Pictures(Dataset):
    """Random pictures of CIFAR's shape, one at a time."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        self.x, self.y = rng.integers(0, 256, (count, 3, 32, 32), np.uint8), rng.integers(0, 10, count)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self.x[i].astype(np.float32) / 255, int(self.y[i])


def from_arrays(data: str, features: str, shape: tuple[int, ...], batch: int, folder: str) -> Callable[[], object]:
    """A batch of a data set of ours."""
    x, transform, draws = stored(shape, folder), transform_for(data, features or "kwt"), generator(0, "bench")
    return lambda: transform(x[torch.randint(len(x), (batch,), generator=draws)], draws, True)


def from_dataset(batch: int) -> Callable[[], object]:
    """A batch of a client whose data are a torch Dataset."""
    local = LocalConfig(batch_size=batch, epochs=1_000_000)
    batches = Items(Pictures(50 * batch)).batches(local, generator(0, "bench"))
    return lambda: next(batches)[0]


def share(model_name: str, pipeline: Callable[[], object], batch: int, repeats: int) -> dict:
    model = build(model_name, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    labels = torch.arange(batch) % 10

    def step(inputs: object) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    inputs = pipeline()
    for _ in range(3):
        step(inputs)
        pipeline()
    times = [(seconds(pipeline), seconds(lambda: step(inputs))) for _ in range(repeats)]
    load, work = (statistics.median(column) for column in zip(*times, strict=True))
    timed = {"input_ms": 1e3 * load, "step_ms": 1e3 * work, "share": load / work}
    return {"model": model_name, "batch": batch} | timed


def partitions() -> list[dict]:
    labels = np.tile(np.arange(10), 5000)
    rows = []
    for kind in ("iid", "dirichlet", "dirichlet-class", "group"):
        groups = np.arange(50_000) % 2112
        clients = 2112 if kind == "group" else 100
        spent = [seconds(lambda: partition(kind, labels, clients, 0, groups=groups)) for _ in range(5)]  # noqa: B023
        rows.append({"partition": kind, "clients": clients, "ms": 1e3 * statistics.median(spent)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shares = [
            share(model, from_arrays(data, features, shape, batch, folder), batch, options.repeats)
            for model, data, features, shape, batch in CASES
        ]
    shares.append(share("lenet", from_dataset(50), 50, options.repeats) | {"model": "lenet, a Dataset"})
    result = {"input": shares, "partition": partitions(), "torch": torch.__version__}
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for row in shares:
        print(
            f"{row['model']:16} batch {row['batch']}: input {row['input_ms']:6.2f} ms, step "
            f"{row['step_ms']:7.2f} ms, {row['share']:.1%}"
        )
    for row in result["partition"]:
        print(f"{row['partition']:16} 50,000 examples, {row['clients']} clients: {row['ms']:.1f} ms")


if __name__ == "__main__":
    main()
