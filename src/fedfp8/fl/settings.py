"""Checks and conversions shared by all settings: names with suggestions, values with the type of their default."""

import difflib
import math
from typing import Any

from fedfp8.errors import ConfigError

__all__ = ["assign", "choice", "not_negative", "parse_assignment", "positive"]

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def choice(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


def positive(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ConfigError(f"{section}.{name} is {value!r}; it must be a number above 0")


def not_negative(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise ConfigError(f"{section}.{name} is {value!r}; it must be a number of at least 0")


def parse_assignment(text: str) -> tuple[str, str]:
    """``"dq.kappa_up=4"`` -> ("dq.kappa_up", "4")"""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"setting {text!r} is not of the form section.field=value, e.g. dq.kappa_up=4")
    return key.strip(), value.strip()


def assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` under ``section.field`` (or ``field``) of nested dicts, converted to the type that stands there."""
    section, dot, name = key.rpartition(".")
    target = values.get(section) if dot else values
    if not isinstance(target, dict) or name not in target or (not dot and isinstance(target[name], dict)):
        known = [f"{s}.{f}" for s, c in values.items() if isinstance(c, dict) for f in c]
        known += [s for s, c in values.items() if not isinstance(c, dict)]
        near = difflib.get_close_matches(key, known, 3, 0.4) or [k for k in known if k.endswith("." + name)]
        raise ConfigError(
            f"unknown setting {key!r}; "
            + (f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}")
        )
    target[name] = convert(key, value, type(target[name]))


def convert(key: str, value: Any, kind: type) -> Any:
    """`value` (maybe text) as `kind`; says what was given and what is needed otherwise."""
    try:
        if kind is bool:
            if isinstance(value, str) and value.lower() in TRUE + FALSE:
                return value.lower() in TRUE
            if isinstance(value, bool):
                return value
        elif kind is int and not isinstance(value, bool):
            if isinstance(value, int) or (isinstance(value, str) and value.lstrip("+-").isdecimal()):
                return int(value)  # not by way of float: a seed may have more than 53 bits
            if float(value) == int(float(value)):
                return int(float(value))
        elif kind is float and not isinstance(value, bool):
            return float(value)
        elif kind is str and isinstance(value, str):
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    raise ConfigError(f"{key} is {value!r}; it must be {wanted}")
