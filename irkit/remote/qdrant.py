"""Search an export in Qdrant: on a server, in the local mode of its client, or in Qdrant Edge."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from irkit.data import Document
from irkit.errors import StorageError, require, reraise_as
from irkit.exporting.to_qdrant import COLLECTION, split_address
from irkit.exporting.to_qdrant_edge import ABOUT
from irkit.index.filters import Group
from irkit.remote.qdrant_filter import whole_filter
from irkit.remote.remote_retriever import RemoteHit, RemoteRetriever
from irkit.retrieval.collection import AnyModel
from irkit.retrieval.retriever import Retriever

_TOGETHER = 1000  # ids of one request


class Qdrant(RemoteRetriever):
    """Documents that ``irkit export --to qdrant`` or ``--to qdrant-edge`` wrote, searched by Qdrant.

    Args:
        location: ``http://HOST:PORT/COLLECTION``, or the folder that was written.
        model: The model of the documents, or the directory of the index that was exported. Only BM25,
            impacts and models without a name need it.
        exact: Score all documents. By default a server, or a large shard, reads its graph (HNSW).

    Raises:
        StorageError: The folder or the collection does not exist, or the server does not answer.
        CorruptError: The documents are not a finished export.
        MissingDependencyError: qdrant-client or qdrant-edge-py is not installed.

    Examples:
        >>> remote = Qdrant("http://127.0.0.1:6333/notes")  # doctest: +SKIP
        >>> [hit.id for hit in remote.search("hibernation", k=1)]  # doctest: +SKIP
        ['bears']
    """

    def __init__(
        self,
        location: str | Path,
        model: AnyModel | Retriever | str | Path | None = None,
        *,
        exact: bool = False,
    ) -> None:
        name = str(location)
        engine = _Shard if (Path(name) / ABOUT).exists() else _Client
        with reraise_as(StorageError, f"opening {name}", "expected what irkit export --to qdrant writes"):
            self._engine = engine(name)
        self._exact = exact
        super().__init__(name, self._engine.about, model)

    def _search(self, query: Any, k: int, where: Any, exact: bool, texts: bool) -> list[RemoteHit]:
        kind = self.about["kind"]
        empty = len(query[0] if kind == "sparse" else query) == 0
        if empty:  # no token or no term that the documents have
            return []
        points = self._engine.query(kind, query, k, where, exact or self._exact, _fields(texts))
        return [RemoteHit(int(point.id), point.score, _document(point.payload)) for point in points]

    def _translate(self, where: Group) -> Any:
        return whole_filter(where, self._engine.models)

    def fetch(self, ids: Sequence[str]) -> list[Document]:
        """Return the documents with these ids, in any order; unknown ids are left out."""
        documents = []
        for start in range(0, len(ids), _TOGETHER):
            models = self._engine.models
            match = models.MatchAny(any=list(ids[start : start + _TOGETHER]))
            where = models.Filter(must=[models.FieldCondition(key="_id", match=match)])
            with self._asking():
                documents += [_document(point.payload) for point in self._engine.scroll(where, _TOGETHER)]
        return documents

    def __len__(self) -> int:
        """Return the number of documents."""
        with self._asking():
            return int(self._engine.count())

    def close(self) -> None:
        """Close files and connections."""
        self._engine.close()


class _Client:
    """A collection, through qdrant-client."""

    def __init__(self, location: str) -> None:
        library = require("qdrant_client", "engines", "irkit.remote.Qdrant")
        self.models = library.models
        if location.startswith(("http://", "https://")):
            address, self._collection = split_address(location)
            self._exact = self.models.SearchParams(exact=True)
            self._client = library.QdrantClient(url=address, check_compatibility=False)
        elif Path(location, "collection", COLLECTION).exists():
            self._client, self._collection = library.QdrantClient(path=location), COLLECTION
            self._exact = None  # the local mode always is
        else:
            raise StorageError(f"opening {location}: no collection of Qdrant is there; run irkit export")
        metadata = self._client.get_collection(self._collection).config.metadata
        self.about = (metadata or {}).get("irkit")

    def query(
        self, name: str, query: Any, k: int, where: Any, exact: bool, fields: list[str]
    ) -> Iterable[Any]:
        if name == "sparse":
            query = self.models.SparseVector(indices=query[0].tolist(), values=query[1].tolist())
        else:
            query = query.tolist()
        return self._client.query_points(  # type: ignore[no-any-return]
            self._collection,
            query=query,
            using=name,
            limit=k,
            query_filter=where,
            search_params=self._exact if exact else None,
            with_payload=fields,
        ).points

    def scroll(self, where: Any, limit: int) -> Iterable[Any]:
        return self._client.scroll(self._collection, where, limit=limit)[0]  # type: ignore[no-any-return]

    def count(self) -> int:
        return int(self._client.count(self._collection).count)

    def close(self) -> None:
        self._client.close()


class _Shard:
    """A shard of Qdrant Edge, in this process."""

    def __init__(self, location: str) -> None:
        self.models = require("qdrant_edge", "engines", "irkit.remote.Qdrant")
        self.about = json.loads(Path(location, ABOUT).read_text())
        self._shard = self.models.EdgeShard.load(location)

    def query(
        self, name: str, query: Any, k: int, where: Any, exact: bool, fields: list[str]
    ) -> Iterable[Any]:
        if name == "sparse":
            query = self.models.SparseVector(query[0].tolist(), query[1].tolist())
        else:
            query = query.tolist()
        request = self.models.QueryRequest(
            limit=k,
            query=self.models.Query.Nearest(query, using=name),
            filter=where,
            params=self.models.SearchParams(exact=exact),
            with_payload=fields,
        )
        return self._shard.query(request)  # type: ignore[no-any-return]

    def scroll(self, where: Any, limit: int) -> Iterable[Any]:
        request = self.models.ScrollRequest(limit=limit, filter=where, with_payload=True)
        return self._shard.scroll(request)[0]  # type: ignore[no-any-return]

    def count(self) -> int:
        return int(self._shard.count(self.models.CountRequest(exact=True)))

    def close(self) -> None:
        self._shard.close()


def _fields(texts: bool) -> list[str]:
    return ["_id", "title", "text", "metadata"] if texts else ["_id"]


def _document(payload: Any) -> Document:
    texts = (payload.get("text", ""), payload.get("title", ""))
    return Document(payload["_id"], *texts, payload.get("metadata") or {})
