"""Metric and loss of a model on the server's test set, in pieces that any worker can take."""

import torch
from torch import nn

from fedfp8.fl.federation import Federation
from fedfp8.fl.repeatable import one_thread, seeded

__all__ = ["evaluate_piece"]


@one_thread()
@torch.no_grad()
def evaluate_piece(model: nn.Module, federation: Federation, piece: int) -> tuple[float, float, float, int]:
    """(metric times weight, weight, summed loss, examples) of one piece, through the nearest-rounding forward."""
    model.eval()
    with seeded(piece):  # a user's own test data may draw
        found = [federation.objective.evaluate(model, batch) for batch in federation.test_batches(piece)]
    value, weight, loss, examples = (sum(column) for column in zip(*found, strict=True))
    return value, weight, loss, examples
