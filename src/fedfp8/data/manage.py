"""What `fedfp8 data list|check|fetch` does, without the printing."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedfp8.data.datasets import load, spec_of
from fedfp8.data.features import MFCC
from fedfp8.data.source import Source, data_root, find_source
from fedfp8.data.spec import SPECS, Spec
from fedfp8.errors import DataError, extra

__all__ = ["Check", "Listing", "check", "fetch", "list_datasets"]

DataDir = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Listing:
    """One line of `fedfp8 data list`."""

    name: str
    about: str
    found: str  # folder, "comes with scikit-learn", or "" if it is not there


@dataclass(frozen=True)
class Check:
    """What `fedfp8 data check` found. A data set that is not as it should be raises instead."""

    name: str
    folder: str
    train: int
    test: int
    classes: tuple[str, ...]
    groups: int
    input_shape: tuple[int, ...]
    per_class: tuple[int, int]  # fewest and most training examples of a class
    files: tuple[tuple[str, int, str], ...]  # name, bytes, SHA-256
    verified: str  # what was compared with known values


def list_datasets(data_dir: DataDir = None) -> list[Listing]:
    """All data sets, and where each was found."""
    return [Listing(spec.name, spec.about, _where(spec, data_dir)) for spec in SPECS.values()]


def _where(spec: Spec, data_dir: DataDir) -> str:
    if spec.kind == "digits":
        return "comes with scikit-learn"
    try:
        return str(find_source(spec, data_dir).folder)
    except DataError:
        return ""


def check(name: str, data_dir: DataDir = None, *, features: str | MFCC = "kwt") -> Check:
    """Decode the files again, whatever the cache holds, and compare with all that is known about them.

    Raises:
        DataError: the data set is missing, incomplete or damaged; the message says which file or row.
    """
    data = load(name, data_dir, features=features, rebuild=True)
    source = None if spec_of(name).kind == "digits" else find_source(spec_of(name), data_dir)
    counts = np.bincount(data.train_y.numpy(), minlength=data.num_classes)
    return Check(
        name=name,
        folder=str(source.folder) if source else "comes with scikit-learn",
        train=len(data.train_y),
        test=len(data.test_y),
        classes=data.classes,
        groups=len(data.groups),
        input_shape=data.input_shape,
        per_class=(int(counts.min()), int(counts.max())),
        files=_digests(source),
        verified=data.verified,
    )


def _digests(source: Source | None) -> tuple[tuple[str, int, str], ...]:
    found = []
    for file in source.files if source else []:
        if file.is_file():
            with open(file, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            found.append((file.name, file.stat().st_size, digest))
    return tuple(found)


def fetch(name: str, data_dir: DataDir = None) -> Path:
    """Download the parquet files from the Hugging Face hub into ``<data_dir>/<name>``; returns that folder.

    Files that are there already are not downloaded again. The data is checked when it is first loaded.

    Raises:
        DataError: no network, or the hub refused; the message says how to get the files otherwise.
    """
    spec, root = spec_of(name), data_root(data_dir)
    if spec.kind == "digits":
        raise DataError("digits need not be fetched: they come with scikit-learn")
    target = root / spec.folders[0]
    with extra("data"):
        from huggingface_hub import snapshot_download
    try:
        snapshot_download(
            spec.hub,
            repo_type="dataset",
            revision=spec.hub_revision,
            allow_patterns=spec.hub_files,
            local_dir=target,
        )
    except Exception as error:  # the hub client has no common base class for "no network" and "not there"
        raise DataError(
            f"could not fetch {spec.hub} from the Hugging Face hub ({type(error).__name__}: {error}). Without a "
            f"network, copy the parquet files to {target}/ by hand, or say where they are with --data-dir DIR "
            "(or FEDFP8_DATA=DIR)"
        ) from error
    return find_source(spec, root).folder
