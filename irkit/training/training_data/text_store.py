"""Texts by id, read from a file when they are needed: a collection is never held in memory."""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from irkit.data import Source, read_documents, read_queries
from irkit.data.catalogues import is_catalogued, load_hf
from irkit.data.document import Document, Query
from irkit.errors import BadValueError, StorageError
from irkit.training.training_data.data_config import Columns
from irkit.utils.cache import cached, hash_of
from irkit.utils.progress import progress_bar
from irkit.utils.uris import source_key

Array = np.ndarray[Any, Any]


class TextStore:
    """Look up the texts of a collection by id.

    The first use reads the collection once and writes its texts to a file in the cache, with a sorted table
    of 64-bit hashes of the ids and the position of each text. A lookup is a binary search in the table and
    a read from the memory-mapped file. The file has the id before each text, so that two ids may share a
    hash.

    Args:
        source: See `irkit.data`.
        side: Whether to read documents, whose texts begin with their titles, or queries.
        columns: Columns or keys with other than usual names.

    Raises:
        StorageError: The source cannot be read, or the cache cannot be written.
        BadValueError: A record is malformed, or two records have the same id.

    Examples:
        >>> corpus = TextStore("scifact")  # doctest: +SKIP
        >>> corpus["4983"][:60]  # doctest: +SKIP
        'Microstructural development of human newborn cerebral white'
    """

    # Why not a table of the library datasets: it finds rows by number only, so the table of hashes would be
    # the same, and one row of its memory-mapped table takes 26 us, where a whole lookup here takes 7 us.

    def __init__(
        self,
        source: str,
        side: Literal["documents", "queries"] = "documents",
        columns: Columns | None = None,
    ) -> None:
        self.source, self.side, self.columns = source, side, columns
        if source == "-":
            raise StorageError("reading the texts of -: expected a file")
        names = {} if columns is None else columns.model_dump(exclude_none=True)
        items: Source[Any] = (read_documents if side == "documents" else read_queries)(source, **names)
        version = load_hf(source)._fingerprint if source.startswith("hf:") else ""
        key = (source, version) if is_catalogued(source) else source_key(items.name)
        folder = cached(("texts", side, key, *names.items()), lambda aside: _build(aside, items))
        self._hashes, self._starts, self._sizes = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("hashes", "starts", "sizes")
        )
        self._sorted = memoryview(self._hashes)
        with (folder / "texts").open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def __reduce__(self) -> tuple[Any, ...]:
        return TextStore, (self.source, self.side, self.columns)  # a worker process maps the files itself

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def __getitem__(self, name: str) -> str:
        row = self._find(name)
        if row is None:
            raise KeyError(name)
        start = int(self._starts[row])
        return self._map[start : start + int(self._sizes[row])].decode()

    def sizes(self, names: Sequence[str]) -> Array:
        """Return ``(n,)`` int64, the bytes of each text, found by hash alone; 0 for missing ids."""
        if not len(self):
            return np.zeros(len(names), np.int64)
        hashes = np.fromiter(map(hash_of, names), np.int64, len(names))
        rows = np.minimum(np.searchsorted(self._hashes, hashes), len(self) - 1)
        return np.where(self._hashes[rows] == hashes, self._sizes[rows], 0)

    def _find(self, name: str) -> int | None:
        """Return the row of an id in the sorted tables; None if no text has the id."""
        hashed, mark = hash_of(name), _mark(name)
        row = bisect_left(self._sorted, hashed)
        while row < len(self) and self._sorted[row] == hashed:
            start = int(self._starts[row])
            if self._map[start - len(mark) : start] == mark:
                return row
            row += 1
        return None


Texts: TypeAlias = Mapping[str, str] | TextStore
"""Texts by id."""


def _mark(name: str) -> bytes:
    """Return the bytes that stand before the text of an id: the id between two null characters."""
    return b"\0" + name.encode(errors="surrogatepass") + b"\0"


def _build(aside: Path, items: Source[Document] | Source[Query]) -> None:
    """Write the texts, and the tables sorted by the hashes of the ids."""
    hashes, starts, sizes, position = array("q"), array("q"), array("q"), 0
    with (aside / "texts").open("wb") as stream, progress_bar(f"reading {items.name}", "texts") as report:
        for item in items:
            mark = _mark(item.id)
            text = (item.full_text if isinstance(item, Document) else item.text).encode()
            stream.write(mark + text)
            hashes.append(hash_of(item.id))
            starts.append(position + len(mark))
            sizes.append(len(text))
            position = starts[-1] + len(text)
            report(1)
        stream.write(b"\0")  # an empty file cannot be mapped
    order = np.argsort(np.asarray(hashes, np.int64), kind="stable")
    tables = {
        name: np.asarray(values, np.int64)[order]
        for name, values in (("hashes", hashes), ("starts", starts), ("sizes", sizes))
    }
    _refuse_repeated_ids(aside / "texts", items.name, tables["hashes"], tables["starts"])
    for name, table in tables.items():
        np.save(aside / f"{name}.npy", table)


def _refuse_repeated_ids(path: Path, name: str, hashes: Array, starts: Array) -> None:
    """Check that ids with the same hash are different.

    Raises:
        BadValueError: An id comes more than once.
    """
    repeated = np.flatnonzero(hashes[1:] == hashes[:-1]).tolist()
    data = path.read_bytes() if repeated else b""
    for row in repeated:
        first, second = (
            data[data.rfind(b"\0", 0, start - 1) + 1 : start - 1] for start in starts[row : row + 2].tolist()
        )
        if first == second:
            raise BadValueError(f"{name}: id {first.decode()!r} comes more than once; ids must be unique")
