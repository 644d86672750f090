"""The networks of the paper, and the small one of the `digits` preset: plain modules that know nothing of
quantization.

:func:`build` makes one by name; :func:`table` lists them with their parameter counts beside those the paper
gives. No network has dropout or batch statistics: the first would draw from torch's global generator, the
second would have to be averaged between clients that saw different data.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedfp8.errors import ConfigError
from fedfp8.models import digits, kwt, lenet, matchboxnet, resnet

__all__ = ["MODELS", "Network", "build", "table"]


@dataclass(frozen=True)
class Network:
    """A network by name: how to make it, what one example looks like, and what the paper says of its size."""

    make: Callable[..., nn.Module]
    num_classes: int
    input_shape: tuple[int, ...]
    paper: str
    about: str


MODELS = {
    "digits": Network(digits.digits, 10, (1, 8, 8), "-", "two convolutions for 8x8 grey images"),
    "lenet": Network(lenet.lenet, 10, (3, 32, 32), "800K", "two 5x5 convolutions, three linear layers"),
    "resnet18": Network(
        resnet.resnet18, 10, (3, 32, 32), "11M", "GroupNorm, 3x3 stem without max-pool (stem='imagenet': 7x7)"
    ),
    "matchboxnet": Network(matchboxnet.matchboxnet, 35, (64, 128), "350K", "MatchboxNet-3x1x64, GroupNorm, 64 MFCC"),
    "kwt1": Network(kwt.kwt1, 35, (40, 98), "450K", "Keyword Transformer, 12 blocks of width 64, 40 MFCC x 98 frames"),
}


def build(name: str, num_classes: int | None = None, *, seed: int | None = None, **options: Any) -> nn.Module:
    """The network `name` for `num_classes` (its usual number if None); `options` go to its constructor.

    With a `seed` the initial weights are drawn from it and torch's global generator is left as it was;
    without one they are drawn from the global generator, as torch does.
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}")
    model = MODELS[name]
    allowed = [o for o in inspect.signature(model.make).parameters if o != "num_classes"]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ConfigError(f"model {name!r} has no option {', '.join(unknown)}; it has {', '.join(allowed) or 'none'}")
    classes = model.num_classes if num_classes is None else num_classes
    if classes < 1:
        raise ConfigError(f"num_classes is {classes}; a classifier needs at least 1")
    if seed is None:
        return model.make(classes, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model.make(classes, **options)


def table() -> list[dict[str, Any]]:
    """One row a network at its usual number of classes, with the paper's figure beside the real count."""
    rows = []
    for name, model in MODELS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in model.make(model.num_classes).parameters())
        rows.append(
            {
                "model": name,
                "classes": model.num_classes,
                "input": "x".join(map(str, model.input_shape)),
                "parameters": count,
                "paper": model.paper,
                "about": model.about,
            }
        )
    return rows
