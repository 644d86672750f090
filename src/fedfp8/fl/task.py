"""A task of your own: model, clients, test set, what to minimise and what to report.

`Task` is what `fedfp8.run` takes apart and what the function behind ``--task package.module:function`` returns.
Defaults are used only where they are right: for pairs (x, class number) and a model that gives class scores the loss is
the cross-entropy and the metric the accuracy. Anything else is refused with the line to write.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedfp8.errors import ConfigError, DataError, RunError
from fedfp8.fl.config import Config, DataConfig, ModelConfig
from fedfp8.fl.examples import Batch, batch_size
from fedfp8.fl.presets import preset
from fedfp8.nn import FP8Layer

__all__ = ["OWN", "Metric", "Objective", "Task", "complete", "objective_for", "own_config", "task_of"]

OWN = "own"  # the preset of runs on a user's own task
Loss = Callable[[nn.Module, Batch], torch.Tensor]
Score = Callable[[nn.Module, Batch], tuple[float, float]]
SIGNATURES = {  # arguments and result of a task's functions
    "loss": ("model, batch", "one number to minimise"),
    "metric": ("model, batch", "(value, weight)"),
    "transform": ("batch, generator, train", "a batch"),
}


@dataclass(frozen=True)
class Metric:
    """What is reported: ``function(model, batch) -> (value, weight)``, averaged over the test set by weight."""

    function: Score
    name: str = ""
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        name = self.name or getattr(self.function, "__name__", "metric")
        object.__setattr__(self, "name", "metric" if name == "<lambda>" else name)


@dataclass(frozen=True)
class Task:
    """Everything of a run that is the user's; see `fedfp8.run`."""

    model: nn.Module
    clients: Sequence[Any]
    test: Any
    loss: Loss | None = None
    metric: Metric | Score | None = None
    transform: Callable[..., Batch] | None = None
    skip: Any = ()
    name: str = ""

    def __post_init__(self) -> None:
        """What can be said before the data is looked at."""
        if not isinstance(self.model, nn.Module):
            raise ConfigError(
                f"model is a {type(self.model).__name__}; give an nn.Module, an instance and not its class"
            )
        if any(isinstance(module, FP8Layer) for module in self.model.modules()):
            raise ConfigError("the model is prepared already, which the run does itself; give fedfp8.restore(model)")
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ConfigError("no parameter of the model has requires_grad=True; there is nothing to train")
        for name in ("loss", "metric", "transform"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Metric) and not callable(given):
                arguments, result = SIGNATURES[name]
                raise ConfigError(f"{name} is {given!r}; give a function {name}({arguments}) that returns {result}")
        self._check_clients()

    def _check_clients(self) -> None:
        clients: Any = self.clients
        if isinstance(clients, Mapping):
            raise ConfigError(f"clients is a {type(clients).__name__}; give a list: list(clients.values())")
        if not (hasattr(clients, "__len__") and hasattr(clients, "__getitem__")):
            raise ConfigError(f"clients is a {type(clients).__name__}; give a list with the data of each client")
        if not len(clients):
            raise ConfigError("no clients were given; pass a list with the data of each client, e.g. (x, y)")
        bare = all(isinstance(client, torch.Tensor | np.ndarray) for client in clients)
        if bare and isinstance(clients, tuple) and isinstance(self.test, tuple | list):
            raise ConfigError("clients is a tuple of tensors; give a list with the data of each client: [(x, y), ...]")


@dataclass(frozen=True)
class Objective:
    """What a client minimises and the server reports."""

    loss: Loss
    metric: Metric

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[float, float, float, int]:
        """(metric times weight, weight, loss times examples, examples) of a batch."""
        loss, size = float(self.loss(model, batch)), batch_size(batch)
        value, weight = (loss, size) if self.metric.function is self.loss else self._score(model, batch)
        return value * weight, weight, loss * size, size

    def _score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        found = self.metric.function(model, batch)
        try:
            value, weight = found
            return float(value), float(weight)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{self.metric.name}(model, batch) gave {found!r}; a metric must give (value, weight) of a batch, "
                "e.g. (value, number of examples)"
            ) from None


class Classification(Objective):
    """Cross-entropy and accuracy of (x, class number), from one forward pass, counted in whole numbers."""

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[float, float, float, int]:
        x, y = batch
        scores = model(x)
        loss = F.cross_entropy(scores, y.long(), reduction="sum")
        return int((scores.argmax(1) == y).sum()), len(y), float(loss), len(y)


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    scores = model(x)
    try:
        return F.cross_entropy(scores, y.long())
    except IndexError:
        raise DataError(_label_text(y, scores.shape[1])) from None


def accuracy(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """(share of right answers, examples) of (x, class number)."""
    x, y = batch
    return float((model(x).argmax(1) == y).double().mean()), len(y)


CLASSIFICATION = Classification(cross_entropy, Metric(accuracy))


def _label_text(y: torch.Tensor, classes: int) -> str:
    return f"labels from {int(y.min())} to {int(y.max())}, but the model gives {classes} scores: use 0 to {classes - 1}"


def objective_for(task: Task, model: nn.Module, batch: Batch) -> Objective:
    """The task's own loss and metric, or the defaults where they are right; `batch` is one of the test set."""
    classes = _classes(model, batch) if task.loss is None or task.metric is None else None
    metric = task.metric if isinstance(task.metric, Metric) or task.metric is None else Metric(task.metric)
    if task.loss is None and not classes:
        raise ConfigError(f"no loss was given, and {_advice(model, batch)}")
    if task.loss is None:
        return CLASSIFICATION if metric is None else Objective(cross_entropy, metric)
    if metric is None:
        metric = Metric(accuracy) if classes else Metric(task.loss, "loss", higher_is_better=False)  # type: ignore[arg-type]
    return Objective(task.loss, metric)


def check_loss(loss: Any) -> None:
    """What `loss(model, batch)` gave must be something to call backward on."""
    if not isinstance(loss, torch.Tensor):
        what = f"a {type(loss).__name__}"
    elif loss.ndim:
        what = f"a tensor of shape {tuple(loss.shape)}"
    elif not loss.requires_grad:
        what = "a tensor that does not depend on the weights"
    else:
        return
    raise ConfigError(f"loss(model, batch) gave {what}; it must give one number to minimise, as a 0-d tensor")


def check_labels(who: str, y: torch.Tensor, classes: int) -> None:
    if len(y) and not (int(y.min()) >= 0 and int(y.max()) < classes):
        raise ConfigError(f"{who} has {_label_text(y, classes)}")


def _is_pair(batch: Batch) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(t, torch.Tensor) for t in batch)


def _classes(model: nn.Module, batch: Batch) -> int:
    """The number of classes if batches are (x, class number) and the model gives a score for each; else 0."""
    if not _is_pair(batch):
        return 0
    x, y = batch
    if y.is_floating_point() or y.dtype == torch.bool or y.ndim != 1:
        return 0
    scores = _output(model, x)
    if not isinstance(scores, torch.Tensor) or not scores.is_floating_point() or scores.ndim != 2:
        return 0
    return scores.shape[1] if len(scores) == len(y) and scores.shape[1] > 1 else 0


def _output(model: nn.Module, x: torch.Tensor) -> Any:
    try:
        with torch.no_grad():
            return model(x)
    except Exception as error:
        hint = "" if x.is_floating_point() else ". Integers stay integers: if it takes floats, convert x beforehand"
        raise RunError(
            f"the model cannot take inputs of {x.dtype} and shape {tuple(x.shape)} from the test set: "
            f"{type(error).__name__}: {error}{hint}"
        ) from error


def _advice(model: nn.Module, batch: Batch) -> str:
    """What was found instead of (x, class number) and class scores, and the loss to write."""
    start = "loss=lambda model, batch: "
    if isinstance(batch, Mapping):
        keys = ", ".join(map(str, batch))
        return f"batches are dicts of {keys}; give e.g. {start}model(**batch).loss"
    if not _is_pair(batch):
        return f"batches are not pairs (x, y); give {start}... (one number, from the model and the batch)"
    x, y = batch
    scores = _output(model, x)
    shape = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
    functional = f"{start}torch.nn.functional."
    if y.is_floating_point():
        fit = "" if shape == tuple(y.shape) else ".view_as(batch[1])"  # else (N, 1) and (N,) become (N, N)
        return f"y is {y.dtype}; for regression give {functional}mse_loss(model(batch[0]){fit}, batch[1])"
    found = f"for y of shape {tuple(y.shape)} and {y.dtype} the model gives {shape}, not a score for each class; give "
    if y.ndim > 1 and isinstance(shape, tuple) and shape[:-1] == tuple(y.shape):
        return f"{found}{functional}cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())"
    if y.ndim > 1 and isinstance(shape, tuple) and (shape[0], *shape[2:]) == tuple(y.shape):
        return f"{found}{functional}cross_entropy(model(batch[0]), batch[1])"
    if y.ndim == 1 and shape in ((len(y),), (len(y), 1)):
        return f"{found}{functional}binary_cross_entropy_with_logits(model(batch[0]).flatten(), batch[1].float())"
    return f"{found}{start}... (one number, from the model and the batch)"


def own_config(config: Config, task: Task) -> Config:
    """`config` as it is recorded: whose run it is. Settings that would be ignored are refused."""
    model = type(task.model).__name__
    clients = replace(config.clients, count=len(task.clients))
    name = task.name or config.name or model
    own = replace(
        config, preset=OWN, name=name, data=DataConfig(name=OWN), model=ModelConfig(name=model), clients=clients
    )
    base = preset(config.preset)
    checked = [("data", f.name) for f in fields(DataConfig)] + [("model", f.name) for f in fields(ModelConfig)]
    for section, key in [*checked, ("clients", "count")]:
        value, unset, recorded = (getattr(getattr(c, section), key) for c in (config, base, own))
        if value not in (unset, recorded):
            raise ConfigError(
                f"{section}.{key}={value!r} means nothing in a run on your own model and data ({model}, "
                f"{len(task.clients)} clients); leave it out"
            )
    return own


def task_of(config: Config) -> Task:
    """The task that a config of preset "own" names."""
    if not config.task:
        raise ConfigError(
            f"the preset {OWN!r} has no data of its own: give fedfp8.run or fedfp8.resume model=, clients= and "
            "test=, or the command line --task package.module:function"
        )
    task = load_task(config.task)
    return replace(task, name=config.name or task.name)


def complete(config: Config) -> Config:
    """`config` as its run will be recorded."""
    return own_config(config, task_of(config)) if config.preset == OWN else config


@lru_cache(maxsize=1)  # the runs of a comparison share it: a run changes nothing of a task
def load_task(path: str) -> Task:
    """The task that the function at ``package.module:function`` returns, as a `Task` or a dict of its fields."""
    module, colon, function = path.partition(":")
    if not colon or not module or not function:
        raise ConfigError(f"task {path!r} is not of the form package.module:function, e.g. my_package.my_task:make")
    if os.getcwd() not in sys.path:  # as `python -m` has it
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        raise ConfigError(f"task {path!r} cannot be imported: {error}; run in the folder that holds it") from None
    except AttributeError:
        raise ConfigError(f"task {path!r}: {module} has no function {function!r}") from None
    found = make()
    if isinstance(found, Mapping):
        known = [f.name for f in fields(Task)]
        missing = [key for key in ("model", "clients", "test") if key not in found]
        if missing or set(found) - set(known):
            raise ConfigError(f"task {path!r} returned a dict of {', '.join(found)}; it has {', '.join(known)}")
        return Task(**found)
    if not isinstance(found, Task):
        raise ConfigError(f"task {path!r} returned a {type(found).__name__}; return a fedfp8.Task or a dict")
    return found
