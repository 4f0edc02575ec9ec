"""The interface of all that can be searched like a `Retriever`: `search` and `run`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

from irkit.data import Document, QueriesLike, Vector
from irkit.evaluation.run import Run
from irkit.retrieval.fusing import Fuse
from irkit.retrieval.searching import Filter, Hit
from irkit.retrieval.selection import RankOptions, SearchOptions

if TYPE_CHECKING:
    from irkit.encoder_free import RM3


class Searcher(ABC):
    """What takes the searches of a `irkit.Retriever` and returns its results.

    `irkit.Hybrid`, `irkit.client.Client` and the retrievers of `irkit.remote` are searchers.
    """

    @overload
    def search(  # type: ignore[overload-overlap]
        self,
        queries: str,
        k: int = 10,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
        fuse: Fuse | None = None,
        **options: Unpack[SearchOptions],
    ) -> list[Hit]: ...
    @overload
    def search(
        self,
        queries: Sequence[str | Vector],
        k: int = 10,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
        fuse: Fuse | None = None,
        **options: Unpack[SearchOptions],
    ) -> list[list[Hit]]: ...
    def search(
        self,
        queries: str | Sequence[str | Vector],
        k: int = 10,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
        fuse: Fuse | None = None,
        **options: Unpack[SearchOptions],
    ) -> list[Hit] | list[list[Hit]]:
        """Return the ``k`` best documents of every query, see `irkit.Retriever.search`.

        Only a `irkit.client.Client` takes ``feedback`` (of an index of BM25) and ``fuse`` (of an index of
        several representations).

        Raises:
            BadTypeError: An option is unknown.
            BadValueError: A number is out of range, or the filter makes no sense.
            StorageError: What is searched does not answer.
        """
        given = {name: value for name, value in (("feedback", feedback), ("fuse", fuse)) if value is not None}
        hits, single = self._find(queries, k, filter, cast(SearchOptions, {**options, **given}))
        return hits[0] if single else hits

    @abstractmethod
    def _find(
        self, queries: Any, k: int, filter: Filter | None, options: SearchOptions
    ) -> tuple[list[list[Hit]], bool]:
        """Return the hits of each query, and whether a single query was given."""

    @abstractmethod
    def run(
        self,
        queries: QueriesLike,
        k: int = 1000,
        filter: Filter | None = None,
        **options: Unpack[RankOptions],
    ) -> Run:
        """Rank documents for many queries, but return only ids and scores, see `irkit.Retriever.run`."""


class OtherRetriever(Searcher):
    """What a `irkit.Hybrid` needs of a retriever whose documents are in another engine."""

    @abstractmethod
    def fetch(self, ids: Sequence[str]) -> list[Document]:
        """Return the documents with these ids, in any order; unknown ids are left out."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of documents."""
