"""Pickled scores of documents by query, read without running anything that is in the file."""

from __future__ import annotations

import gzip
import pickle
import zlib
from pathlib import Path
from typing import IO, Any, Never

from irkit.errors import BadValueError, StorageError

__all__ = ["read_pickle"]


class _Plain(pickle.Unpickler):
    """Makes numbers, strings and containers: every name of a class or a function is refused."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only numbers and strings are read")

    def persistent_load(self, pid: Any) -> Never:
        raise pickle.UnpicklingError("it refers to objects outside of the file")


def read_pickle(path: str | Path) -> dict[str, dict[str, float]]:
    """Read ``{query id: {document id: score}}``, the form of SPLADE's hard negatives, also with ``.gz``.

    Pickle files can hold programs. Here a file that holds anything but dicts, strings and numbers is an
    error before any of it is made.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: It holds something else.
    """
    name = str(path)
    try:
        with gzip.open(name) if name.endswith(".gz") else Path(name).open("rb") as stream:
            return _checked(_load(stream))
    except (OSError, EOFError, zlib.error) as error:
        raise StorageError(f"reading {name}: {getattr(error, 'strerror', None) or error}") from error
    except (pickle.UnpicklingError, BadValueError, *_DAMAGE) as error:
        raise BadValueError(
            f"reading {name}: expected a pickle of {{query id: {{document id: score}}}} only; {error}"
        ) from error


# what the machine of pickle raises when the bytes make no sense
_DAMAGE = (
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    TypeError,
    ValueError,
)


def _load(stream: IO[bytes] | gzip.GzipFile) -> Any:
    return _Plain(stream).load()


def _checked(found: Any) -> dict[str, dict[str, float]]:
    if type(found) is not dict:
        raise BadValueError(f"got {type(found).__name__}")
    result: dict[str, dict[str, float]] = {}
    for query, documents in found.items():
        if type(query) not in (int, str) or type(documents) is not dict:
            raise BadValueError(f"got {query!r:.40}: {type(documents).__name__}")
        scores = result[str(query)] = {}
        for document, score in documents.items():
            if type(document) not in (int, str) or type(score) not in (int, float):
                raise BadValueError(f"query {query!r:.40}: got {document!r:.40}: {type(score).__name__}")
            scores[str(document)] = float(score)
    return result
