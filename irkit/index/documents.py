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

from irkit.arguments import brief
from irkit.data.document import Document
from irkit.errors import BadTypeError, BadValueError
from irkit.index.array_files import Array, corrupt
from irkit.index.filters import Seen, check_filter, note_values, parse_filter
from irkit.index.index_base import live_rows, row_list
from irkit.index.layout import element_positions
from irkit.index.state import snapshot
from irkit.index.store import Store, check_store

_BLOBS = ("ids.bin", "documents.jsonl", "metadata.jsonl")


class Documents:
    """Documents of the rows of an index, in the same `Store`; a removed row is removed here, too.

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
        check_store("Documents", store, "Store.open(path)")
        self.store = store
        self._known = (-1, np.empty(0, np.uint64), np.empty(0, np.int64))  # epoch, sorted hashes, their rows
        self._mask = lru_cache(maxsize=16)(self._scan_metadata)

    def __len__(self) -> int:
        """Rows ever added, removed ones included."""
        return self.store.rows("hashes.bin")

    def __iter__(self) -> Iterator[Document]:
        """Iterate over the documents in order of addition, without removed ones."""
        with self.store.snapshot() as state:
            rows = np.flatnonzero(live_rows(self.store, len(self)))
        block = self.store.limits.read_documents
        for start in range(0, len(rows), block):
            with self.store.snapshot(state):
                documents = self.fetch(rows[start : start + block])
            yield from documents

    def __contains__(self, id: object) -> bool:
        """Return whether there is a document with this id."""
        return isinstance(id, str) and bool(self.find([id])[0] >= 0)

    @snapshot
    def __getitem__(self, id: str) -> Document:
        """Return the document with an id.

        Raises:
            BadTypeError: The id is not a string.
            BadValueError: There is no such document.
        """
        if not isinstance(id, str):
            raise BadTypeError(
                f"documents: got {brief(id)}, expected the id of one, a string; rows are fetched"
            )
        rows = self.find([id])
        if rows[0] < 0:
            raise BadValueError(f"documents: the index has none of id {id!r}; `in` says whether it has")
        return self.fetch(rows)[0]

    def add(self, documents: Iterable[Document]) -> range:
        """Add documents, all at once; add large collections in chunks.

        Returns:
            Their rows.

        Raises:
            BadTypeError: An item is not a document.
            BadValueError: An id is given twice or in the index already, or metadata is not JSON; nothing is
                added.
            StorageError: They could not be stored; nothing is added.
        """
        items = list(documents) if isinstance(documents, Iterable) else [documents]
        for item in items:
            if not isinstance(item, Document):
                raise BadTypeError(f"adding documents: got {brief(item)}; expected a Document")
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
                ends[:, number] = self.store.rows(name) + np.cumsum([*map(len, parts)], dtype=np.int64)
                self.store.append(name, np.frombuffer(b"".join(parts), np.uint8))
            self.store.append("ends.bin", ends)
            self.store.append("hashes.bin", _hashes(ids))
            return range(start, len(self))

    @snapshot
    def find(self, ids: Sequence[str]) -> Array:
        """Return the rows ``(n,)`` int64 of documents by id; -1 for an id that is unknown or removed.

        Raises:
            BadTypeError: The ids are not strings in a list.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise BadTypeError(f"documents: ids are {brief(ids)}; expected strings in a list")
        result = np.full(len(ids), -1, np.int64)
        keys, (hashes, order) = _hashes(ids), self.store.derived("hashes", self._merge_hashes)
        first, last = np.searchsorted(hashes, keys, "left"), np.searchsorted(hashes, keys, "right")
        # rows with the hash of an id: several, if it was used before, or if another id has the same hash
        counts = last - first
        numbers, rows = np.repeat(np.arange(len(ids)), counts), order[element_positions(last, counts)]
        live = live_rows(self.store, len(self))[rows]
        numbers, rows = numbers[live], rows[live]
        names = zip(self.ids(rows), numbers.tolist(), strict=True)
        same = np.array([name == ids[number] for name, number in names], np.bool_)
        np.maximum.at(result, numbers[same], rows[same])
        return result

    @snapshot
    def ids(self, rows: Array) -> list[str]:
        """Return the ids of ``rows (n,)``."""
        blob, starts, ends = self._spans(0, rows)
        with self._readable("ids"):
            return [str(blob[start:end], "utf-8") for start, end in zip(starts, ends, strict=True)]

    @snapshot
    def fetch(self, rows: Array) -> list[Document]:
        """Return the documents of ``rows (n,)``, removed ones included."""
        blob, starts, ends = self._spans(1, rows)
        with self._readable("documents"):
            items = [json.loads(bytes(blob[start:end])) for start, end in zip(starts, ends, strict=True)]
            return [
                Document(item["_id"], item["text"], item["title"], _mapping(item.get("metadata", {})))
                for item in items
            ]

    @snapshot
    def filter(self, where: Mapping[str, Any]) -> Array:
        """Return the rows whose metadata meets all conditions, for ``Index.search(allowed=)``.

        Args:
            where: A condition per key: a value to be equal to; a list of such values; or operators and
                values, as in ``{">=": 2000, "<": 2010}``, where operators are ``== != < <= > >= in``. A
                stored list meets a condition if one of its elements does. A document without the key meets
                none.

        Returns:
            ``(len(self),)`` bool; treat it as read-only. Results of the last filters are kept.

        Raises:
            BadValueError: An operator or a value makes no sense, no document has a key, or a value is of
                another type than the values of the documents for its key.
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
        """Yield rows that have metadata, and their metadata, block by block."""
        block = self.store.limits.filter_rows
        for start in range(0, len(self) if self.store.rows("metadata.jsonl") else 0, block):
            rows = np.arange(start, min(start + block, len(self)))
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
        """Turn errors of parsing stored bytes into a CorruptError."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise corrupt(self.store.path, f"its {what} cannot be read ({error!r:.100})") from error

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

    def _merge_hashes(self) -> tuple[Array, Array]:
        """Return the hashes of all ids in order, and the row of each.

        New rows are merged into the known hashes, unless these are of another epoch or of more rows.
        """
        epoch, hashes, order = self._known
        if epoch != self.store.epoch or len(hashes) > len(self):
            hashes, order = np.empty(0, np.uint64), np.empty(0, np.int64)
        if len(hashes) < len(self):
            new = self.store.read("hashes.bin")[len(hashes) :]
            ranks = np.argsort(new)
            positions = np.searchsorted(hashes, new[ranks])
            hashes = np.insert(hashes, positions, new[ranks])
            order = np.insert(order, positions, len(order) + ranks)
        self._known = (self.store.epoch, hashes, order)
        return hashes, order

    def _spans(self, blob: int, rows: Array) -> tuple[memoryview, list[int], list[int]]:
        """Return a file of parts, and where the part of each row starts and ends in it."""
        rows = row_list("documents", rows, len(self))
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
        raise BadTypeError(f"documents: got the id {brief(wrong)}; expected a string") from None
    return np.frombuffer(b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in names), "<u8")


def _line(document: Document) -> bytes:
    """Return a document as a line of BEIR's corpus.jsonl."""
    fields: dict[str, Any] = {"_id": document.id, "title": document.title, "text": document.text}
    if document.metadata:
        fields["metadata"] = document.metadata
    return _json(fields, document.id)


def _json(value: Mapping[str, Any], identifier: str) -> bytes:
    try:
        line = json.dumps(dict(value), ensure_ascii=False, allow_nan=False) + "\n"
        return line.encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        raise BadValueError(
            f"adding documents: metadata of {identifier!r} is not JSON ({error}); expected numbers, strings, "
            "booleans, null, lists and dictionaries"
        ) from error
