"""Score documents for queries by a model, an index or any other `Scorer`; and rerank by such scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor

from irkit.arguments import brief, check_functions, is_count
from irkit.core.late_interaction import mean_maxsim
from irkit.core.representation import Representation
from irkit.core.scoring import score
from irkit.data import Document, QueriesLike, Query, parse_documents, parse_queries
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation.run import Run
from irkit.model.cross_encoder import check_scorable
from irkit.retrieval.collection import AnyModel, Collection, format_model
from irkit.retrieval.searching import Hit, Rows, fetch_lists, find_rows, parse_contents

Array: TypeAlias = np.ndarray[Any, Any]
Interaction: TypeAlias = Callable[[Any, Any], Tensor]
"""Compute ``(n_q, n_d)`` scores of two representations, such as `irkit.core.late_interaction.mean_maxsim`."""

_TOGETHER = 16  # whose documents a ModelScorer encodes together
_EMPTY = np.empty(0, np.float32)


class Scorer(Protocol):
    """Scores documents for queries; higher is better. A `irkit.model.cross_encoder.CrossEncoder` is one."""

    def __call__(self, queries: Sequence[Query], documents: Sequence[Sequence[Document]]) -> list[Array]:
        """Score the documents of each query.

        Args:
            queries: Ids and texts.
            documents: The documents of each query.

        Returns:
            For each query one float per document, in their order.
        """
        ...


class IndexScorer:
    """Scores documents of an index exactly, by what is stored of them; it encodes only the queries."""

    def __init__(self, collection: Collection) -> None:
        self.collection = collection

    def __call__(self, queries: Sequence[Query], documents: Sequence[Sequence[Document]]) -> list[Array]:
        """Score documents by their ids, see `Scorer`; their texts are not read.

        Raises:
            BadValueError: The index has no document of an id.
        """
        check_scorable(queries, documents)
        advice = "index the collection that the examples are of, or take a model as teacher"
        ids = ([document.id for document in line] for line in documents)
        rows = [find_rows(self.collection.documents, line, "scoring", advice) for line in ids]
        contents = [self.collection.content(query) for query in queries]
        return score_rows(self.collection, contents, rows)


class ModelScorer:
    """Scores texts by a retriever model; it encodes the documents of 16 queries at a time."""

    def __init__(self, model: AnyModel) -> None:
        self.model = model

    def __call__(self, queries: Sequence[Query], documents: Sequence[Sequence[Document]]) -> list[Array]:
        """See `Scorer`."""
        check_scorable(queries, documents)
        scores: list[Array] = []
        for start in range(0, len(queries), _TOGETHER):
            span = slice(start, start + _TOGETHER)
            scores += score_texts(self.model, [query.text for query in queries[span]], documents[span])
        return scores


def score_rows(
    collection: Collection,
    contents: Sequence[Any],
    rows: Sequence[Rows],
    interaction: Interaction | None = None,
) -> list[Array]:
    """Score documents of an index by what is stored of them.

    Args:
        collection: Model and index.
        contents: Queries as `Collection.content` gives them.
        rows: The documents of each query.
        interaction: Compares the representations instead of `irkit.score`.

    Returns:
        For each query ``(n,)`` float32.
    """
    lengths = [len(line) for line in rows]
    if not any(lengths):
        return [_EMPTY for _ in rows]
    queries = collection.model.encode_representation(contents, "query")
    if interaction is None:
        padded = np.full((len(rows), max(lengths)), -1, np.int64)
        padded[np.arange(max(lengths)) < np.array(lengths)[:, None]] = np.concatenate(rows)
        table = collection.index.rescore(queries, padded)
        return [line[:length] for line, length in zip(table, lengths, strict=True)]
    parts = (collection.index.representations(line) if len(line) else None for line in rows)
    return [_compare(interaction, queries[row : row + 1], part) for row, part in enumerate(parts)]


def score_texts(
    model: AnyModel,
    contents: Sequence[Any],
    documents: Sequence[Sequence[Document]],
    interaction: Interaction | None = None,
) -> list[Array]:
    """Score documents that need not be in an index; each distinct text is encoded once.

    Args:
        model: Encodes queries and documents.
        contents: Queries as the model takes them.
        documents: The documents of each query.
        interaction: Compares the representations instead of `irkit.score`.

    Returns:
        For each query ``(n,)`` float32.
    """
    positions: dict[str, int] = {}
    for document in chain.from_iterable(documents):
        positions.setdefault(document.full_text, len(positions))
    if not positions:
        return [_EMPTY for _ in documents]
    queries = model.encode_representation(contents, "query")
    encoded = model.encode_representation(list(positions), "document")
    rows = ([positions[document.full_text] for document in line] for line in documents)
    parts = (encoded[line] if line else None for line in rows)
    return [_compare(interaction or score, queries[row : row + 1], part) for row, part in enumerate(parts)]


def score_checked(
    scorer: Scorer, queries: Sequence[Query], documents: Sequence[Sequence[Document]]
) -> list[Array]:
    """Call a scorer and check what it returns: for each query ``(n,)`` finite float32.

    Raises:
        BadValueError: The numbers of scores do not match, or a score is not finite.
    """
    if not queries:
        return []
    scores = [np.asarray(line, np.float32) for line in scorer(queries, documents)]
    if [line.shape for line in scores] != [(len(line),) for line in documents]:
        raise BadValueError(
            f"scoring: the teacher gave scores of shapes {[line.shape for line in scores[:3]]} ...; expected "
            f"{[(len(line),) for line in documents[:3]]} ..., one a document"
        )
    for query, candidates, line in zip(queries, documents, scores, strict=True):
        if not np.isfinite(line).all():
            worst = int(np.isfinite(line).argmin())
            raise BadValueError(
                f"scoring: the teacher gave {line[worst]} for query {query.id!r} and document "
                f"{candidates[worst].id!r}; expected a finite number. Has the document no text?"
            )
    return scores


@torch.inference_mode()
def _compare(interaction: Interaction, query: Representation, documents: Representation | None) -> Array:
    if documents is None:
        return _EMPTY
    scores = interaction(query, documents)
    if not isinstance(scores, Tensor) or scores.shape != (1, len(documents)):
        result = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise BadTypeError(
            f"reranking: the interaction gave {result} for 1 query and {len(documents)} documents; "
            f"expected a tensor (1, {len(documents)})"
        )
    if scores.isnan().any():
        raise BadValueError("reranking: the interaction gave NaN")
    return scores[0].to("cpu", torch.float32).numpy()


Candidates: TypeAlias = Iterable[str] | Iterable[Hit] | Mapping[str, Any] | Iterable[Document]
"""Ids of documents of the index, or hits, whose ids count; or id -> text, or documents."""

_RUN_QUERIES = 64  # of a run, scored together


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
    # every query of the run needs its text
    by_id = {query.id: query for query in parse_queries(queries)}
    missing = [query_id for query_id in run.query_ids if query_id not in by_id]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise BadValueError(
            f"reranking: the run has query {missing[0]!r}{others}, whose text is not given; give the queries "
            "it was made of"
        )

    # score a batch of queries at a time
    def rankings() -> Iterable[tuple[str, list[str], Array]]:
        for start in range(0, len(run), _RUN_QUERIES):
            batch = [by_id[query_id] for query_id in run.query_ids[start : start + _RUN_QUERIES]]
            rows = [_find_candidates(collection, run.columns(query.id)[0]) for query in batch]
            if teacher is None:
                contents = [collection.content(query) for query in batch]
                scores = score_rows(collection, contents, rows, interaction)
            else:
                scores = score_checked(teacher, batch, fetch_lists(collection.documents, rows))
            # order the documents of each query
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
