"""Texts by id, read from where they are: a collection is never held in memory."""

from __future__ import annotations

import json
import mmap
from array import array
from bisect import bisect_left
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from irkit.bars import bar
from irkit.data import read_documents, read_queries
from irkit.data.document import Document, Query
from irkit.data.files import decode, parse_json, tsv_columns
from irkit.data.remote import PREFIXES, load_hf
from irkit.data.source import DOCUMENT_FIELDS, QUERY_FIELDS, to_document, to_query
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.training.data.caching import cached, file_key, hash_of

__all__ = ["TextStore", "Texts"]

Array = np.ndarray[Any, Any]
Side = Literal["documents", "queries"]


class TextStore:
    """Texts of a collection by id, by their places in its file, which are found once and kept in a cache.

    Of a compressed file, or of one that is not here, the cache has a copy.

    Args:
        source: See `irkit.data`.
        side: What it is read for; documents have their titles in front.

    Raises:
        StorageError: It cannot be read, or the cache not written.
        BadValueError: A record is malformed, or two have one id.

    Examples:
        >>> corpus = TextStore("scifact")  # doctest: +SKIP
        >>> corpus["4983"][:60]  # doctest: +SKIP
        'Microstructural development of human newborn cerebral white'
    """

    def __init__(self, source: str, side: Side = "documents") -> None:
        self.source, self.side = source, side
        path = Path(source)
        if path.is_dir():
            name = "corpus.jsonl" if side == "documents" else "queries.jsonl"
            path = next((each for each in (path / name, path / f"{name}.gz") if each.is_file()), path)
            source = str(path)
        if path.is_dir() or source == "-":
            raise StorageError(
                f"reading the texts of {source}: expected {name if path.is_dir() else 'a file'}"
            )
        in_place = path.is_file() and path.suffix in (".jsonl", ".tsv")
        remote = source.startswith(PREFIXES)
        version = load_hf(source)._fingerprint if source.startswith("hf:") else ""
        key = ("texts", side, (source, version) if remote else file_key(source))
        self._folder = cached(key, lambda aside: _build(aside, source, side, in_place))
        self._file = source if in_place else str(self._folder / "texts.jsonl")
        self._parse = _Parser(self._file, side)
        self._hashes, self._starts, self._sizes = (
            np.load(self._folder / f"{name}.npy", mmap_mode="r") for name in ("hashes", "starts", "sizes")
        )
        self._sorted = memoryview(self._hashes)
        with Path(self._file).open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if len(self) else b""

    def __reduce__(self) -> tuple[Any, ...]:
        return TextStore, (self.source, self.side)  # a worker maps the files itself

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def __getitem__(self, name: str) -> str:
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        return found.full_text if isinstance(found, Document) else found.text

    def sizes(self, names: Sequence[str]) -> Array:
        """``(n,)`` int64, about how many bytes each text has; 0 of ids that are not there."""
        wanted = np.fromiter(map(hash_of, names), np.int64, len(names))
        rows = np.minimum(np.searchsorted(self._hashes, wanted), max(0, len(self) - 1))
        if not len(self):
            return np.zeros(len(names), np.int64)
        return np.where(self._hashes[rows] == wanted, self._sizes[rows], 0)

    def _find(self, name: str) -> Document | Query | None:
        wanted = hash_of(name)
        row = bisect_left(self._sorted, wanted)
        while row < len(self) and self._sorted[row] == wanted:  # two ids may share a hash
            start = int(self._starts[row])
            found = self._parse(self._map[start : start + int(self._sizes[row])], self._file)
            if found.id == name:
                return found
            row += 1
        return None


Texts: TypeAlias = Mapping[str, str] | TextStore
"""Texts by id."""


class _Parser:
    """Makes an item of a line: an object of JSON, or the columns of a tsv file."""

    def __init__(self, path: str, side: Side) -> None:
        self._fields = DOCUMENT_FIELDS if side == "documents" else QUERY_FIELDS
        self._item: Any = to_document if side == "documents" else to_query
        self._columns, self.has_header = None, False
        if path.endswith(".tsv"):
            with Path(path).open("rb") as stream:
                first = decode(stream.readline().removeprefix(BOM_UTF8).rstrip(b"\r\n"), f"{path}:1")
            self._columns, self.has_header = tsv_columns(first, self._fields)

    def __call__(self, line: bytes, where: str) -> Document | Query:
        try:
            item: Document | Query = self._item(
                self._record(line.removeprefix(BOM_UTF8).rstrip(b"\r\n"), where)
            )
        except (BadValueError, BadTypeError) as error:
            prefix = "" if str(error).startswith(where) else f"{where}: "
            raise BadValueError(f"{prefix}{error}") from error
        return item

    def _record(self, line: bytes, where: str) -> dict[str, Any]:
        if self._columns is None:
            return parse_json(line, where)
        values = decode(line, where).split("\t")
        if len(values) != len(self._columns):
            raise BadValueError(
                f"expected {len(self._columns)} columns ({', '.join(self._columns)}), got {len(values)}"
            )
        return dict(zip(self._columns, values, strict=True))


def _build(aside: Path, source: str, side: Side, in_place: bool) -> None:
    path = Path(source) if in_place else _copy(aside / "texts.jsonl", source, side)
    hashes, starts, sizes, place = array("q"), array("q"), array("i"), 0
    parse = _Parser(str(path), side)
    with path.open("rb") as stream, bar(f"reading {source}", "bytes", path.stat().st_size) as report:
        for number, line in enumerate(stream, 1):
            report(len(line))
            if line.strip() and not (number == 1 and parse.has_header):
                hashes.append(hash_of(parse(line, f"{source}:{number}").id))
                starts.append(place)
                sizes.append(len(line))
            place += len(line)
    found = np.frombuffer(hashes, np.int64) if hashes else np.empty(0, np.int64)
    order = np.argsort(found, kind="stable")
    places = np.asarray(starts, np.int64)
    _refuse_twins(path, found, places, order, parse)
    for name, values in (("hashes", found), ("starts", places), ("sizes", np.asarray(sizes, np.int32))):
        np.save(aside / f"{name}.npy", values[order])


def _refuse_twins(path: Path, hashes: Array, starts: Array, order: Array, parse: _Parser) -> None:
    """Equal hashes need not be equal ids; equal ids are an error."""
    twins = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    with path.open("rb") as stream:
        for place in twins.tolist():
            names = []
            for row in order[place : place + 2].tolist():
                stream.seek(int(starts[row]))
                names.append(parse(stream.readline(), str(path)).id)
            if names[0] == names[1]:
                raise BadValueError(f"{path}: id {names[0]!r} comes more than once; ids must be unique")


def _copy(target: Path, source: str, side: Side) -> Path:
    """Write the texts of a source that cannot be read at any place as lines that can."""
    with target.open("w", encoding="utf-8") as stream:
        for item in read_documents(source) if side == "documents" else read_queries(source):
            text = item.full_text if isinstance(item, Document) else item.text
            stream.write(json.dumps({"_id": item.id, "text": text}, ensure_ascii=False) + "\n")
    return target
