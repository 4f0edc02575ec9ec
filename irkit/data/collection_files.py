"""Read records and judgments from files: JSON lines, columns, plain lines or TREC markup, also compressed."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from irkit.arguments import brief, check_path
from irkit.data.document import Qrels
from irkit.data.markup import LONGEST, check_length, is_markup, read_markup
from irkit.data.table_files import Fields, Header, read_csv, read_parquet
from irkit.data.vector_files import READABLE, read_vectors
from irkit.errors import BadTypeError, BadValueError, IrkitError, StorageError
from irkit.utils.uris import is_uri, local_copy, open_uri, without_query

TABLES = (".csv", ".parquet", ".arrow")
"""Extensions that the library datasets reads, from folders."""
_FORMATS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl"} | {
    f".{name}": name for name in ("csv", "tsv", "txt", "parquet")
}


def source_name(source: str | Path) -> str:
    """Check the name of a file or of another source, and return it as a string.

    Raises:
        BadTypeError: ``source`` is neither a string nor a path.
        BadValueError: ``source`` is empty.
    """
    if not isinstance(source, str | Path):
        raise BadTypeError(f"got {brief(source)} as a file, expected a path or the name of a source")
    name = str(source)
    if not name:
        raise BadValueError("got an empty name of a file; expected a path or the name of a source")
    check_path("reading", name)
    return name


def read_lines(path: str, longest: int = LONGEST) -> Iterator[tuple[int, bytes]]:
    r"""Yield the lines of a file that are not blank; ``.gz`` is decompressed, ``-`` is standard input.

    Only ``\n`` and ``\r\n`` end a line, because texts may contain the other line separators of Unicode.

    Returns:
        Pairs of the line number, from 1 and counting blank lines, and the line without its end.

    Raises:
        StorageError: The file cannot be read, or its compressed stream is damaged.
        BadValueError: A line has more than ``longest`` bytes, by default 256 MB.
    """
    for number, line in _whole_lines(path, longest):
        if line.strip():
            yield number, line.rstrip(b"\r\n")


def _whole_lines(path: str, longest: int) -> Iterator[tuple[int, bytes]]:
    """Yield all lines of a file with their ends, see `read_lines`."""
    number = 0
    try:
        with _open(path) as stream:
            for number, line in enumerate(iter(partial(stream.readline, longest + 1), b""), 1):
                check_length(f"{path}:{number}", len(line), longest)
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except (OSError, EOFError, zlib.error) as error:
        where = f", after line {number}" if number else ""
        if isinstance(error, IrkitError):  # of a store, with its own message
            raise
        reason = getattr(error, "strerror", None) or error  # str(error) would repeat the path
        raise StorageError(f"reading {path}{where}: {reason}") from error


def read_records(path: str, fields: Fields, longest: int = LONGEST) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a file record by record.

    The extension decides the format: ``.jsonl`` (``.json``, ``.ndjson``), ``.csv``, ``.tsv`` or ``.txt``,
    each also with ``.gz``, or ``.parquet``. Without an extension, as for standard input, the first line
    decides. A file whose first line is markup is read by `irkit.data.markup`, whatever its name, except a
    table. ``.npy`` and ``.safetensors`` hold vectors, see `irkit.data.vector_files`.

    Returns:
        Pairs of line number (of parquet, row number) and record. The record of a plain line has the line
        number as ``id``.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: The format is unknown, or a line is not in it; the message names file and line.
    """
    name = without_query(path).lower()
    if name.endswith(READABLE):  # mapped into memory
        yield from read_vectors(str(local_copy(path)) if is_uri(path) else path)
        return
    if name.endswith(".parquet"):
        yield from read_parquet(path, fields)
        return
    if name.removesuffix(".gz").endswith(".csv"):
        whole = _whole_lines(path, longest)
        yield from read_csv(path, ((n, decode(line, f"{path}:{n}")) for n, line in whole), fields, longest)
        return
    lines = read_lines(path, longest)
    first = next(lines, None)
    lines = itertools.chain([first] if first else [], lines)
    if first and is_markup(first[1]):  # names of topic files often end in a number
        yield from read_markup(path, lines, longest)
        return
    kind = _format(path) or (_guess(path, first[1], fields) if first else "txt")
    decoded = ((number, decode(line, f"{path}:{number}")) for number, line in lines)
    if kind == "jsonl":
        for number, line in decoded:
            yield number, parse_json(line, f"{path}:{number}")
    elif kind == "tsv":
        yield from _read_tsv(path, decoded, fields)
    else:
        for number, line in decoded:
            yield number, {"id": str(number), "text": line}


def parse_json(line: str | bytes, where: str) -> dict[str, Any]:
    """Parse one line of JSON.

    Raises:
        BadValueError: The line is not a JSON object; the message starts with ``where``.
    """
    text = decode(line, where) if isinstance(line, bytes) else line
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadValueError(f"{where}: not valid JSON ({error}); expected one object a line") from error
    if not isinstance(record, dict):
        raise BadValueError(f"{where}: expected one JSON object a line, got {text[:60]!r}")
    return record


def decode(line: bytes, where: str) -> str:
    """Decode UTF-8.

    Raises:
        BadValueError: The line is not UTF-8; the message starts with ``where``.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadValueError(
            f"{where}: byte {error.start + 1} of the line ({line[error.start]:#04x}) is not UTF-8; "
            "convert the file, for example with iconv -f latin1 -t utf-8"
        ) from error


def _open(path: str) -> AbstractContextManager[IO[bytes]]:
    if path == "-":
        return nullcontext(sys.stdin.buffer)
    is_packed = without_query(path).lower().endswith(".gz")
    if is_uri(path):
        stream = open_uri(path)
        return cast(IO[bytes], gzip.GzipFile(fileobj=stream)) if is_packed else stream
    if is_packed:
        return cast(IO[bytes], gzip.open(path))
    return Path(path).open("rb")


def _format(path: str) -> str | None:
    """Return the format of an extension; None if the file has no extension."""
    name = without_query(path).lower()
    suffix = "" if path == "-" else Path(name.removesuffix(".gz")).suffix
    if suffix and suffix not in _FORMATS:
        advice = ", or hf:FOLDER for a folder of such files" if suffix in TABLES else ""
        raise BadValueError(
            f"{path}: unknown extension {suffix!r}; expected .jsonl, .csv, .tsv or .txt (or with .gz), or "
            f".parquet{advice}"
        )
    if suffix == ".parquet" and name.endswith(".gz"):
        raise BadValueError(f"{path}: a parquet file is compressed inside; decompress it with gunzip first")
    return _FORMATS.get(suffix)


def _guess(path: str, first: bytes, fields: Fields) -> str:
    """Return the format that the first line of a file without an extension has."""
    names = {name.strip(b' "').lower().decode(errors="replace") for name in first.split(b",")}
    if not names.isdisjoint(fields.ids) and not names.isdisjoint(fields.texts):
        raise BadValueError(f"{path}:1: expected JSON lines, tsv or texts, got csv; give a file named .csv")
    return "jsonl" if first.lstrip().startswith(b"{") else "tsv" if b"\t" in first else "txt"


def _read_tsv(
    path: str, lines: Iterator[tuple[int, str]], fields: Fields
) -> Iterator[tuple[int, dict[str, Any]]]:
    header, expected, row = None, tuple[str, ...](), 0
    for number, line in lines:
        values = line.split("\t")
        if not expected:
            names = {name.strip().lower() for name in values}
            if fields.named or not (names.isdisjoint(fields.ids) or names.isdisjoint(fields.texts)):
                header = Header(f"{path}:{number}", values, fields)
                expected = tuple(header.names)
                continue
            expected = fields.columns.get(len(values), fields.columns[min(fields.columns)])
        if len(values) != len(expected):
            raise BadValueError(
                f"{path}:{number}: expected {len(expected)} tab-separated columns ({', '.join(expected)}), "
                f"got {len(values)}: {line[:60]!r}"
            )
        yield number, header.parse(row, values) if header else dict(zip(expected, values, strict=True))
        row += 1


Judgment = tuple[int, str, str, Any]
"""Line number, query id, document id and grade, which is to be an integer."""

_HEADERS = (b"query-id", b"query_id", b"qid")


def read_qrels_file(path: str) -> Qrels:
    """Read TREC's four columns (query, iteration, document, grade) or BEIR's three (query, document, grade).

    A header line of BEIR is skipped. Columns are separated by tabs or spaces.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: A line is malformed; the message names file and line.
    """
    return collect_qrels(path, _judgments(path))


def collect_qrels(name: str, judgments: Iterable[Judgment]) -> Qrels:
    """Collect judgments by query.

    Raises:
        BadValueError: A grade is not an integer, or a document has two grades for a query.
    """
    qrels: Qrels = {}
    for number, query_id, doc_id, grade in judgments:
        try:
            value = int(grade)
            if isinstance(grade, float) and grade != value:
                raise ValueError("a part of a grade")
        except (ValueError, TypeError, OverflowError) as error:
            raise BadValueError(f"{name}:{number}: expected an integer grade, got {brief(grade)}") from error
        if qrels.setdefault(query_id, {}).setdefault(doc_id, value) != value:
            raise BadValueError(
                f"{name}:{number}: document {doc_id!r} of query {query_id!r} was judged "
                f"{qrels[query_id][doc_id]} before and is {value} here; keep one of the lines"
            )
    return qrels


def _judgments(path: str) -> Iterable[Judgment]:
    width = None
    for number, line in read_lines(path):
        columns = line.split(b"\t") if line.count(b"\t") == 2 else line.split()
        header = width is None and columns[0].lower() in _HEADERS
        width = width or len(columns)
        if len(columns) != width or width not in (3, 4):
            raise BadValueError(
                f"{path}:{number}: expected 4 columns (query 0 document grade) or 3 (query document grade), "
                f"the same on every line; got {len(columns)}: {line[:60].decode(errors='replace')!r}"
            )
        if not header:
            texts = [decode(column, f"{path}:{number}") for column in columns]
            if not (texts[0] and texts[-2]):
                start = line[:60].decode(errors="replace")
                raise BadValueError(f"{path}:{number}: an id is empty: {start!r}")
            yield number, texts[0], texts[-2], texts[-1]
