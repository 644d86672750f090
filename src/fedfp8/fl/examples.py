"""Where batches come from: tensors, a torch Dataset, or a function that gives batches.

A batch is whatever the loss takes: a tensor, or tensors in tuples, lists and dicts, nested as they like, with the
examples along the first dimension of each. numpy arrays become tensors and floats become float32; integers stay
integers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fedfp8.errors import ConfigError
from fedfp8.fl.config import LocalConfig

__all__ = ["Batch", "Items", "Part", "Source", "Stream", "leaves", "minibatches", "sources", "tree_map"]

Batch = Any
STORED = (torch.Tensor, np.ndarray, tuple, list, Mapping)  # kept in memory as they are


class Source(Protocol):
    """The examples of one client, or of the test set."""

    @property
    def size(self) -> int: ...

    def batches(self, local: LocalConfig, rng: torch.Generator) -> Iterator[Batch]:
        """What a client trains on in a round."""

    def pieces(self, size: int) -> int:
        """How many pieces of `size` examples there are to evaluate."""

    def piece(self, index: int, size: int) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Part:
    """Rows of tensors that other clients may have rows of too."""

    data: Batch
    rows: np.ndarray

    @property
    def size(self) -> int:
        return len(self.rows)

    def batches(self, local: LocalConfig, rng: torch.Generator) -> Iterator[Batch]:
        return (self._take(rows) for rows in minibatches(self.rows, local, rng))

    def pieces(self, size: int) -> int:
        return -(-len(self.rows) // size)

    def piece(self, index: int, size: int) -> Iterator[Batch]:
        yield self._take(torch.as_tensor(self.rows[index * size : (index + 1) * size]))

    def _take(self, rows: torch.Tensor) -> Batch:
        return tree_map(lambda tensor: tensor[rows], self.data)


@dataclass(frozen=True)
class Items:
    """A torch Dataset: ``len(dataset)`` examples, ``dataset[i]`` one of them, collated as a DataLoader does."""

    dataset: Any

    @property
    def size(self) -> int:
        return len(self.dataset)

    def batches(self, local: LocalConfig, rng: torch.Generator) -> Iterator[Batch]:
        return (self._take(rows.tolist()) for rows in minibatches(np.arange(self.size), local, rng))

    def pieces(self, size: int) -> int:
        return -(-self.size // size)

    def piece(self, index: int, size: int) -> Iterator[Batch]:
        yield self._take(range(index * size, min((index + 1) * size, self.size)))

    def _take(self, rows: Iterable[int]) -> Batch:
        several = getattr(self.dataset, "__getitems__", None)
        return as_tensors(default_collate(several(list(rows)) if several else [self.dataset[i] for i in rows]))


@dataclass(frozen=True)
class Stream:
    """A function that gives an iterable of batches, one pass over the data a call; ``local.batch_size`` is its own."""

    function: Callable[[], Iterable[Batch]]
    size: int

    def batches(self, local: LocalConfig, rng: torch.Generator) -> Iterator[Batch]:
        done = 0
        for _ in range(local.epochs or local.steps):
            for batch in self.function():
                yield as_tensors(batch)
                done += 1
                if local.steps and done == local.steps:
                    return

    def pieces(self, size: int) -> int:
        return 1

    def piece(self, index: int, size: int) -> Iterator[Batch]:
        return map(as_tensors, self.function())


@dataclass(frozen=True)
class Loader:
    """A DataLoader as the function that gives its batches."""

    loader: Any

    def __call__(self) -> Iterable[Batch]:
        return iter(self.loader)


def minibatches(rows: "np.ndarray | torch.Tensor", local: LocalConfig, rng: torch.Generator) -> Iterator[torch.Tensor]:
    """Shuffled minibatches of a client's rows: `epochs` passes, or `steps` batches."""
    indices = torch.as_tensor(rows)
    done = 0
    for _ in range(local.epochs or local.steps):
        for batch in indices[torch.randperm(len(indices), generator=rng)].split(local.batch_size):
            yield batch
            done += 1
            if local.steps and done == local.steps:
                return


def sources(given: Mapping[str, Any]) -> list[Source]:
    """A source for each entry; who it belongs to is for messages. Tensors of one kind share one pool."""
    found = [_source(who, data) for who, data in given.items()]
    parts = [source for source in found if isinstance(source, Part)]
    if len({_kind(part.data) for part in parts}) != 1:
        return found
    ends = np.cumsum([part.size for part in parts])
    pool = _joined([part.data for part in parts])
    pooled = iter([Part(pool, np.arange(end - part.size, end)) for part, end in zip(parts, ends, strict=True)])
    return [next(pooled) if isinstance(source, Part) else source for source in found]


def _source(who: str, data: Any) -> Source:
    if isinstance(data, IterableDataset):
        raise ConfigError(
            f"{who} is an IterableDataset; give a function that makes its batches: "
            "functools.partial(DataLoader, dataset, batch_size=20)"
        )
    if isinstance(data, DataLoader):
        if data.generator is not None:
            raise ConfigError(f"{who} is a DataLoader with a generator of its own; leave it out: the run seeds torch")
        return Stream(Loader(data), _count(who, data))
    if isinstance(data, STORED):
        return _part(who, data)
    sequence = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | bytes)
    if isinstance(data, Dataset) or sequence:
        return Items(data)
    if callable(data):
        return Stream(data, _count(who, data()))
    raise ConfigError(
        f"{who} is a {type(data).__name__}; give a pair of tensors or arrays, a torch Dataset, or a function that "
        "gives an iterable of batches"
    )


def _part(who: str, data: Any) -> Part:
    try:
        tensors = as_tensors(data)
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None
    sizes = [len(leaf) if leaf.ndim else -1 for leaf in leaves(tensors)]
    if not sizes or -1 in sizes:
        raise ConfigError(
            f"{who} is a {type(data).__name__} without tensors of examples; give tensors or arrays with the examples "
            "along the first dimension, a torch Dataset, or a function that gives an iterable of batches"
        )
    if len(set(sizes)) > 1:
        counts = f"{sizes[0]} examples and {sizes[1]} labels" if len(sizes) == 2 else f"tensors of {sizes[:8]} examples"
        batches = "; for a list of batches give a function that returns it" if isinstance(data, list) else ""
        raise ConfigError(f"{who} has {counts}; they must be equal in number{batches}")
    return Part(tensors, np.arange(sizes[0]))


def _count(who: str, batches: Any) -> int:
    """Examples in one pass."""
    if isinstance(batches, DataLoader) and not isinstance(batches.dataset, IterableDataset) and not batches.drop_last:
        return len(batches.dataset)  # type: ignore[arg-type]
    if not isinstance(batches, Iterable):
        raise ConfigError(
            f"the function of {who} gave a {type(batches).__name__}; it must give an iterable of batches: one pass"
        )
    return sum(batch_size(as_tensors(batch)) for batch in batches)


def batch_size(batch: Batch) -> int:
    found = leaves(batch)
    if not found or not found[0].ndim:
        raise ConfigError(
            f"a batch is a {type(batch).__name__} without tensors; give tensors, or tuples or dicts of them"
        )
    return len(found[0])


def tree_map(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """`function` of every tensor (or array) of a batch, in the same nesting; whatever is none stays as it is."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: tree_map(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(tree_map(function, item) for item in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(tree_map(function, item) for item in batch)
    return batch


def leaves(batch: Batch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(found.append, batch)
    return found


def as_tensors(data: Any) -> Batch:
    """Arrays as tensors, floats as float32, integers as they are."""
    return tree_map(_tensor, data)


def _tensor(data: torch.Tensor | np.ndarray) -> torch.Tensor:
    try:
        tensor = torch.tensor(data) if isinstance(data, np.ndarray) else data
    except TypeError as error:
        raise ConfigError(f"an array of {data.dtype} cannot become a tensor: {error}") from None
    return tensor.float() if tensor.is_floating_point() else tensor


def _kind(data: Batch) -> Any:
    """Equal for tensors that can be joined along the first dimension."""
    if isinstance(data, torch.Tensor):
        return data.dtype, tuple(data.shape[1:])
    if isinstance(data, Mapping):
        return tuple((key, _kind(value)) for key, value in data.items())
    return (type(data), *map(_kind, data)) if isinstance(data, tuple | list) else type(data)


def _joined(parts: list[Batch]) -> Batch:
    columns = [torch.cat(column) for column in zip(*map(leaves, parts), strict=True)]
    remaining = iter(columns)
    return tree_map(lambda _: next(remaining), parts[0])
