"""What makes training repeatable: one torch thread, and random numbers that follow from the run's seed."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["one_thread", "seeded"]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums are added in another order by more threads; a worker has one, so whoever stands in for it has one too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generators of torch, numpy and Python start from `seed` inside, and are as before after it.

    A user's model, Dataset or DataLoader draws from them (dropout, augmentation, shuffling).
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
