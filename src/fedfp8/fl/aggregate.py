"""The weighted mean of the clients' models, one model at a time: the cohort is never held in memory."""

import torch

from fedfp8.errors import RunError
from fedfp8.fp8.kernels import add_weighted
from fedfp8.fp8.parallel import run
from fedfp8.model.layout import Layout
from fedfp8.model.state import State

__all__ = ["WeightedMean"]


class WeightedMean:
    """sum_k n_k/m * state_k in float64, in the order of `add`; also the smallest and largest value of every range.

    A range of 0 is "not set yet" and is no part of the mean: the clients that did set it decide.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.weight = 0.0
        self.count = 0
        self._sums: dict[str, torch.Tensor] = {}
        self._unset: dict[str, float] = {}  # weight of the clients whose range is not set yet
        self._integers: dict[str, torch.Tensor] = {}
        self.range_low: dict[str, float] = {}
        self.range_high: dict[str, float] = {}

    def add(self, state: State, weight: float) -> None:
        for spec in self.layout:
            tensor = state[spec.name]
            if spec.kind == "integer":
                # A counter has no mean: the first client's is kept.
                self._integers.setdefault(spec.name, tensor.clone())
                continue
            if spec.kind == "range":
                value = float(tensor)
                if value == 0.0:  # not set: this client saw no data through the layer, or trains without FP8
                    self._unset[spec.name] = self._unset.get(spec.name, 0.0) + weight
                    continue
                self.range_low[spec.name] = min(value, self.range_low.get(spec.name, value))
                self.range_high[spec.name] = max(value, self.range_high.get(spec.name, value))
            if spec.name not in self._sums:
                self._sums[spec.name] = torch.zeros(spec.shape, dtype=torch.float64)
            run(add_weighted, (self._sums[spec.name].view(-1).numpy(), tensor.view(-1).numpy()), (float(weight),))
        self.weight += weight
        self.count += 1

    def result(self) -> State:
        if self.count == 0:
            raise RunError(
                "the mean of no update was asked for; a round without valid updates keeps the server's model"
            )
        tensors = {}
        for spec in self.layout:
            if spec.kind == "integer":
                tensors[spec.name] = self._integers[spec.name]
            elif spec.name in self._sums:
                weight = self.weight - self._unset.get(spec.name, 0.0)
                tensors[spec.name] = (self._sums[spec.name] / weight).float()
            else:
                tensors[spec.name] = torch.zeros(spec.shape)  # a range that no client has set
        return State(self.layout, tensors)
