"""Who holds which training examples: pure functions from labels and a seed to one index array per client.

    iid               shuffled, then dealt out evenly
    dirichlet         every client draws its own class mix ~ Dir(concentration) and fills up to its share; all
                      have the same size (FedDyn's, very likely the paper's; flwr-datasets: InnerDirichlet)
    dirichlet-class   every class is split over the clients ~ Dir(concentration); client sizes differ widely
                      (Yurochkin et al. 2019; flwr-datasets: Dirichlet)
    group             all examples of a group (a speaker) belong to one client

Every example is given to exactly one client. An index array is sorted, int64 and may be empty only if ``min_size=0``
allows it. The same arguments give the same partition on every machine with the same numpy. A request that cannot be met
is a :class:`DataError` with the numbers that make it impossible.

Why not flwr-datasets' partitioners: see docs/data.md.
"""

from bisect import bisect_right

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedfp8.errors import DataError
from fedfp8.rng import derive_seed

__all__ = ["KINDS", "partition"]

KINDS = ("iid", "dirichlet", "dirichlet-class", "group")
ATTEMPTS = 100  # draws of a dirichlet-class split before giving up on `min_size`

Indices = NDArray[np.int64]


def partition(
    kind: str,
    labels: ArrayLike,
    num_clients: int | None,
    seed: int,
    *,
    concentration: float = 0.3,
    groups: ArrayLike | None = None,
    num_classes: int | None = None,
    min_size: int = 1,
) -> list[Indices]:
    """One sorted int64 index array per client; `num_clients` may be None for "group" (one client per group).

    Args:
        kind: one of `KINDS`.
        labels: class of every training example, 0 .. C-1.
        seed: root seed of the run; the partition has a stream of its own under it.
        concentration: parameter of the Dirichlet distribution, per class or client; small means skewed.
        groups: group (speaker) of every training example; needed by "group" only.
        num_classes: C if known; without it C is the largest label + 1.
        min_size: fewest examples a client may have.

    Raises:
        DataError: unknown kind, more clients than examples or groups, a class without examples, `min_size` not reached.
    """
    if kind not in KINDS:
        raise DataError(f"unknown partition {kind!r}; known are {', '.join(KINDS)}")
    y = np.asarray(labels)
    classes = _check_labels(y, num_classes)
    if kind == "group":
        return _by_group(y, groups, num_clients, _rng(seed, kind), min_size)
    clients = _check_clients(kind, len(y), num_clients, min_size)
    rng = _rng(seed, kind)
    if kind == "iid":
        return [np.sort(part) for part in np.array_split(rng.permutation(len(y)).astype(np.int64), clients)]
    if not (np.isfinite(concentration) and concentration > 0):
        raise DataError(f"Dirichlet concentration is {concentration}; it must be a finite number above 0")
    if kind == "dirichlet":
        return _dirichlet(y, clients, classes, concentration, rng)
    return _dirichlet_class(y, clients, classes, concentration, rng, min_size)


def _rng(seed: int, kind: str) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, "partition", kind))


def _check_labels(y: NDArray[np.generic], num_classes: int | None) -> int:
    if y.ndim != 1 or len(y) == 0 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"labels have shape {y.shape} and type {y.dtype}; a non-empty list of integers is needed")
    low, high = int(y.min()), int(y.max())
    classes = high + 1 if num_classes is None else num_classes
    if low < 0 or high >= classes:
        raise DataError(f"labels go from {low} to {high}; with {classes} classes they must be 0..{classes - 1}")
    missing = np.flatnonzero(np.bincount(y, minlength=classes) == 0)
    if len(missing):
        some = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise DataError(
            f"{len(missing)} of {classes} classes have no training example (class {some}; {len(y):,} examples in "
            "all); use the complete data set or relabel the classes that are there"
        )
    return classes


def _check_clients(kind: str, examples: int, num_clients: int | None, min_size: int) -> int:
    if num_clients is None or num_clients < 1:
        raise DataError(f"partition {kind!r} was asked for {num_clients} clients; 1 or more are needed")
    if num_clients * max(min_size, 1) > examples:
        raise DataError(
            f"{num_clients:,} clients with at least {max(min_size, 1)} examples each need "
            f"{num_clients * max(min_size, 1):,}, the data set has {examples:,}; ask for fewer clients"
        )
    return num_clients


def _dirichlet(
    y: NDArray[np.generic], clients: int, classes: int, concentration: float, rng: np.random.Generator
) -> list[Indices]:
    """Clients take turns in random order; each draws a class from its own mix and takes one example of it.

    A class that has run out is drawn no more: every mix is renormalised over what is left, which is what FedDyn's
    "redraw until there is one" amounts to. A client whose whole mix has run out takes the classes left as they are.
    """
    pools = [rng.permutation(np.flatnonzero(y == c)).tolist() for c in range(classes)]
    mix = rng.dirichlet(np.full(classes, concentration), clients)  # [clients, classes]
    sizes = [len(part) for part in np.array_split(np.arange(len(y)), clients)]
    turns = rng.permutation(np.repeat(np.arange(clients), sizes)).tolist()
    # below 1 by more than rounding, so that u * total stays below total
    draws = (rng.random(len(y)) * (1 - 2**-50)).tolist()
    owned: list[list[int]] = [[] for _ in range(clients)]
    ladders = _ladders(mix, pools)
    for client, u in zip(turns, draws, strict=True):
        ladder = ladders[client]
        chosen = bisect_right(ladder, u * ladder[-1])  # first class whose upper end is above: never a closed one
        owned[client].append(pools[chosen].pop())
        if not pools[chosen]:
            ladders = _ladders(mix, pools)
    return [np.sort(np.array(part, dtype=np.int64)) for part in owned]


def _ladders(mix: NDArray[np.float64], pools: list[list[int]]) -> list[list[float]]:
    """Cumulative class weights per client over the classes that still have examples."""
    left = np.array([len(pool) for pool in pools], dtype=np.float64)
    open_mix = mix * (left > 0)
    # 1e-12: a client whose own classes are gone to rounding has no preference left among the others
    spent = open_mix.sum(axis=1) < 1e-12
    open_mix[spent] = left
    return np.cumsum(open_mix, axis=1).tolist()


def _dirichlet_class(
    y: NDArray[np.generic],
    clients: int,
    classes: int,
    concentration: float,
    rng: np.random.Generator,
    min_size: int,
) -> list[Indices]:
    """Cut every shuffled class at Dirichlet proportions; again until the smallest client has `min_size`."""
    best = -1
    for _ in range(ATTEMPTS):
        pieces = []
        for c in range(classes):
            pool = rng.permutation(np.flatnonzero(y == c))
            cuts = np.cumsum(rng.dirichlet(np.full(clients, concentration)))[:-1]
            pieces.append(np.split(pool, np.minimum(cuts * len(pool), len(pool)).astype(np.int64)))
        parts = [np.sort(np.concatenate(own)).astype(np.int64) for own in zip(*pieces, strict=True)]
        smallest = min(len(part) for part in parts)
        if smallest >= min_size:
            return parts
        best = max(best, smallest)
    raise DataError(
        f"no dirichlet-class split of {len(y):,} examples over {clients:,} clients with concentration "
        f"{concentration} gave every client {min_size} examples in {ATTEMPTS} draws (best: {best}); ask for fewer "
        "clients, a larger concentration or a smaller min_size (0 allows empty clients)"
    )


def _by_group(
    y: NDArray[np.generic],
    groups: ArrayLike | None,
    num_clients: int | None,
    rng: np.random.Generator,
    min_size: int,
) -> list[Indices]:
    """One client per group; with fewer clients, shuffled groups are dealt out in turn, never cut."""
    if groups is None:
        raise DataError('partition "group" needs the group (speaker) of every example; this data set has none')
    g = np.asarray(groups)
    if g.shape != y.shape:
        raise DataError(f"{len(y):,} labels but groups of shape {g.shape}; one group per example is needed")
    found = np.unique(g)
    clients = len(found) if num_clients is None else num_clients
    if not 1 <= clients <= len(found):
        raise DataError(
            f"{clients:,} clients asked for, but the training examples come from {len(found):,} groups "
            f"(speakers); use 1 to {len(found):,} clients"
        )
    dealt = np.arange(len(found)) if clients == len(found) else rng.permutation(len(found))
    owner = np.empty(len(found), dtype=np.int64)
    owner[dealt] = np.arange(len(found)) % clients
    of_example = owner[np.searchsorted(found, g)]
    order = np.argsort(of_example, kind="stable")  # stable keeps indices sorted within a client
    sizes = np.bincount(of_example, minlength=clients)
    if sizes.min() < min_size:
        raise DataError(
            f"{int((sizes < min_size).sum())} of {clients:,} clients would have fewer than {min_size} examples "
            f"(smallest: {sizes.min()}); ask for fewer clients or a smaller min_size"
        )
    return np.split(order.astype(np.int64), np.cumsum(sizes)[:-1])
