"""Search an index: parse queries and filters, find rows and scores, make hits or a run of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

import numpy as np

from irkit.arguments import brief, check_functions
from irkit.core.representation import Representation, Sparse
from irkit.data import JSON, Document, QueriesLike, Query, parse_queries
from irkit.encoder_free import Impacts, Vectors
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation.run import Run
from irkit.index import Documents, Hits, Index, SeveralIndex
from irkit.index.array_files import Array
from irkit.retrieval.collection import AnyModel, Collection
from irkit.retrieval.fusing import Fuse, check_fuse, heads_of, search_several
from irkit.retrieval.selection import DEEP_HITS, DEEPER, Groups, Selection, check_group_key
from irkit.retrieval.windows import Passage, find_passages

if TYPE_CHECKING:
    from irkit.encoder_free import RM3

Filter: TypeAlias = Mapping[str, Any] | Iterable[str]
"""Conditions on metadata, where ``"_id"`` stands for the id; or ids."""
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Scores: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Search: TypeAlias = Callable[[Representation, int], Hits]


class PartialResultWarning(UserWarning):
    """Shards gave no answer, so that hits are missing."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A result of a search: a document and its score; a higher score is better.

    Fields that the search was asked to leave out, see `SearchOptions`, are empty.

    Attributes:
        id: Id of the document.
        score: Score of the document.
        text: Its text.
        title: Its title.
        metadata: Its metadata.
        passage: In an index of windows, where the best one is in the text.
    """

    id: str
    score: float
    text: str
    title: str
    metadata: Mapping[str, JSON]
    passage: Passage | None = None

    @classmethod
    def of(
        cls,
        document: Document,
        score: float,
        fields: frozenset[str] | None = None,
        passage: Passage | None = None,
    ) -> Self:
        """Make a hit of a document, of all or of some fields."""
        if fields is None:
            return cls(document.id, score, document.text, document.title, document.metadata, passage)
        metadata = document.metadata
        if "metadata" not in fields:
            metadata = {key: value for key, value in metadata.items() if f"metadata.{key}" in fields}
        text, title = ("text" in fields) * document.text, ("title" in fields) * document.title
        return cls(document.id, score, text, title, metadata, passage)


def find_rows(documents: Documents, ids: str | Iterable[str], operation: str, advice: str) -> Rows:
    """Return the rows ``(n,)`` of documents.

    Raises:
        BadTypeError: An id is not a string.
        BadValueError: The index has no document of an id; the message ends with ``advice``.
    """
    names = parse_strings(operation, ids)
    rows = documents.find(names)
    missing = [name for name, row in zip(names, rows.tolist(), strict=True) if row < 0]
    if missing:
        others = f", nor {len(missing) - 1} more of those given" if len(missing) > 1 else ""
        raise BadValueError(f"{operation}: the index has no document {missing[0]!r}{others}; {advice}")
    return rows


def parse_filter(filter: Filter) -> Mapping[str, Any]:
    """Return conditions for `irkit.index.Documents.filter`.

    Raises:
        BadTypeError: The filter is neither conditions nor ids.
    """
    if isinstance(filter, str) or not isinstance(filter, Iterable):
        raise BadTypeError(
            f"filter: got {brief(filter, 100)}, expected conditions in a dictionary or a list of ids"
        )
    return filter if isinstance(filter, Mapping) else {"_id": list(filter)}


def parse_strings(operation: str, strings: str | Iterable[str]) -> list[str]:
    """Return one string or several as a list.

    Raises:
        BadTypeError: An item is not a string.
    """
    single = isinstance(strings, str | bytes | Mapping) or not isinstance(strings, Iterable)
    items: list[Any] = [strings] if single else list(strings)
    wrong = [item for item in items if not isinstance(item, str)]
    if wrong:
        raise BadTypeError(f"{operation}: got {brief(wrong[0], 100)}, expected a string or several")
    return items


def queries_of_run(run: Run, queries: QueriesLike) -> list[Query]:
    """Return those of ``queries`` that a run has, in the order of the run.

    Raises:
        BadValueError: A query of the run is missing.
    """
    by_id = {query.id: query for query in parse_queries(queries)}
    missing = [query_id for query_id in run.query_ids if query_id not in by_id]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise BadValueError(
            f"reranking: the run has query {missing[0]!r}{others}, whose text is not given; give the queries "
            "it was made of"
        )
    return [by_id[query_id] for query_id in run.query_ids]


def fetch_lists(documents: Documents, rows: Sequence[Rows]) -> list[list[Document]]:
    """Return the documents of several arrays of rows; each document is read once."""
    distinct = np.unique(np.concatenate([*rows, np.empty(0, np.int64)]))
    by_row = dict(zip(distinct.tolist(), documents.fetch(distinct), strict=True))
    return [[by_row[row] for row in line.tolist()] for line in rows]


def _read_hits(
    collection: Collection,
    queries: Representation,
    hits: Hits,
    fields: frozenset[str] | None,
    fuse: Fuse | None,
) -> list[list[Hit]]:
    """Return the hits of each query with all or some fields of their documents; see `SearchOptions`."""
    masks = [line >= 0 for line in hits.rows]
    rows = [line[mask] for line, mask in zip(hits.rows, masks, strict=True)]
    scores = [line[mask] for line, mask in zip(hits.scores, masks, strict=True)]
    return make_hits(collection, lambda: queries, rows, scores, fields, fuse)


def make_hits(
    collection: Collection,
    queries: Callable[[], Representation],
    rows: list[Rows],
    scores: list[Scores],
    fields: frozenset[str] | None = None,
    fuse: Fuse | None = None,
) -> list[list[Hit]]:
    """Make hits from the rows and scores of each query; see `SearchOptions`.

    ``queries`` returns the queries, and is called if the index has passages. ``fuse`` weighs the heads for
    them, where there are several.
    """
    documents, passages = collection.documents, find_passages(collection.index, queries, rows, fuse)
    if fields is not None and fields <= {"id"}:  # the other fields stay on disk
        lists = [[Document(name, "") for name in documents.ids(line)] for line in rows]
    else:
        lists = fetch_lists(documents, rows)
    return [
        [
            Hit.of(document, score, fields, passage)
            for document, score, passage in zip(line, values.tolist(), line_passages, strict=True)
        ]
        for line, values, line_passages in zip(lists, scores, passages, strict=True)
    ]


_QUERIES, _HITS = 1024, 1 << 18  # of queries that are encoded and searched together


def parse_contents(operation: str, model: AnyModel, queries: Any) -> tuple[list[Any], bool]:
    """Return queries as the model takes them, texts or vectors, and whether there was a single one.

    Raises:
        BadTypeError: They are neither texts nor vectors.
    """
    if isinstance(model, Vectors):
        return model.split_queries(queries)
    if isinstance(model, Impacts):
        single = isinstance(queries, Mapping | str) or not isinstance(queries, Iterable)
        return [queries] if single else list(queries), single
    first = queries[:1] if isinstance(queries, list | tuple) else [queries]
    if shapes := [tuple(item.shape) for item in first if hasattr(item, "shape")]:
        raise BadTypeError(
            f"{operation}: got a {type(first[0]).__name__} of shape {shapes[0]}, expected texts, which "
            "the model encodes; vectors (n, dim) go to retriever.index.search(Dense(vectors), k), whose "
            "rows go to retriever.documents.fetch"
        )
    return parse_strings(operation, queries), isinstance(queries, str)


def find_documents(
    collection: Collection,
    queries: Any,
    selection: Selection,
    filter: Filter | None,
    feedback: RM3 | None,
    fuse: Fuse | None,
) -> list[Hit] | list[list[Hit]]:
    """Return the hits of a query, or of each query, see `irkit.Retriever.search`."""
    contents, single = parse_contents("searching", collection.model, queries)
    batches = _find_hits(collection, contents, selection, filter, feedback, fuse)
    lists = [hits for batch in batches for hits in _read_hits(collection, *batch, selection.fields, fuse)]
    return lists[0] if single else lists


def make_run(
    collection: Collection,
    queries: QueriesLike,
    selection: Selection,
    filter: Filter | None,
    feedback: RM3 | None,
    fuse: Fuse | None,
    progress: Callable[[int], object] | None,
) -> Run:
    """Return the run of queries, see `irkit.Retriever.run`."""
    check_functions("search", progress=progress)
    items = list(parse_queries(queries))
    contents = [collection.content(query) for query in items]
    batches = _find_hits(collection, contents, selection, filter, feedback, fuse)
    return _read_run(collection.documents, [query.id for query in items], batches, progress)


def _find_hits(
    collection: Collection,
    contents: list[Any],
    selection: Selection,
    filter: Filter | None,
    feedback: RM3 | None,
    fuse: Fuse | None,
) -> Iterator[tuple[Representation, Hits]]:
    """Yield up to 1,024 queries at a time, with rows and scores, see `irkit.Retriever.search`.

    Raises:
        BadValueError: The filter or ``fuse`` makes no sense, or no document has the key to group by.
    """
    collection.check_current()
    check_fuse("search", fuse, heads_of(collection.index))
    if feedback is not None and not callable(getattr(feedback, "expand", None)):
        raise BadTypeError(f"search: feedback is {brief(feedback)}; expected irkit.encoder_free.RM3 or None")
    index, model, documents = collection.index, collection.model, collection.documents
    allowed = None if filter is None else documents.filter(parse_filter(filter))

    def search(queries: Representation, depth: int) -> Hits:
        return _search(index, queries, depth, allowed, fuse)

    def read(rows: list[int]) -> list[Document]:
        return documents.fetch(np.array(rows))

    groups = None if selection.group_by is None else Groups(read, selection.group_by)
    most = max(1, len(index))
    size = max(1, min(_QUERIES, _HITS // min(selection.stop, most)))
    for start in range(0, len(contents), size):
        queries = model.encode_representation(contents[start : start + size], "query")
        if feedback is not None:
            queries = feedback.expand(index, queries, allowed)
        if groups is None:
            yield queries, _find_page(search, queries, selection, most)
        else:
            yield queries, _find_groups(search, queries, selection, most, groups)
    if groups is not None and groups.found_none:
        check_group_key("search", [documents], str(selection.group_by))


def _search(
    index: Index, queries: Representation, depth: int, allowed: Array | None, fuse: Fuse | None
) -> Hits:
    """Return the best documents of queries; results of several representations are fused."""
    if isinstance(index, SeveralIndex):
        search = partial(_search, allowed=allowed, fuse=None)
        return search_several(index, cast(Any, queries), depth, fuse, search)
    if isinstance(queries, Sparse):
        return _search_terms(index, queries, depth, allowed)
    return index.search(queries, depth, allowed)


def _find_page(search: Search, queries: Representation, selection: Selection, most: int) -> Hits:
    """Return the hits from ``offset`` to ``stop``, without scores below the threshold."""
    hits = search(queries, min(selection.stop, most))
    rows, scores = hits.rows[:, selection.offset :], hits.scores[:, selection.offset :]
    if selection.threshold > -np.inf:
        low = scores.astype(np.float64) < selection.threshold  # float32 would round the threshold
        rows[low], scores[low] = -1, -np.inf
    return Hits(rows, scores)


def _find_groups(
    search: Search, queries: Representation, selection: Selection, most: int, groups: Groups[int]
) -> Hits:
    """Return the hits from ``offset`` to ``stop`` of a ranking without hits beyond ``per_group``.

    Queries with too few hits are searched deeper, see `irkit.retrieval.selection`.

    Args:
        search: Returns the best documents of queries.
        queries: ``n_q`` representations.
        selection: Says which hits.
        most: Number of documents.
        groups: Returns the groups of rows.
    """
    depth = min(selection.stop, most)
    shape = len(queries), max(0, depth - selection.offset)
    result = Hits(np.full(shape, -1), np.full(shape, -np.inf, np.float32))
    left = np.arange(len(queries))
    while len(left):
        few = []
        size = max(1, DEEP_HITS // depth)
        for start in range(0, len(left), size):
            part = left[start : start + size]
            for query, rows, scores in zip(part.tolist(), *search(queries[part], depth), strict=True):
                chosen = selection.choose(scores, rows.tolist(), groups)
                ended = depth == most or rows[-1] < 0 or float(scores[-1]) < selection.threshold
                if len(chosen) < selection.stop and not ended:
                    few.append(query)
                    continue
                chosen = chosen[selection.offset :]
                result.rows[query, : len(chosen)] = rows[chosen]
                result.scores[query, : len(chosen)] = scores[chosen]
        left, depth = np.array(few, np.int64), min(DEEPER * depth, most)
    return result


def _search_terms(index: Index, queries: Sparse, depth: int, allowed: Array | None) -> Hits:
    """Return the best documents that share a term with each query.

    With weights below 0, such documents may rank after documents that share no term, which score 0. Then all
    documents are ranked, one query at a time.
    """
    hits = index.search(queries, depth, allowed)
    with_zero = np.flatnonzero(((hits.scores == 0) & (hits.rows >= 0)).any(1))
    hits = _without_zeros(hits)
    if len(with_zero) and (index.may_be_negative or bool((queries.weights < 0).any())):
        for query in with_zero.tolist():
            ranking = _without_zeros(index.search(queries[query : query + 1], len(index), allowed))
            hits.rows[query], hits.scores[query] = ranking.rows[0, :depth], ranking.scores[0, :depth]
    return hits


def _without_zeros(hits: Hits) -> Hits:
    """Drop hits of score 0: a document that shares no term with a query does not answer it."""
    zeros = hits.scores == 0
    hits.rows[zeros], hits.scores[zeros] = -1, -np.inf
    order = np.argsort(-hits.scores, axis=1, kind="stable")  # they rank after negative scores
    return Hits(np.take_along_axis(hits.rows, order, axis=1), np.take_along_axis(hits.scores, order, axis=1))


def _read_run(
    documents: Documents,
    query_ids: Sequence[str],
    batches: Iterable[tuple[Representation, Hits]],
    progress: Callable[[int], object] | None,
) -> Run:
    """Return the run of the queries, whose hits come in batches."""
    next_id = iter(query_ids).__next__

    def rankings() -> Iterator[tuple[str, list[str], Any]]:
        for _, hits in batches:
            rows, positions = np.unique(hits.rows, return_inverse=True)  # reads each id once
            missing = int(np.searchsorted(rows, 0))  # 1 if -1, no hit, is among them
            ids = np.array([""] * missing + documents.ids(rows[missing:]), dtype=object)
            counts = (hits.rows >= 0).sum(1)  # hits come before -1
            for line, scores, count in zip(positions, hits.scores, counts, strict=True):
                yield next_id(), ids[line[:count]].tolist(), scores[:count]
            if progress is not None:
                progress(len(counts))

    return Run(rankings())
