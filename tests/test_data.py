"""Data sets from tiny parquet files made here: decoding, checks, cache, sharing, messages."""

import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedfp8.data import by_file, check, fetch, list_datasets, load
from fedfp8.data import images as images_module
from fedfp8.data.cache import cache_root, open_cached
from fedfp8.data.spec import SPECS
from fedfp8.errors import DataError, MissingPackage


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDFP8_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDFP8_DATA", raising=False)


def pictures(n, seed):
    return np.random.default_rng(seed).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)


def write_cifar(path, pixels, labels, names=None):
    encoded = []
    for image in pixels:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG")
        encoded.append({"bytes": buffer.getvalue(), "path": None})
    table = pa.table({"img": encoded, "label": pa.array(labels, pa.int64())})
    if names:
        info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({b"huggingface": json.dumps(info).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def original_md5(pixels, labels):
    """As the authors' binary files: a label byte, then red, green and blue planes."""
    rows = b"".join(bytes([y]) + x.transpose(2, 0, 1).tobytes() for x, y in zip(pixels, labels, strict=True))
    return hashlib.md5(rows).hexdigest()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A CIFAR-10 with 40 + 10 images in two training files; returns its data directory and pixels."""
    train, test = pictures(40, 0), pictures(10, 1)
    train_y, test_y = np.arange(40) % 10, np.arange(10)
    folder = tmp_path / "data" / "cifar10"
    write_cifar(folder / "train-00000-of-00002.parquet", train[:20], train_y[:20])
    write_cifar(folder / "train-00001-of-00002.parquet", train[20:], train_y[20:])
    write_cifar(folder / "test-00000-of-00001.parquet", test, test_y)
    sums = (original_md5(train[:20], train_y[:20]), original_md5(train[20:], train_y[20:]), original_md5(test, test_y))
    monkeypatch.setitem(SPECS, "cifar10", replace(SPECS["cifar10"], counts=((40, 10),), contents=sums))
    return tmp_path / "data", train, test


def forbid_decoding(monkeypatch):
    def decode(*args):
        raise AssertionError("decoded again")

    monkeypatch.setattr(images_module, "_decode", decode)


def test_digits_are_split_evenly_and_always_alike():
    data = load("digits")
    assert data.train_x.shape == (1437, 1, 8, 8) and data.test_x.shape == (360, 1, 8, 8)
    assert data.train_x.dtype == torch.uint8 and int(data.train_x.max()) == 16
    assert data.input_shape == (1, 8, 8) and data.num_classes == 10 and data.train_groups is None
    every = torch.bincount(torch.cat([data.train_y, data.test_y]))
    tested = torch.bincount(data.test_y)
    assert (tested - every / 5).abs().max() < 1  # a fifth of every class, up to rounding
    assert torch.equal(load("digits").test_x, data.test_x)


def test_images_come_out_exactly_and_the_second_load_decodes_nothing(tiny, monkeypatch):
    root, train, test = tiny
    data = load("cifar10", root)
    assert torch.equal(data.train_x, torch.from_numpy(train.transpose(0, 3, 1, 2)))
    assert torch.equal(data.test_x, torch.from_numpy(test.transpose(0, 3, 1, 2)))
    assert data.train_y.tolist() == [i % 10 for i in range(40)] and data.train_y.dtype == torch.int64
    assert data.classes[:2] == ("airplane", "automobile") and "md5" in data.verified
    forbid_decoding(monkeypatch)
    again = load("cifar10", root)
    assert torch.equal(again.train_x, data.train_x) and again.classes == data.classes
    with pytest.raises(AssertionError, match="decoded again"):
        load("cifar10", root, rebuild=True)


def test_cached_tensors_are_memory_maps_nobody_else_can_change(tiny):
    root, train, _ = tiny
    first, second = load("cifar10", root), load("cifar10", root)
    with open("/proc/self/maps") as maps:
        assert str(cache_root()) in maps.read()
    first.train_x.zero_()
    assert torch.equal(second.train_x, torch.from_numpy(train.transpose(0, 3, 1, 2)))
    assert torch.equal(load("cifar10", root).train_x, second.train_x)


def test_class_names_come_from_the_files_where_they_have_them(tiny):
    root, train, _ = tiny
    names = [f"thing {i}" for i in range(10)]
    write_cifar(root / "cifar10" / "train-00000-of-00002.parquet", train[:20], np.arange(20) % 10, names)
    assert load("cifar10", root).classes == tuple(names)


@pytest.mark.parametrize("inside", ["", "data", "plain_text"])
def test_folder_layouts(tiny, inside, tmp_path):
    root, *_ = tiny
    target = tmp_path / "elsewhere" / "cifar10" / inside
    target.parent.mkdir(parents=True, exist_ok=True)
    (root / "cifar10").rename(target)
    assert len(load("cifar10", tmp_path / "elsewhere").train_y) == 40
    assert len(load("cifar10", tmp_path / "elsewhere" / "cifar10").train_y) == 40  # its own folder


def test_hub_cache_layout_and_environment(tiny, tmp_path, monkeypatch):
    root, *_ = tiny
    target = tmp_path / "hub" / "datasets--uoft-cs--cifar10" / "snapshots" / "0123abc" / "plain_text"
    target.parent.mkdir(parents=True)
    (root / "cifar10").rename(target)
    monkeypatch.setenv("FEDFP8_DATA", str(tmp_path / "hub"))
    assert len(load("cifar10").train_y) == 40
    found = {listing.name: listing.found for listing in list_datasets()}
    assert found["cifar10"].endswith("0123abc") and found["cifar100"] == ""
    assert found["digits"] == "comes with scikit-learn"


def test_missing_data_says_what_where_and_three_ways(tmp_path):
    with pytest.raises(DataError) as error:
        load("cifar10", tmp_path / "none")
    text = str(error.value)
    assert "train-*.parquet" in text and f"{tmp_path}/none/cifar10  (no such folder)" in text
    assert "fedfp8 data fetch cifar10" in text and "--data-dir DIR" in text
    assert "https://huggingface.co/datasets/uoft-cs/cifar10" in text


def test_half_a_data_set_says_which_half_is_missing(tiny):
    root, *_ = tiny
    (root / "cifar10" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"cifar10  \(no test-\*.parquet\)"):
        load("cifar10", root)


def test_missing_shard_is_noticed_by_the_count(tiny):
    root, *_ = tiny
    (root / "cifar10" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(DataError, match="20 training and 10 test examples, expected 40"):
        load("cifar10", root)


def test_one_changed_pixel_is_noticed_by_the_checksum(tiny):
    root, train, _ = tiny
    train = train.copy()
    train[33, 5, 5, 1] ^= 1
    write_cifar(root / "cifar10" / "train-00001-of-00002.parquet", train[20:], np.arange(20) % 10)
    with pytest.raises(DataError, match="block 1 of 3"):
        load("cifar10", root)
    assert not list(cache_root().glob("arrays/*"))  # nothing unchecked is kept


@pytest.mark.parametrize(
    ("labels", "size", "message"),
    [
        (np.arange(20) % 9, 32, r"train has 9 different labels from 0 to 8, expected all of 0..9"),
        (np.arange(20) % 11, 32, r"train has 11 different labels from 0 to 10, expected all of 0..9"),
        (np.arange(20) % 10, 28, r"row 0 .*shape \(3, 28, 28\)"),
    ],
)
def test_wrong_labels_and_shapes_are_refused(tiny, labels, size, message, monkeypatch):
    root, train, _ = tiny
    monkeypatch.setitem(SPECS, "cifar10", replace(SPECS["cifar10"], contents=()))
    for name in ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet"):
        write_cifar(root / "cifar10" / name, train[:20, :size, :size], labels)
    with pytest.raises(DataError, match=message):
        load("cifar10", root)


def test_damaged_and_foreign_files(tiny):
    root, *_ = tiny
    file = root / "cifar10" / "train-00001-of-00002.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"train-00001-of-00002.parquet.*damaged"):
        load("cifar10", root)
    pq.write_table(pa.table({"picture": [1]}), file)
    with pytest.raises(DataError, match=r"img|label"):
        load("cifar10", root)


def test_known_files_are_compared_by_sha256(tiny, monkeypatch):
    root, *_ = tiny
    name = "cifar10/test-00000-of-00001.parquet"
    right = hashlib.sha256((root / name).read_bytes()).hexdigest()
    monkeypatch.setitem(SPECS, "cifar10", replace(SPECS["cifar10"], files={name: "0" * 64}))
    with pytest.raises(DataError, match=f"damaged: its SHA-256 is {right}"):
        load("cifar10", root)
    monkeypatch.setitem(SPECS, "cifar10", replace(SPECS["cifar10"], files={name: right}))
    assert load("cifar10", root).verified == "sha256 of 1 files, md5 of the original contents"


def test_check_reports_what_it_found(tiny):
    root, *_ = tiny
    report = check("cifar10", root)
    assert (report.train, report.test, report.per_class, report.input_shape) == (40, 10, (4, 4), (3, 32, 32))
    digest = hashlib.sha256((root / "cifar10" / "test-00000-of-00001.parquet").read_bytes()).hexdigest()
    assert [file[2] for file in report.files][-1] == digest and "md5" in report.verified
    assert check("digits").train == 1437


def test_a_changed_source_is_decoded_anew(tiny, monkeypatch):
    root, *_ = tiny
    load("cifar10", root)
    file = root / "cifar10" / "train-00001-of-00002.parquet"
    os.utime(file, ns=(1, 1))
    forbid_decoding(monkeypatch)
    with pytest.raises(AssertionError, match="decoded again"):
        load("cifar10", root)


def test_fetch_copies_from_the_hub_and_explains_a_missing_network(tiny, tmp_path, monkeypatch):
    import huggingface_hub

    root, *_ = tiny

    def download(repo, *, repo_type, revision, allow_patterns, local_dir):
        assert (repo, repo_type, revision, allow_patterns) == ("uoft-cs/cifar10", "dataset", None, "*.parquet")
        (root / "cifar10").rename(local_dir / "plain_text")

    def no_network(*args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(DataError, match=r"Name or service not known.*--data-dir"):
        fetch("cifar10", tmp_path / "new")
    (tmp_path / "new" / "cifar10").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch("cifar10", tmp_path / "new") == tmp_path / "new" / "cifar10"
    assert len(load("cifar10", tmp_path / "new").train_y) == 40
    with pytest.raises(DataError, match="scikit-learn"):
        fetch("digits")


def test_unknown_name():
    with pytest.raises(DataError, match="'mnist'; known are digits, cifar10"):
        load("mnist")


def test_cache_entries_are_whole_or_absent(tmp_path, monkeypatch):
    def build():
        return {"a": np.arange(5)}, {"classes": []}

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_cached("x", {"k": 1}, build)
    assert list((cache_root() / "arrays").iterdir()) == []
    arrays, _ = open_cached("x", {"k": 1}, build)
    assert arrays["a"].tolist() == [0, 1, 2, 3, 4]
    open_cached("x", {"k": 2}, build)
    folders = sorted((cache_root() / "arrays").iterdir())
    assert len(folders) == 2  # other settings, other entry
    (folders[0] / "a.npy").write_bytes(b"")
    (folders[1] / "meta.json").unlink()
    for k in (1, 2):
        with pytest.raises(DataError, match=r"damaged cache entry.*delete that folder"):
            open_cached("x", {"k": k}, build)


def test_losing_the_race_for_an_entry_is_no_error(monkeypatch):
    def build():
        return {"a": np.zeros(1)}, {}

    def slow_build():
        open_cached("x", {}, build)  # another process finishes the same entry meanwhile
        return build()

    assert open_cached("x", {}, slow_build)[0]["a"].tolist() == [0.0]
    assert len(list((cache_root() / "arrays").iterdir())) == 1


def test_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDFP8_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="FEDFP8_CACHE"):
        open_cached("x", {}, lambda: ({"a": np.zeros(1)}, {}))


def test_a_cached_tensor_is_pickled_as_the_name_of_its_file(tiny):
    data = load("cifar10", tiny[0])
    pickled = pickle.dumps([by_file(data.train_x), by_file(data.train_y)])
    assert len(pickled) < 1000 < data.train_x.nbytes
    x, y = pickle.loads(pickled)
    assert torch.equal(x, data.train_x) and torch.equal(y, data.train_y)
    x.zero_()  # copy-on-write: nobody else sees it
    assert torch.equal(pickle.loads(pickled)[0], data.train_x) and data.train_x.any()
    assert by_file(x) == by_file(data.train_x)  # a worker may start others


def test_a_tensor_without_a_file_is_pickled_as_it_is(tiny):
    data = load("cifar10", tiny[0])
    shutil.rmtree(cache_root())
    for tensor in (data.train_x, data.train_x[3:], data.train_x + 1, load("digits").train_x):
        assert torch.equal(pickle.loads(pickle.dumps(by_file(tensor))), tensor)


def test_import_needs_no_optional_package():
    heavy = ("datasets", "pyarrow", "librosa", "soundfile", "PIL", "sklearn", "matplotlib", "huggingface_hub")
    code = f"import sys, fedfp8.data; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["pyarrow", "PIL"])
def test_missing_extra_is_named(tiny, monkeypatch, package):
    root, *_ = tiny
    monkeypatch.setitem(sys.modules, package, None)
    if package == "pyarrow":
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingPackage, match=r'pip install "fedfp8\[data\]"'):
        load("cifar10", root)
