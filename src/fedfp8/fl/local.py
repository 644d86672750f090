"""LocalUpdate (algorithm 1): what a client does with a model between receiving and sending it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from numpy.typing import ArrayLike
from torch import nn
from torch.nn.functional import cross_entropy

from fedfp8.fl.config import Config, LocalConfig
from fedfp8.fl.federation import Federation
from fedfp8.nn import parameter_groups

__all__ = ["learning_rate", "local_update", "minibatches", "one_thread"]


def learning_rate(config: Config, round: int) -> float:
    """Constant, or a cosine from the first round to the last."""
    if config.local.schedule == "constant":
        return config.local.lr
    return config.local.lr * 0.5 * (1 + math.cos(math.pi * (round - 1) / config.round.count))


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums come out the same whatever the number of cores: every engine trains and evaluates with one torch thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def local_update(
    model: nn.Module, federation: Federation, client: int, local: LocalConfig, rate: float, dice: torch.Generator
) -> float:
    """LocalUpdate (algorithm 1): train `model` in place on a client's examples; returns the mean loss."""
    model.train()
    groups = parameter_groups(model, lr=rate, weight_decay=local.weight_decay, range_lr=_range_rate(local, rate))
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, momentum=local.momentum) if local.optimizer == "sgd" else torch.optim.AdamW(groups)
    )
    anchor = [(p, p.detach().clone()) for p in groups[0]["params"]] if local.prox else []
    total, batches = 0.0, 0
    for batch in minibatches(federation.parts[client], local, dice):
        x = federation.transform(federation.train_x[batch], dice, local.augment)
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(model(x), federation.train_y[batch])
        loss.backward()
        for parameter, start in anchor:
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - start, alpha=local.prox)
        if local.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), local.clip_norm)
        optimizer.step()
        total, batches = total + loss.item(), batches + 1
    return total / max(batches, 1)


def _range_rate(local: LocalConfig, rate: float) -> float | None:
    return rate * local.range_lr / local.lr if local.range_lr else None


def minibatches(part: ArrayLike, local: LocalConfig, dice: torch.Generator) -> Iterator[torch.Tensor]:
    """Shuffled minibatches of a client's examples: `epochs` passes, or `steps` batches."""
    indices = torch.as_tensor(part)
    done = 0
    for _ in range(local.epochs or local.steps):
        for batch in indices[torch.randperm(len(indices), generator=dice)].split(local.batch_size):
            yield batch
            done += 1
            if local.steps and done == local.steps:
                return
