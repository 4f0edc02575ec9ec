"""The files of a store: the manifest and its checks, mapped arrays, and writes that reach the disk."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from irkit.errors import CorruptError, StorageError
from irkit.utils.atomic import explained

Array = np.ndarray[Any, Any]

DATA_FILE = re.compile(r"[a-z_]+\.g(\d{1,15})\.[a-z]+")  # values.g3.bin: the array values.bin, generation 3
SHARD = re.compile(r"shard-\d+-\d+")  # shard-2-000: a directory, see irkit.shards
DTYPES = frozenset(np.dtype(letter).newbyteorder("<").str for letter in "?bBhHiIqQefd")
"""Dtypes of arrays."""
_REMEDY = "restore the directory from a copy or rebuild the index"
_FORMAT = 1
_KIND = "irkit index"
_DEEPEST = 50  # nested values: copying and writing them is recursive
_MOST = 1 << 48  # largest number of rows, bytes, and numbers per row
_BLOCK_BYTES = 1 << 24
_SPARE = 1024  # elements of room after an array that grows
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_Count = Annotated[int, Field(strict=True, ge=0, le=_MOST)]


def corrupt(what: object, problem: str) -> CorruptError:
    """Return the error of an index, or of ``"file PATH"`` in it, whose content irkit did not write."""
    return CorruptError(f"index {what}: {problem}; {_REMEDY}")


class _Pages(mmap.mmap):
    """Mapped pages.

    Attributes:
        file: Device and inode of the file, which no other file gets while it is mapped.
    """

    file: tuple[int, int]


@dataclass(frozen=True)
class Entry:
    """The entry of an array in the manifest: ``rows`` of ``shape`` and ``dtype``, stored in ``file``."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    file: str
    dtype: str
    shape: Annotated[tuple[_Count, ...], Field(max_length=8)]
    rows: _Count
    crc32: _Count

    @property
    def nbytes(self) -> int:
        """Bytes of the file that belong to the array; bytes after them are not committed."""
        return self.rows * math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def map(self, directory: Path) -> Array:
        """Map the array ``(rows, *shape)`` into memory.

        Raises:
            CorruptError: The file is missing or too short.
        """
        path = directory / self.file
        with explained(f"reading {path}"):
            try:
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe would wait for its writer
                descriptor = os.open(path, flags)
            except FileNotFoundError:
                raise corrupt(f"file {path}", "it is missing") from None
            try:
                status = os.fstat(descriptor)
                size = status.st_size
                if size < self.nbytes:
                    raise corrupt(f"file {path}", f"it has {size} bytes, expected {self.nbytes}")
                if not self.nbytes:
                    return np.empty((self.rows, *self.shape), self.dtype)
                # private and writable, because torch warns of arrays that are read-only; nobody writes to
                # them, and NORESERVE keeps the kernel from reserving memory for that
                pages = _Pages(
                    descriptor,
                    self.nbytes,
                    flags=mmap.MAP_PRIVATE | _NORESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
                pages.file = status.st_dev, status.st_ino
            finally:
                os.close(descriptor)
        return np.frombuffer(pages, self.dtype).reshape(self.rows, *self.shape)


@dataclass
class Manifest:
    """One committed state: the arrays by name, free values, and the number of the newest file."""

    arrays: dict[str, Entry] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    generation: _Count = 0

    def serialise(self) -> bytes:
        """Return JSON that carries its own checksum, with a line for each array and each value of ``meta``.

        Indentation takes Python's slow encoder, which would be a third of the time of a small change.
        """
        arrays = {name: vars(entry) for name, entry in self.arrays.items()}
        body: dict[str, Any] = {"kind": _KIND, "format": _FORMAT, "generation": self.generation}
        body |= {"arrays": arrays, "meta": self.meta}
        body["checksum"] = zlib.crc32(_canonical(body))
        lines = (
            f"{json.dumps(key)}: {_lines(value) if key in ('arrays', 'meta') else json.dumps(value)}"
            for key, value in sorted(body.items())
        )
        return ("{\n" + ",\n".join(lines) + "\n}").encode()


def read_manifest(data: bytes, path: Path) -> Manifest:
    """Parse what ``serialise`` made; ``path`` is for messages.

    Raises:
        StorageError: The file belongs to something else.
        CorruptError: It was altered, or is of an unknown format.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise corrupt(f"file {path}", f"not valid JSON ({error})") from None
    if not isinstance(body, dict) or (body.get("kind") != _KIND and "checksum" not in body):
        raise StorageError(
            f"{path}: not the manifest of an index; expected a directory an index was built in"
        )
    if _depth(body) > _DEEPEST:
        raise corrupt(f"file {path}", "lists or dictionaries too deep in each other")
    if body.get("format") != _FORMAT:
        raise CorruptError(
            f"index file {path}: format {body.get('format')!r}, expected {_FORMAT}; "
            f"open it with the version of irkit that wrote it, or {_REMEDY}"
        )
    if body.pop("checksum", None) != zlib.crc32(_canonical(body)):
        raise corrupt(f"file {path}", "its checksum differs: it was altered")
    return _manifest(body, path)


def _manifest(body: Mapping[str, Any], path: Path) -> Manifest:
    """Make a manifest from JSON values, after a check of their types."""
    try:
        manifest = _MANIFEST.validate_python({name: body[name] for name in ("arrays", "meta", "generation")})
    except (KeyError, ValidationError) as error:
        problem = " ".join(str(error).split())
        raise corrupt(f"file {path}", f"not of format {_FORMAT} ({problem:.200})") from None
    for name, entry in manifest.arrays.items():
        if entry.dtype not in DTYPES or entry.nbytes > _MOST:
            raise corrupt(f"file {path}", f"{name!r:.60} is no array ({entry!r:.200})")
    files = [entry.file for entry in manifest.arrays.values()]
    names = [match for match in map(DATA_FILE.fullmatch, files) if match]
    if len(set(files)) < len(files) or len(names) < len(files):
        raise corrupt(f"file {path}", "it names files that are not of an index")
    newest = max((int(name[1]) for name in names), default=0)
    if newest > manifest.generation:  # the next change would write to a file that is there
        raise corrupt(f"file {path}", f"its generation is {manifest.generation}, it names one of {newest}")
    return manifest


_MANIFEST = TypeAdapter(Manifest)


def _depth(value: Any) -> int:
    """Return how deep lists and dictionaries are nested."""
    depth, level = 0, [value]
    while level:
        depth += 1
        items = [item for item in level if isinstance(item, dict | list)]
        level = [part for item in items for part in (item.values() if isinstance(item, dict) else item)]
    return depth


def peek(path: Path) -> Manifest | None:
    """Return the manifest in a file, or None without a whole one; raise an OSError if reading fails."""
    try:
        return read_manifest(path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError, StorageError):
        return None


def checksum(array: Array) -> int:
    """Return the CRC-32 of the bytes of an array, read in blocks; a mapped one does not stay in memory."""
    content, value = array.reshape(-1).view(np.uint8), 0
    for start in range(0, len(content), _BLOCK_BYTES):
        value = zlib.crc32(content[start : start + _BLOCK_BYTES].data, value)
        release(array)
    return value


def release(array: Array) -> None:
    """Release mapped pages: they stay in the kernel's cache, but leave the memory of this process."""
    pages = _pages(array)
    if pages is not None:
        pages.madvise(mmap.MADV_DONTNEED)


def mapped_file(array: Array) -> tuple[int, int] | None:
    """Return device and inode of the file of a mapped array; None if the array is not mapped."""
    pages = _pages(array)
    return pages.file if pages is not None else None


def is_cut(array: Array) -> bool:
    """Return whether a mapped array's file was truncated later; reading the array would end the process."""
    pages = _pages(array)
    return pages is not None and pages.size() < len(pages)


def _pages(array: Array) -> _Pages | None:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return base if isinstance(base, _Pages) else None


def lengthen(before: Array, new: Array) -> Array:
    """Return an array with ``new`` appended; spare room at its end lets most calls copy only ``new``.

    Args:
        before: Empty, or what this function has returned. Its content stays as it is.
        new: Elements to add. Two calls with the same ``before`` must add equal elements, or one of the
            results must not be used any more.
    """
    count, total = len(before), len(before) + len(new)
    room = before.base if isinstance(before.base, np.ndarray) else before
    if len(room) < total:
        room = np.empty((total + total // 8 + _SPARE, *before.shape[1:]), before.dtype)
        room[:count] = before
    room[count:total] = new
    return room[:total]


def write_at(path: Path, position: int, content: memoryview | bytes) -> None:
    """Write ``content`` at ``position`` and end the file there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(content)
        while len(view):
            written = os.pwrite(descriptor, view, position)
            view, position = view[written:], position + written
        os.ftruncate(descriptor, position)
    finally:
        os.close(descriptor)


def allocate(path: Path, begin: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Map zeros at a position of an existing file, to be written to; a full disk fails here.

    Without allocated blocks, a full disk would fail when a page is written: by a signal that ends the
    process.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not size:
        return np.empty(shape, dtype)
    with path.open("r+b") as stream:
        os.posix_fallocate(stream.fileno(), begin, size)
    return np.memmap(path, dtype, "r+", begin, shape)


def _lines(values: Mapping[str, Any]) -> str:
    """Return JSON with a line for each value."""
    lines = (f"\n {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in values.items())
    return "{" + ",".join(sorted(lines)) + "\n}"


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


_BETWEEN = "__"  # stands in no name of a part, and in no name of an array
_REMOVED = ("removed.bin", "removed_documents.bin")
_SHARED = (*_REMOVED, "sequence.bin")  # by all parts and the documents


def part_name(part: str, name: str) -> str:
    """Return the name in the store of an array of one part of an index with several.

    Examples:
        >>> part_name("dense", "values.bin"), part_name("dense", "removed.bin")
        ('dense__values.bin', 'removed.bin')
    """
    return name if name in _SHARED else f"{part}{_BETWEEN}{name}"


def part_entries(entries: Mapping[str, Entry], part: str) -> dict[str, Entry]:
    """Return the arrays of one part of a manifest with several indexes, by their names in the part."""
    start = part_name(part, "")
    own = {key.removeprefix(start): entry for key, entry in entries.items() if key.startswith(start)}
    return own | {key: entry for key, entry in entries.items() if key in _REMOVED}
