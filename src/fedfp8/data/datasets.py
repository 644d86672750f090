"""Data sets as compact tensors: load once, share everywhere.

    data = load("cifar10", "/path/to/data")    # uint8 [50000, 3, 32, 32], int64 labels
    data.train_x[indices]

Loading checks what was found (counts, classes, shapes, checksums where known) and keeps the decoded arrays in
a cache (:mod:`fedfp8.data.cache`), so every later load, in any process, maps the same pages and copies
nothing. A process that starts others gives them :func:`by_file` of the tensors, to map the same files.
"""

import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfp8.data.cache import Arrays, Meta, identity, open_cached
from fedfp8.data.features import MFCC, features_named
from fedfp8.data.images import read_images
from fedfp8.data.source import find_source
from fedfp8.data.spec import SPECS, Spec
from fedfp8.data.speech import read_speech
from fedfp8.errors import DataError, extra

__all__ = ["Dataset", "by_file", "load", "spec_of"]


@dataclass(frozen=True)
class Dataset:
    """Training and test examples, stored compactly; a transform turns batches of them into float32."""

    name: str
    train_x: Tensor  # uint8 [N, C, H, W] or float16 [N, coefficients, frames]
    train_y: Tensor  # int64 [N]
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    train_groups: Tensor | None = None  # int64 [N]: speaker of each training example, 0 .. G-1
    groups: tuple[str, ...] = ()  # names of the groups
    verified: str = ""  # what the data was compared with when it was decoded

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train_x.shape[1:])

    @property
    def num_classes(self) -> int:
        return len(self.classes)


@dataclass(frozen=True)
class Mapped:
    """A tensor in a file. Pickled, it becomes the tensor: mapped, not copied, by whoever unpickles it."""

    path: str
    dtype: str
    offset: int
    shape: tuple[int, ...]

    def __reduce__(self) -> Any:
        return map_tensor, (self.path, self.dtype, self.offset, self.shape)


def map_tensor(path: str, dtype: str, offset: int, shape: tuple[int, ...]) -> Tensor:
    """Copy-on-write, so that nobody changes what others see. What is computed from the tensor has no `mapped`."""
    tensor = torch.from_numpy(np.memmap(path, dtype, "c", offset, shape))
    tensor.mapped = Mapped(path, dtype, offset, shape)  # type: ignore[attr-defined]
    return tensor


def by_file(tensor: Tensor) -> Tensor | Mapped:
    """What to pickle of a tensor for another process here: its file, if it was mapped from one that still exists."""
    mapped: Mapped | None = getattr(tensor, "mapped", None)
    if mapped is None:
        return tensor
    return mapped if os.path.exists(mapped.path) else tensor.detach()


def spec_of(name: str) -> Spec:
    """The description of a data set; DataError with the known names otherwise."""
    if name not in SPECS:
        raise DataError(f"unknown data set {name!r}; known are {', '.join(SPECS)}")
    return SPECS[name]


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    features: str | MFCC = "kwt",
    rebuild: bool = False,
) -> Dataset:
    """Open a data set, decoding it into the cache the first time.

    Args:
        data_dir: folder of data sets; default $FEDFP8_DATA, else where `fedfp8 data fetch` writes to.
        features: what speech is turned into: "kwt", "matchboxnet" or own settings; other data ignore it.
        rebuild: decode and check again even if the cache has it.

    Raises:
        DataError: unknown name, files missing (the message says how to get them) or not what they should be.
    """
    spec = spec_of(name)
    if spec.kind == "digits":
        return _as_dataset(name, *read_digits())
    source = find_source(spec, data_dir)
    settings: dict[str, Any] = {"files": identity(source.files, source.folder)}
    chosen = features_named(features)
    if spec.kind == "speech":
        settings |= {"features": asdict(chosen)}

    def build() -> tuple[Arrays, Meta]:
        return read_speech(spec, source, chosen) if spec.kind == "speech" else read_images(spec, source)

    return _as_dataset(name, *open_cached(name, settings, build, rebuild))


def _as_dataset(name: str, arrays: Arrays, meta: Meta) -> Dataset:
    tensors = {key: _as_tensor(array) for key, array in arrays.items()}
    return Dataset(
        name=name,
        classes=tuple(meta["classes"]),
        groups=tuple(meta.get("groups", ())),
        verified=meta["verified"],
        **tensors,
    )


def _as_tensor(array: NDArray[Any]) -> Tensor:
    if isinstance(array, np.memmap) and array.flags.c_contiguous:
        return map_tensor(str(array.filename), array.dtype.str, array.offset, array.shape)
    return torch.from_numpy(array)


def read_digits() -> tuple[Arrays, Meta]:
    """scikit-learn's 1,797 digits; every fifth in order of class (so evenly by class) is a test example."""
    with extra("digits"):
        from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.argsort(labels, kind="stable")
    test = np.zeros(len(labels), dtype=bool)
    test[order[::5]] = True
    x: NDArray[np.uint8] = images.astype(np.uint8).reshape(-1, 1, 8, 8)
    y = labels.astype(np.int64)
    arrays = {"train_x": x[~test], "train_y": y[~test], "test_x": x[test], "test_y": y[test]}
    return arrays, {"classes": [str(c) for c in range(10)], "verified": "comes with scikit-learn"}
