"""What the wrapper must know of the strategy inside: how it treats updates, and what it expects of them."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from fedfp8.errors import ConfigError, WireFormatError
from fedfp8.flower.blob import numpy_view, short

__all__ = ["Inner", "is_old"]

# These compare, select or normalize single updates, or divide by the size of their mean, so that noise which averages
# out elsewhere stays. A finer step costs them some bytes and gives them back their accuracy.
NORM_BASED = {"FedOpt", "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan", "QFedAvg"}
CLIPPED_BY_CLIENTS = {"DifferentialPrivacyClientSideFixedClipping", "DifferentialPrivacyClientSideAdaptiveClipping"}
UNLIKE = "its records, arrays or metrics are others than those of most replies"
NO_MEAN = "the weights of all replies together are 0 or infinite: there is no mean"
NEEDED = ("configure_train", "aggregate_train", "start")


def is_old(strategy: Any) -> bool:
    """Whether it is one of flwr.server.strategy (configure_fit, aggregate_fit) rather than of flwr.serverapp."""
    return callable(getattr(strategy, "configure_fit", None)) and not callable(getattr(strategy, "start", None))


class Inner:
    """The strategy that an app gave us, and those that it wraps."""

    def __init__(self, strategy: Any) -> None:
        use = "give it the strategy of your app, FP8(FedAvg(...))"
        if isinstance(strategy, type):
            raise ConfigError(f"FP8 was given the class {strategy.__name__}; {use}: an object, with its arguments")
        missing = [] if is_old(strategy) else [name for name in NEEDED if not callable(getattr(strategy, name, None))]
        if missing:
            raise ConfigError(f"FP8 was given {short(repr(strategy))}, which has no {', '.join(missing)}; {use}")
        self.chain = list(_chain(strategy))
        if any(hasattr(type(one), "on") and "FP8" in type(one).__name__ for one in self.chain):
            raise ConfigError("FP8 was given a strategy with an FP8 in it; one is enough, as the outermost wrapper")
        self.last = self.chain[-1]

    @cached_property
    def wants_fine_steps(self) -> str:
        """Why the uplink's steps should be fine; "" if updates are averaged, which is what the default is made for."""
        for one in self.chain:
            names = _flower_names(one)
            if names & NORM_BASED or any(name.startswith(("DifferentialPrivacy", "DPFedAvg")) for name in names):
                return f"{type(one).__name__} works with single updates or their size"
        names = _flower_names(self.last)
        averages = "FedAvg" in names and not any(name.startswith("FedXgb") for name in names)  # those join trees
        return "" if averages else f"{type(self.last).__name__} is not known to average updates"

    @property
    def bound(self) -> float | None:
        """The norm that updates are promised to keep, where Flower leaves the clipping to the clients."""
        bounds = []
        for one in self.chain:
            if _flower_names(one) & CLIPPED_BY_CLIENTS:
                bounds.append(float(one.clipping_norm))
            elif "DPFedAvgFixed" in _flower_names(one) and one.server_side_noising:
                bounds.append(float(one.clip_norm))
        return min(bounds, default=None)

    @cached_property
    def aggregated_by_flower(self) -> bool:
        """Whether Flower's own code aggregates, be it that the strategy's calls it."""
        name = "aggregate_fit" if is_old(self.last) else "aggregate_train"
        aggregate = getattr(type(self.last), name, None)
        if aggregate is None or aggregate.__module__.startswith("flwr."):
            return aggregate is not None
        return "FedAvg" in _flower_names(self.last) and {"super", name} <= set(aggregate.__code__.co_names)

    # Replies

    def check_weight(self, reply: Message) -> None:
        """Refuse a reply whose weight would spoil the mean."""
        weight = self.weight(reply)
        if isinstance(weight, list) or not (math.isfinite(weight) and weight >= 0):
            raise WireFormatError(f"its weight is {short(weight)}; a number of at least 0 is needed")

    def check(self, reply: Message, models: dict[str, dict[str, Any]]) -> None:
        """Refuse a decoded update that would harm the others; clip it where clients should have.

        models: what was sent, by record and name.
        """
        content = reply.content
        empty = not any(map(len, content.array_records.values()))
        if empty and any(models.values()) and "FedAvg" in _flower_names(self.last):
            raise WireFormatError("a model was asked for and the reply holds none")
        if self.bound is not None:
            for name, record in list(content.array_records.items()):
                model = next((m for m in models.values() if list(m) == list(record)), None)
                if model is None:
                    raise WireFormatError(
                        f"record {name!r} does not hold the arrays that were sent: it cannot be clipped"
                    )
                content[name] = _clipped(record, model, self.bound)

    def weight(self, reply: Message) -> Any:
        """What a client says its result weighs in the mean; 1 where it says nothing."""
        key = "num_examples" if is_old(self.last) else getattr(self.last, "weighted_by_key", None)
        return next((record[key] for record in reply.content.metric_records.values() if key in record), 1)

    def odd_ones(self, replies: list[Message], train: bool) -> list[tuple[Message, str]]:
        """Replies that would end the run, and why. Old-style servers ask one by one, and OldFP8 looks at them all."""
        found = [] if is_old(self.last) else [reply for reply in replies if reply.has_content()]
        return self.odd([(reply, _shape(reply, train), self.weight(reply)) for reply in found])

    def odd(self, results: list[tuple[Any, Any, float]]) -> list[tuple[Any, str]]:
        """Of (result, shape, weight) those that would end the run where Flower's own code aggregates, and why."""
        if not self.aggregated_by_flower:
            return []
        counts = Counter(shape for _, shape, _ in results)
        usual = max(counts, key=lambda shape: (counts[shape], len(str(shape))), default=None)
        weights = sum(weight for _, shape, weight in results if shape == usual)
        mean = 0 < weights < math.inf
        reasons = [(one, UNLIKE if shape != usual else "" if mean else NO_MEAN) for one, shape, _ in results]
        return [(one, reason) for one, reason in reasons if reason]


def _shape(reply: Message, train: bool) -> tuple[Any, ...]:
    """What Flower's strategies want to be the same in all replies."""
    metrics = reply.content.metric_records.items()
    arrays = reply.content.array_records.items() if train else ()
    lengths = (
        (key, tuple(sorted((name, _length(value)) for name, value in record.items()))) for key, record in metrics
    )
    return (*lengths, *((key, tuple(shapes(record))) for key, record in arrays))


def shapes(arrays: Mapping[str, Array]) -> list[tuple[str, tuple[int, ...] | None]]:
    """Names, and the shapes of arrays that can be averaged; trees and the like (bytes) have any length."""
    found: list[tuple[str, tuple[int, ...] | None]] = []
    for name, array in sorted(arrays.items()):
        try:
            values = numpy_view(name, array)
            found.append((name, values.shape if values.dtype.kind == "f" else None))
        except WireFormatError:
            found.append((name, None))
    return found


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else -1


def _clipped(record: ArrayRecord, model: dict[str, Any], bound: float) -> ArrayRecord:
    """Coding adds noise to an update that a client had clipped: clip it again, all float arrays as one vector."""
    floats = [name for name, array in model.items() if array.dtype.kind == "f"]  # counters are not clipped
    moved = {name: numpy_view(name, record[name]).astype(np.float64) - model[name] for name in floats}
    norm = math.sqrt(sum(float(np.vdot(change, change)) for change in moved.values()))
    if norm <= bound:
        return record
    new = {name: (model[name] + change * (bound / norm)).astype(model[name].dtype) for name, change in moved.items()}
    return ArrayRecord({name: Array(np.asarray(new[name])) if name in new else a for name, a in record.items()})


def _chain(strategy: Any) -> Iterator[Any]:
    """A strategy and those it wraps, the way Flower's privacy wrappers do."""
    seen: list[Any] = []
    while strategy is not None and not any(one is strategy for one in seen):
        seen.append(strategy)
        yield strategy
        strategy = getattr(strategy, "__dict__", {}).get("strategy")


def _flower_names(strategy: Any) -> set[str]:
    """Names of the classes of Flower that it is an instance of, of the new and the old strategies."""
    return {c.__name__ for c in type(strategy).__mro__ if c.__module__.startswith("flwr.")}
