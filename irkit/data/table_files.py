"""Read tables, whose columns have names: csv, the header of a tsv file, and parquet."""

from __future__ import annotations

import csv
import datetime
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, NamedTuple

from irkit.arguments import suggest
from irkit.errors import BadValueError, StorageError, require
from irkit.utils.uris import is_uri, open_uri

VECTORS = ("vector", "weights_x100")  # Anserini writes the second key; a factor does not change rankings
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")  # of JSON
_BATCH = 1024  # rows of a parquet file that are read together


class Fields(NamedTuple):
    """The keys and columns that hold the parts of a record.

    Args:
        ids: Keys of the id; the first one present counts.
        texts: Keys of the text; the first one present counts.
        columns: Names of the columns of a tsv file without a header, by the number of columns.
        titles: Key of the title, if there is one.
        metadata: Keys of the metadata; None takes all that are left.
        named: The keys that the caller named. A table must have them.
        joins: Whether the texts of all keys are joined, rather than the first one present taken.
    """

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    columns: Mapping[int, tuple[str, ...]]
    titles: tuple[str, ...] = ("title",)
    metadata: tuple[str, ...] | None = None
    named: tuple[str, ...] = ()
    joins: bool = False


class Header:
    """The columns of a table.

    Args:
        where: File and line, for messages.
        names: Names of the columns. Usual names of a part, such as ``Text``, may have any case.
        fields: Which columns hold which part.

    Raises:
        BadValueError: A name comes twice, or a column that the caller named is missing.
    """

    def __init__(self, where: str, names: Sequence[str], fields: Fields) -> None:
        usual = {*fields.ids, *fields.texts, *fields.titles}
        names = [name.strip() for name in names]
        usual -= {*names}
        self.names = [
            name.lower() if name.lower() in usual and name not in fields.named else name for name in names
        ]
        for name in self.names:
            if self.names.count(name) > 1:
                raise BadValueError(f"{where}: two columns are named {name!r}; expected different names")
        for name in fields.named:
            if name not in self.names:
                raise BadValueError(f"{where}: no column {name!r}; {suggest(name, self.names)}")
        texts = [name for name in fields.texts if name in self.names]
        self.id = next((name for name in fields.ids if name in self.names), None)
        self.parts = {self.id, *fields.titles, *(texts if fields.joins else texts[:1])}
        self._new_id = fields.ids[0]

    def record(self, row: int, values: Iterable[Any]) -> dict[str, Any]:
        """Return the record of a row; without a column of ids, its id is the number of the row."""
        record = dict(zip(self.names, values, strict=True))
        return record if self.id is not None else record | {self._new_id: str(row)}

    def parse(self, row: int, cells: Sequence[str]) -> dict[str, Any]:
        """Return the record of a row of text.

        Id, title and text stay as they are. Other cells become metadata: empty cells are left out; numbers,
        ``true`` and ``false``, written as in JSON, become numbers and booleans.
        """
        record = self.record(row, cells)
        for name in self.names:
            if name not in self.parts and (value := _parse_cell(record.pop(name))) != "":
                record[name] = value
        return record


def _parse_cell(cell: str) -> Any:
    if cell in ("true", "false") or _NUMBER.fullmatch(cell):
        try:
            value = json.loads(cell)
            return value if math.isfinite(value) else cell
        except (ValueError, OverflowError):  # hundreds or thousands of digits
            return cell
    return cell


def read_csv(
    path: str, lines: Iterable[tuple[int, str]], fields: Fields, longest: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read comma-separated values, whose first line names the columns.

    A value in double quotes may contain commas, line breaks and, doubled, quotes.

    Args:
        path: Name of the file, for messages.
        lines: Line numbers and lines with their ends.
        fields: Which columns hold which part.
        longest: Maximum number of characters of a value.

    Returns:
        Pairs of the number of the first line of a row, and a record.

    Raises:
        BadValueError: A row has another number of columns than the header, a quote is not closed, or the
            header lacks a column; the message names file and line.
    """
    rows = csv.reader((line for _, line in lines), strict=True)
    header, start, row = None, 1, 0
    while True:
        try:
            with _longer_values(longest):
                cells = next(rows, None)
        except csv.Error as error:
            raise BadValueError(
                f"{path}:{start}: not valid csv ({error}) in the row that begins here; is there a quote that "
                "is not closed, or not doubled?"
            ) from error
        if cells is None:
            return
        if header is None and cells:
            header = Header(f"{path}:{start}", cells, fields)
            if len(cells) == 1 and re.search("[;\t|]", cells[0]):
                raise BadValueError(
                    f"{path}:{start}: expected columns separated by commas, got {cells[0]!r:.80}"
                )
        elif header is not None and cells and (len(header.names) == 1 or len(cells) > 1 or cells[0].strip()):
            if len(cells) != len(header.names):
                raise BadValueError(
                    f"{path}:{start}: expected {len(header.names)} columns ({', '.join(header.names):.80}), "
                    f"got {len(cells)}: {','.join(cells)!r:.60}"
                )
            yield start, header.parse(row, cells)
            row += 1
        start = rows.line_num + 1


@contextmanager
def _longer_values(longest: int) -> Iterator[None]:
    """Let csv read values longer than 128 kB inside the block; the limit applies to the whole process."""
    with _limit_lock:
        before = csv.field_size_limit(longest)
        try:
            yield
        finally:
            csv.field_size_limit(before)


_limit_lock = threading.Lock()


def _forked() -> None:
    global _limit_lock
    _limit_lock = threading.Lock()  # a thread that only the parent has may hold the old one


os.register_at_fork(after_in_child=_forked)


def read_parquet(path: str, fields: Fields) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a parquet file; only some of its rows are held in memory.

    Numbers, booleans, strings, lists, structs and maps keep their types. Dates and times become strings as in
    ISO 8601, decimals become floats. Null and NaN are left out of metadata. A column ``metadata`` of strings
    holds objects of JSON.

    Returns:
        Pairs of the number of a row, counted from 1, and a record.

    Raises:
        MissingDependencyError: The package pyarrow is not installed.
        StorageError: The file cannot be read.
        BadValueError: The file is not in the format, lacks a column, or has a column of bytes.
    """
    arrow = require("pyarrow", "data", "Reading parquet files")
    parquet = require("pyarrow.parquet", "data", "Reading parquet files")
    try:
        with parquet.ParquetFile(open_uri(path) if is_uri(path) else path) as file:
            header = Header(path, file.schema_arrow.names, fields)
            used = file.schema_arrow.names
            if fields.metadata is not None:
                needed = {*header.parts, *fields.metadata, *VECTORS}
                used = [old for old, new in zip(used, header.names, strict=True) if new in needed]
                header = Header(path, used, fields)
            row = 0
            for batch in file.iter_batches(_BATCH, columns=used):
                columns = [_to_list(arrow, batch.column(name)) for name in used]
                for values in zip(*columns, strict=True):
                    record, row = header.record(row, values), row + 1
                    yield row, _plain_record(f"{path}:{row}", record, header)
    except (StorageError, BadValueError):
        raise
    except OSError as error:
        raise StorageError(f"reading {path}: {error.strerror or error}") from error
    except (ValueError, LookupError, OverflowError, arrow.ArrowException) as error:
        raise BadValueError(f"reading {path}: expected a parquet file that can be read: {error}") from error


def _to_list(arrow: Any, column: Any) -> list[Any]:
    kind = column.type
    if arrow.types.is_timestamp(kind) and kind.unit == "ns":  # more than datetime holds
        column = column.cast(arrow.timestamp("us", kind.tz), safe=False)
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return values


def _plain_record(where: str, record: dict[str, Any], header: Header) -> dict[str, Any]:
    """Return a record with metadata that JSON can hold."""
    plain = {}
    for name, value in record.items():
        if name in header.parts or name in VECTORS:
            plain[name] = value
        elif name == "metadata" and isinstance(value, str):
            plain[name] = _parse_object(where, value)
        elif value is not None and value == value:
            try:
                plain[name] = _to_json(value)
            except TypeError as error:
                raise BadValueError(
                    f"{where}: column {name!r} holds {error}, which metadata cannot hold; name the columns "
                    "to keep: metadata= (--metadata-columns)"
                ) from error
    return plain


def _parse_object(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadValueError(f"{where}: metadata is {text!r:.60}; expected an object of JSON")
    return value


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {name: _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    raise TypeError(type(value).__name__)
