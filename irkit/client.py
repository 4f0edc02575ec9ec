"""The `Client`: an index of a server (``irkit serve``), with the methods of a `Retriever`."""

from __future__ import annotations

import http.client
import json
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, Unpack, cast
from urllib.parse import quote, urlencode, urlsplit

import numpy as np

from irkit.arguments import brief, check_flags
from irkit.data import JSON, Document, DocumentsLike, QueriesLike, parse_documents, parse_queries
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.evaluation.run import Run
from irkit.index.filters import as_json
from irkit.retrieval.explanation import Explanation, Match
from irkit.retrieval.fusing import Fuse
from irkit.retrieval.searcher import Searcher
from irkit.retrieval.searching import Filter, Hit, PartialResultWarning
from irkit.retrieval.selection import RankOptions, SearchOptions
from irkit.retrieval.windows import Passage
from irkit.tokenizer import TokenSpan

_TOGETHER = 256  # queries or documents of one request
_ATTEMPTS = 10  # while the server is busy


class Client(Searcher):
    """An index of a server, with the methods of `irkit.Retriever`; any number of threads may use one.

    Args:
        url: Address of the server, such as ``"http://127.0.0.1:8080"``.
        index: Name of the index; by default the only one of the server.
        key: API key, if the server has keys.
        timeout: Seconds to wait for an answer.
        partial_results: Return the hits of other shards, with a `irkit.ray_engine.PartialResultWarning`, if
            one that Ray searches does not answer the server; `missing` names it. By default that is an error.

    Raises:
        BadValueError: The address is not a URL, the server has several indexes and ``name`` is missing, or it
            has none of this name.
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
        self._parts, self._timeout, self._partial = parts, timeout, partial_results
        self._thread = threading.local()
        self._idle: deque[http.client.HTTPConnection] = deque()  # which threads may share
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        names = [item["name"] for item in self._ask("GET", "/indexes")["indexes"]]
        self.close()  # in case that the name is refused
        if index is None and len(names) != 1:
            raise BadValueError(f"Client: {url} has {len(names)} indexes; give the name of one: {names}")
        self.index = names[0] if index is None else index
        if self.index not in names:
            raise BadValueError(f"Client: {url} has no index {brief(index)}; known: {', '.join(names)}")
        self._route = f"/indexes/{quote(self.index, safe='')}"

    # ---- searching ----

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the shards that gave no answer to the last request of this thread."""
        return getattr(self._thread, "missing", ())

    def _find(
        self, queries: Any, k: int, filter: Filter | None, options: SearchOptions
    ) -> tuple[list[list[Hit]], bool]:
        single = isinstance(queries, str)
        items = [queries] if single else [_plain(query) for query in queries]
        lists: list[list[Hit]] = []
        for start in range(0, len(items), _TOGETHER):
            body = {"queries": items[start : start + _TOGETHER], "k": k, "filter": _plain_filter(filter)}
            body |= {"partial": True} if self._partial else {}
            lists += self._hits("search", body | {name: _plain(value) for name, value in options.items()})
        return lists, single

    def run(
        self,
        queries: QueriesLike,
        k: int = 1000,
        filter: Filter | None = None,
        *,
        fuse: Fuse | None = None,
        **options: Unpack[RankOptions],
    ) -> Run:
        """Rank documents for many queries, but return only ids and scores, see `irkit.Retriever.run`."""
        items = list(parse_queries(queries))
        contents = [query.text if query.vector is None else query.vector for query in items]
        with_ids: Any = {**options, "fields": ["id"]}
        lists = self.search(contents, k, filter, fuse=fuse, **with_ids)
        return Run(
            (query.id, [hit.id for hit in line], np.array([hit.score for hit in line], np.float32))
            for query, line in zip(items, lists, strict=True)
        )

    def rerank(
        self, queries: str | Sequence[str], candidates: Sequence[Any], k: int | None = None
    ) -> list[Hit] | list[list[Hit]]:
        """Rank documents of the index, given by ids or hits, see `irkit.Retriever.rerank`."""
        single = isinstance(queries, str)
        lists = [candidates] if single else candidates
        ids = [[item.id if isinstance(item, Hit) else item for item in line] for line in lists]
        reranked = self._hits(
            "rerank", {"queries": [queries] if single else list(queries), "ids": ids, "k": k}
        )
        return reranked[0] if single else reranked

    def explain(self, query: str | Mapping[str, float], document: str | Document) -> Explanation:
        """Explain the score of a document, given by its id or as a `Document`."""
        target: dict[str, Any] = {"id": document}
        if isinstance(document, Document):
            target = {"document": _record(document)}
        elif not isinstance(document, str):
            raise BadTypeError(f"explain: got {brief(document)}; expected an id or a Document")
        answer = self._ask("POST", f"{self._route}/explain", {"query": query, **target})
        return _explanation(answer)

    def facets(self, key: str, filter: Filter | None = None, k: int = 10) -> list[tuple[JSON, int]]:
        """Return the ``k`` most frequent values of a key, see `irkit.Retriever.facets`."""
        body = {"keys": [key], "filter": _plain_filter(filter), "k": k}
        counts = self._ask("POST", f"{self._route}/facets", body)["facets"][key]
        return [(item["value"], item["count"]) for item in counts]

    # ---- documents ----

    def documents(self, ids: Iterable[str]) -> list[Document]:
        """Return documents by their ids."""
        items = self._ask("GET", f"{self._route}/documents?" + urlencode([("id", name) for name in ids]))
        return [
            Document(item["id"], item["text"], item["title"], item["metadata"]) for item in items["documents"]
        ]

    def add(self, documents: DocumentsLike) -> None:
        """Add documents, 256 in one step; return when they are stored. See `irkit.Retriever.add`."""
        self._send("POST", documents)

    def update(self, documents: DocumentsLike) -> None:
        """Replace documents by others of the same ids, 256 in one step; return when they are stored."""
        self._send("PUT", documents)

    def remove(self, ids: str | Iterable[str]) -> None:
        """Remove documents in one step; return when that is stored."""
        names = [ids] if isinstance(ids, str) else list(ids)
        self._ask("DELETE", f"{self._route}/documents", {"ids": names})

    def _send(self, method: str, documents: DocumentsLike) -> None:
        items = [_record(document) for document in parse_documents(documents)]
        for start in range(0, len(items), _TOGETHER):
            self._ask(method, f"{self._route}/documents", {"documents": items[start : start + _TOGETHER]})

    # ---- what it is ----

    def stats(self) -> dict[str, Any]:
        """Describe the index: kind, number of documents, model, keys of metadata and more."""
        return cast(dict[str, Any], self._ask("GET", self._route))

    def __len__(self) -> int:
        """Return the number of documents that a search can find."""
        return int(self.stats()["documents"])

    def close(self) -> None:
        """Close the connections that no thread uses."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._parts.geturl()!r}, {self.index!r})"

    # ---- requests ----

    def _hits(self, route: str, body: dict[str, Any]) -> list[list[Hit]]:
        results = self._ask("POST", f"{self._route}/{route}", body)["results"]
        missing = sorted({name for result in results for name in result.get("missing", ())})
        self._thread.missing = tuple(missing)
        if missing:
            problem = f"searching {self.index}: no answer of {', '.join(missing)}; hits are missing"
            warnings.warn(problem, PartialResultWarning, stacklevel=4)
        names = ("id", "score", "text", "title", "metadata")
        return [
            [
                Hit(**{name: hit[name] for name in names}, passage=_passage(hit.get("passage")))
                for hit in result["hits"]
            ]
            for result in results
        ]

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the JSON of the answer; wait and repeat it while the server is busy.

        Raises:
            BadValueError: The server refuses the request.
            StorageError: The server fails or does not answer.
        """
        content = None if body is None else json.dumps(body).encode()
        for attempt in range(1, _ATTEMPTS + 1):
            status, headers, data = self._exchange(method, self._parts.path.rstrip("/") + path, content)
            if status != 429 or attempt == _ATTEMPTS:
                break
            time.sleep(float(headers.get("retry-after", 1)))
        try:
            answer = json.loads(data)
        except ValueError as error:
            raise StorageError(f"{method} {path}: status {status}, and no JSON; is it irkit?") from error
        if status >= 400:
            problem = answer.get("error", answer) if isinstance(answer, dict) else answer
            kind = StorageError if status >= 500 or status == 429 else BadValueError
            raise kind(f"{method} {path}: {problem}")
        return answer

    def _exchange(self, method: str, path: str, content: bytes | None) -> tuple[int, Any, bytes]:
        """Send a request over an idle connection, or over a new one; the server may have closed idle ones."""
        while True:
            is_old = bool(self._idle)
            connection = self._idle.pop() if is_old else self._connect()
            try:
                connection.request(method, path, content, self._headers)
                response = connection.getresponse()
                answer = response.status, response.headers, response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not (is_old and isinstance(error, ConnectionError)):
                    address = f"{self._parts.scheme}://{self._parts.netloc}{path}"
                    raise StorageError(f"{method} {address}: {error}; is the server up?") from error
            else:
                self._idle.append(connection)
                return answer

    def _connect(self) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(cast(str, self._parts.hostname), self._parts.port, timeout=self._timeout)


def _passage(answer: dict[str, int] | None) -> Passage | None:
    return None if answer is None else Passage(answer["start"], answer["end"])


def _plain(value: Any) -> Any:
    """Convert a value for JSON: arrays and other iterables become lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    is_plain = value is None or isinstance(value, str | int | float | Mapping)
    return value if is_plain else [_plain(item) for item in value]


def _plain_filter(filter: Filter | None) -> Any:
    if filter is None:
        return None
    return json.loads(as_json(filter)) if isinstance(filter, Mapping) else list(filter)


def _explanation(answer: Mapping[str, Any]) -> Explanation:
    matches = tuple(
        Match(
            TokenSpan(**match["query"]),
            TokenSpan(**match["document"]),
            match["score"],
            tuple(match["weights"]) if "weights" in match else None,
        )
        for match in answer["matches"]
    )
    score = float("-inf") if answer["score"] is None else answer["score"]
    parts = {name: _explanation(part) for name, part in answer.get("parts", {}).items()}
    return Explanation(answer["query"], answer["document"], score, matches, parts)


def _record(document: Document) -> dict[str, Any]:
    record = {"id": document.id, "text": document.text, "title": document.title}
    return record | {"metadata": dict(document.metadata), "vector": _plain(document.vector)}
