"""Every error irkit raises on purpose: one tree, each also the built-in exception it refines.

A message names the operation, what it got, what it expected and what to do about it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

__all__ = [
    "BadKeyError",
    "BadTypeError",
    "BadValueError",
    "ConfigError",
    "CorruptError",
    "IrkitError",
    "LockedError",
    "MissingDependencyError",
    "StorageError",
    "TrainingError",
    "require",
    "told_as",
]


class IrkitError(Exception):
    """Base of all irkit errors; the command line shows these without a traceback."""


class BadValueError(IrkitError, ValueError):
    """An argument or an input file has a value that the operation cannot use."""


class BadTypeError(IrkitError, TypeError):
    """An argument has a type that the operation cannot use."""


class BadKeyError(BadValueError, KeyError):
    """What is asked for by its key, such as a query of a run, is not there."""

    __str__ = Exception.__str__  # of a KeyError it would be the message in quotes


class ConfigError(BadValueError):
    """A recipe or configuration file has an unknown key or an impossible value."""


class StorageError(IrkitError, OSError):
    """A file or directory is missing, is in the way, or could not be written."""


class CorruptError(StorageError):
    """Stored data is not what was written: truncated, altered, or of another format."""


class LockedError(StorageError):
    """Another process is writing to the index."""


class MissingDependencyError(IrkitError, ImportError):
    """An optional package is not installed."""


class TrainingError(IrkitError, RuntimeError):
    """A loss or a gradient is no longer a number, so that going on would spoil the model."""


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or say which install command brings it.

    Args:
        module: Import name, such as ``"ir_datasets"``.
        extra: Extra of irkit that installs it.
        purpose: What needs it, as the subject of a sentence (``"Reading ir_datasets collections"``).

    Returns:
        The imported module.

    Raises:
        MissingDependencyError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs the package {module.split('.')[0]!r}. "
            f"Install it with: pip install 'irkit[{extra}]'"
        ) from error


@contextmanager
def told_as(kind: type[IrkitError], operation: str, advice: str) -> Iterator[None]:
    """Raise ``kind`` where other libraries, or values of any type in a file, raise errors of their own.

    Panics of the tokenizers library are among them, which are no Exception and whose class has no place to be
    imported from.

    Args:
        kind: Class of the error.
        operation: Start of the message.
        advice: Its end: what to do.
    """
    try:
        yield
    except (IrkitError, Warning):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise kind(f"{operation}: {reason}; {advice}") from error
