"""Where every random number of fedfp8 comes from.

A run has one root seed. Whoever needs randomness names its purpose, ``generator(root, "train", round, client)``,
and gets a stream of its own: results do not depend on the order in which things happen, on the number of workers or
on the engine. Nothing in the package draws from torch's or numpy's global generators; a user's own model and data may,
and find them seeded in the same way (fl/repeatable.py).
"""

import hashlib

import torch

__all__ = ["derive_seed", "generator"]


def derive_seed(root: int, *path: str | int) -> int:
    """A 63-bit seed for `path` under `root`; equal inputs give equal seeds on every machine."""
    text = "/".join([str(int(root)), *(str(part) for part in path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(root: int, *path: str | int) -> torch.Generator:
    """A CPU generator seeded by :func:`derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(root, *path))
