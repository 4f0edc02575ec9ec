"""All errors that irkit raises on purpose; each is also the built-in exception that it refines.

A message names the operation, the value it got, the value it expected, and a remedy.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


class IrkitError(Exception):
    """Base of all errors of irkit; the command line shows them without a traceback."""


class BadValueError(IrkitError, ValueError):
    """An argument or an input file has a value that the operation cannot use."""


class BadTypeError(IrkitError, TypeError):
    """An argument has a type that the operation cannot use."""


class BadKeyError(BadValueError, KeyError):
    """A key, such as a query of a run, does not exist."""

    __str__ = Exception.__str__  # KeyError would put the message in quotes


class ConfigError(BadValueError):
    """A recipe or configuration file has an unknown key or an impossible value."""


class StorageError(IrkitError, OSError):
    """A file or directory is missing, is in the way, or could not be written."""


class CorruptError(StorageError):
    """Stored data is truncated, altered, or of another format."""


class LockedError(StorageError):
    """Another process is writing to the index."""


class MissingDependencyError(IrkitError, ImportError):
    """An optional package is not installed."""


class TrainingError(IrkitError, RuntimeError):
    """A loss or a gradient is not finite; further training would destroy the model."""


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency.

    Args:
        module: Import name, such as ``"ir_datasets"``.
        extra: Extra of irkit that installs it.
        purpose: Operation that needs it, as the subject of a sentence (``"Reading ir_datasets
            collections"``).

    Returns:
        The imported module.

    Raises:
        MissingDependencyError: The package is not installed; the message has the install command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs the package {module.split('.')[0]!r}. "
            f"Install it with: pip install 'irkit[{extra}]'"
        ) from error


@contextmanager
def reraise_as(kind: type[IrkitError], operation: str, advice: str) -> Iterator[None]:
    """Convert exceptions of other libraries, or of unexpected values in a file, to ``kind``.

    Panics of the tokenizers library are converted too; they are not an Exception, and no module exports
    their class.

    Args:
        kind: Class of the error.
        operation: Start of the message.
        advice: End of the message: a remedy.
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
