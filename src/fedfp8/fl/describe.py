"""Every setting with its default and meaning, read from config.py, where the comment beside a field documents it."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from fedfp8.fl import config as source
from fedfp8.fl.config import Config

__all__ = ["Setting", "describe", "to_toml"]

FIELD = re.compile(r"^    (\w+): .*?  # (.+)$")  # name: type = default  # meaning


@dataclass(frozen=True)
class Setting:
    """One line of `fedfp8 settings`. `key` is ``section.field`` as `--set` takes it."""

    key: str
    value: Any
    meaning: str


def describe(config: Config | None = None) -> list[Setting]:
    """All settings in the order of config.py, with the values of `config` (default: the defaults)."""
    return [setting for _, _, settings in _sections(config or Config()) for setting in settings]


def to_toml(config: Config) -> str:
    """A complete config file: every setting with its meaning behind it."""
    parts = ["# Everything this run was told. `fedfp8 run FILE` takes this file again; `fedfp8 settings` lists all.\n"]
    for section, about, settings in _sections(config):
        parts.append(f"\n# {about}\n[{section}]\n" if section else "")
        lines = [f"{s.key.rpartition('.')[2]} = {_toml(s.value)}" for s in settings]
        parts += [f"{line:<28}  # {s.meaning}\n" for line, s in zip(lines, settings, strict=True)]
    return "".join(parts)


def _toml(value: str | bool | int | float) -> str:
    """JSON's strings are TOML's but for DEL; numbers are Python's own."""
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _sections(config: Config) -> Iterator[tuple[str, str, list[Setting]]]:
    """Name, first sentence and settings of the top level (no name) and of every section."""
    names = {f.name: getattr(config, f.name) for f in fields(config)}
    yield "", "", _settings("", config, {k: v for k, v in names.items() if not is_dataclass(v)})
    for name, part in names.items():
        if is_dataclass(part):
            about = (inspect.getdoc(type(part)) or "").partition("\n")[0]
            yield name, about, _settings(f"{name}.", part, {f.name: getattr(part, f.name) for f in fields(part)})


def _settings(prefix: str, part: Any, values: dict[str, Any]) -> list[Setting]:
    meanings = _meanings(type(part).__name__)
    return [Setting(f"{prefix}{name}", value, meanings.get(name, "")) for name, value in values.items()]


def _meanings(name: str) -> dict[str, str]:
    """The comments beside the fields of a class of config.py."""
    text = inspect.getsource(getattr(source, name))
    return {match[1]: match[2] for line in text.splitlines() if (match := FIELD.match(line))}
