"""The `Client`: an index of a server (``irkit serve``), with the methods of a `Retriever`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack, cast, overload
from urllib.parse import quote, urlencode, urlsplit

import numpy as np

from irkit.arguments import brief, check_flags, check_functions
from irkit.client.conversions import plain, plain_filter, to_explanation, to_hits, to_record, with_ids
from irkit.client.transport import Transport
from irkit.data import JSON, Document, DocumentsLike, QueriesLike, Query, parse_documents, parse_queries
from irkit.encoder_free import Vectors
from irkit.errors import BadKeyError, BadTypeError, BadValueError
from irkit.evaluation.run import Run
from irkit.retrieval.explanation import Explanation
from irkit.retrieval.fusing import Fuse
from irkit.retrieval.reranking import parse_id_lists
from irkit.retrieval.searcher import Searcher
from irkit.retrieval.searching import Filter, Hit, PartialResultWarning, queries_of_run
from irkit.retrieval.selection import RankOptions, SearchOptions

if TYPE_CHECKING:
    from irkit.encoder_free import RM3

_TOGETHER = 256  # queries or documents of one request
_HITS = 50_000  # of one request, or documents to rank


class Client(Searcher):
    """An index of a server, with the methods of `irkit.Retriever`; any number of threads may use one.

    Attributes:
        index: Name of the index.
        transport: Sends the requests.

    Args:
        url: Address of the server, such as ``"http://127.0.0.1:8080"``.
        index: Name of the index; by default the only one of the server.
        key: API key, if the server has keys.
        timeout: Seconds to wait for an answer.
        partial_results: Return the hits of other shards, with a `irkit.ray_engine.PartialResultWarning`, if
            one that Ray searches does not answer the server; `missing` names it. By default that is an error.

    Raises:
        BadValueError: The address is not a URL, the server has several indexes and ``index`` is missing, or
            it has none of this name.
        StorageError: The server does not answer.

    Examples:
        >>> client = Client("http://127.0.0.1:8080", "notes")  # doctest: +SKIP
        >>> [hit.id for hit in client.search("hibernation", k=1)]  # doctest: +SKIP
        ['bears']
    """

    def __init__(
        self,
        url: str,
        index: str | None = None,
        *,
        key: str | None = None,
        timeout: float = 60,
        partial_results: bool = False,
    ) -> None:
        check_flags("Client", partial_results=partial_results)
        parts = urlsplit(url if isinstance(url, str) else "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadValueError(f"Client: the address is {brief(url)}; expected http://HOST:PORT")
        self._url, self._partial = url, partial_results
        self._thread = threading.local()
        self.transport = Transport(parts, key, timeout)
        indexes = {item["name"]: item for item in self.transport.ask("GET", "/indexes")["indexes"]}
        names = [*indexes]
        self.close()  # in case that the name is refused
        if index is None and len(names) != 1:
            raise BadValueError(f"Client: {url} has {len(names)} indexes; give the name of one: {names}")
        self.index = names[0] if index is None else index
        if self.index not in names:
            raise BadValueError(f"Client: {url} has no index {brief(index)}; known: {', '.join(names)}")
        about = indexes[self.index]
        self._most_hits = about["most_hits"]
        vectors_of_tokens = about["representation"] == "multi_vector"
        self._vectors = Vectors(representation="multi_vector" if vectors_of_tokens else "dense")
        self._route = f"/indexes/{quote(self.index, safe='')}"

    # ---- searching ----

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the shards that gave no answer to the last request of this thread."""
        return getattr(self._thread, "missing", ())

    def _find(
        self, queries: Any, k: int, filter: Filter | None, options: SearchOptions
    ) -> tuple[list[list[Hit]], bool]:
        if isinstance(queries, str | Mapping):
            contents, single = [queries], True
        elif not isinstance(queries, Iterable):
            raise BadTypeError(f"search: got {brief(queries)}, expected a query or several")
        else:  # texts, too: only vectors can be a single query here
            contents, single = self._vectors.split_queries(queries)
        items = [plain(query) for query in contents]
        lines = self._search(items, {**options, "k": k, "filter": plain_filter(filter)})
        return [line for part in lines for line in part], single

    def _search(self, items: list[Any], options: Mapping[str, Any]) -> Iterator[list[list[Hit]]]:
        """Yield the hits of up to 256 queries at a time; many hits of a query come as a stream."""
        body = {name: plain(value) for name, value in options.items()}
        body |= {"partial": True} if self._partial else {}
        depth = sum(body[name] for name in ("k", "offset") if isinstance(body.get(name), int))
        body |= {"stream": True} if depth > self._most_hits else {}
        step = max(1, min(_TOGETHER, _HITS // max(1, depth)))
        for start in range(0, len(items), step):
            yield self._hits("search", {**body, "queries": items[start : start + step]})

    def run(
        self,
        queries: QueriesLike,
        k: int = 1000,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
        fuse: Fuse | None = None,
        progress: Callable[[int], object] | None = None,
        **options: Unpack[RankOptions],
    ) -> Run:
        """Rank documents for many queries, but return only ids and scores, see `irkit.Retriever.run`."""
        check_functions("run", progress=progress)
        items = list(parse_queries(queries))
        contents = [plain(query.text if query.vector is None else query.vector) for query in items]
        asked = {**options, "k": k, "filter": plain_filter(filter), "fields": ["id"]}
        asked |= {"feedback": feedback, "fuse": fuse}
        found = list[list[Hit]]()
        for part in self._search(contents, asked):
            found += part
            if progress is not None:
                progress(len(part))
        return _make_run(items, found)

    @overload
    def rerank(  # type: ignore[overload-overlap]
        self, queries: str, candidates: Sequence[Any], k: int | None = None, **options: Unpack[SearchOptions]
    ) -> list[Hit]: ...
    @overload
    def rerank(
        self, queries: QueriesLike, candidates: Run, k: int | None = None, **options: Unpack[SearchOptions]
    ) -> Run: ...
    @overload
    def rerank(
        self,
        queries: Sequence[str],
        candidates: Sequence[Any],
        k: int | None = None,
        **options: Unpack[SearchOptions],
    ) -> list[list[Hit]]: ...
    def rerank(
        self, queries: Any, candidates: Any, k: int | None = None, **options: Unpack[SearchOptions]
    ) -> list[Hit] | list[list[Hit]] | Run:
        """Rank documents of the index, given by ids, hits or a `Run`, see `irkit.Retriever.rerank`.

        ``fuse``, ``progress`` (of a run) and the options of a search are taken. ``interaction`` and
        ``teacher`` are refused, because the server scores; its search ranks again by its models.
        """
        given: dict[str, Any] = dict(options)
        progress, fuse = given.pop("progress", None), given.pop("fuse", None)
        check_functions("reranking", progress=progress)
        refused = [name for name in ("interaction", "teacher") if given.pop(name, None) is not None]
        if refused:
            raise BadValueError(f"reranking: a Client takes no {refused[0]}, because the server scores")
        given |= {"k": k} | ({} if fuse is None else {"fuse": fuse})
        if isinstance(candidates, Run):
            items = queries_of_run(candidates, queries)
            if lone := [query.id for query in items if query.vector is not None]:
                raise BadValueError(
                    f"reranking: query {brief(lone[0])} is a vector, and a Client sends texts; rerank with a "
                    "Retriever"
                )
            found = list[list[Hit]]()
            lists = [candidates.columns(query.id)[0] for query in items]
            for part in self._rerank([query.text for query in items], lists, {**given, "fields": ["id"]}):
                found += part
                if progress is not None:
                    progress(len(part))
            return _make_run(items, found)
        single = isinstance(queries, str)
        texts = [queries] if single else list(queries)
        ids = parse_id_lists([candidates] if single else candidates, len(texts))
        found = [line for part in self._rerank(texts, ids, given) for line in part]
        return found[0] if single else found

    def _rerank(
        self, texts: list[str], ids: list[list[str]], options: Mapping[str, Any]
    ) -> Iterator[list[list[Hit]]]:
        """Yield the hits of some queries at a time."""
        body = {name: plain(value) for name, value in options.items()}
        step = max(1, min(_TOGETHER, _HITS // max(1, *map(len, ids), 1)))
        for start in range(0, len(texts), step):
            part = slice(start, start + step)
            yield self._hits("rerank", {**body, "queries": texts[part], "ids": ids[part]})

    def explain(self, query: str | Mapping[str, float], document: str | Document) -> Explanation:
        """Explain the score of a document, given by its id or as a `Document`."""
        target: dict[str, Any] = {"id": document}
        if isinstance(document, Document):
            target = {"document": to_record(document)}
        elif not isinstance(document, str):
            raise BadTypeError(f"explain: got {brief(document)}; expected an id or a Document")
        answer = self.transport.ask("POST", f"{self._route}/explain", {"query": query, **target})
        return to_explanation(answer)

    def facets(self, key: str, filter: Filter | None = None, k: int = 10) -> list[tuple[JSON, int]]:
        """Return the ``k`` most frequent values of a key, see `irkit.Retriever.facets`."""
        body = {"keys": [key], "filter": plain_filter(filter), "k": k}
        counts = self.transport.ask("POST", f"{self._route}/facets", body)["facets"][key]
        return [(item["value"], item["count"]) for item in counts]

    # ---- documents ----

    @property
    def documents(self) -> ClientDocuments:
        """The documents of the index: ``client.documents["bears"]``, ``"bears" in client.documents``."""
        return ClientDocuments(self._fetch)

    def _fetch(self, ids: Sequence[str]) -> list[Document]:
        found = list[Document]()
        for start in range(0, len(ids), _TOGETHER):
            pairs = urlencode([("id", name) for name in ids[start : start + _TOGETHER]])
            items = self.transport.ask("GET", f"{self._route}/documents?{pairs}")["documents"]
            found += [Document(item["id"], item["text"], item["title"], item["metadata"]) for item in items]
        return found

    def add(self, documents: DocumentsLike) -> None:
        """Add documents, 256 in one step; return when they are stored. See `irkit.Retriever.add`.

        Raises:
            BadValueError: A document has no id; a Client numbers none, because others may add some meanwhile.
        """
        self._send("POST", documents)

    def update(self, documents: DocumentsLike) -> None:
        """Replace documents by others of the same ids, 256 in one step; return when they are stored."""
        self._send("PUT", documents)

    def remove(self, ids: str | Iterable[str]) -> None:
        """Remove documents in one step; return when that is stored."""
        names = [ids] if isinstance(ids, str) else list(ids)
        self.transport.ask("DELETE", f"{self._route}/documents", {"ids": names})

    def _send(self, method: str, documents: DocumentsLike) -> None:
        items = [to_record(document) for document in parse_documents(with_ids(documents))]
        for start in range(0, len(items), _TOGETHER):
            body = {"documents": items[start : start + _TOGETHER]}
            self.transport.ask(method, f"{self._route}/documents", body)

    # ---- what it is ----

    def stats(self) -> dict[str, Any]:
        """Describe the index: kind, number of documents, model, keys of metadata and more."""
        return cast(dict[str, Any], self.transport.ask("GET", self._route))

    def __len__(self) -> int:
        """Return the number of documents that a search can find."""
        return int(self.stats()["documents"])

    def close(self) -> None:
        """Close the connections that no thread uses."""
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._url!r}, {self.index!r})"

    # ---- requests ----

    def _hits(self, route: str, body: dict[str, Any]) -> list[list[Hit]]:
        results = self.transport.ask("POST", f"{self._route}/{route}", body)["results"]
        missing = sorted({name for result in results for name in result.get("missing", ())})
        self._thread.missing = tuple(missing)
        if missing:
            problem = f"searching {self.index}: no answer of {', '.join(missing)}; hits are missing"
            warnings.warn(problem, PartialResultWarning, stacklevel=4)
        return [to_hits(result) for result in results]


class ClientDocuments:
    """Documents of an index on a server, see `Client.documents`."""

    def __init__(self, fetch: Callable[[Sequence[str]], list[Document]]) -> None:
        self._fetch = fetch

    def __getitem__(self, id: str) -> Document:
        """Return the document with an id.

        Raises:
            BadKeyError: The index lacks the document.
        """
        return self.fetch([id])[0]

    def __contains__(self, id: object) -> bool:
        """Return whether there is a document with this id."""
        try:
            return isinstance(id, str) and bool(self._fetch([id]))
        except BadKeyError:
            return False

    def fetch(self, ids: Iterable[str]) -> list[Document]:
        """Return documents by their ids, in this order.

        Raises:
            BadTypeError: The ids are one string.
            BadKeyError: The index lacks one of the documents.
        """
        if isinstance(ids, str):
            raise BadTypeError(f"documents: got {brief(ids)}; expected a list of ids")
        return self._fetch(list(ids))


def _make_run(items: Sequence[Query], found: Sequence[Sequence[Hit]]) -> Run:
    return Run(
        (query.id, [hit.id for hit in line], np.array([hit.score for hit in line], np.float32))
        for query, line in zip(items, found, strict=True)
    )
