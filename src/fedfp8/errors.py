"""Every error fedfp8 raises on purpose. Each message says what was given, what is allowed and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager


class Fedfp8Error(Exception):
    """Base of all errors raised by fedfp8."""


class QuantizationError(Fedfp8Error, ValueError):
    """A tensor, range, step or code that cannot be quantized; names the tensor where one is known."""


class WireFormatError(Fedfp8Error, ValueError):
    """A payload that is not a valid fedfp8 message, or not one for this model or reference."""


class ConfigError(Fedfp8Error, ValueError):
    """Settings that are unknown, out of range or contradict each other."""


class DataError(Fedfp8Error, ValueError):
    """A data set that is missing, damaged or cannot be split as asked."""


class RunError(Fedfp8Error, RuntimeError):
    """A run that cannot start, continue or be resumed."""


class LostReference(Fedfp8Error, RuntimeError):
    """A message is coded given a model that the receiver does not have (any more): it must be sent the whole model."""


class MissingPackage(Fedfp8Error, ImportError):
    """An optional package that is not installed; names the extra that brings it."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """``with extra("plots"): import matplotlib``: an import that fails says which extra of fedfp8 to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f'{error.name} is not installed; it comes with: pip install "fedfp8[{name}]"', name=error.name
        ) from error
