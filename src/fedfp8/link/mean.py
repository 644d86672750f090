"""The weighted mean of state dicts: for programs that have no code of their own for it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from fedfp8.errors import QuantizationError

__all__ = ["average"]


def average(states: Iterable[Any], weights: Sequence[float] | None = None) -> dict[str, Any]:
    """sum w_k state_k / sum w_k, computed in float64, one state at a time; tensors like those of the first state.

    A counter has no mean: whole numbers are the first state's. A tensor that some states leave out is the mean of those
    that have it.
    """
    sums: dict[str, Any] = {}
    totals: dict[str, float] = {}
    first: dict[str, Any] = {}
    given = iter(weights) if weights is not None else None
    for number, state in enumerate(states):
        weight = 1.0 if given is None else float(next(given, -1.0))
        if not (weight >= 0 and np.isfinite(weight)):
            raise QuantizationError(f"weight {number} is missing, negative or not finite; give one a state, at least 0")
        for name, array in state.items():
            if name not in first:
                first[name] = array
                sums[name], totals[name] = 0.0, 0.0
            values = torch.as_tensor(array).detach().to("cpu", torch.float64) if _is_float(array) else None
            if values is not None:
                sums[name] = sums[name] + weight * values
                totals[name] += weight
    if not first:
        raise QuantizationError("the mean of no state was asked for; average needs at least one")
    return {name: _like(name, array, sums[name], totals[name]) for name, array in first.items()}


def _is_float(array: Any) -> bool:
    return array.is_floating_point() if isinstance(array, torch.Tensor) else np.asarray(array).dtype.kind == "f"


def _like(name: str, array: Any, total: Any, weight: float) -> Any:
    if not _is_float(array):
        return array
    if weight == 0:
        raise QuantizationError(f"the weights of all states with tensor {name!r} are 0; at least one must be above")
    mean = total / weight
    if isinstance(array, torch.Tensor):
        return mean.to(array.device, array.dtype)
    return np.asarray(mean.numpy(), dtype=np.asarray(array).dtype)
