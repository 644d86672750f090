"""The network of the `digits` preset: 8x8 grey images, 38,282 parameters.

Large enough that names, ranges and headers do not dominate a message, small enough that a client's round
takes a fraction of a second.
"""

from torch import nn

__all__ = ["digits"]


def digits(num_classes: int = 10) -> nn.Module:
    """(batch, 1, 8, 8) -> (batch, num_classes)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.MaxPool2d(2),  # before the ReLU: both are monotone, so the values are the same
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )
