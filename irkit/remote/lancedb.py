"""Search an export in LanceDB, an engine that runs inside the calling process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from irkit.data import Document
from irkit.errors import BadTypeError, StorageError, require, reraise_as
from irkit.exporting.to_lancedb import TABLE
from irkit.index.filters import Group
from irkit.remote.remote_retriever import RemoteHit, RemoteRetriever
from irkit.remote.sql_filter import sql_filter
from irkit.retrieval.collection import AnyModel
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.searching import parse_strings

_TOGETHER = 1000  # ids of one request


class LanceDB(RemoteRetriever):
    """Documents that ``irkit export --to lancedb`` wrote, searched by LanceDB.

    Vectors are compared by inner product or MaxSim. Without an index of LanceDB all vectors are scanned,
    which is exact; with one, the results are approximate. Documents of a BM25 index are searched by the
    full-text search of LanceDB, whose terms and scores are its own.

    Args:
        location: The folder that was written, or the address of the database in an object store.
        model: See `irkit.remote.Qdrant`; full-text search needs none.

    Raises:
        StorageError: The database does not exist.
        CorruptError: The documents are not a finished export.
        MissingDependencyError: lancedb is not installed.

    Examples:
        >>> remote = LanceDB("notes-lance")  # doctest: +SKIP
        >>> [hit.id for hit in remote.search("hibernation", k=1)]  # doctest: +SKIP
        ['bears']
    """

    def __init__(self, location: str | Path, model: AnyModel | Retriever | str | Path | None = None) -> None:
        name = str(location)
        library = require("lancedb", "engines", "irkit.remote.LanceDB")
        if "://" not in name and not Path(name).is_dir():
            raise StorageError(f"opening {name}: no such folder; run irkit export --to lancedb")
        with reraise_as(StorageError, f"opening {name}", "expected what irkit export --to lancedb wrote"):
            self._table = library.connect(name).open_table(TABLE)
        metadata = self._table.schema.metadata or {}
        super().__init__(name, json.loads(metadata.get(b"irkit", b"null")), model)
        self._by_text = self.about["model"]["name"] == "bm25"

    def _parse(self, queries: Any, operation: str) -> tuple[list[Any], bool]:
        if not self._by_text:
            return super()._parse(queries, operation)
        return parse_strings(operation, queries), isinstance(queries, str)

    def _encode(self, contents: list[Any]) -> Iterator[Any]:
        return iter(contents) if self._by_text else super()._encode(contents)

    def _content(self, query: Any) -> Any:
        if self._by_text and not isinstance(query.text, str):
            raise BadTypeError(f"searching: query {query.id!r} has no text")
        return query.text if self._by_text else super()._content(query)

    def _search(self, query: Any, k: int, where: Any, exact: bool, texts: bool) -> list[RemoteHit]:
        columns = ["row", *_columns(texts)]
        if self._by_text:
            text_query = require("lancedb.query", "engines", "irkit.remote.LanceDB").MultiMatchQuery
            request = self._table.search(text_query(query, ["title", "text"])).select([*columns, "_score"])
        elif not len(query):
            return []
        else:
            request = self._table.search(query, vector_column_name="vector").distance_type("dot")
            request = request.select([*columns, "_distance"])
            if exact:
                request = request.bypass_vector_index()
        if where is not None:
            request = request.where(where, prefilter=True)
        # a distance is 1 less an inner product, summed over the tokens of a query
        tokens = 1 if self._by_text or query.ndim == 1 else len(query)
        return [
            RemoteHit(
                row["row"], row["_score"] if self._by_text else tokens - row["_distance"], _document(row)
            )
            for row in request.limit(k).to_list()
        ]

    def _translate(self, where: Group) -> str | None:
        types = {key: (kind, in_lists) for key, (kind, in_lists) in self.about["types"].items()}
        return sql_filter(where, types) if where.parts else None

    def fetch(self, ids: Sequence[str]) -> list[Document]:
        """Return the documents with these ids, in any order; unknown ids are left out."""
        documents = []
        for start in range(0, len(ids), _TOGETHER):
            where = self._where(ids[start : start + _TOGETHER])
            with self._asking():
                rows = self._table.search().where(where).select(_columns(True)).limit(_TOGETHER).to_list()
            documents += [_document(row) for row in rows]
        return documents

    def __len__(self) -> int:
        """Return the number of documents."""
        with self._asking():
            return int(self._table.count_rows())

    def close(self) -> None:
        """Do nothing: LanceDB closes its files itself."""


def _columns(texts: bool) -> list[str]:
    return ["_id", "title", "text", "json"] if texts else ["_id"]


def _document(row: Any) -> Document:
    metadata = json.loads(row.get("json", "{}"))
    return Document(row["_id"], row.get("text", ""), row.get("title", ""), metadata)
