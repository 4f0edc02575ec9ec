"""Search an index: parse queries, find rows and scores, make a run of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from irkit.arguments import brief, check_counts
from irkit.encoder_free import Impacts, Vectors
from irkit.errors import BadTypeError
from irkit.evaluation.run import Run
from irkit.index import Documents, Hits
from irkit.retrieval.collection import Collection
from irkit.retrieval.hits import Filter, allowed_rows, parse_strings
from irkit.retrieval.model_identity import AnyModel

if TYPE_CHECKING:
    from irkit.encoder_free import RM3

_QUERIES = 256  # encoded and searched together


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


def find_hits(
    collection: Collection, contents: list[Any], k: int, filter: Filter | None, feedback: RM3 | None
) -> Iterator[Hits]:
    """Yield rows and scores for 256 queries at a time, see `irkit.Retriever.search`.

    Raises:
        BadValueError: ``k`` is below 1, or the filter makes no sense.
    """
    collection.check_current()
    check_counts("search", k=k)
    if feedback is not None and not callable(getattr(feedback, "expand", None)):
        raise BadTypeError(f"search: feedback is {brief(feedback)}; expected irkit.encoder_free.RM3 or None")
    index, model = collection.index, collection.model
    k = min(int(k), max(1, len(index)))
    allowed = None if filter is None else allowed_rows(collection.documents, filter)
    for start in range(0, len(contents), _QUERIES):
        queries = model.encode_representation(contents[start : start + _QUERIES], "query")
        if feedback is not None:
            queries = feedback.expand(index, queries, allowed)
        hits = index.search(queries, k, allowed)
        yield _without_zeros(hits) if model.kind == "sparse" else hits


def _without_zeros(hits: Hits) -> Hits:
    """Drop hits of score 0: a document that shares no term with a query does not answer it."""
    zeros = hits.scores == 0
    hits.rows[zeros], hits.scores[zeros] = -1, -np.inf
    order = np.argsort(-hits.scores, axis=1, kind="stable")  # move them behind negative scores
    return Hits(np.take_along_axis(hits.rows, order, axis=1), np.take_along_axis(hits.scores, order, axis=1))


def read_run(
    documents: Documents,
    query_ids: Sequence[str],
    batches: Iterable[Hits],
    progress: Callable[[int], object] | None = None,
) -> Run:
    """Return the run of the queries, whose hits come in batches."""
    next_id = iter(query_ids).__next__

    def rankings() -> Iterator[tuple[str, list[str], Any]]:
        for hits in batches:
            rows, positions = np.unique(hits.rows, return_inverse=True)  # reads each id once
            missing = int(np.searchsorted(rows, 0))  # 1 if -1, no hit, is among them
            ids = np.array([""] * missing + documents.ids(rows[missing:]), dtype=object)
            counts = (hits.rows >= 0).sum(1)  # hits come before -1
            for line, scores, count in zip(positions, hits.scores, counts, strict=True):
                yield next_id(), ids[line[:count]].tolist(), scores[:count]
            if progress is not None:
                progress(len(counts))

    return Run(rankings())
