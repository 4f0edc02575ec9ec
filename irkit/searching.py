"""What the index of a `irkit.Retriever` finds for queries: the first stage, in rows and as a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from irkit.arguments import check_counts, shown
from irkit.errors import BadTypeError
from irkit.index import Documents, Hits
from irkit.lexical import Impacts, Vectors
from irkit.lookup import Filter, allowed_rows, given_strings
from irkit.model_choice import AnyModel
from irkit.run import Run

if TYPE_CHECKING:
    from irkit.feedback import RM3
    from irkit.retriever import Retriever

__all__ = ["find_hits", "given_contents", "read_run"]

_QUERIES = 256  # encoded and searched together


def given_contents(operation: str, model: AnyModel, queries: Any) -> tuple[list[Any], bool]:
    """Queries as the model takes them, texts or vectors, and whether it is only one.

    Raises:
        BadTypeError: They are neither.
    """
    if isinstance(model, Vectors):
        return model.given(queries)
    if isinstance(model, Impacts):
        single = isinstance(queries, Mapping | str) or not isinstance(queries, Iterable)
        return [queries] if single else list(queries), single
    some = queries[:1] if isinstance(queries, list | tuple) else [queries]
    if shapes := [tuple(item.shape) for item in some if hasattr(item, "shape")]:
        raise BadTypeError(
            f"{operation}: got a {type(some[0]).__name__} of shape {shapes[0]}, expected texts, which "
            "the model encodes; vectors (n, dim) go to retriever.index.search(Dense(vectors), k), whose "
            "rows go to retriever.documents.fetch"
        )
    return given_strings(operation, queries), isinstance(queries, str)


def find_hits(
    retriever: Retriever, contents: list[Any], k: int, filter: Filter | None, feedback: RM3 | None
) -> Iterator[Hits]:
    """Rows and scores of some queries at a time, see `Retriever.search`.

    Raises:
        BadValueError: ``k`` is below 1, or the filter makes no sense.
    """
    check_counts("search", k=k)
    if feedback is not None and not callable(getattr(feedback, "expand", None)):
        raise BadTypeError(f"search: feedback is {shown(feedback)}; expected irkit.feedback.RM3 or None")
    k = min(int(k), max(1, len(retriever.index)))
    allowed = None if filter is None else allowed_rows(retriever.documents, filter)
    for start in range(0, len(contents), _QUERIES):
        queries = retriever.model.represent(contents[start : start + _QUERIES], "query")
        if feedback is not None:
            queries = feedback.expand(retriever.index, queries, allowed)
        hits = retriever.index.search(queries, k, allowed)
        yield _without_zeros(hits) if retriever.model.kind == "sparse" else hits


def _without_zeros(hits: Hits) -> Hits:
    """Who shares no term with a query is no answer to it."""
    nothing = hits.scores == 0
    hits.rows[nothing], hits.scores[nothing] = -1, -np.inf
    order = np.argsort(-hits.scores, axis=1, kind="stable")  # scores below 0 come before them
    return Hits(np.take_along_axis(hits.rows, order, axis=1), np.take_along_axis(hits.scores, order, axis=1))


def read_run(
    documents: Documents,
    names: Sequence[str],
    found: Iterable[Hits],
    progress: Callable[[int], object] | None = None,
) -> Run:
    """The run of queries of these names, from what was found for some of them at a time."""
    name = iter(names)

    def rankings() -> Iterator[tuple[str, list[str], Any]]:
        for hits in found:
            rows, place = np.unique(hits.rows, return_inverse=True)  # each id is read once
            none = int(np.searchsorted(rows, 0))  # 1 if -1, no hit, is among them
            ids = np.array([""] * none + documents.ids(rows[none:]), dtype=object)
            counts = (hits.rows >= 0).sum(1)  # they come first
            for line, scores, count in zip(place, hits.scores, counts, strict=True):
                yield next(name), ids[line[:count]].tolist(), scores[:count]
            if progress is not None:
                progress(len(counts))

    return Run(rankings())
