"""Accuracy and loss of a model on the server's test set, in pieces that any worker can take."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedfp8.fl.federation import Federation
from fedfp8.fl.local import one_thread

__all__ = ["PIECE", "evaluate_piece"]

PIECE = 500  # examples a piece: fixed, so that results do not depend on who evaluates what


@one_thread()
@torch.no_grad()
def evaluate_piece(model: nn.Module, federation: Federation, piece: int) -> tuple[int, float, int]:
    """(correct answers, summed loss, examples) of one piece, through the nearest-rounding forward."""
    model.eval()
    where = slice(piece * PIECE, (piece + 1) * PIECE)
    x, y = federation.test_x[where], federation.test_y[where]
    logits = model(federation.transform(x, None, False))
    return int((logits.argmax(1) == y).sum()), float(cross_entropy(logits, y, reduction="sum")), len(y)
