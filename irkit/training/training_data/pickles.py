"""Pickled scores of documents by query, read without running anything that is in the file."""

from __future__ import annotations

import gzip
import pickle
import zlib
from pathlib import Path
from typing import Any, Never

from irkit.errors import BadValueError, StorageError


class _PlainUnpickler(pickle.Unpickler):
    """Unpickle numbers, strings and containers; refuse every name of a class or a function."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only numbers and strings are read")

    def persistent_load(self, pid: Any) -> Never:
        raise pickle.UnpicklingError("it refers to objects outside of the file")


def read_pickle(path: str | Path) -> dict[str, dict[str, float]]:
    """Read ``{query id: {document id: score}}``, the form of SPLADE's hard negatives, also with ``.gz``.

    Pickle files can hold programs. A file that holds anything but dicts, strings and numbers is an error
    before any of it is made.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: The file holds something else.
    """
    name = str(path)
    try:
        with gzip.open(name) if name.endswith(".gz") else Path(name).open("rb") as stream:
            return _checked(_PlainUnpickler(stream).load())
    except (OSError, EOFError, zlib.error) as error:
        raise StorageError(f"reading {name}: {getattr(error, 'strerror', None) or error}") from error
    except Exception as error:  # pickle raises nearly anything when the bytes make no sense
        raise BadValueError(
            f"reading {name}: expected a pickle of {{query id: {{document id: score}}}} only; {error}"
        ) from error


def _checked(content: Any) -> dict[str, dict[str, float]]:
    if type(content) is not dict:
        raise BadValueError(f"got {type(content).__name__}")
    result: dict[str, dict[str, float]] = {}
    for query, documents in content.items():
        if type(query) not in (int, str) or type(documents) is not dict:
            raise BadValueError(f"got {query!r:.40}: {type(documents).__name__}")
        scores = result[str(query)] = {}
        for document, score in documents.items():
            if type(document) not in (int, str) or type(score) not in (int, float):
                raise BadValueError(f"query {query!r:.40}: got {document!r:.40}: {type(score).__name__}")
            scores[str(document)] = float(score)
    return result
