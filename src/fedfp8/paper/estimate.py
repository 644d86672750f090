"""How long runs will take on this machine: a few timed training steps and test pieces, times how many there are.

Only training and evaluation are counted; coding and aggregation add a few percent. A plan with several methods and
seeds times each kind of step once.
"""

import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from fedfp8.errors import DataError
from fedfp8.fl.config import Config, cohort_size
from fedfp8.fl.evaluate import evaluate_piece
from fedfp8.fl.federation import Federation, build
from fedfp8.fl.local import local_update
from fedfp8.paper.jobs import Job
from fedfp8.rng import generator

__all__ = ["round_seconds", "seconds_per_round"]

STEPS = 3  # timed, after one to warm up; a single one where a step takes longer than a second


def seconds_per_round(jobs: Iterable[Job], workers: int) -> dict[Job, float | None]:
    """Estimated seconds of one round of every job; None where the data set is missing."""
    timed: dict[tuple[object, ...], tuple[float, float]] = {}
    found: dict[Job, float | None] = {}
    for job in jobs:
        config = job.config
        try:
            federation = build(config)
        except DataError:
            found[job] = None
            continue
        local = config.local
        by_group = config.data.partition == "group"  # clients with less than a batch
        examples = (config.data.name, config.data.features, by_group, local.batch_size)
        key = (*examples, config.model, config.qat, local.optimizer)
        if key not in timed:
            timed[key] = _time(config, federation)
        found[job] = round_seconds(config, federation, *timed[key], workers=workers)
    return found


def round_seconds(config: Config, federation: Federation, step: float, piece: float, *, workers: int) -> float:
    """One round from the seconds of a training step and of a piece of the test set."""
    local, clients = config.local, federation.eligible(config)
    steps = [local.steps or local.epochs * -(-federation.size(k) // local.batch_size) for k in clients]
    cohort = cohort_size(config, len(clients))
    train = cohort * sum(steps) / len(steps) * step
    models = 2 if config.round.eval_sent and config.down.rounding != "none" else 1
    evaluate = models * federation.pieces * piece / config.round.eval_every
    return train / max(1, min(workers, cohort)) + evaluate / max(1, workers)


def _time(config: Config, federation: Federation) -> tuple[float, float]:
    """Seconds of a training step and of a test piece, on one thread as in a worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = federation.network(config)
        clients = sorted(federation.eligible(config), key=federation.size)
        client = clients[len(clients) // 2]
        rng = generator(config.seed, "estimate")

        def train(steps: int) -> float:
            local = replace(config.local, steps=steps, epochs=0)
            begin = time.perf_counter()
            local_update(model, federation, client, local, config.local.lr, rng)
            return (time.perf_counter() - begin) / steps

        def evaluate() -> float:
            begin = time.perf_counter()
            evaluate_piece(model, federation, 0)
            return time.perf_counter() - begin

        slow = train(1) > 1
        step, piece = train(1 if slow else STEPS), evaluate()
        return step, piece if slow else min(piece, evaluate())
    finally:
        torch.set_num_threads(threads)
