"""Hybrid search: several retrievers over the same documents, searched as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack, cast

from irkit.arguments import brief, check_counts
from irkit.data import Document, QueriesLike, Query, parse_queries
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation.fusion import Method, fuse
from irkit.evaluation.run import Run
from irkit.model.pipeline import chunks
from irkit.retrieval.explanation import Explanation
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.searcher import OtherRetriever, Searcher
from irkit.retrieval.searching import Filter, Hit, parse_strings
from irkit.retrieval.selection import (
    DEEP_HITS,
    DEEPER,
    Array,
    Groups,
    RankOptions,
    SearchOptions,
    Selection,
    check_group_key,
    parse_selection,
)
from irkit.retrieval.windows import Passage, find_passages


class Hybrid(Searcher):
    """Searches with several retrievers, such as BM25 and a dense model, and fuses their results.

    The retrievers hold the same documents by the same ids. A document that only some of them hold can still
    be found by these; its text comes from the first retriever that holds it, and its passage from the first
    that has it in windows.

    ``offset``, ``threshold`` and ``group_by`` of a search apply to the fused ranking. That ranking is made of
    ``depth`` results of each retriever, or of ``offset + k`` if that is more. While groups leave too few
    hits, it is made again of four times as many results.

    Args:
        retrievers: Two or more, including retrievers of `irkit.remote`.
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
        retrievers: Iterable[Retriever | OtherRetriever],
        method: Method = "rrf",
        *,
        weights: Sequence[float] | None = None,
        depth: int = 100,
        rrf_k: float = 60,
    ) -> None:
        self.retrievers = list(retrievers) if isinstance(retrievers, Iterable) else [retrievers]
        for retriever in self.retrievers:
            if not isinstance(retriever, Retriever | OtherRetriever):
                raise BadTypeError(
                    f"Hybrid: got {brief(retriever)}, expected retrievers; Retriever.load makes one"
                )
        if len(self.retrievers) < 2:
            raise BadValueError(f"Hybrid: expected two or more retrievers, got {len(self.retrievers)}")
        self.method, self.weights, self.depth, self.rrf_k = method, weights, depth, rrf_k
        check_counts("Hybrid", depth=depth)
        self._fuse([Run()] * len(self.retrievers), 1)  # checks the options

    def _find(
        self, queries: Any, k: int, filter: Filter | None, options: SearchOptions
    ) -> tuple[list[list[Hit]], bool]:
        selection = parse_selection("search", k, options, SearchOptions)
        texts = parse_strings("searching", queries)
        items = [Query(str(number), text) for number, text in enumerate(texts)]
        with self._snapshot():
            run = self._rank(items, selection, filter)
            ids = {result.doc_id for result in run}
            if selection.fields is not None and selection.fields <= {"id"}:
                documents = {name: Document(name, "") for name in ids}
            else:
                documents = self._documents(ids)
            passages = self._passages(texts, [[name for name, _ in run[query]] for query in run.query_ids])
        results = [
            [
                Hit.of(documents[name], score, selection.fields, best.get(name))
                for name, score in run[query]
                if name in documents  # an engine may have removed one meanwhile
            ]
            for query, best in zip(run.query_ids, passages, strict=True)
        ]
        return results, isinstance(queries, str)

    def run(
        self,
        queries: QueriesLike,
        k: int = 1000,
        filter: Filter | None = None,
        **options: Unpack[RankOptions],
    ) -> Run:
        """Rank documents for many queries, but return only ids and scores, see `search`."""
        selection = parse_selection("search", k, options, RankOptions)
        with self._snapshot():
            return self._rank(list(parse_queries(queries)), selection, filter)

    def explain(
        self, query: str, document: str | Document | Mapping[str, Any] | tuple[str, str]
    ) -> list[Explanation | None]:
        """Explain the score that each retriever gives to a document, see `irkit.Retriever.explain`.

        Args:
            query: A text.
            document: Id of a document; or a `Document`, a record, or a pair of id and text.

        Returns:
            An explanation for each retriever, in their order. None for a retriever that does not hold the
            document, and for one of `irkit.remote`.

        Raises:
            BadTypeError: The query is not a string.
            BadValueError: No retriever can explain it, or vectors were computed elsewhere.
        """
        with self._snapshot():
            explanations = [
                retriever.explain(query, document)
                if isinstance(retriever, Retriever)
                and (not isinstance(document, str) or document in retriever.documents)
                else None
                for retriever in self.retrievers
            ]
        if not any(explanations):
            raise BadValueError(
                f"explaining a score: no index of the Hybrid holds {brief(document)}; expected the id of a "
                "document of one, or a Document"
            )
        return explanations

    def _rank(self, queries: list[Query], selection: Selection, filter: Filter | None) -> Run:
        """Return the fused run; queries for which groups leave too few hits are searched deeper."""
        if isinstance(filter, Iterator):  # every retriever reads it
            filter = list(filter)

        # how documents are grouped, and how deep the first searches go
        def read(ids: list[str]) -> list[Document]:
            by_id = self._documents(set(ids))
            return [by_id.get(name) or Document(name, "") for name in ids]  # an engine may have removed one

        groups = None if selection.group_by is None else Groups(read, selection.group_by)
        chosen: dict[str, tuple[str, list[str], Array]] = {}
        most = max(1, *map(len, self.retrievers))
        left, depth = queries, min(max(selection.stop, self.depth), most)
        # search, fuse and choose; go deeper for queries whose groups leave too few hits
        while left:
            few = []
            size = max(1, DEEP_HITS // (depth * len(self.retrievers)))
            for part in chunks(left, size):
                runs = [retriever.run(part, depth, filter) for retriever in self.retrievers]
                fused = self._fuse(runs, depth * len(runs))
                for query in part:
                    ids, scores = fused.columns(query.id)
                    positions = selection.choose(scores, ids, groups)
                    ended = depth == most or all(len(run.columns(query.id)[0]) < depth for run in runs)
                    ended = ended or groups is None or not len(scores)
                    ended = ended or bool(scores[-1] < selection.threshold)
                    if len(positions) < selection.stop and not ended:
                        few.append(query)
                        continue
                    positions = positions[selection.offset :]
                    chosen[query.id] = query.id, [ids[position] for position in positions], scores[positions]
            left, depth = few, min(DEEPER * depth, most)
        # a key that no document has is an error
        if groups is not None and groups.found_none:
            own = [item.documents for item in self.retrievers if isinstance(item, Retriever)]
            if len(own) == len(self.retrievers):
                check_group_key("search", own, str(selection.group_by))
        return Run(chosen[query.id] for query in queries)

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Show one state of every index."""
        with contextlib.ExitStack() as stack:
            for retriever in self.retrievers:
                if isinstance(retriever, Retriever):
                    stack.enter_context(retriever.store.snapshot())
            yield

    def __repr__(self) -> str:
        return f"Hybrid({self.retrievers!r}, {self.method!r})"

    def _fuse(self, runs: list[Run], k: int) -> Run:
        return fuse(runs, self.method, k, weights=self.weights, rrf_k=self.rrf_k)

    def _passages(self, texts: list[str], id_lists: list[list[str]]) -> list[dict[str, Passage | None]]:
        """Return the best passage of each document by id, of the first retriever that has it in windows."""
        passages: list[dict[str, Passage | None]] = [{} for _ in texts]
        for retriever in self.retrievers:
            if not isinstance(retriever, Retriever) or retriever.index.windows is None:
                continue
            ids, rows = [], []
            for names, best in zip(id_lists, passages, strict=True):
                names = [name for name in names if name not in best]
                known_rows = retriever.documents.find(names)
                ids.append([name for name, row in zip(names, known_rows, strict=True) if row >= 0])
                rows.append(known_rows[known_rows >= 0])
            queries = partial(cast(Any, retriever.model).encode_representation, texts, "query")
            spans = find_passages(retriever.index, queries, rows)
            for best, names, line in zip(passages, ids, spans, strict=True):
                best |= dict(zip(names, line, strict=True))
        return passages

    def _documents(self, ids: set[str]) -> dict[str, Document]:
        by_id: dict[str, Document] = {}
        for retriever in self.retrievers:
            missing = [name for name in ids if name not in by_id]
            if isinstance(retriever, Retriever):
                rows = retriever.documents.find(missing)
                documents = retriever.documents.fetch(rows[rows >= 0])
            else:
                documents = retriever.fetch(missing) if missing else []
            by_id |= {document.id: document for document in documents}
        return by_id
