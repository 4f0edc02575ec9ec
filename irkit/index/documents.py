"""Ids, texts and metadata of the documents of an index, kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from irkit.arguments import shown
from irkit.data.document import Document
from irkit.errors import BadTypeError, BadValueError, CorruptError
from irkit.index.base import as_rows, live_rows
from irkit.index.files import REMEDY, Array
from irkit.index.filters import Seen, check_filter, note_values, parse_filter
from irkit.index.state import pinned
from irkit.index.store import Store

__all__ = ["Documents"]

_BLOBS = ("ids.bin", "documents.jsonl", "metadata.jsonl")
_BLOCK_ROWS = 1 << 14
_READ = 1 << 10  # documents, while they are iterated


class Documents:
    """What belongs to the rows of an index, in the same `Store`; a row that the index removes is gone here.

    Examples:
        >>> import tempfile
        >>> with Store.build(tempfile.mkdtemp()) as store:
        ...     documents = Documents(store)
        ...     rows = documents.add([Document("a", "one"), Document("b", "two", metadata={"year": 2020})])
        ...     store.publish()
        >>> documents.find(["b", "c"]).tolist(), documents.filter({"year": {">=": 2000}}).tolist()
        ([1, -1], [False, True])
        >>> documents["b"].text, "c" in documents, [document.id for document in documents]
        ('two', False, ['a', 'b'])
    """

    def __init__(self, store: Store) -> None:
        if not isinstance(store, Store):
            raise BadTypeError(f"Documents: got {shown(store)}; expected a Store")
        self.store = store
        self._known = (-1, np.empty(0, np.uint64), np.empty(0, np.int64))  # epoch, sorted hashes, their rows
        self._mask = lru_cache(maxsize=16)(self._scan_metadata)

    def __len__(self) -> int:
        """Rows ever added, removed ones included."""
        return self.store.rows("hashes.bin")

    def __iter__(self) -> Iterator[Document]:
        """The documents in the order they came in, without those that were removed."""
        with self.store.pinned() as state:
            rows = np.flatnonzero(live_rows(self.store, len(self)))
        for start in range(0, len(rows), _READ):
            with self.store.pinned(state):
                documents = self.fetch(rows[start : start + _READ])
            yield from documents

    def __contains__(self, id: object) -> bool:
        """Whether there is a document of this id."""
        return isinstance(id, str) and bool(self.find([id])[0] >= 0)

    @pinned
    def __getitem__(self, id: str) -> Document:
        """The document of an id.

        Raises:
            BadTypeError: It is no string.
            BadValueError: There is none.
        """
        if not isinstance(id, str):
            raise BadTypeError(
                f"documents: got {shown(id)}, expected the id of one, a string; rows are fetched"
            )
        rows = self.find([id])
        if rows[0] < 0:
            raise BadValueError(f"documents: the index has none of id {id!r}; `in` says whether it has")
        return self.fetch(rows)[0]

    def add(self, documents: Iterable[Document]) -> range:
        """Add documents, all at once: give large collections in chunks.

        Returns:
            Their rows.

        Raises:
            BadTypeError: Something is no document.
            BadValueError: An id comes twice or is there already, or metadata is not JSON; nothing is added.
            StorageError: They could not be stored; nothing is added.
        """
        items = list(documents) if isinstance(documents, Iterable) else [documents]
        for item in items:
            if not isinstance(item, Document):
                raise BadTypeError(f"adding documents: got {shown(item)}; expected a Document")
        with self.store.update():
            ids = [item.id for item in items]
            self._refuse_duplicates(ids)
            columns = (
                [identifier.encode() for identifier in ids],
                [_line(item) for item in items],
                [_json(item.metadata, item.id) if item.metadata else b"" for item in items],
            )
            start = len(self)
            ends = np.empty((len(items), len(columns)), np.int64)
            for number, (name, parts) in enumerate(zip(_BLOBS, columns, strict=True)):
                ends[:, number] = self.store.rows(name) + np.cumsum(
                    [len(part) for part in parts], dtype=np.int64
                )
                self.store.append(name, np.frombuffer(b"".join(parts), np.uint8))
            self.store.append("ends.bin", ends)
            self.store.append("hashes.bin", _hashes(ids))
            return range(start, len(self))

    @pinned
    def find(self, ids: Sequence[str]) -> Array:
        """``(n,)`` int64 rows of documents by id; -1 where there is none, or none any more.

        Raises:
            BadTypeError: The ids are not strings in a list.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise BadTypeError(f"documents: ids are {shown(ids)}; expected strings in a list")
        found = np.full(len(ids), -1, np.int64)
        wanted, (hashes, order) = _hashes(ids), self._hash_index()
        first, last = np.searchsorted(hashes, wanted, "left"), np.searchsorted(hashes, wanted, "right")
        live = live_rows(self.store, len(self))
        only = np.flatnonzero(last - first == 1)
        only = only[live[order[first[only]]]]
        names = zip(self.ids(order[first[only]]), only.tolist(), strict=True)
        only = only[np.array([name == ids[place] for name, place in names], np.bool_)]
        found[only] = order[first[only]]
        for place in np.flatnonzero(last - first > 1).tolist():
            rows = order[first[place] : last[place]]
            rows = rows[live[rows]]  # several if the id was used before, or if two ids share a hash
            same = [
                row for row, name in zip(rows.tolist(), self.ids(rows), strict=True) if name == ids[place]
            ]
            found[place] = max(same, default=-1)
        return found

    @pinned
    def ids(self, rows: Array) -> list[str]:
        """Ids of ``rows (n,)``."""
        blob, starts, ends = self._spans(0, rows)
        with self._readable("ids"):
            return [str(blob[start:end], "utf-8") for start, end in zip(starts, ends, strict=True)]

    @pinned
    def fetch(self, rows: Array) -> list[Document]:
        """Documents of ``rows (n,)``, removed ones included."""
        blob, starts, ends = self._spans(1, rows)
        with self._readable("documents"):
            items = [json.loads(bytes(blob[start:end])) for start, end in zip(starts, ends, strict=True)]
            return [
                Document(item["_id"], item["text"], item["title"], _mapping(item.get("metadata", {})))
                for item in items
            ]

    @pinned
    def filter(self, where: Mapping[str, Any]) -> Array:
        """Which rows have metadata that meets all conditions, for ``Index.search(allowed=)``.

        Args:
            where: A condition for each key. A value: equal to it. A list: equal to one of them. Operators:
                ``{">=": 2000, "<": 2010}``, of ``== != < <= > >= in``. A stored list meets a condition if
                one of its elements does. A document without the key does not meet it.

        Returns:
            ``(len(self),)`` bool; treat it as read-only. Kept for the filters used last.

        Raises:
            BadValueError: An operator or a value makes no sense, no document has a key, or a value is of
                another type than those that documents have for its key.
        """
        parse_filter(where)
        return self._mask(self.store.version, json.dumps(where, sort_keys=True))

    def _scan_metadata(self, version: int, where: str) -> Array:
        conditions = json.loads(where)
        meets, seen = parse_filter(conditions), Seen((key, {}) for key in conditions)
        mask = np.full(len(self), meets({}))
        for rows, values in self._metadata():
            mask[rows] = [meets(value) for value in values]
            note_values(seen, values)
        if len(self):  # an index without documents has no keys to compare with
            check_filter(conditions, seen, self._metadata_keys)
        return mask

    def _metadata_keys(self) -> set[str]:
        return {key for _, values in self._metadata() for key in chain.from_iterable(values)}

    def _metadata(self) -> Iterator[tuple[Array, list[dict[str, Any]]]]:
        """Rows that have metadata, and what they have, block by block."""
        for start in range(0, len(self) if self.store.rows("metadata.jsonl") else 0, _BLOCK_ROWS):
            rows = np.arange(start, min(start + _BLOCK_ROWS, len(self)))
            blob, starts, ends = self._spans(2, rows)
            lines = bytes(blob[starts[0] : ends[-1]])
            with self._readable("metadata"):
                values = json.loads(b"[" + lines.replace(b"\n", b",")[:-1] + b"]")  # one call is far faster
                rows = rows[np.asarray(ends) > np.asarray(starts)]
                if len(values) != len(rows):
                    raise ValueError(f"{len(values)} values for {len(rows)} documents")
                values = list(map(_mapping, values))
            yield rows, values

    @contextlib.contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """Say of the bytes of a file that they are not what was written, whatever they are instead."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CorruptError(
                f"index {self.store.path}: its {what} cannot be read ({error!r:.100}); {REMEDY}"
            ) from error

    def _refuse_duplicates(self, ids: list[str]) -> None:
        seen: set[str] = set()
        twice = [name for name in ids if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        there = [name for name, row in zip(ids, self.find(ids).tolist(), strict=True) if row >= 0]
        for names, problem in ((twice, "given more than once"), (there, "in the index already")):
            if names:
                some = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
                raise BadValueError(
                    f"adding documents: {len(names)} of the ids {problem}: {some}; expected every id once. "
                    "To replace documents of an index, use Retriever.update"
                )

    def _hash_index(self) -> tuple[Array, Array]:
        """Hashes of all ids in order, and the row of each."""
        return self.store.derived("hashes", self._merge_hashes)

    def _merge_hashes(self) -> tuple[Array, Array]:
        """New rows are merged into what is known, unless that is of another epoch or of more rows."""
        epoch, hashes, order = self._known
        if epoch != self.store.epoch or len(hashes) > len(self):
            hashes, order = np.empty(0, np.uint64), np.empty(0, np.int64)
        if len(hashes) < len(self):
            new = self.store.read("hashes.bin")[len(hashes) :]
            ranks = np.argsort(new)
            places = np.searchsorted(hashes, new[ranks])
            hashes, order = (
                np.insert(hashes, places, new[ranks]),
                np.insert(order, places, len(order) + ranks),
            )
        self._known = (self.store.epoch, hashes, order)
        return hashes, order

    def _spans(self, blob: int, rows: Array) -> tuple[memoryview, list[int], list[int]]:
        """A blob and where in it each row starts and ends."""
        rows = as_rows("documents", rows)
        if rows.ndim != 1:
            raise BadValueError(f"documents: rows of shape {rows.shape}; expected (n,)")
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise BadValueError(
                f"documents: rows {rows.min()} to {rows.max()}, expected 0 to {len(self) - 1}"
            )
        if not rows.size:
            return memoryview(b""), [], []
        ends = self.store.read("ends.bin")[:, blob]
        starts = np.where(rows > 0, ends[rows - 1], 0)
        return self.store.read(_BLOBS[blob]).data, starts.tolist(), ends[rows].tolist()


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"metadata is {value!r:.60}")
    return value


def _hashes(ids: Sequence[str]) -> Array:
    try:  # no document has an unpaired surrogate in its id, but one may be asked for
        names = [identifier.encode("utf-8", "surrogatepass") for identifier in ids]
    except (AttributeError, LookupError, TypeError):
        wrong = next((item for item in ids if not isinstance(item, str)), ids)
        raise BadTypeError(f"documents: got the id {shown(wrong)}; expected a string") from None
    return np.frombuffer(b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in names), "<u8")


def _line(document: Document) -> bytes:
    """A line of BEIR's corpus.jsonl."""
    fields: dict[str, Any] = {"_id": document.id, "title": document.title, "text": document.text}
    if document.metadata:
        fields["metadata"] = document.metadata
    return _json(fields, document.id)


def _json(value: Mapping[str, Any], identifier: str) -> bytes:
    try:
        return (
            json.dumps(dict(value), ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")
            + b"\n"
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise BadValueError(
            f"adding documents: metadata of {identifier!r} is not JSON ({error}); expected numbers, strings, "
            "booleans, null, lists and dictionaries"
        ) from error
