"""Who takes part and with what: the network, every client's examples, the test set.

A `Federation` is built from a config (data set, partition, network) or from a user's own model and data. It is the same
in the server process, in every worker and on every Flower node, because it follows from the config alone.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from fedfp8 import data as datasets
from fedfp8 import models
from fedfp8.errors import ConfigError
from fedfp8.fl.config import Config
from fedfp8.fp8 import Format
from fedfp8.nn import prepare, set_rounding
from fedfp8.rng import derive_seed, generator

__all__ = ["FP32", "Federation", "build", "client_formats", "from_tensors"]

FP32 = "FP32"  # the format of clients that do not train in FP8
Examples = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Identity:
    """The transform of examples that are ready for the network."""

    input_range: float

    def __call__(self, x: torch.Tensor, generator: torch.Generator | None, train: bool) -> torch.Tensor:
        return x.float()


@dataclass(frozen=True)
class Federation:
    model: nn.Module  # float, initial weights
    train_x: torch.Tensor
    train_y: torch.Tensor
    parts: list[np.ndarray]  # examples of each client, as indices
    test_x: torch.Tensor
    test_y: torch.Tensor
    transform: datasets.Transform
    formats: list[str]  # of each client: "E4M3", ..., "FP32"

    def size(self, client: int) -> int:
        return len(self.parts[client])

    def eligible(self, config: Config) -> list[int]:
        """Clients with enough examples to train on."""
        return [k for k, part in enumerate(self.parts) if len(part) >= config.clients.min_examples]

    def network(self, config: Config, format: str | None = None) -> nn.Module:
        """A fresh network for clients of `format` (default: the run's), prepared if the run trains in FP8."""
        model = copy.deepcopy(self.model)
        if config.prepared:
            format = format or config.qat.format
            prepare(
                model,
                Format.parse(config.qat.format if format == FP32 else format),
                rounding=config.qat.rounding,
                input_range=self.transform.input_range,
            )
            if format == FP32:
                set_rounding(model, "off")
        if any(isinstance(module, nn.Conv2d) for module in model.modules()):
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def share(self) -> "Federation":
        """The same with its tensors in shared memory, so that workers copy nothing."""

        def shared(x: torch.Tensor) -> torch.Tensor:
            return x if x.is_shared() else x.clone().share_memory_()

        return replace(
            self,
            train_x=shared(self.train_x),
            train_y=shared(self.train_y),
            test_x=shared(self.test_x),
            test_y=shared(self.test_y),
        )


def build(config: Config) -> Federation:
    """The federation of a config: data set, partition, network."""
    data = datasets.load(config.data.name, config.data.dir or None, features=config.data.features)
    train = _subset(len(data.train_y), config.data.limit, config.seed, "train")
    test = _subset(len(data.test_y), config.data.test_limit, config.seed, "test")
    labels, groups = data.train_y[train], data.train_groups
    by_group = config.data.partition == "group"
    parts = datasets.partition(
        config.data.partition,
        labels.numpy(),
        None if by_group else config.clients.count,
        config.seed,
        concentration=config.data.concentration,
        groups=None if groups is None else groups[train].numpy(),
        num_classes=data.num_classes,
    )
    options = {"stem": config.model.stem} if config.model.stem else {}
    seed = derive_seed(config.seed, "init")
    model = models.build(config.model.name, data.num_classes, seed=seed, **options)
    transform = datasets.transform_for(config.data.name, config.data.features)
    formats = client_formats(config, len(parts))
    return Federation(
        model, data.train_x[train], labels, parts, data.test_x[test], data.test_y[test], transform, formats
    )


def from_tensors(config: Config, model: nn.Module, clients: Sequence[Examples], test: Examples) -> Federation:
    """A federation of your own: a float model, (x, y) of every client and of the test set; x ready to use."""
    if not clients:
        raise ConfigError("no clients were given; pass a list with (x, y) of each client")
    for who, (x, y) in [*((f"client {k}", examples) for k, examples in enumerate(clients)), ("the test set", test)]:
        if len(x) != len(y):
            raise ConfigError(f"{who} has {len(x)} examples and {len(y)} labels; they must be equal in number")
    if not len(test[1]):
        raise ConfigError("the test set is empty; pass test=(x, y) with at least one example")
    bounds = np.cumsum([0] + [len(y) for _, y in clients])
    parts = [np.arange(a, b) for a, b in pairwise(bounds)]
    train_x = torch.cat([x for x, _ in clients])
    finite = train_x[train_x.isfinite()].abs()  # a client with NaN in its data fails alone, in training
    transform = Identity(max(float(finite.max()), 1e-6) if finite.numel() else 1.0)
    train_y = torch.cat([y for _, y in clients])
    return Federation(model, train_x, train_y, parts, *test, transform, client_formats(config, len(parts)))


def _subset(total: int, limit: int, seed: int, which: str) -> torch.Tensor | slice:
    if not limit or limit >= total:
        return slice(None)
    return torch.randperm(total, generator=generator(seed, "subset", which))[:limit].sort().values


def client_formats(config: Config, count: int) -> list[str]:
    """The format of every client from ``clients.formats``: shares "E4M3:3,FP32:1" or single clients "0=FP32,7=E5M2"."""
    text = config.clients.formats.replace(" ", "")
    formats = [config.qat.format if config.prepared else FP32] * count
    if not text:
        return formats
    items = text.split(",")
    if all("=" in item for item in items):
        for item in items:
            client, _, format = item.partition("=")
            if not client.isdigit() or int(client) >= count:
                raise ConfigError(f"clients.formats names client {client!r}; clients are 0 to {count - 1}")
            formats[int(client)] = _format_name(format)
        return formats
    shares = [(_format_name(name), _share(share)) for name, _, share in (item.partition(":") for item in items)]
    bounds = np.cumsum([share for _, share in shares]) / sum(share for _, share in shares)
    order = torch.randperm(count, generator=generator(config.seed, "formats")).tolist()
    for place, client in enumerate(order):
        formats[client] = shares[int(np.searchsorted(bounds, (place + 0.5) / count))][0]
    return formats


def _share(text: str) -> float:
    try:
        share = float(text or 1)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise ConfigError(
            f"clients.formats gives a share of {text!r}; shares are numbers above 0, as in 'E4M3:3,FP32:1'"
        )
    return share


def _format_name(text: str) -> str:
    try:
        return FP32 if text.upper() == FP32 else Format.parse(text).name
    except ValueError as error:
        raise ConfigError(f"clients.formats: {error}; or FP32 for clients without FP8 training") from None
