"""Decoded arrays on disk: decode once, then memory-map.

An entry is a folder ``<root>/arrays/<name>-<key>/`` with one ``.npy`` per array and a ``meta.json``. The key
is a hash of everything that decides the contents (source files by name, size and time, feature settings,
version of the decoder). A folder is written under a temporary name and renamed when complete, so an entry
exists entirely or not at all, and its existence says that the data was checked when it was built. Every
process that opens the entry maps the same pages; the maps are copy-on-write, so nobody can change what the
others see.

The root is ``$FEDFP8_CACHE``, or ``~/.cache/fedfp8``.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfp8.errors import DataError

__all__ = ["Arrays", "Meta", "cache_root", "identity", "open_cached"]

Arrays = dict[str, NDArray[Any]]
Meta = dict[str, Any]
VERSION = 1  # of the entries: a change of decoding or of what is stored makes old entries invisible


def cache_root() -> Path:
    """Where everything derived is kept; safe to delete at any time."""
    return Path(os.environ.get("FEDFP8_CACHE") or Path.home() / ".cache" / "fedfp8")


def identity(files: list[Path], root: Path) -> list[tuple[str, int, int]]:
    """(name below `root`, size, modification time) of each file: enough for a key to notice a change."""
    return [(str(f.relative_to(root)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def open_cached(
    name: str, settings: Mapping[str, Any], build: Callable[[], tuple[Arrays, Meta]], rebuild: bool = False
) -> tuple[Arrays, Meta]:
    """Arrays and description of the entry for `settings`; `build` is called if there is none yet.

    `rebuild` makes it anew. Processes that have the old entry open keep it.
    """
    text = json.dumps({"version": VERSION, "name": name, **settings}, sort_keys=True)
    key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    folder = cache_root() / "arrays" / f"{name}-{key}"
    if rebuild or not folder.exists():
        made = build()  # first: a source that fails its checks leaves the old entry alone
        if rebuild:
            shutil.rmtree(folder, ignore_errors=True)
        _write(folder, *made)
    return _read(folder)


def _write(folder: Path, arrays: Arrays, meta: Meta) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise DataError(
            f"cannot write the cache folder {folder.parent} ({error}); set FEDFP8_CACHE to a folder that can be written"
        ) from error
    try:
        for name, array in arrays.items():
            with open(temporary / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                os.fsync(file.fileno())
        with open(temporary / "meta.json", "w") as text:
            json.dump({**meta, "arrays": {k: [str(a.dtype), *a.shape] for k, a in arrays.items()}}, text)
            text.flush()
            os.fsync(text.fileno())
        os.rename(temporary, folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.exists():  # it does exist if another process built the same entry first: equally good
            raise DataError(f"cannot write {folder} ({error}); free space or set FEDFP8_CACHE elsewhere") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _read(folder: Path) -> tuple[Arrays, Meta]:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        arrays = {k: np.load(folder / f"{k}.npy", mmap_mode="c") for k in meta["arrays"]}
        for name, array in arrays.items():
            if [str(array.dtype), *array.shape] != meta["arrays"][name]:
                raise ValueError(f"{name} is {array.dtype} {array.shape}, recorded were {meta['arrays'][name]}")
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise DataError(f"damaged cache entry {folder} ({error}); delete that folder and run again") from error
    return arrays, meta
