"""What workers are given: mapped from the cache and the run folder, never copied into shared memory, and cleaned up."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedfp8
from fedfp8.data import datasets
from fedfp8.data.cache import open_cached
from fedfp8.errors import RunError
from fedfp8.fl.federation import build, from_tensors
from fedfp8.fl.handover import hand_over
from fl_tools import comparable, own_data, own_tiny, tiny

MAPS = Path("/proc/self/maps")
needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="looks at the memory maps of processes in /proc")


def mapped_files() -> list[str]:
    """The files that the worker processes have mapped, deleted ones too."""
    pids = [process.pid for process in multiprocessing.active_children()]
    assert pids
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6]


def in_shared_memory(files: list[str]) -> list[str]:
    """Of torch: other libraries keep a few bytes of their own there."""
    return [file for file in files if file.startswith("/dev/shm/torch_")]


@pytest.fixture
def cached_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The digits as if they were decoded into a cache, which nobody may write to any more."""
    monkeypatch.setenv("FEDFP8_CACHE", str(tmp_path / "cache"))
    data = datasets._as_dataset("digits", *open_cached("digits", {}, datasets.read_digits))
    monkeypatch.setattr("fedfp8.data.load", lambda *_, **__: data)
    for path in [*(tmp_path / "cache").rglob("*"), tmp_path / "cache"]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield tmp_path / "cache"
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


@needs_maps
def test_workers_map_a_read_only_cache(cached_digits: Path, tmp_path: Path) -> None:
    config, before = tiny("dq", 2, data__limit=0, data__test_limit=0), contents(cached_digits)
    here = fedfp8.run(config, out=tmp_path / "here", workers=0)
    seen: list[list[str]] = []
    there = fedfp8.run(config, out=tmp_path / "run", workers=2, on_round=lambda _: seen.append(mapped_files()))
    assert comparable(there.rounds) == comparable(here.rounds)
    assert not any(map(in_shared_memory, seen))
    assert {Path(f).stem for f in seen[-1] if f.startswith(str(cached_digits))} == {*before}
    assert contents(cached_digits) == before
    with hand_over(config, build(config), tmp_path / "models") as given:
        assert before["train_x"][-6400:] not in given.read_bytes()  # a hundred images, which are in the cache


def contents(cache: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in cache.rglob("*.npy")}


@needs_maps
@pytest.mark.parametrize("out", [True, False])
def test_own_tensors_and_model_reach_workers_through_the_run_folder(out: bool, tmp_path: Path) -> None:
    """What no cache has: the model (tied, so one tensor under two names), tensors of clients, a Dataset, a loss."""
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 3))
    model[2].weight = model[0].weight
    x, y = own_data(1)[0]
    task: dict[str, Any] = {"model": model, "test": (x, y), "loss": nn_loss}
    task["clients"] = [*own_data(2), torch.utils.data.TensorDataset(x, y)]
    folder, seen = tmp_path / "run" if out else None, []
    here = fedfp8.run(own_tiny("uq", 2), **task)
    there = fedfp8.run(own_tiny("uq", 2), **task, out=folder, workers=1, on_round=lambda _: seen.append(mapped_files()))
    assert comparable(there.rounds) == comparable(here.rounds)
    assert len(seen) == 3 and not any(map(in_shared_memory, seen))
    handed = [{file for file in files if "models.workers" in file} for files in seen]
    assert all(len(files) == 1 and files.pop().endswith("(deleted)") for files in handed)


def nn_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    federation = from_tensors(own_tiny(), nn.Linear(5, 3), own_data(), own_data(1)[0])
    with (
        pytest.raises(RunError, match=r"file/models\.workers, which gives worker processes their data.*--out"),
        hand_over(own_tiny(), federation, tmp_path / "file" / "models"),
    ):
        pass
