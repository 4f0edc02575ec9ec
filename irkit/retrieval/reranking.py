"""Rerank: rank given candidates by exact scores, as the second stage after any first one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np

from irkit.arguments import brief, check_functions, is_count
from irkit.core.late_interaction import mean_maxsim
from irkit.data import Document, Query
from irkit.data.parsing import QueriesLike, parse_documents, parse_queries
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation.run import Run
from irkit.retrieval.collection import Collection, format_model
from irkit.retrieval.scorer import Array, Interaction, Scorer, score_checked, score_rows, score_texts
from irkit.retrieval.searching import Hit, Rows, fetch_lists, find_rows, parse_contents

Candidates: TypeAlias = Iterable[str] | Iterable[Hit] | Mapping[str, Any] | Iterable[Document]
"""Ids of documents of the index, or hits, whose ids count; or id -> text, or documents."""

_QUERIES = 64  # of a run, scored together


class RerankOptions(TypedDict, total=False):
    """The options of `irkit.Retriever.rerank`, described there."""

    interaction: Interaction | None
    teacher: Scorer | None
    progress: Callable[[int], object] | None


def rerank(
    collection: Collection,
    queries: Any,
    candidates: Any,
    k: int | None = None,
    interaction: Interaction | None = None,
    teacher: Scorer | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[Hit] | list[list[Hit]] | Run:
    """Rank candidates in any form by exact scores, see `irkit.Retriever.rerank`."""
    if interaction is not None and teacher is not None:
        raise BadValueError("reranking: an interaction and a teacher; expected one of them at most")
    _check_interaction(collection, interaction)
    if k is not None and not is_count(k):
        raise BadValueError(
            f"reranking: k is {brief(k)}; expected a whole number of 1 or more, or None for all"
        )
    check_functions("reranking", teacher=teacher, progress=progress)
    if isinstance(candidates, Run):
        return _rerank_run(collection, queries, candidates, k, interaction, teacher, progress)

    contents, single = parse_contents("reranking", collection.model, queries)
    lists = _parse_candidates([candidates] if single else candidates, len(contents))
    documents: list[list[Document]]
    if all(isinstance(item, str) for items in lists for item in items):
        rows = [_find_candidates(collection, ids) for ids in lists]
        if teacher is None:  # only the texts of the best are read
            scores = score_rows(collection, contents, rows, interaction)
            orders = [_order(line, k) for line in scores]
            rows = [line[order] for line, order in zip(rows, orders, strict=True)]
            scores = [line[order] for line, order in zip(scores, orders, strict=True)]
        documents = fetch_lists(collection.documents, rows)
    else:
        documents = lists
        if teacher is None:
            scores = score_texts(collection.model, contents, documents, interaction)
    if teacher is not None:
        items = [Query(str(number), text) for number, text in enumerate(contents)]
        scores = score_checked(teacher, items, documents)
    hits = [
        [Hit.of(line[i], float(values[i])) for i in _order(values, k)]
        for line, values in zip(documents, scores, strict=True)
    ]
    return hits[0] if single else hits


def _rerank_run(
    collection: Collection,
    queries: QueriesLike,
    run: Run,
    k: int | None,
    interaction: Interaction | None,
    teacher: Scorer | None,
    progress: Callable[[int], object] | None,
) -> Run:
    by_id = {query.id: query for query in parse_queries(queries)}
    missing = [query_id for query_id in run.query_ids if query_id not in by_id]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise BadValueError(
            f"reranking: the run has query {missing[0]!r}{others}, whose text is not given; give the queries "
            "it was made of"
        )

    def rankings() -> Iterable[tuple[str, list[str], Array]]:
        for start in range(0, len(run), _QUERIES):
            batch = [by_id[query_id] for query_id in run.query_ids[start : start + _QUERIES]]
            rows = [_find_candidates(collection, run.columns(query.id)[0]) for query in batch]
            if teacher is None:
                contents = [collection.content(query) for query in batch]
                scores = score_rows(collection, contents, rows, interaction)
            else:
                scores = score_checked(teacher, batch, fetch_lists(collection.documents, rows))
            for query, line, values in zip(batch, rows, scores, strict=True):
                order = _order(values, k)
                yield query.id, collection.documents.ids(line[order]), values[order]
            if progress is not None:
                progress(len(batch))

    return Run(rankings())


def _order(scores: Array, k: int | None) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the positions of the best ``k`` scores, ties in order, without -inf."""
    order = np.argsort(-scores, kind="stable")[:k]
    return order[scores[order] > -np.inf]


def _find_candidates(collection: Collection, ids: Sequence[str]) -> Rows:
    """Return the rows of documents of the index, each once."""
    advice = "give documents that are not in it as id -> text"
    return find_rows(collection.documents, list(dict.fromkeys(ids)), "reranking", advice)


def _parse_candidates(candidates: Any, n_queries: int) -> list[list[Any]]:
    """Return the candidates of each query: ids if all of them are ids, documents otherwise.

    Raises:
        BadTypeError: Candidates are neither ids nor documents, or some are ids and some documents.
        BadValueError: The numbers of lists and queries differ, a document is malformed, or one query
            has two documents of one id.
    """
    lists = [] if isinstance(candidates, str | Mapping) else list(candidates)
    if len(lists) != n_queries:
        raise BadValueError(
            f"reranking: {n_queries} queries and {len(lists)} lists of candidates; expected one each"
        )
    items = [_list_items(line) for line in lists]
    are_ids = {isinstance(item, str) for line in items for item in line}
    if are_ids <= {True}:
        return items
    if True in are_ids:
        raise BadTypeError("reranking: some candidates are strings, which are ids, and some are documents")
    documents = [list(parse_documents(line)) for line in items]
    for line in documents:
        if len({document.id for document in line}) < len(line):
            raise BadValueError("reranking: two candidates of one query have the same id")
    return documents


def _list_items(candidates: Candidates) -> list[Any]:
    if isinstance(candidates, str) or not isinstance(candidates, Iterable):
        raise BadTypeError(
            f"reranking: candidates are {brief(candidates)}, expected ids in a list, id -> text, or documents"
        )
    items = candidates.items() if isinstance(candidates, Mapping) else candidates
    return [item.id if isinstance(item, Hit) else item for item in items]


def _check_interaction(collection: Collection, interaction: Interaction | None) -> None:
    if interaction is not None and not callable(interaction):
        raise BadTypeError(
            f"reranking: the interaction is {brief(interaction)}; expected a function of two "
            "representations, such as irkit.core.late_interaction.mean_maxsim"
        )
    manifest = collection.store.meta["model"]
    if interaction is mean_maxsim and manifest["similarity"] == "meanmaxsim":
        raise BadValueError(
            "reranking: mean_maxsim of a model that averages already (meanmaxsim); leave the interaction out"
        )
    fingerprint = getattr(interaction, "fingerprint", None)
    if fingerprint not in (None, manifest["fingerprint"]):
        raise BadValueError(
            f"reranking: the interaction was trained with a model of fingerprint {fingerprint[:8]}, the "
            f"index built with {format_model(manifest)}; expected the same"
        )
