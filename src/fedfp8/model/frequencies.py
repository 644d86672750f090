"""Kernels as frequencies: training moves neighbouring weights alike, so few numbers hold most of what changes.

A kernel of a convolution sees neighbouring pixels or samples, and so do the weights with which a layer reads what a
convolution has left. Their changes are smooth, like a picture: the cosine transform of each block of k x k weights (of
k in one dimension) puts most of a change into its low frequencies, ten times as large as the high ones. It is
orthonormal: errors of the frequencies are errors of the weights, of the same size.

Frequencies are tensors of a layout of their own, one for each diagonal i + j, low ones first: on a diagonal all are of
about the same size. Quantizer and coder know nothing of where they come from. Sums are taken in a fixed order, so that
the same weights have the same frequencies on every machine.
"""

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch

from fedfp8.fp8.quantizers import MOST_STEPS, STEP_MIN
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.state import State, Values

__all__ = ["Frequencies", "from_frequencies", "layout_of_frequencies", "steps_of_frequencies", "tensor_of"]

FEWEST = 1 << 14  # elements; a smaller tensor has too few to gain
LARGEST_BLOCK = 64  # weights
LOW, HIGH = 0.7, 2.1  # steps of the lowest and of the highest frequencies, in steps of the tensor
Block = tuple[int, ...]  # sides


class Frequencies(Values):
    """The values of a state in the layout of frequencies, made when they are asked for."""

    def __init__(self, state: Values) -> None:
        self.state, self.layout, self._blocks = state, layout_of_frequencies(state.layout), _blocks(state.layout)
        self._made: dict[str, torch.Tensor] = {}  # those of the tensor that was asked for last

    def __getitem__(self, name: str) -> torch.Tensor:
        whole = tensor_of(name)
        if whole == name or whole not in self._blocks:
            return self.state[name]
        if name not in self._made:
            self._made = _parted(whole, self.state[whole], self._blocks[whole])
        return self._made[name]


def _parted(name: str, tensor: torch.Tensor, block: Block) -> dict[str, torch.Tensor]:
    from fedfp8.fp8 import kernels

    basis, counts = _basis(block)
    blocks = tensor.view(-1, len(basis))
    rows = torch.empty(blocks.T.shape)
    kernels.to_frequencies(blocks.numpy(), basis, rows.numpy())
    return dict(zip(_names(name, block), rows.split(counts), strict=True))


def from_frequencies(state: Values, layout: Layout) -> State:
    """The inverse: the same in `layout`."""
    from fedfp8.fp8 import kernels

    found = dict(state)
    for spec in layout:
        if block := _blocks(layout).get(spec.name):
            basis, _ = _basis(block)
            rows = torch.cat([found.pop(name) for name in _names(spec.name, block)])
            found[spec.name] = torch.empty(spec.shape)
            kernels.from_frequencies(rows.numpy(), basis, found[spec.name].view(-1, len(basis)).numpy())
    return State(layout, {spec.name: found[spec.name] for spec in layout})


def steps_of_frequencies(steps: Mapping[str, float], state: State) -> dict[str, float]:
    """From the steps of a state's tensors, those of its frequencies: finer where noise does more harm (docs/method.md).

    Curvature goes with the square of the change, which is ten times as large for low frequencies as for high ones.
    """
    found = dict(steps)
    for name, block in _blocks(state.layout).items():
        step, names = found.pop(name), _names(name, block)
        finest = max(state.largest(name) * math.sqrt(math.prod(block)) / MOST_STEPS, STEP_MIN) if step else 0.0
        for i, part in enumerate(names):
            found[part] = max(step * LOW * (HIGH / LOW) ** (i / (len(names) - 1)), finest)
    return found


@lru_cache(maxsize=64)
def layout_of_frequencies(layout: Layout) -> Layout:
    blocks = _blocks(layout)
    if not blocks:
        return layout
    specs: list[TensorSpec] = []
    for spec in layout:
        block = blocks.get(spec.name)
        specs += [spec] if block is None else _parts(spec.name, spec.size // math.prod(block), block)
    return Layout(tuple(specs))


def tensor_of(name: str) -> str:
    """The tensor that a tensor of frequencies is of; any other is its own."""
    whole, _, diagonal = name.rpartition("~")
    return whole if whole and diagonal.isascii() and diagonal.isdigit() else name


def _parts(name: str, blocks: int, block: Block) -> list[TensorSpec]:
    """One for each diagonal; a frequency is a row, with a number for each of `blocks` blocks."""
    return [TensorSpec(one, (count, blocks)) for one, count in zip(_names(name, block), _basis(block)[1], strict=True)]


@lru_cache(maxsize=64)
def _names(name: str, block: Block) -> tuple[str, ...]:
    return tuple(f"{name}~{i}" for i in range(len(_basis(block)[1])))


@lru_cache(maxsize=64)
def _blocks(layout: Layout) -> dict[str, Block]:
    """The tensors that travel as frequencies: kernels, and the weights that read what a convolution has left.

    Those are a matrix right behind a convolution, with k x k inputs for each of its outputs. A tensor whose frequencies
    would have names that others are called by travels as it is.
    """
    found: dict[str, Block] = {}
    taken = {tensor_of(spec.name) for spec in layout if tensor_of(spec.name) != spec.name}
    channels = 0  # of the convolution before
    for spec in layout:
        if spec.kind not in ("fp8", "float") or len(spec.shape) < 2:
            continue
        block = spec.shape[2:]
        if not block and channels:
            side = math.isqrt(spec.shape[1] // channels)
            block = (side, side) if channels * side * side == spec.shape[1] else ()
        if spec.size >= FEWEST and 1 < math.prod(block) <= LARGEST_BLOCK and spec.name not in taken:
            found[spec.name] = block
        channels = spec.shape[0] if len(spec.shape) > 2 else 0
    return found


@lru_cache(maxsize=64)
def _basis(block: Block) -> tuple[np.ndarray, list[int]]:
    """(the cosine transform of a block, a row for each frequency by its diagonal; how many there are on each)."""
    whole = np.ones((1, 1))
    for side in block:
        i, j = np.arange(side)[:, None], np.arange(side)
        rows = np.cos(np.pi * i * (2 * j + 1) / (2 * side)) * np.sqrt(np.where(i, 2, 1) / side)
        whole = np.kron(whole, rows)
    diagonal = np.indices(block).sum(0).ravel()
    order = np.argsort(diagonal, kind="stable")
    return whole[order].astype(np.float32), np.bincount(diagonal).tolist()
