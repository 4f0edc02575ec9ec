"""Exact scores of given candidates: the second stage after any first one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from irkit.arguments import check_functions, is_count, shown
from irkit.data import Document, Query
from irkit.data.given import Queries, given_documents, given_queries
from irkit.errors import BadTypeError, BadValueError
from irkit.index import Hits
from irkit.late_interaction import mean_maxsim
from irkit.lookup import Hit, find_rows, read_hits
from irkit.model_choice import name_model
from irkit.representation import Representation
from irkit.run import Run
from irkit.scoring import score
from irkit.searching import given_contents

if TYPE_CHECKING:
    from irkit.model import Model
    from irkit.retriever import Retriever
    from irkit.training.teachers import Teacher

__all__ = [
    "Candidates",
    "Interaction",
    "RerankOptions",
    "given_candidates",
    "rerank",
    "rerank_ids",
    "rerank_run",
    "rerank_taught",
    "rerank_texts",
    "stored_documents",
]

Candidates: TypeAlias = Iterable[str] | Iterable[Hit] | Mapping[str, Any] | Iterable[Document]
"""Ids of documents of the index, or hits, whose ids count; or id -> text, or documents."""
Interaction: TypeAlias = Callable[[Any, Any], Tensor]
"""``(n_q, n_d)`` scores of two representations, as `irkit.score` and those of `irkit.late_interaction`."""

Array: TypeAlias = np.ndarray[Any, Any]

_QUERIES = 64  # encoded together
_ADVICE = "give documents that are not in it as id -> text"


class RerankOptions(TypedDict, total=False):
    """The options of `Retriever.rerank`, described there."""

    interaction: Interaction | None
    teacher: Teacher | None
    progress: Callable[[int], object] | None


def rerank(
    retriever: Retriever,
    queries: Any,
    candidates: Any,
    k: int | None = None,
    interaction: Interaction | None = None,
    teacher: Teacher | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[Hit] | list[list[Hit]] | Run:
    """See `Retriever.rerank`: candidates of whatever form, by the scores of the model or of a teacher."""
    if interaction is not None and teacher is not None:
        raise BadValueError("reranking: an interaction and a teacher; expected one of them at most")
    _check_interaction(retriever, interaction)
    _check_k(k)
    check_functions("reranking", teacher=teacher, progress=progress)
    if isinstance(candidates, Run):
        return rerank_run(retriever, queries, candidates, k, interaction, teacher, progress)
    texts, single = given_contents("reranking", retriever.model, queries)
    given = given_candidates([candidates] if single else candidates, len(texts))
    by_id = all(isinstance(item, str) for some in given for item in some)
    if by_id and teacher is None:
        found = rerank_ids(retriever, texts, cast(Any, given), k, interaction)
        hits = read_hits(retriever.documents, found)
        return hits[0] if single else hits
    documents = (
        [stored_documents(retriever, some) for some in cast(Any, given)] if by_id else cast(Any, given)
    )
    if teacher is None:
        ranked = rerank_texts(cast("Model", retriever.model), texts, documents, k, interaction)
    else:
        asked = [Query(str(number), text) for number, text in enumerate(texts)]
        ranked = rerank_taught(teacher, asked, documents, k)
    hits = [[Hit.of(document, value) for document, value in some] for some in ranked]
    return hits[0] if single else hits


def given_candidates(
    candidates: Sequence[Candidates], queries: int
) -> list[list[str]] | list[list[Document]]:
    """The candidates of each query: ids, if all of them are, else documents.

    Raises:
        BadTypeError: Candidates are neither, or some are ids and some documents.
        BadValueError: There are not as many lists as queries, a document is malformed, or an id comes with
            two texts.
    """
    lists = [] if isinstance(candidates, str | Mapping) else list(candidates)
    if len(lists) != queries:
        raise BadValueError(
            f"reranking: {queries} queries and {len(lists)} lists of candidates; expected one each"
        )
    items = [_items(some) for some in lists]
    if all(isinstance(item, str) for some in items for item in some):
        return items
    if any(isinstance(item, str) for some in items for item in some):
        raise BadTypeError("reranking: some candidates are strings, which are ids, and some are documents")
    documents = [list(given_documents(some)) for some in items]
    for some in documents:
        if len({document.id for document in some}) < len(some):
            raise BadValueError("reranking: two candidates of one query have the same id")
    return documents


def _items(candidates: Candidates) -> list[Any]:
    if isinstance(candidates, str) or not isinstance(candidates, Iterable):
        raise BadTypeError(
            f"reranking: candidates are {shown(candidates)}, expected ids in a list, id -> text, or documents"
        )
    items = candidates.items() if isinstance(candidates, Mapping) else candidates
    return [item.id if isinstance(item, Hit) else item for item in items]


def rerank_run(
    retriever: Retriever,
    queries: Queries,
    run: Run,
    k: int | None = None,
    interaction: Interaction | None = None,
    teacher: Teacher | None = None,
    progress: Callable[[int], object] | None = None,
) -> Run:
    """See `Retriever.rerank`: documents of a run, by the scores of the model or of a teacher."""
    asked = {query.id: query for query in given_queries(queries)}
    names = run.query_ids
    missing = [name for name in names if name not in asked]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise BadValueError(
            f"reranking: the run has query {missing[0]!r}{others}, whose text is not given; give the queries "
            "it was made of"
        )

    def rankings() -> Iterable[tuple[str, list[str], Array]]:
        for start in range(0, len(names), _QUERIES):
            some = names[start : start + _QUERIES]
            ids = [[document for document, _ in run[name]] for name in some]
            if teacher is not None:
                documents = [stored_documents(retriever, each) for each in ids]
                ranked = rerank_taught(teacher, [asked[name] for name in some], documents, k)
                for name, line in zip(some, ranked, strict=True):
                    yield name, [document.id for document, _ in line], np.array([value for _, value in line])
            else:
                contents = [retriever.content(asked[name]) for name in some]
                found = rerank_ids(retriever, contents, ids, k, interaction)
                for name, rows, scores in zip(some, found.rows, found.scores, strict=True):
                    yield name, retriever.documents.ids(rows[rows >= 0]), scores[rows >= 0]
            if progress is not None:
                progress(len(some))

    return Run(rankings())


def rerank_ids(
    retriever: Retriever,
    queries: Sequence[str],
    candidates: Sequence[Sequence[str]],
    k: int | None = None,
    interaction: Interaction | None = None,
) -> Hits:
    """Score documents of the index, from what is stored of them.

    Args:
        retriever: Model and index.
        queries: Texts.
        candidates: Ids of each.
        k: Results of each query, at most; None is all.
        interaction: Instead of `irkit.score`.

    Returns:
        Rows and scores, ``(n_q, k)``, best first, ties in the order of the candidates.

    Raises:
        BadValueError: There is no document of an id, or ``k`` is below 1.
    """
    _check_k(k)
    lines = [_rows(retriever, ids) for ids in candidates]
    rows = np.full((len(lines), max(map(len, lines), default=0)), -1, np.int64)
    for place, line in enumerate(lines):
        rows[place, : len(line)] = line
    if not rows.size:
        return Hits(rows, np.empty(rows.shape, np.float32))
    encoded = retriever.model.represent(queries, "query")
    if interaction is None:
        scores = retriever.index.rescore(encoded, rows)
    else:
        scores = np.full(rows.shape, -np.inf, np.float32)
        for place, line in enumerate(lines):
            if len(line):
                documents = retriever.index.representations(line)
                scores[place, : len(line)] = _interact(interaction, encoded[place : place + 1], documents)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    rows, scores = np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)
    return Hits(np.where(scores > -np.inf, rows, -1), scores)


def stored_documents(retriever: Retriever, ids: Sequence[str]) -> list[Document]:
    """Documents of the index, each once.

    Raises:
        BadValueError: There is no document of an id.
    """
    return retriever.documents.fetch(_rows(retriever, ids))


def _rows(retriever: Retriever, ids: Sequence[str]) -> Array:
    return find_rows(retriever.documents, list(dict.fromkeys(ids)), "reranking", _ADVICE)


def rerank_taught(
    teacher: Teacher,
    queries: Sequence[Query],
    candidates: Sequence[Sequence[Document]],
    k: int | None = None,
) -> list[list[tuple[Document, float]]]:
    """Score documents by a teacher, such as a cross-encoder; otherwise as `rerank_texts`.

    Raises:
        BadValueError: ``k`` is below 1, or the teacher gives numbers that do not match or are not finite.
    """
    from irkit.training.teachers import score_all

    _check_k(k)
    scores = score_all(teacher, queries, candidates) if queries else []
    return [
        [(some[i], float(line[i])) for i in np.argsort(-line, kind="stable")[:k]]
        for some, line in zip(candidates, scores, strict=True)
    ]


def rerank_texts(
    model: Model,
    queries: Sequence[str],
    candidates: Sequence[Sequence[Document]],
    k: int | None = None,
    interaction: Interaction | None = None,
) -> list[list[tuple[Document, float]]]:
    """Score documents that need not be in an index; otherwise as `rerank_ids`.

    Raises:
        BadValueError: ``k`` is below 1.
    """
    _check_k(k)
    places: dict[str, int] = {}  # each text is encoded once
    for document in chain.from_iterable(candidates):
        places.setdefault(document.full_text, len(places))
    if not places:
        return [[] for _ in candidates]
    encoded, documents = model.represent(queries, "query"), model.represent(list(places), "document")
    results = []
    for number, some in enumerate(candidates):
        chosen = documents[[places[document.full_text] for document in some]]
        scores = _interact(interaction or score, encoded[number : number + 1], chosen)
        order = np.argsort(-scores, kind="stable")[:k]
        results.append([(some[i], float(scores[i])) for i in order if scores[i] > -np.inf])
    return results


def _check_interaction(retriever: Retriever, interaction: Interaction | None) -> None:
    if interaction is not None and not callable(interaction):
        raise BadTypeError(
            f"reranking: the interaction is {shown(interaction)}; expected a function of two "
            "representations, such as irkit.late_interaction.mean_maxsim"
        )
    about = retriever.store.meta["model"]
    if interaction is mean_maxsim and about["similarity"] == "meanmaxsim":
        raise BadValueError(
            "reranking: mean_maxsim of a model that averages already (meanmaxsim); leave the interaction out"
        )
    trained = getattr(interaction, "fingerprint", None)
    if trained not in (None, about["fingerprint"]):
        raise BadValueError(
            f"reranking: the interaction was trained with a model of fingerprint {trained[:8]}, the index "
            f"built with {name_model(about)}; expected the same"
        )


def _check_k(k: int | None) -> None:
    if k is not None and not is_count(k):
        raise BadValueError(
            f"reranking: k is {shown(k)}; expected a whole number of 1 or more, or None for all"
        )


@torch.inference_mode()
def _interact(interaction: Interaction, query: Representation, documents: Representation) -> Array:
    scores = interaction(query, documents)
    if not isinstance(scores, Tensor) or scores.shape != (1, len(documents)):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise BadTypeError(
            f"reranking: the interaction gave {got} for 1 query and {len(documents)} documents; expected a "
            f"tensor (1, {len(documents)})"
        )
    if scores.isnan().any():
        raise BadValueError("reranking: the interaction gave NaN")
    return scores[0].to("cpu", torch.float32).numpy()
