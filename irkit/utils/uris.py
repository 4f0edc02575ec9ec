"""Files in object stores and elsewhere, named by URIs such as ``s3://bucket/corpus.jsonl``.

`fsspec` reads and writes them; each kind of store has a package of its own there, such as s3fs or gcsfs, that
knows where keys and endpoints are configured.
"""

from __future__ import annotations

import io
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from irkit.errors import BadValueError, MissingDependencyError, StorageError, reraise_as
from irkit.utils.cache import cached, file_key

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_ADVICE = "check the address, the connection and the right to read"


def is_uri(name: object) -> bool:
    """Return whether a name is a URI rather than a path.

    Examples:
        >>> is_uri("s3://bucket/corpus.jsonl"), is_uri("corpus.jsonl"), is_uri("hf:scifact")
        (True, False, False)
    """
    return isinstance(name, str) and _URI.match(name) is not None


def without_query(name: str) -> str:
    """Return a path or URI without what follows ``?`` in a URI, so that it ends in the name of the file."""
    return name.partition("?")[0] if is_uri(name) else name


def open_store_of(uri: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URI, and the path in it.

    Raises:
        MissingDependencyError: The package of this kind of store is not installed.
        BadValueError: The kind of store is unknown.
        StorageError: The store cannot be used, for example without keys.
    """
    import fsspec
    from fsspec.registry import known_implementations

    kind = uri.partition("://")[0].lower()
    if kind not in known_implementations and kind not in fsspec.registry:
        raise BadValueError(
            f"{uri}: {kind}:// is no kind of store; expected file, s3, gs, az, http or memory"
        )
    try:
        with reraise_as(StorageError, f"opening {uri}", _ADVICE):
            return fsspec.core.url_to_fs(uri)  # type: ignore[no-any-return]
    except StorageError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        known = known_implementations.get(kind, {"class": kind})
        package = known["class"].split(".")[0]
        package = "aiohttp" if package == "fsspec" else package
        raise MissingDependencyError(
            f"{uri}: {kind}:// needs the package {package!r}. Install it with: pip install {package}"
        ) from error


def describe_file(uri: str) -> dict[str, Any]:
    """Return what the store says of a file: ``size`` (bytes, or None) and others.

    Raises:
        StorageError: The file does not exist, or the store does not answer.
    """
    store, path = open_store_of(uri)
    with reraise_as(StorageError, f"reading {uri}", _ADVICE):
        try:
            description: dict[str, Any] = store.info(path)
        except FileNotFoundError as error:
            raise StorageError(f"reading {uri}: there is no such file") from error
    return description


def is_folder_of_store(uri: str) -> bool:
    """Return whether a URI names a folder; one of HTTP never does."""
    if uri.lower().startswith("http"):
        return False
    store, path = open_store_of(uri)
    with reraise_as(StorageError, f"reading {uri}", _ADVICE):
        return bool(store.isdir(path))


def list_folder(uri: str) -> list[str]:
    """Return the names in a folder, sorted; none if the folder does not exist."""
    store, path = open_store_of(uri)
    with reraise_as(StorageError, f"reading {uri}", _ADVICE):
        try:
            children = store.ls(path, detail=False)
        except FileNotFoundError:
            return []
    return sorted(child.rstrip("/").rpartition("/")[2] for child in children)


def open_uri(uri: str) -> io.BufferedReader:
    """Open a file of a store for reading.

    Raises:
        StorageError: The file does not exist. While reading: the connection fails, or the file ends early.
    """
    size = describe_file(uri).get("size")
    store, path = open_store_of(uri)
    with reraise_as(StorageError, f"reading {uri}", _ADVICE):
        return io.BufferedReader(_Reader(uri, store.open(path, "rb"), size), 1 << 20)


class _Reader(io.RawIOBase):
    """A stream that raises StorageError for every failure, and where the store sends less than it said."""

    def __init__(self, uri: str, stream: Any, size: int | None) -> None:
        self._uri, self._stream, self._size = uri, stream, size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._stream.seekable())

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        return int(self._stream.seek(position, whence))

    def tell(self) -> int:
        return int(self._stream.tell())

    def readinto(self, buffer: Any) -> int:
        with reraise_as(StorageError, f"reading {self._uri}", _ADVICE):
            data = self._stream.read(len(buffer))
        if not data and len(buffer) and self._size is not None and self.tell() < self._size:
            raise StorageError(
                f"reading {self._uri}: it was cut after {self.tell():,} of {self._size:,} bytes; try again"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def local_copy(uri: str) -> Path:
    """Return the path of a copy of a file in the cache, see `irkit.utils.cache.cached`.

    The file is copied again if the store reports a size, time or checksum that differs from the copy.

    Raises:
        StorageError: The file cannot be read, or not be written.
    """
    name = without_query(uri).rpartition("/")[2]

    def build(folder: Path) -> None:
        with open_uri(uri) as stream, (folder / name).open("wb") as copy:
            while block := stream.read(1 << 23):
                copy.write(block)

    return cached(("uri", uri, _marks(uri)), build) / name


def source_key(path: str) -> tuple[Any, ...]:
    """Return a key that changes when a file does, here or in a store; see `irkit.utils.cache.file_key`."""
    return (path, *_marks(path)) if is_uri(path) else file_key(path)


def _marks(uri: str) -> list[tuple[str, str]]:
    """Return what the store reports of a file, but for the time of the last access."""
    known = str | int | float | datetime
    facts = describe_file(uri).items()
    return sorted((key, str(value)) for key, value in facts if isinstance(value, known) and key != "time")
