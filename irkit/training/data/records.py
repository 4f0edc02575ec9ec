"""Sequences of records: of the lines of a file, of a table, and of streams without an end."""

from __future__ import annotations

import json
import mmap
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from irkit.bars import bar
from irkit.data.files import TABLES, decode, read_lines
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.training.data.caching import cached, file_key, hash_of
from irkit.training.data.formats import Row, detect, parse
from irkit.training.data.record import Record

__all__ = ["LineReader", "Lines", "Records", "Some", "Stream", "Table", "parsed", "query_keys"]

Array = np.ndarray[Any, Any]
T = TypeVar("T")

_JSON = (".jsonl", ".json", ".ndjson")
_HEADERS = {"query", "anchor", "qid", "query_id", "query-id"}


@dataclass(frozen=True)
class LineReader:
    """Makes records of lines of one format.

    Attributes:
        format: Name of the format.
        ids: Whether strings without a name are ids.
        is_json: Whether lines are JSON rather than columns.
    """

    format: str
    ids: bool
    is_json: bool

    @classmethod
    def of(cls, name: str, lines: list[bytes], format: str = "auto", ids: bool = False) -> LineReader:
        """What reads a file of that name that starts with these two lines."""
        suffix, first = Path(name.removesuffix(".gz")).suffix, lines[0]
        if suffix in TABLES:
            raise BadValueError(
                f"{name}: a table of {suffix}; put it into a folder and name that as hf:FOLDER"
            )
        is_json = suffix in _JSON or (suffix not in (".tsv", ".txt") and first[:1] in (b"{", b"["))
        if format == "auto":
            header = cls(format, ids, is_json).is_header(first)
            format = detect(_row(lines[-1] if header else first, is_json, name))
        return cls(format, ids, is_json)

    def is_header(self, line: bytes) -> bool:
        """Whether the first line of a file names columns."""
        return not self.is_json and line.split(b"\t")[0].decode(errors="replace").lower() in _HEADERS

    def __call__(self, line: bytes, where: str) -> Record:
        """The record of a line."""
        return parsed(_row(line, self.is_json, where), self.format, self.ids, where)


def _row(line: bytes, is_json: bool, where: str) -> Row:
    text = decode(line, where)
    if not is_json:
        return text.split("\t")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadValueError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(row, dict | list):
        raise BadValueError(f"{where}: expected an object or a list, got {text[:60]!r}")
    return row


def parsed(row: Row, format: str, ids: bool, where: str) -> Record:
    """`parse` whose errors say where.

    Raises:
        BadValueError: The row is not in the format.
    """
    try:
        return parse(row, format, ids)
    except (BadValueError, BadTypeError) as error:
        raise BadValueError(f"{where}: {error}") from error


class Records(Protocol):
    """Records that are found by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Record: ...


class Stream(Generic[T]):
    """Records read front to back, over and over: position ``i`` is the ``i``-th of an endless sequence.

    The last ``2 * block`` that were read can be had; for one before them reading starts again.

    Args:
        name: Of the source, for messages.
        read: Starts reading.
        once: Whether it can be read only once, as standard input.
        block: How many neighbours are shuffled with each other.
    """

    def __init__(
        self, name: str, read: Callable[[], Iterator[T]], once: bool = False, block: int = 10_000
    ) -> None:
        self.name, self.read, self.once, self.block = name, read, once, block
        self._restart()

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream, (self.name, self.read, self.once, self.block)

    def _restart(self) -> None:
        self._next, self._window = 0, dict[int, T]()
        self._records: Iterator[T] | None = None

    def __getitem__(self, position: int) -> T:
        if position < self._next and position not in self._window:
            self._restart()
        while self._next <= position:
            self._window[self._next] = self._advance()
            self._window.pop(self._next - 2 * self.block, None)
            self._next += 1
        return self._window[position]

    def _advance(self) -> T:
        record = next(self._records, None) if self._records else None
        if record is None and not (self.once and self._records):  # the first time, or at the end
            self._records = self.read()
            record = next(self._records, None)
        if record is None:
            raise StorageError(
                f"reading {self.name}: it ended after {self._next} examples and cannot be read again; train "
                "for fewer steps (max_steps) or save it to a file"
            )
        return record


class Table:
    """Records of a dataset of the library datasets, whose rows are found by number."""

    def __init__(self, name: str, rows: Any, format: str = "auto", ids: bool = False) -> None:
        if not len(rows):
            raise BadValueError(f"{name}: it has no rows")
        self.rows, self._name, self._ids = rows, name, ids
        self._format = detect(rows[0]) if format == "auto" else format

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        return parsed(dict(self.rows[index]), self._format, self._ids, f"{self._name}: row {index + 1}")

    def query_keys(self) -> Array:
        """``(n,)`` int64, equal where the queries are."""
        key = ("table", self.rows._fingerprint, self._format, self._ids)
        folder = cached(key, lambda aside: np.save(aside / "keys.npy", _read_keys(self)))
        keys: Array = np.load(folder / "keys.npy", mmap_mode="r")
        return keys


class Lines:
    """Records of the lines of a file, whose places are found once and kept in a cache.

    Raises:
        BadValueError: A line is malformed; the message names file and line.
    """

    def __init__(self, name: str, format: str = "auto", ids: bool = False) -> None:
        self._given = (name, format, ids)
        first = [line for _, line in islice(read_lines(name), 2)]
        if not first:
            raise BadValueError(f"{name}: it has no examples")
        self._reader = LineReader.of(name, first, format, ids)
        folder = cached(("lines", file_key(name), self._reader), self._build)
        packed = folder / "lines"
        self._path = packed if packed.is_file() else Path(name)
        self._starts = np.load(folder / "starts.npy", mmap_mode="r")
        self._keys: Array = np.load(folder / "keys.npy", mmap_mode="r")
        if not len(self):
            raise BadValueError(f"{name}: it has no examples")
        with self._path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def __reduce__(self) -> tuple[Any, ...]:
        return Lines, self._given  # a worker opens the file itself

    def __len__(self) -> int:
        return max(0, len(self._starts) - 1)

    def __getitem__(self, index: int) -> Record:
        index = range(len(self))[index]  # from the end if negative, and an error if there is none
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        line = self._map[start:end].split(b"\n")[0]
        return self._reader(line.rstrip(b"\r"), f"{self._given[0]}: example {index + 1}")

    def query_keys(self) -> Array:
        """``(n,)`` int64, equal where the queries are."""
        return self._keys

    def _build(self, aside: Path) -> None:
        name = self._given[0]
        path = Path(name)
        if name.endswith(".gz"):
            path = aside / "lines"
            with path.open("wb") as target:
                target.writelines(line + b"\n" for _, line in read_lines(name))
        starts, keys, place = array("q"), array("q"), 0
        with path.open("rb") as stream, bar(f"reading {name}", "bytes", path.stat().st_size) as report:
            for number, line in enumerate(stream, 1):
                report(len(line))
                text = line.removeprefix(BOM_UTF8)
                if text.strip() and not (number == 1 and self._reader.is_header(text)):
                    record = self._reader(text.rstrip(b"\r\n"), f"{name}:{number}")
                    starts.append(place + len(line) - len(text))
                    keys.append(_query_key(record))
                place += len(line)
        np.save(aside / "starts.npy", np.asarray([*starts, place] if starts else [], np.int64))
        np.save(aside / "keys.npy", np.asarray(keys, np.int64))


class Some:
    """Some of the records of a source, in their order.

    Args:
        records: All of them.
        rows: Which, ``(n,)`` int64.
    """

    def __init__(self, records: Records, rows: Array) -> None:
        self.records, self.rows = records, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        return self.records[int(self.rows[index])]

    def query_keys(self) -> Array:
        """``(n,)`` int64, equal where the queries are."""
        keys: Array = query_keys(self.records)[self.rows]
        return keys


def query_keys(records: Records) -> Array:
    """``(n,)`` int64, equal where the queries of records are."""
    if isinstance(records, Lines | Some | Table):  # which know them
        return records.query_keys()
    return _read_keys(records)


def _read_keys(records: Records) -> Array:
    return np.fromiter((_query_key(records[i]) for i in range(len(records))), np.int64, len(records))


def _query_key(record: Record) -> int:
    return hash_of(record.query_id or record.query or "")
