"""Partitions: every example exactly once, the promised sizes and skew, refusals with the numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfp8.data import KINDS, draw_partition, partition, partition_report
from fedfp8.errors import DataError

LABELS = np.tile(np.arange(10), 500)  # 5,000 examples, balanced
GROUPS = np.arange(5000) // 13


def split(kind, labels=LABELS, clients=50, seed=0, **options):
    return partition(kind, labels, clients, seed, groups=GROUPS[: len(labels)], **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_belongs_to_exactly_one_client(kind):
    parts = split(kind)
    assert len(parts) == 50
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(5000))


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_partition_other_seed_another(kind):
    first, again, other = split(kind), split(kind), split(kind, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_partitions_do_not_touch_the_global_generators():
    before = (np.random.get_state()[1].copy(), torch.get_rng_state())  # noqa: NPY002 (reading, not drawing)
    for kind in KINDS:
        split(kind)
    assert np.array_equal(before[0], np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(before[1], torch.get_rng_state())


def test_torch_labels_are_accepted():
    parts = partition("iid", torch.from_numpy(LABELS), 10, 0)
    assert all(np.array_equal(a, b) for a, b in zip(parts, partition("iid", LABELS, 10, 0), strict=True))


@given(n=st.integers(1, 300), clients=st.integers(1, 40), classes=st.integers(1, 7), seed=st.integers(0, 99))
def test_equal_sizes_up_to_one_for_any_numbers(n, clients, classes, seed):
    labels = np.arange(n) % classes
    for kind in ("iid", "dirichlet"):
        if clients > n:
            with pytest.raises(DataError, match=f"{clients:,} clients"):
                partition(kind, labels, clients, seed)
            continue
        parts = partition(kind, labels, clients, seed)
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


@pytest.mark.parametrize("concentration", [1e-3, 0.3, 1e4])
def test_dirichlet_takes_every_example_at_extreme_concentrations(concentration):
    for kind in ("dirichlet", "dirichlet-class"):
        parts = split(kind, concentration=concentration, clients=20, min_size=0)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(5000))


def test_dirichlet_mix_has_the_variance_of_the_dirichlet_distribution():
    """A client's shares are multinomial draws from its own mix: with p = 1/C, A = C * concentration, n per client,

        Var[share] = p (1-p) (1/(A+1) + (1 - 1/(A+1)) / n).

    Noise: the mean of K*C squared deviations has a relative error of about sqrt(kurtosis / (K*C)); the kurtosis of
    Beta(0.3, 2.7) is below 10: 5 sigma = 5 * sqrt(10 / 40,000) = 0.08. Bias: demand for a class differs from its
    supply by sqrt(9/4 / 4000) = 2.4 %, and that share of the examples is redirected to classes that are left: at
    most twice that in the squares, 0.05.
    """
    clients, classes, n, concentration = 4000, 10, 50, 0.3
    labels = np.tile(np.arange(classes), clients * n // classes)
    parts = partition("dirichlet", labels, clients, 0, concentration=concentration)
    share = np.stack([np.bincount(labels[part], minlength=classes) for part in parts]) / n
    spread = 1 / (classes * concentration + 1)
    expected = 0.1 * 0.9 * (spread + (1 - spread) / n)
    assert np.square(share - 0.1).mean() == pytest.approx(expected, rel=0.08 + 0.05)


def test_skew_falls_with_concentration_and_iid_is_flat():
    def skew(kind, **options):
        return partition_report(split(kind, **options), LABELS).skew

    for kind in ("dirichlet", "dirichlet-class"):
        low, middle, high = (skew(kind, concentration=c, min_size=0) for c in (0.05, 0.5, 50.0))
        assert low > middle + 0.1 > high + 0.2
    # 100 draws over 10 classes: E|share - 0.1| <= sqrt(0.09 / 100) = 0.03, so the distance is at most 0.15
    assert skew("iid") < 0.15


def test_classwise_split_has_unequal_sizes_and_respects_min_size():
    sizes = [len(part) for part in split("dirichlet-class", min_size=5)]
    assert min(sizes) >= 5
    assert max(sizes) > 2 * min(sizes)


def test_groups_are_never_cut():
    for clients in (None, 385, 40, 1):
        parts = split("group", clients=clients)
        owners = [set(GROUPS[part]) for part in parts]
        assert sum(len(o) for o in owners) == len(set(GROUPS)) == 385
        assert len(parts) == (clients or 385)
    in_order = split("group", clients=None)
    assert [set(GROUPS[part]) for part in in_order] == [{g} for g in range(385)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: partition("dirichlett", LABELS, 5, 0), ["dirichlett", "dirichlet-class"]),
        (lambda: partition("iid", LABELS, 5001, 0), ["5,001 clients", "5,000"]),
        (lambda: partition("iid", LABELS, 0, 0), ["0 clients"]),
        (lambda: partition("dirichlet", LABELS, None, 0), ["None clients"]),
        (lambda: partition("dirichlet", LABELS, 10, 0, concentration=0.0), ["0.0", "above 0"]),
        (lambda: partition("dirichlet", LABELS, 10, 0, num_classes=12), ["2 of 12 classes", "10, 11"]),
        (lambda: partition("iid", LABELS * 2, 10, 0), ["classes have no training example"]),
        (lambda: partition("iid", LABELS - 1, 10, 0), ["-1"]),
        (lambda: partition("iid", LABELS.astype(float), 10, 0), ["float64"]),
        (lambda: partition("iid", [], 1, 0), ["non-empty"]),
        (lambda: partition("dirichlet-class", LABELS, 500, 0, concentration=0.01), ["500 clients", "100 draws"]),
        (lambda: partition("dirichlet-class", LABELS, 500, 0, min_size=11), ["5,500", "5,000"]),
        (lambda: partition("group", LABELS, None, 0), ["group (speaker)"]),
        (lambda: partition("group", LABELS, 386, 0, groups=GROUPS), ["386 clients", "385 groups"]),
        (lambda: partition("group", LABELS, 5, 0, groups=GROUPS[:9]), ["5,000 labels", "(9,)"]),
        (lambda: partition("group", LABELS, None, 0, groups=GROUPS, min_size=9), ["1 of 385", "smallest: 8"]),
    ],
)
def test_impossible_requests_are_refused_with_the_numbers(call, words):
    with pytest.raises(DataError) as error:
        call()
    for word in words:
        assert word in str(error.value)


def test_report_counts_what_is_there(tmp_path):
    labels = np.array([0, 0, 1, 1, 1, 2])
    report = partition_report([np.array([0, 1, 2]), np.array([3, 4, 5]), np.array([], dtype=np.int64)], labels, "abc")
    assert [(r.client, r.examples, r.classes, r.counts) for r in report.rows] == [
        (0, 3, 2, (2, 1, 0)),
        (1, 3, 2, (0, 2, 1)),
        (2, 0, 0, (0, 0, 0)),
    ]
    assert (report.smallest, report.median, report.largest, report.classes) == (0, 3.0, 3, ("a", "b", "c"))
    # |2/3-1/3| + |1/3-1/2| + |0-1/6| = 2/3 and |0-1/3| + |2/3-1/2| + |1/3-1/6| = 2/3; halves, mean 1/3
    assert report.skew == pytest.approx(1 / 3)
    assert "3 clients, 6 examples" in str(report)
    draw_partition(report, tmp_path / "partition.png")
    assert (tmp_path / "partition.png").read_bytes().startswith(b"\x89PNG")


def test_same_recipe_as_flwr_datasets():
    """InnerDirichlet of flwr-datasets draws the same distribution: mean label skew agrees within its noise.

    The skew of one client lies in [0, 0.9]; a mean over 100 clients has a standard error below 0.45/sqrt(100), in
    fact near 0.12/sqrt(100) = 0.012 as measured over clients; 5 sigma of the difference of two: 5*0.012*sqrt(2).
    """
    from datasets import Dataset
    from flwr_datasets.partitioner import InnerDirichletPartitioner

    theirs = InnerDirichletPartitioner(partition_sizes=[50] * 100, partition_by="label", alpha=0.3, seed=1)
    theirs.dataset = Dataset.from_dict({"label": LABELS.tolist(), "row": list(range(5000))})
    their_parts = [np.array(theirs.load_partition(k)["row"]) for k in range(100)]
    ours = partition_report(partition("dirichlet", LABELS, 100, 0), LABELS)
    assert ours.skew == pytest.approx(partition_report(their_parts, LABELS).skew, abs=5 * 0.012 * 2**0.5)
