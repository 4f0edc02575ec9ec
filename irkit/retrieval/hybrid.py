"""Hybrid search: several retrievers over the same documents, searched as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from irkit.arguments import brief, check_counts
from irkit.data import Document, QueriesLike, parse_queries
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation.fusion import Method, fuse
from irkit.evaluation.run import Run
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.searching import Filter, Hit, parse_strings


class Hybrid:
    """Searches with several retrievers, such as BM25 and a dense model, and fuses their results.

    The retrievers hold the same documents by the same ids. A document that only some of them hold can still
    be found by these; its text comes from the first retriever that holds it.

    Args:
        retrievers: Two or more.
        method: Method of fusion, see `irkit.fuse`.
        weights: Weight of each retriever; by default 1.
        depth: Number of results of each retriever that are fused, at least ``k``.
        rrf_k: Constant of the method ``"rrf"``.

    Raises:
        BadTypeError: An item is not a `Retriever`.
        BadValueError: There are fewer than two retrievers, or an option makes no sense.

    Examples:
        >>> hybrid = Hybrid([Retriever.load("words"), Retriever.load("vectors")])  # doctest: +SKIP
        >>> [hit.id for hit in hybrid.search("hibernation", k=1)]  # doctest: +SKIP
        ['b']
    """

    def __init__(
        self,
        retrievers: Iterable[Retriever],
        method: Method = "rrf",
        *,
        weights: Sequence[float] | None = None,
        depth: int = 100,
        rrf_k: float = 60,
    ) -> None:
        self.retrievers = list(retrievers) if isinstance(retrievers, Iterable) else [retrievers]
        for retriever in self.retrievers:
            if not isinstance(retriever, Retriever):
                raise BadTypeError(
                    f"Hybrid: got {brief(retriever)}, expected retrievers; Retriever.load makes one"
                )
        if len(self.retrievers) < 2:
            raise BadValueError(f"Hybrid: expected two or more retrievers, got {len(self.retrievers)}")
        self.method, self.weights, self.depth, self.rrf_k = method, weights, depth, rrf_k
        check_counts("Hybrid", depth=depth)
        self._fuse([Run()] * len(self.retrievers), 1)  # checks the options

    @overload
    def search(  # type: ignore[overload-overlap]
        self, queries: str, k: int = 10, filter: Filter | None = None
    ) -> list[Hit]: ...
    @overload
    def search(
        self, queries: Sequence[str], k: int = 10, filter: Filter | None = None
    ) -> list[list[Hit]]: ...
    def search(
        self, queries: str | Sequence[str], k: int = 10, filter: Filter | None = None
    ) -> list[Hit] | list[list[Hit]]:
        """Return the ``k`` best documents of every query by fused scores, see `Retriever.search`."""
        texts = parse_strings("searching", queries)
        with contextlib.ExitStack() as stack:
            for retriever in self.retrievers:
                stack.enter_context(retriever.store.snapshot())
            run = self.run({str(number): text for number, text in enumerate(texts)}, k, filter)
            documents = self._documents({result.doc_id for result in run})
        results = [[Hit.of(documents[name], score) for name, score in run[query]] for query in run.query_ids]
        return results[0] if isinstance(queries, str) else results

    def run(self, queries: QueriesLike, k: int = 1000, filter: Filter | None = None) -> Run:
        """Rank documents for many queries, but return only ids and scores, see `Retriever.run`."""
        check_counts("search", k=k)
        items = list(parse_queries(queries))
        if isinstance(filter, Iterator):  # every retriever reads it
            filter = list(filter)
        depth = max(k, self.depth)
        return self._fuse([retriever.run(items, depth, filter) for retriever in self.retrievers], k)

    def __repr__(self) -> str:
        return f"Hybrid({self.retrievers!r}, {self.method!r})"

    def _fuse(self, runs: list[Run], k: int) -> Run:
        return fuse(runs, self.method, k, weights=self.weights, rrf_k=self.rrf_k)

    def _documents(self, ids: set[str]) -> dict[str, Document]:
        by_id: dict[str, Document] = {}
        for retriever in self.retrievers:
            rows = retriever.documents.find([name for name in ids if name not in by_id])
            by_id |= {document.id: document for document in retriever.documents.fetch(rows[rows >= 0])}
        return by_id
