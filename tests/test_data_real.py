"""The real data sets, where they are: `pytest -m slow tests/test_data_real.py --data-dir DIR`, or FEDFP8_DATA=DIR."""

import numpy as np
import pytest
import torch

from fedfp8.data import load, partition, partition_report
from fedfp8.data.spec import SPECS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDFP8_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def load_twice(data_root):
    """Loads a data set, and once more without the functions that decode: the second time it is mapped."""

    def both(name, **options):
        data = load(name, data_root, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr("fedfp8.data.datasets.read_images")
            patch.delattr("fedfp8.data.datasets.read_speech")
            again = load(name, data_root, **options)
        assert torch.equal(again.train_x[:100], data.train_x[:100])
        return data

    return both


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_is_bit_exact(load_twice, name, classes):
    data = load_twice(name)
    assert data.verified == f"{SPECS[name].digest} of the original contents"
    assert torch.bincount(data.train_y).tolist() == [50_000 // classes] * classes
    report = partition_report(partition("dirichlet", data.train_y, 100, 0), data.train_y, data.classes)
    assert (report.smallest, report.largest) == (500, 500)


@pytest.mark.parametrize(("features", "shape"), [("kwt", (40, 98)), ("matchboxnet", (64, 128))])
def test_speech_commands_by_speaker(load_twice, features, shape):
    data = load_twice("speech_commands", features=features)
    assert data.train_x.shape == (18_538, *shape) and data.test_x.shape == (2_567, *shape)
    assert data.classes == ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
    assert len(data.groups) == 1_468 and data.train_x.isfinite().all()
    assert data.verified == "sha256 of 2 files"
    sizes = [len(part) for part in partition("group", data.train_y, None, 0, groups=data.train_groups)]
    assert (len(sizes), np.median(sizes), max(sizes)) == (1_468, 10, 94)


def test_fashion_mnist_subset(load_twice):
    data = load_twice("fashion_mnist")
    assert data.train_x.shape[1:] == (1, 28, 28) and data.num_classes == 10
