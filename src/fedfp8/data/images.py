"""Parquet files of encoded images -> uint8 arrays, checked against the spec: counts, shapes, checksums."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfp8.data.cache import Arrays, Meta
from fedfp8.data.source import Source
from fedfp8.data.spec import Spec
from fedfp8.errors import DataError, extra

__all__ = ["check_files", "class_names", "read_images", "read_table"]


def read_images(spec: Spec, source: Source) -> tuple[Arrays, Meta]:
    """Decode and check a whole data set; about 20 s for 60,000 small images."""
    known = check_files(spec, source)
    train_x, train_y, train_coarse = _read_split(spec, source.train)
    test_x, test_y, test_coarse = _read_split(spec, source.test)
    classes = class_names(source.train[0], spec.label) or spec.classes
    _check_counts(spec, source, train_y, test_y, len(classes))
    contents = _check_contents(spec, source, [(train_x, train_y, train_coarse), (test_x, test_y, test_coarse)])
    arrays: Arrays = {"train_x": train_x, "train_y": train_y, "test_x": test_x, "test_y": test_y}
    compared = ([f"sha256 of {known} files"] if known else []) + ([contents] if contents else [])
    return arrays, {"classes": classes, "verified": ", ".join(compared) or "counts, classes and shapes"}


def read_table(files: tuple[Path, ...], columns: list[str]) -> Any:
    """The columns of all files as one pyarrow table."""
    with extra("data"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        return pa.concat_tables([pq.read_table(file, columns=columns) for file in files])
    except (pa.ArrowException, OSError) as error:
        names = ", ".join(str(file) for file in files)
        raise DataError(
            f"cannot read {names}: {error}. The file is damaged or no parquet file; fetch it again"
        ) from error


def class_names(file: Path, column: str) -> tuple[str, ...]:
    """Names of the classes from the `datasets` metadata of a parquet file; () if it has none."""
    import pyarrow.parquet as pq

    stored = (pq.read_schema(file).metadata or {}).get(b"huggingface")
    features = json.loads(stored).get("info", {}).get("features", {}) if stored else {}
    return tuple(features.get(column, {}).get("names") or ())


def check_files(spec: Spec, source: Source) -> int:
    """Compare files known by SHA-256 with it; returns how many were known. Raises on one that differs."""
    known = 0
    for file in source.files:
        expected = spec.files.get(f"{source.folder.name}/{file.name}")
        if expected is None:
            continue
        with open(file, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != expected:
            raise DataError(f"{file} is damaged: its SHA-256 is {found}, expected {expected}; copy it again")
        known += 1
    return known


def _read_split(
    spec: Spec, files: tuple[Path, ...]
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64] | None]:
    columns = [spec.input, spec.label] + ([spec.coarse] if spec.coarse else [])
    table = read_table(files, columns)
    if missing := [c for c in columns if c not in table.column_names]:
        raise DataError(f"{files[0]} has no column {', '.join(missing)}; is it {spec.name}?")
    images = np.empty((len(table), *spec.shape), dtype=np.uint8)
    row = 0
    for chunk in table[spec.input].chunks:
        for encoded in chunk.field("bytes"):
            images[row] = _decode(encoded.as_py(), spec, row, files)
            row += 1
    coarse = table[spec.coarse].to_numpy().astype(np.int64) if spec.coarse else None
    return images, table[spec.label].to_numpy().astype(np.int64), coarse


def _decode(encoded: bytes, spec: Spec, row: int, files: tuple[Path, ...]) -> NDArray[np.uint8]:
    with extra("data"):
        from PIL import Image
    try:
        pixels = np.asarray(Image.open(io.BytesIO(encoded)))  # [H, W] or [H, W, C]
    except (OSError, TypeError) as error:
        raise DataError(f"row {row} of {files[0].parent}: not a readable image ({error})") from error
    channels_first = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    if channels_first.shape != spec.shape or channels_first.dtype != np.uint8:
        raise DataError(
            f"row {row} of {files[0].parent}: image of shape {channels_first.shape} ({channels_first.dtype}), "
            f"{spec.name} has {spec.shape} (uint8)"
        )
    return channels_first


def _check_counts(
    spec: Spec, source: Source, train_y: NDArray[np.int64], test_y: NDArray[np.int64], classes: int
) -> None:
    found = (len(train_y), len(test_y))
    if spec.counts and found not in spec.counts:
        allowed = " or ".join(f"{a:,} + {b:,}" for a, b in spec.counts)
        raise DataError(
            f"{spec.name} in {source.folder} has {found[0]:,} training and {found[1]:,} test examples, expected "
            f"{allowed}; a file is missing or cut short (found {', '.join(f.name for f in source.files)})"
        )
    for split, labels in (("train", train_y), ("test", test_y)):
        present = np.unique(labels)
        if not np.array_equal(present, np.arange(classes)):
            raise DataError(
                f"{spec.name} in {source.folder}: {split} has {len(present)} different labels from "
                f"{present.min()} to {present.max()}, expected all of 0..{classes - 1}"
            )


def _check_contents(
    spec: Spec, source: Source, splits: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]]
) -> str:
    """Digests of label and pixel bytes, laid out as in the original files; "" if none is known."""
    if not spec.contents:
        return ""
    found = []
    for (images, labels, coarse), blocks in zip(splits, (len(spec.contents) - 1, 1), strict=True):
        heads = [labels] if coarse is None else [coarse, labels]
        rows = [np.stack(heads, axis=1).astype(np.uint8), images.reshape(len(images), -1)]
        for block in np.split(np.concatenate(rows, axis=1), blocks):
            found.append(hashlib.new(spec.digest, block.tobytes()).hexdigest())
    for i, (got, expected) in enumerate(zip(found, spec.contents, strict=True)):
        if got != expected:
            raise DataError(
                f"{spec.name} in {source.folder}: block {i} of {len(found)} (training blocks, then test) has "
                f"{spec.digest} {got}, the original has {expected}; the files are damaged, reordered or lossily "
                "re-encoded"
            )
    return f"{spec.digest} of the original contents"
