"""LocalUpdate (algorithm 1): what a client does with a model between receiving and sending it."""

import math

import torch
from torch import nn

from fedfp8.errors import DataError, QuantizationError
from fedfp8.fl.config import Config, LocalConfig
from fedfp8.fl.examples import Batch, leaves, minibatches
from fedfp8.fl.federation import Federation
from fedfp8.fl.repeatable import one_thread, seeded
from fedfp8.fl.task import Objective
from fedfp8.nn import parameter_groups

__all__ = ["learning_rate", "local_update", "minibatches", "one_thread"]


def learning_rate(config: Config, round: int) -> float:
    """Constant, or a cosine from the first round to the last."""
    if config.local.schedule == "constant":
        return config.local.lr
    return config.local.lr * 0.5 * (1 + math.cos(math.pi * (round - 1) / config.round.count))


@one_thread()
def local_update(
    model: nn.Module, federation: Federation, client: int, local: LocalConfig, rate: float, rng: torch.Generator
) -> float:
    """LocalUpdate (algorithm 1): train `model` in place on a client's examples; returns the mean loss."""
    model.train()
    groups = parameter_groups(model, lr=rate, weight_decay=local.weight_decay, range_lr=_range_rate(local, rate))
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, momentum=local.momentum) if local.optimizer == "sgd" else torch.optim.AdamW(groups)
    )
    anchor = [(p, p.detach().clone()) for p in groups[0]["params"]] if local.prox else []
    total, steps = 0.0, 0
    with seeded(rng.initial_seed()):  # dropout, and what a user's own data draws
        for batch in federation.batches(client, local, rng):
            optimizer.zero_grad(set_to_none=True)
            loss = _loss(federation.objective, model, batch)
            loss.backward()
            for parameter, start in anchor:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - start, alpha=local.prox)
            if local.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), local.clip_norm)
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
            if not math.isfinite(total):
                raise DataError(_why(loss.item(), steps, batch))
    return total / max(steps, 1)


def _loss(objective: Objective, model: nn.Module, batch: Batch) -> torch.Tensor:
    try:
        return objective.loss(model, batch)
    except QuantizationError as error:  # an FP8 layer met NaN before there was a loss
        raise DataError("the client's data holds NaN or Inf") if _is_damaged(batch) else error from None


def _is_damaged(batch: Batch) -> bool:
    return any(not bool(t.isfinite().all()) for t in leaves(batch) if t.is_floating_point())


def _why(loss: float, step: int, batch: Batch) -> str:
    """The cause of a loss that is no number."""
    what = f"the loss is {loss} in step {step}"
    if _is_damaged(batch):
        return f"{what}: the client's data holds NaN or Inf"
    return (
        f"{what}, though its batch holds neither NaN nor Inf: training diverged; lower local.lr or set local.clip_norm"
    )


def _range_rate(local: LocalConfig, rate: float) -> float | None:
    return rate * local.range_lr / local.lr if local.range_lr else None
