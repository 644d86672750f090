"""What worker processes are given of a run: one file that all of them map, so that its pages exist once.

Tensors of a cached data set are named in it, not copied: workers map the cache. Everything goes over the disk because a
container has 64 MB of shared memory (/dev/shm), less than CIFAR-10 or a model of 20 million weights.
"""

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl.config import Config
from fedfp8.fl.federation import Federation

__all__ = ["hand_over", "take_over"]


@contextlib.contextmanager
def hand_over(config: Config, federation: Federation, folder: Path) -> Iterator[Path]:
    """The file, beside `folder`, as long as workers are taking over; then its name goes, and what they mapped stays."""
    path = folder.with_suffix(".workers")
    try:
        _write(path, config, federation, folder)
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _write(path: Path, config: Config, federation: Federation, folder: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save((config, federation.by_file(), folder), path)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"worker processes cannot be given this run: {error}. Define loss, metric, transform, skip and the "
            "clients' functions at the top level of a module (no lambda), or train in this process with workers=0"
        ) from error
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's way to say that a disk is full
        raise RunError(
            f"{path}, which gives worker processes their data, cannot be written: {error}; free space there, choose "
            "another run folder (--out), or train in this process with workers=0"
        ) from error


def take_over(path: Path) -> tuple[Config, Federation, Path]:
    """In a worker. The file is this run's own, written a moment ago, and pickled as all that a new process is given."""
    config, federation, folder = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return config, federation, folder
