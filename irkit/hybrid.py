"""Hybrid search: several retrievers over the same documents, asked as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from irkit.arguments import check_counts, shown
from irkit.data import Document
from irkit.data.given import Queries, given_queries
from irkit.errors import BadTypeError, BadValueError
from irkit.fusion import Method, fuse
from irkit.lookup import Filter, Hit, given_strings
from irkit.retriever import Retriever
from irkit.run import Run

__all__ = ["Hybrid"]


class Hybrid:
    """Searches with several retrievers, such as one of BM25 and one of vectors, and fuses what they find.

    The retrievers hold the same documents under the same ids; a document that only some of them hold is found
    by those, and its text is that of the first that holds it.

    Args:
        retrievers: Two or more.
        method: How their results are fused, see `irkit.fuse`.
        weights: Of each retriever; by default 1.
        depth: Results that each gives, or as many as are asked for if that is more.
        rrf_k: Of the method ``"rrf"``.

    Raises:
        BadTypeError: One is no `Retriever`.
        BadValueError: There are fewer than two, or an option makes no sense.

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
                    f"Hybrid: got {shown(retriever)}, expected retrievers; Retriever.load makes one"
                )
        if len(self.retrievers) < 2:
            raise BadValueError(f"Hybrid: expected two or more retrievers, got {len(self.retrievers)}")
        self.method, self.weights, self.depth, self.rrf_k = method, weights, depth, rrf_k
        check_counts("Hybrid", depth=depth)
        self._fuse([Run()] * len(self.retrievers), 1)  # what makes no sense is told now

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
        """The ``k`` best documents of every query, with fused scores; otherwise as `Retriever.search`."""
        texts = given_strings("searching", queries)
        with contextlib.ExitStack() as stack:
            for retriever in self.retrievers:
                stack.enter_context(retriever.store.pinned())
            run = self.run({str(number): text for number, text in enumerate(texts)}, k, filter)
            documents = self._documents({result.doc_id for result in run})
        results = [[Hit.of(documents[name], score) for name, score in run[query]] for query in run.query_ids]
        return results[0] if isinstance(queries, str) else results

    def run(self, queries: Queries, k: int = 1000, filter: Filter | None = None) -> Run:
        """Rank documents for many queries: as `search`, but ids and scores only; see `Retriever.run`."""
        check_counts("search", k=k)
        named = list(given_queries(queries))
        if isinstance(filter, Iterator):  # is read by each
            filter = list(filter)
        depth = max(k, self.depth)
        return self._fuse([retriever.run(named, depth, filter) for retriever in self.retrievers], k)

    def __repr__(self) -> str:
        return f"Hybrid({self.retrievers!r}, {self.method!r})"

    def _fuse(self, runs: list[Run], k: int) -> Run:
        return fuse(runs, self.method, k, weights=self.weights, rrf_k=self.rrf_k)

    def _documents(self, ids: set[str]) -> dict[str, Document]:
        found: dict[str, Document] = {}
        for retriever in self.retrievers:
            rows = retriever.documents.find([name for name in ids if name not in found])
            found |= {document.id: document for document in retriever.documents.fetch(rows[rows >= 0])}
        return found
