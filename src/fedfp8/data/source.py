"""Finding the files of a data set, and saying how to get them when they are not there.

Accepted below the data directory: ``<folder>/train-*.parquet``, the layout of a Hugging Face snapshot
(``<folder>/{data,plain_text,...}/train-*.parquet``, ``<folder>/**/train/*.parquet``), a hub cache
(``datasets--owner--name/snapshots/...``) and the data set's own folder given directly as the data directory.
Speech Commands may also be the unpacked official archive (``<word>/<speaker>_nohash_<n>.wav`` with
``testing_list.txt``).
"""

import os
from dataclasses import dataclass
from pathlib import Path

from fedfp8.data.cache import cache_root
from fedfp8.data.spec import Spec
from fedfp8.errors import DataError

__all__ = ["Source", "data_root", "find_source"]


@dataclass(frozen=True)
class Source:
    """The files of one data set: parquet by split, or lists and word folders of an official archive."""

    folder: Path
    train: tuple[Path, ...]
    test: tuple[Path, ...]
    archive: bool = False

    @property
    def files(self) -> list[Path]:
        return [*self.train, *self.test]


def data_root(data_dir: str | os.PathLike[str] | None) -> Path:
    """The data directory: as given, else $FEDFP8_DATA, else the place `fedfp8 data fetch` writes to."""
    return Path(data_dir or os.environ.get("FEDFP8_DATA") or cache_root() / "datasets").expanduser()


def find_source(spec: Spec, data_dir: str | os.PathLike[str] | None) -> Source:
    """The first complete set of files; DataError with the places looked at and what to do if none is."""
    root = data_root(data_dir)
    tried: list[str] = []
    for pattern in (*spec.folders, "."):
        folders = sorted(root.glob(pattern)) if "*" in pattern else [root / pattern]
        for folder in folders or [root / pattern]:
            source = _look_in(spec, folder)
            if source is not None:
                return source
            tried.append(f"    {folder}{_state(folder)}")
    raise DataError(_advice(spec, root, tried))


def _look_in(spec: Spec, folder: Path) -> Source | None:
    if not folder.is_dir():
        return None
    train, test = _parquet(folder, "train"), _parquet(folder, "test")
    if train and test:
        return Source(folder, train, test)
    lists = (folder / "validation_list.txt", folder / "testing_list.txt")
    if spec.kind == "speech" and all(file.is_file() for file in lists):
        # Word folders stand for their files: a folder's time changes when a file comes or goes.
        words = tuple(sorted(p for p in folder.iterdir() if p.is_dir()))
        return Source(folder, (lists[0], *words), (lists[1],), archive=True)
    return None


def _parquet(folder: Path, split: str) -> tuple[Path, ...]:
    """Files of a split in the flattest layout present; deeper ones are not mixed in."""
    patterns = (f"{split}-*.parquet", f"*/{split}-*.parquet", f"{split}/*.parquet", f"*/{split}/*.parquet")
    for pattern in patterns:
        if found := sorted(folder.glob(pattern)):
            return tuple(found)
    return ()


def _state(folder: Path) -> str:
    if not folder.is_dir():
        return "  (no such folder)"
    missing = [f"{split}-*.parquet" for split in ("train", "test") if not _parquet(folder, split)]
    return f"  (no {' and no '.join(missing)})"


def _advice(spec: Spec, root: Path, tried: list[str]) -> str:
    files = "train-*.parquet and test-*.parquet"
    if spec.kind == "speech":
        files += ", or the unpacked official archive (<word>/*.wav, testing_list.txt)"
    by_hand = spec.by_hand or f"copy the parquet files of https://huggingface.co/datasets/{spec.hub} to"
    looked = "\n".join(tried)
    return (
        f"data set {spec.name!r} not found. Missing: {files}. Looked in\n{looked}\n"
        "Three ways to get it:\n"
        f"  1. with a network:  fedfp8 data fetch {spec.name} --data-dir {root}\n"
        f"  2. it is somewhere on this machine:  --data-dir DIR (or FEDFP8_DATA=DIR), DIR holding "
        f"{spec.folders[0]}/train-*.parquet\n"
        f"  3. by hand, on a machine with a network: {by_hand} {root / spec.folders[0]}/"
    )
