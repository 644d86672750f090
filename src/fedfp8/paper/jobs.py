"""Which runs an experiment needs, and which of them are done, begun or still to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedfp8.errors import ConfigError
from fedfp8.fl import METHODS, Config, from_dict, preset, to_dict, with_settings
from fedfp8.fl.checkpoint import RunFolder, write_config
from fedfp8.fl.settings import parse_assignment
from fedfp8.paper.paper import TABLES
from fedfp8.paper.records import read_run

__all__ = ["Job", "find_job", "plan", "set_length"]


@dataclass(frozen=True)
class Job:
    """One run: ``OUT/<cell>/<label>-seed<seed>``."""

    config: Config
    folder: Path
    done: int = 0  # rounds that are there already
    variant: str = ""  # of the method, as `compare` was asked for it: "dq:dq.kappa_up=16"

    @property
    def label(self) -> str:
        return self.variant or self.config.method

    @property
    def name(self) -> str:
        return f"{self.config.preset} {self.label} seed {self.config.seed}"

    @property
    def rounds(self) -> int:
        return self.config.round.count

    @property
    def status(self) -> str:
        if self.done >= self.rounds:
            return "done"
        return "begun" if (self.folder / "config.toml").exists() else "new"


def plan(
    experiment: str,
    out: Path,
    *,
    only: Sequence[str] = (),
    methods: Sequence[str] = (),
    rounds: int | None = None,
    seeds: Sequence[int] = (0,),
    data_dir: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[Job]:
    """The runs of a table or of Figure 4, cell by cell, FP32 first. A method may have settings of its own, as in
    ``dq:dq.kappa_up=16``.

    Raises:
        ConfigError: a cell or method that does not exist, or a folder that holds a run with other settings.
    """
    table = TABLES[experiment]
    cells = _chosen("cell", only, table.cells, table.cells)
    _chosen("method", [label.partition(":")[0] for label in methods], tuple(METHODS), ())
    chosen = dict(settings or {})
    if rounds is not None:
        chosen["round.count"] = rounds
    if data_dir is not None:
        chosen["data.dir"] = str(data_dir.resolve())
    jobs = []
    for cell in cells:
        for label in methods or table.methods:
            method, *own = label.split(":")
            config = with_settings(preset(cell, method), chosen | dict(map(parse_assignment, own)))
            jobs += [find_job(replace(config, seed=seed), out, label if own else "") for seed in seeds]
    return jobs


def _chosen(what: str, given: Sequence[str], known: Sequence[str], default: Sequence[str]) -> Sequence[str]:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"unknown {what} {', '.join(map(repr, unknown))}; choose from {', '.join(known)}")
    return given or default


def find_job(config: Config, out: Path, variant: str = "", *, overwrite: bool = False) -> Job:
    """The job of a run below `out`: match what is asked with what its folder holds.

    The number of rounds may differ where the learning rate does not depend on it: a longer run continues a shorter one
    to the same bytes. Everything else must be equal, or records of two settings would be mixed.
    """
    label = (variant or config.method).replace("/", "_")
    folder = out / config.preset / f"{label}-seed{config.seed}"
    if overwrite or not (folder / "config.toml").exists():
        return Job(config, folder, 0, variant)
    record = read_run(folder)
    other = from_dict(record.config)
    free = config.local.schedule == "constant"
    wanted, found = _flat(config), _flat(other)
    ignored = {"data.dir", "round.keep_payloads"} | ({"round.count"} if free else set())
    changed = [
        f"{key} is {found.get(key)!r} there and {value!r} asked for"
        for key, value in wanted.items()
        if key not in ignored and found.get(key) != value
    ]
    if changed:
        raise ConfigError(
            f"{folder} holds a run with other settings: {'; '.join(changed)}. Ask for the same settings, or choose "
            "another --out"
        )
    return Job(config, folder, record.rounds, variant)


def _flat(config: Config) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, content in to_dict(config).items():
        flat |= {f"{section}.{k}": v for k, v in content.items()} if isinstance(content, dict) else {section: content}
    return flat


def set_length(folder: Path, rounds: int) -> None:
    """Let a run go on to another number of rounds than it was begun with.

    Raises:
        ConfigError: more rounds are there already, or every round's learning rate depends on how many there are.
    """
    with RunFolder.open(folder) as opened:
        config, done = opened.config, read_run(folder).rounds
        if config.round.count == rounds:
            return
        if config.local.schedule != "constant":
            raise ConfigError(
                f"{folder} was begun for {config.round.count} rounds, and with local.schedule="
                f"{config.local.schedule!r} the learning rate of each depends on that number: {rounds} rounds would be "
                f"another run; start it with --rounds {rounds} in another folder"
            )
        if done > rounds:
            raise ConfigError(f"{folder} has {done} rounds already; ask for more than that")
        write_config(folder / "config.toml", replace(config, round=replace(config.round, count=rounds)))
        (folder / "sizes.json").unlink(missing_ok=True)  # its date would be that of the shorter run
