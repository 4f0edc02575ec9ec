"""Score documents for queries by a model, an index or any other `Scorer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from irkit.core.representation import Representation, Several
from irkit.core.scoring import score
from irkit.data import Document, Query
from irkit.errors import BadTypeError, BadValueError
from irkit.index import SeveralIndex
from irkit.model.cross_encoder import check_scorable
from irkit.retrieval.collection import AnyModel, Collection
from irkit.retrieval.fusing import Fuse, compare_several, score_several
from irkit.retrieval.padding import pad_rows
from irkit.retrieval.searching import Rows, find_rows

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
    """Scores documents of an index exactly, by their stored representations; it encodes only the queries."""

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
    fuse: Fuse | None = None,
) -> list[Array]:
    """Score documents of an index by their stored representations.

    Args:
        collection: Model and index.
        contents: Queries as `Collection.content` gives them.
        rows: The documents of each query.
        interaction: Compares the representations instead of `irkit.score`.
        fuse: Weights of several representations, all 1 by default.

    Returns:
        For each query ``(n,)`` float32.
    """
    scores = [_EMPTY for _ in rows]
    if not any(map(len, rows)):
        return scores
    queries = collection.model.encode_representation(contents, "query")
    if interaction is None:
        index = collection.index
        for numbers, padded in pad_rows(rows):
            own = queries[numbers]
            if isinstance(index, SeveralIndex):
                table = score_several(index, cast(Any, own), padded, fuse)
            else:
                table = index.rescore(own, padded)
            for number, line in zip(numbers.tolist(), table, strict=True):
                scores[number] = line[: len(rows[number])]
        return scores
    parts = (collection.index.representations(line) if len(line) else None for line in rows)
    return [_compare(interaction, queries[row : row + 1], part) for row, part in enumerate(parts)]


def score_texts(
    model: AnyModel,
    contents: Sequence[Any],
    documents: Sequence[Sequence[Document]],
    interaction: Interaction | None = None,
    fuse: Fuse | None = None,
) -> list[Array]:
    """Score documents that need not be in an index; each distinct text is encoded once.

    Args:
        model: Encodes queries and documents.
        contents: Queries as the model takes them.
        documents: The documents of each query.
        interaction: Compares the representations instead of `irkit.score`.
        fuse: Weights of several representations, all 1 by default.

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
    if isinstance(queries, Several):
        interaction = partial(compare_several, weights=fuse)
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
