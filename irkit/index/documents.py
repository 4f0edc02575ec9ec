"""Ids, texts and metadata of the documents of an index, kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from irkit.arguments import brief, check_counts
from irkit.data.document import JSON, Document
from irkit.errors import BadTypeError, BadValueError
from irkit.index.array_files import Array, corrupt
from irkit.index.facets import Counts, count_values, most_frequent
from irkit.index.field_encoding import encode_old_metadata, has_old_metadata, type_of
from irkit.index.fields import Fields
from irkit.index.filters import Condition, as_json, check_key, check_type, conditions, evaluate, parse_filter
from irkit.index.id_rows import find_hashes, sort_hashes
from irkit.index.index_base import live_rows, row_list
from irkit.index.sorted_fields import sort_fields
from irkit.index.state import snapshot
from irkit.index.store import Store, check_store

REMOVED_DOCUMENTS = "removed_documents.bin"
_BLOBS = ("ids.bin", "documents.jsonl")


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
        self._fields = Fields(store)
        self._mask = lru_cache(maxsize=16)(self._evaluate)

    def __len__(self) -> int:
        """Rows ever added, removed ones included."""
        return self.store.rows("hashes.bin")

    def __iter__(self) -> Iterator[Document]:
        """Iterate over the documents in order of addition, without removed ones."""
        with self.store.snapshot() as state:
            rows = np.flatnonzero(self._live())
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
            BadValueError: The index lacks the document.
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
            )
            metadata = [as_stored(item).metadata for item in items]
            self._upgrade()
            start = len(self)
            ends = np.empty((len(items), len(columns)), np.int64)
            for number, (name, parts) in enumerate(zip(_BLOBS, columns, strict=True)):
                ends[:, number] = self.store.rows(name) + np.cumsum([*map(len, parts)], dtype=np.int64)
                self.store.append(name, np.frombuffer(b"".join(parts), np.uint8))
            self.store.append("ends.bin", ends)
            self.store.append("hashes.bin", _hashes(ids))
            self._fields.append(start, metadata)
            return range(start, len(self))

    def finish(self) -> None:
        """Sort ids and metadata, if many were added. Documents are found without it, too."""
        if len(self):
            with self.store.update():
                sort_hashes(self.store)
                if not has_old_metadata(self.store):
                    sort_fields(self.store, self._fields, len(self))

    @snapshot
    def find(self, ids: Sequence[str]) -> Array:
        """Return the rows ``(n,)`` int64 of documents by id; -1 for an id that is unknown or removed.

        Raises:
            BadTypeError: The ids are not strings in a list.
        """
        return self._find(ids)

    def _find(self, ids: Sequence[str]) -> Array:
        """Return rows, see `find`."""
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise BadTypeError(f"documents: ids are {brief(ids)}; expected strings in a list")
        result = np.full(len(ids), -1, np.int64)
        numbers, rows = find_hashes(self.store, _hashes(ids))
        live = self._live()[rows]
        numbers, rows = numbers[live], rows[live]
        names = zip(self.ids(rows), numbers.tolist(), strict=True)
        same = np.array([name == ids[number] for name, number in names], np.bool_)
        np.maximum.at(result, numbers[same], rows[same])
        return result

    @snapshot
    def taken(self, documents: Sequence[Document]) -> list[str]:
        """Return the ids of those documents that `add` refuses because the index has them."""
        ids = [document.id for document in documents]
        return [name for name, row in zip(ids, self._find(ids).tolist(), strict=True) if row >= 0]

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
                values, as in ``{">=": 2000, "<": 2010}``:

                * ``==``, ``!=``, ``<``, ``<=``, ``>``, ``>=``: numbers compare with numbers, and strings with
                  strings. A ``date`` or ``datetime`` stands for its ``isoformat()``, which is a string.
                * ``in`` and ``not in`` a list.
                * ``all``: a stored list has all values of a list.
                * ``prefix``: a string begins so.
                * ``exists``: ``True`` or ``False``; a key whose value is null exists.

                A stored list meets a condition if one of its elements does; ``!=`` and ``not in`` ask that
                none is equal. A document without the key meets only ``{"exists": False}``. ``"_id"`` is the
                id. ``{"$and": [...]}``, ``{"$or": [...]}`` and ``{"$not": {...}}`` combine filters, at any
                depth; ``$not`` also finds documents without a key.

        Returns:
            ``(len(self),)`` bool; treat it as read-only. Results of the last filters are kept.

        Raises:
            BadTypeError: Ids are not strings.
            BadValueError: An operator or a value makes no sense, no document has a key, or a value is of
                another type than the values of the documents for its key.
        """
        parsed = parse_filter(where)
        if len(self):  # an index without documents has no keys to compare with
            for condition in conditions(parsed):
                if condition.key != "_id":
                    self._check(condition)
        return self._matching(where)

    @snapshot
    def metadata_keys(self) -> list[str]:
        """Return the keys of the metadata of all documents, removed ones included, in order."""
        return sorted(self._fields.keys())

    @snapshot
    def facets(self, key: str, where: Mapping[str, Any] | None = None, k: int = 10) -> list[tuple[JSON, int]]:
        """Return the most frequent values of a key, and how many documents have each.

        Args:
            key: Key of the metadata. Each different element of a list counts.
            where: Count documents that meet this filter; removed documents never count.
            k: Maximum number of values.

        Returns:
            Values and counts; the highest count first, then in the order of the first documents.

        Raises:
            BadValueError: No document has the key, ``k`` is below 1, or the filter makes no sense.
        """
        check_counts("facets", k=k)
        if not isinstance(key, str):
            raise BadTypeError(f"facets: the key is {brief(key)}; expected a string")
        counted = self._live() & (True if where is None else self.filter(where))
        if len(self):
            check_key(key, self.metadata_keys(), "facets")
        return most_frequent(self._count_values(key, counted, k), k)

    # ---- what `irkit.shards` answers from several stores ----

    def _live(self) -> Array:
        """Return ``(len(self),)`` bool: rows that are not removed."""
        return live_rows(self.store, len(self), removal_list(self.store))

    def _matching(self, where: Mapping[str, Any]) -> Array:
        """Return the rows that meet a filter that has been checked."""
        return self._mask(self.store.version, as_json(where))

    def _count_values(self, key: str, counted: Array, k: int | None, numbers: Array | None = None) -> Counts:
        """Count the values of a key, see `count_values`."""
        return count_values(self._fields, key, counted, k, numbers)

    def _types(self, key: str) -> set[int]:
        """Return the types that the values of a key have."""
        return self._fields.types(key)

    def _first_row(self, key: str, kind: int) -> int:
        """Return the first row with a value of a key and a type."""
        return int(self._fields.column(key, kind, len(self)).rows[0])

    # ----

    def _evaluate(self, version: int, where: str) -> Array:
        return evaluate(parse_filter(json.loads(where)), self._fields, len(self), self.find)

    def _check(self, condition: Condition) -> None:
        """Refuse a condition that no document could meet, because of its key or the type of its value."""
        kinds = self._types(condition.key)
        if not kinds:
            check_key(condition.key, self.metadata_keys())
        check_type(condition, kinds, self._first_row, self._example)

    def _example(self, key: str, kind: int) -> Any:
        """Return a value of a key and a type."""
        value = self.fetch(np.array([self._first_row(key, kind)]))[0].metadata.get(key)
        values = value if isinstance(value, list) else [value]
        return next((value for value in values if type_of(value) == kind), value)

    @contextlib.contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """Turn errors of parsing stored bytes into a CorruptError."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise corrupt(self.store.path, f"its {what} cannot be read ({error!r:.100})") from error

    def _upgrade(self) -> None:
        """Store the metadata of an older index in columns, instead of lines of JSON."""
        if not has_old_metadata(self.store):
            return
        for arrays in encode_old_metadata(self.store):
            for name, array in arrays.items():
                self.store.append(name, array)
        ends = self.store.read("ends.bin")[:, :2].copy()
        self.store.drop("metadata.jsonl")
        self.store.drop("ends.bin")
        self.store.append("ends.bin", ends)

    def _refuse_duplicates(self, ids: list[str]) -> None:
        seen: set[str] = set()
        twice = [name for name in ids if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        existing = [name for name, row in zip(ids, self._find(ids).tolist(), strict=True) if row >= 0]
        for names, problem in ((twice, "given more than once"), (existing, "in the index already")):
            if names:
                examples = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
                raise BadValueError(
                    f"adding documents: {len(names)} of the ids {problem}: {examples}; expected every id "
                    "once. To replace documents of an index, use Retriever.update"
                )

    def _spans(self, blob: int, rows: Array) -> tuple[memoryview, list[int], list[int]]:
        """Return the bytes of a file of `_BLOBS`, and where the part of each row starts and ends in it."""
        rows = row_list("documents", rows, len(self))
        if not rows.size:
            return memoryview(b""), [], []
        ends = self.store.read("ends.bin")[:, blob]
        starts = np.where(rows > 0, ends[rows - 1], 0)
        return self.store.read(_BLOBS[blob]).data, starts.tolist(), ends[rows].tolist()


def removal_list(store: Store) -> str:
    """Return the name of the array of removed documents; windows have rows, and a list, of their own."""
    return REMOVED_DOCUMENTS if store.meta.get("index", {}).get("windows") else "removed.bin"


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


def as_stored(document: Document) -> Document:
    """Return a document as it is fetched: the keys of its metadata are strings, and tuples are lists."""
    metadata = json.loads(_json(document.metadata, document.id)) if document.metadata else {}
    return Document(document.id, document.text, document.title, metadata)


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
