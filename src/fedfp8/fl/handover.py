"""What worker processes are given: one file that all of them map, so that its pages exist once.

Tensors of a cached data set are named in it, not copied: workers map the cache. Everything goes over the disk because a
container has 64 MB of shared memory (/dev/shm), less than CIFAR-10 or a model of 20 million weights.
"""

import pickle
from pathlib import Path

import torch

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl.config import Config
from fedfp8.fl.federation import Federation

__all__ = ["read_handover", "write_handover"]


def write_handover(path: Path, config: Config, federation: Federation) -> None:
    """For the caller to remove when no worker can start any more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save((config, federation.by_file()), path)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        path.unlink()
        raise ConfigError(
            f"worker processes cannot be given this run: {error}. Define loss, metric, transform, skip and the "
            "clients' functions at the top level of a module (no lambda), or train in this process with workers=0"
        ) from error
    except (OSError, RuntimeError) as error:  # torch's way to say that a disk is full
        if path.is_file():
            path.unlink()
        raise RunError(
            f"{path}, which gives worker processes their data, cannot be written: {error}; free space there, choose "
            "another run folder (--out), or train in this process with workers=0"
        ) from error


def read_handover(path: Path) -> tuple[Config, Federation]:
    """What this run's own process wrote; pickled, as all that Python passes to a process it starts."""
    config, federation = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return config, federation
