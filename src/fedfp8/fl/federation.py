"""Who takes part and with what: the network, every client's examples, the test set.

A `Federation` is built from a config (data set, partition, network) or from a user's own task. It is the same in the
server process, in every worker and on every Flower node, because it follows from the config (or the task) alone.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import nn

from fedfp8 import data as datasets
from fedfp8 import models
from fedfp8.errors import ConfigError, Fedfp8Error, RunError
from fedfp8.fl.config import Config, LocalConfig
from fedfp8.fl.examples import Batch, Part, Source, sources, tree_map
from fedfp8.fl.repeatable import one_thread, seeded
from fedfp8.fl.task import CLASSIFICATION, OWN, Objective, Task, check_labels, check_loss, objective_for, task_of
from fedfp8.fp8 import Format
from fedfp8.nn import prepare, set_rounding
from fedfp8.nn.layers import WeightedLayer
from fedfp8.rng import derive_seed, generator

__all__ = ["FP32", "PIECE", "Federation", "build", "client_formats", "from_task", "from_tensors"]

FP32 = "FP32"  # the format of clients that do not train in FP8
PIECE = 500  # examples evaluated at a time: fixed, so that results do not depend on who evaluates what


@dataclass(frozen=True)
class OnInputs:
    """A transform of x as one of batches (x, y)."""

    transform: datasets.Transform

    def __call__(self, batch: Batch, generator: torch.Generator | None, train: bool) -> Batch:
        return self.transform(batch[0], generator, train), batch[1]


def unchanged(batch: Batch, generator: torch.Generator | None, train: bool) -> Batch:
    """The transform of batches that are ready for the network."""
    return batch


@dataclass(frozen=True)
class Federation:
    model: nn.Module  # float, initial weights
    clients: list[Source]
    test: Source
    formats: list[str]  # of each client: "E4M3", ..., "FP32"
    objective: Objective = CLASSIFICATION
    transform: Callable[[Batch, torch.Generator | None, bool], Batch] = unchanged
    skip: Any = ()  # layers that stay float, as in `prepare`
    input_range: float | None = None  # of the first layer, where the transform fixes it
    ranges: dict[str, float] = field(default_factory=dict)  # of other layers that see the data itself
    piece: int = PIECE
    device: str = "cpu"

    def size(self, client: int) -> int:
        return self.clients[client].size

    def eligible(self, config: Config) -> list[int]:
        """Clients with enough examples to train on."""
        return [k for k, source in enumerate(self.clients) if source.size >= config.clients.min_examples]

    @property
    def pieces(self) -> int:
        """How many pieces the test set is evaluated in."""
        return self.test.pieces(self.piece)

    def batches(self, client: int, local: LocalConfig, rng: torch.Generator) -> Iterator[Batch]:
        """What a client trains on in a round."""
        for batch in self.clients[client].batches(local, rng):
            yield self.transform(self._here(batch), rng, local.augment)

    def test_batches(self, piece: int) -> Iterator[Batch]:
        for batch in self.test.piece(piece, self.piece):
            yield self.transform(self._here(batch), None, False)

    def _here(self, batch: Batch) -> Batch:
        return batch if self.device == "cpu" else tree_map(lambda tensor: tensor.to(self.device), batch)

    def network(self, config: Config, format: str | None = None) -> nn.Module:
        """A fresh network for clients of `format` (default: the run's), prepared if the run trains in FP8."""
        model = copy.deepcopy(self.model)
        if config.prepared:
            format = format or config.qat.format
            prepare(
                model,
                Format.parse(config.qat.format if format == FP32 else format),
                skip=self.skip,
                rounding=config.qat.rounding,
                ranges=config.qat.ranges,
                input_range=self.input_range,
            )
            for name, value in self.ranges.items():
                model.get_parameter(name).data.fill_(value)
            if format == FP32:
                set_rounding(model, "off")
        if any(isinstance(module, nn.Conv2d) for module in model.modules()):
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if frozen := {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}:
            model.register_state_dict_post_hook(partial(_without, frozen))
        return model.to(self.device)

    def by_file(self) -> "Federation":
        """The same, to be pickled: tensors of a cached data set by the names of their files, which are mapped again."""
        return self._moved(datasets.by_file)

    def to(self, device: str) -> "Federation":
        """The same with its tensors on `device`: moved once, not with every batch."""
        return self if device == self.device else replace(self._moved(lambda x: x.to(device)), device=device)

    def _moved(self, move: Callable[[torch.Tensor], Any]) -> "Federation":
        pools = {id(source.data): source.data for source in (*self.clients, self.test) if isinstance(source, Part)}
        moved = {key: tree_map(move, data) for key, data in pools.items()}

        def there(source: Source) -> Source:
            return replace(source, data=moved[id(source.data)]) if isinstance(source, Part) else source

        return replace(self, clients=[there(source) for source in self.clients], test=there(self.test))


def _without(names: set[str], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Frozen parameters are the same on all sides for ever: they do not travel (LoRA: only the adapters do)."""
    for name in names:
        state.pop(prefix + name, None)


def build(config: Config) -> Federation:
    """The federation of a config: data set, partition, network; or of the task it names."""
    if config.preset == OWN:
        return from_task(config, task_of(config))
    data = datasets.load(config.data.name, config.data.dir or None, features=config.data.features)
    train = _subset(len(data.train_y), config.data.limit, config.seed, "train")
    test = _subset(len(data.test_y), config.data.test_limit, config.seed, "test")
    labels, groups = _rows(data.train_y, train), data.train_groups
    by_group = config.data.partition == "group"
    parts = datasets.partition(
        config.data.partition,
        labels.numpy(),
        None if by_group else config.clients.count,
        config.seed,
        concentration=config.data.concentration,
        groups=None if groups is None else _rows(groups, train).numpy(),
        num_classes=data.num_classes,
    )
    options = {"stem": config.model.stem} if config.model.stem else {}
    model = models.build(config.model.name, data.num_classes, seed=derive_seed(config.seed, "init"), **options)
    transform = datasets.transform_for(config.data.name, config.data.features)
    pool, tested = (_rows(data.train_x, train), labels), (_rows(data.test_x, test), _rows(data.test_y, test))
    return Federation(
        model,
        [Part(pool, rows) for rows in parts],
        Part(tested, np.arange(len(tested[1]))),
        client_formats(config, len(parts)),
        transform=OnInputs(transform),
        input_range=transform.input_range,
    )


def from_tensors(config: Config, model: nn.Module, clients: Sequence[Any], test: Any) -> Federation:
    """`from_task` of a model and data alone."""
    return from_task(config, Task(model, clients, test))


def from_task(config: Config, task: Task) -> Federation:
    """A federation of your own; what does not fit together is said here, before anything is trained."""
    with one_thread(), seeded(derive_seed(config.seed, "probe")):
        clients = sources({f"client {k}": data for k, data in enumerate(task.clients)})
        (test,) = sources({"the test set": task.test})
        if not test.size:
            raise ConfigError("the test set is empty; pass test=(x, y) with at least one example")
        federation = Federation(
            copy.deepcopy(task.model).cpu(),
            clients,
            test,
            client_formats(config, len(clients)),
            transform=task.transform or unchanged,
            skip=task.skip,
            piece=min(PIECE, 4 * config.local.batch_size),  # forward alone takes less memory than a training step
        )
        return _fitted(federation, task, federation.network(config).eval())


def _fitted(federation: Federation, task: Task, model: nn.Module) -> Federation:
    """With its loss and metric, and the ranges of the data; tried on the test set, which is the server's."""
    try:
        batch = next(federation.test_batches(0))
        federation = replace(federation, objective=objective_for(task, model, batch))
        if federation.objective.loss is CLASSIFICATION.loss:
            _check_labels(federation, len(model(batch[0])[0]))
        return replace(federation, ranges=_data_ranges(federation, model))
    except Fedfp8Error:
        raise
    except Exception as error:
        raise RunError(
            f"loss(model, batch) failed on a batch of the test set: {type(error).__name__}: {error}"
        ) from error


def _check_labels(federation: Federation, classes: int) -> None:
    """Of stored tensors; a Dataset's are checked as they come."""
    for k, source in [*enumerate(federation.clients), (-1, federation.test)]:
        if isinstance(source, Part):
            who = f"client {k}" if k >= 0 else "the test set"
            check_labels(who, source.data[1][torch.as_tensor(source.rows)], classes)


def _data_ranges(federation: Federation, model: nn.Module) -> dict[str, float]:
    """The largest input of each FP8 layer that sees the data itself, over some of the test set.

    Other layers' inputs have ranges that are learned, from the first minibatch on. What a layer sees is measured, not
    what is stored: token numbers, for one, become embeddings first.
    """
    found: dict[str, float] = {}

    def watch(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        if not x.requires_grad:
            seen = x[x.isfinite()].abs()
            found[name] = max(found.get(name, 0.0), float(seen.max()) if seen.numel() else 0.0)

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, WeightedLayer)]
    handles = [
        module.register_forward_pre_hook(partial(watch, f"{name}.beta" if name else "beta")) for name, module in layers
    ]
    pieces = sorted({round(i * (federation.pieces - 1) / 7) for i in range(8)})  # spread: sorted by class, say
    for batch in islice(chain.from_iterable(map(federation.test_batches, pieces)), 8):
        check_loss(federation.objective.loss(model, batch))
    for handle in handles:
        handle.remove()
    return {name: max(value, 1e-6) for name, value in found.items() if value > 0}


def _subset(total: int, limit: int, seed: int, which: str) -> torch.Tensor | None:
    """Rows; None for all."""
    if not limit or limit >= total:
        return None
    return torch.randperm(total, generator=generator(seed, "subset", which))[:limit].sort().values


def _rows(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return tensor if rows is None else tensor[rows]


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
