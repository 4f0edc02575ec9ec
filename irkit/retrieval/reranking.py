"""Rerank: order candidates by exact scores of a model or a teacher, and return some of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from irkit.arguments import brief, check_functions, is_count
from irkit.core.late_interaction import mean_maxsim
from irkit.data import Document, QueriesLike, Query, parse_documents
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation.run import Run
from irkit.index import WindowsConfig
from irkit.retrieval.collection import Collection, format_model
from irkit.retrieval.fusing import Fuse, check_fuse, heads_of
from irkit.retrieval.scorer import Array, Interaction, Scorer, score_checked, score_rows, score_texts
from irkit.retrieval.searching import (
    Hit,
    Rows,
    fetch_lists,
    find_rows,
    make_hits,
    parse_contents,
    queries_of_run,
)
from irkit.retrieval.selection import (
    Groups,
    RankOptions,
    SearchOptions,
    Selection,
    check_group_key,
    parse_selection,
)
from irkit.retrieval.windows import Passage, score_in_windows

Candidates: TypeAlias = Iterable[str] | Iterable[Hit] | Mapping[str, Any] | Iterable[Document]
"""Ids of documents of the index, or hits, whose ids count; or id -> text, or documents."""

_RUN_QUERIES = 64  # of a run, scored together


class RerankRunOptions(RankOptions, total=False):
    """Options of `irkit.Retriever.rerank` of a run: the scorer, and the options of a search.

    The options of a search apply to the ranking by the new scores: candidates below ``threshold`` and beyond
    ``per_group`` are left out, ``offset`` candidates of the rest are skipped, and ``k`` follow. No other
    documents are searched for.

    Attributes:
        interaction: Compares representations instead of `irkit.score`, such as a
            `irkit.core.late_interaction.MultiVectorAttention`.
        teacher: Scores the texts instead of the model, such as the cross-encoder that
            `irkit.training.teachers.load_teacher` loads.
        progress: Called with the number of queries of a run finished since its last call.
        fuse: Weights by head, for a model with several: the score is the weighted sum over the heads that it
            names. By default all weigh 1.
    """

    fuse: Mapping[str, float] | None
    interaction: Interaction | None
    teacher: Scorer | None
    progress: Callable[[int], object] | None


class RerankOptions(RerankRunOptions, SearchOptions, total=False):
    """Options of `irkit.Retriever.rerank`: `RerankRunOptions`, and what hits hold, see `SearchOptions`."""


def rerank(
    collection: Collection, queries: Any, candidates: Any, k: int | None, options: RerankOptions
) -> list[Hit] | list[list[Hit]] | Run:
    """Rank candidates in any form by exact scores, see `irkit.Retriever.rerank`."""
    # check everything that was given
    is_run = isinstance(candidates, Run)
    if k is not None and not is_count(k):
        raise BadValueError(
            f"reranking: k is {brief(k)}; expected a whole number of 1 or more, or None for all"
        )
    selection = parse_selection(
        "reranking", sys.maxsize if k is None else k, options, RerankRunOptions if is_run else RerankOptions
    )
    interaction, teacher = options.get("interaction"), options.get("teacher")
    if interaction is not None and teacher is not None:
        raise BadValueError("reranking: an interaction and a teacher; expected one of them at most")
    fuse = _check_fuse(collection, options.get("fuse"), interaction)
    _check_interaction(collection, interaction)
    if interaction is not None and collection.index.windows is not None:
        raise BadValueError(
            "reranking: an interaction, and an index of windows, whose documents have several "
            "representations; leave the interaction out, or give a teacher"
        )
    check_functions("reranking", teacher=teacher, progress=options.get("progress"))
    if is_run:
        return _rerank_run(collection, queries, candidates, selection, options)

    # score all candidates, and choose
    contents, single = parse_contents("reranking", collection.model, queries)
    lists = _parse_candidates([candidates] if single else candidates, len(contents))
    items = [Query(str(number), text) for number, text in enumerate(contents)] if teacher else []
    if all(isinstance(item, str) for line in lists for item in line):
        rows = [_find_candidates(collection, ids) for ids in lists]
        if teacher is None:
            scores = score_rows(collection, contents, rows, interaction, fuse)
        else:
            scores = score_checked(teacher, items, fetch_lists(collection.documents, rows))
        best = _choose_rows(collection, selection, scores, rows)
        rows, scores = _take(rows, best), _take(scores, best)
        encode = partial(collection.model.encode_representation, contents, "query")
        hits = make_hits(collection, encode, rows, scores, selection.fields, fuse)
    else:
        passages: list[list[Passage | None]] = [[None] * len(line) for line in lists]
        windows = collection.index.windows
        if teacher is None and windows is not None:
            scores, passages = _score_in_windows(collection, windows, contents, lists, fuse)
        elif teacher is None:
            scores = score_texts(collection.model, contents, lists, interaction, fuse)
        else:
            scores = score_checked(teacher, items, lists)
        best = _choose_documents(selection, scores, lists)
        hits = [
            [Hit.of(line[i], float(values[i]), selection.fields, places[i]) for i in positions]
            for line, values, places, positions in zip(lists, scores, passages, best, strict=True)
        ]
    return hits[0] if single else hits


def _score_in_windows(
    collection: Collection,
    windows: WindowsConfig,
    contents: list[Any],
    lists: list[list[Document]],
    fuse: Fuse | None,
) -> tuple[list[Array], list[list[Passage | None]]]:
    """Score the candidates of each query by their windows; each distinct document is encoded once."""
    documents = list({(item.title, item.text): item for line in lists for item in line}.values())
    if not documents:
        return [np.empty(0, np.float32) for _ in lists], [[] for _ in lists]
    numbers = {(item.title, item.text): number for number, item in enumerate(documents)}
    table, passages = score_in_windows(collection, windows, contents, documents, fuse)
    chosen = [[numbers[item.title, item.text] for item in line] for line in lists]
    return (
        [values[np.array(line, np.int64)] for values, line in zip(table, chosen, strict=True)],
        [
            [line_passages[number] for number in line]
            for line_passages, line in zip(passages, chosen, strict=True)
        ],
    )


def _rerank_run(
    collection: Collection, queries: QueriesLike, run: Run, selection: Selection, options: RerankRunOptions
) -> Run:
    # every query of the run needs its text
    items = queries_of_run(run, queries)
    teacher, progress = options.get("teacher"), options.get("progress")

    # score a batch of queries at a time
    def rankings() -> Iterable[tuple[str, list[str], Array]]:
        for start in range(0, len(items), _RUN_QUERIES):
            batch = items[start : start + _RUN_QUERIES]
            rows = [_find_candidates(collection, run.columns(query.id)[0]) for query in batch]
            if teacher is None:
                contents = [collection.content(query) for query in batch]
                settings = options.get("interaction"), options.get("fuse")
                scores = score_rows(collection, contents, rows, *settings)
            else:
                scores = score_checked(teacher, batch, fetch_lists(collection.documents, rows))
            # order the documents of each query
            best = _choose_rows(collection, selection, scores, rows)
            for query, line, values in zip(batch, _take(rows, best), _take(scores, best), strict=True):
                yield query.id, collection.documents.ids(line), values
            if progress is not None:
                progress(len(batch))

    return Run(rankings())


def _choose_rows(
    collection: Collection, selection: Selection, scores: list[Array], rows: list[Rows]
) -> list[Rows]:
    """Choose, for each query, which candidates from the index to return; positions, best first.

    Raises:
        BadValueError: No document of the index has the key to group by.
    """
    if selection.group_by is None:
        return _choose(selection, scores, rows, None)
    groups = Groups[int](lambda names: collection.documents.fetch(np.array(names)), selection.group_by)
    best = _choose(selection, scores, rows, groups)
    if groups.found_none:
        check_group_key("reranking", [collection.documents], selection.group_by)
    return best


def _choose_documents(selection: Selection, scores: list[Array], lists: list[list[Document]]) -> list[Rows]:
    """Return the positions of the given documents to return for each query, best first.

    Raises:
        BadValueError: No document has the key to group by.
    """
    documents, key = list(chain.from_iterable(lists)), selection.group_by
    ends = np.cumsum([len(line) for line in lists])
    numbers = [np.arange(end - len(line), end) for line, end in zip(lists, ends, strict=True)]
    if key is None:
        return _choose(selection, scores, numbers, None)
    groups = Groups[int](lambda names: [documents[name] for name in names], key)
    best = _choose(selection, scores, numbers, groups)
    if groups.found_none:
        raise BadValueError(
            f"reranking: group_by {brief(key)}: no candidate has this key of metadata; give documents with "
            "metadata, or leave group_by out"
        )
    return best


def _choose(
    selection: Selection, scores: list[Array], names: list[Rows], groups: Groups[int] | None
) -> list[Rows]:
    """Return the positions of the candidates to return for each query, best first, ties in order."""
    best = []
    for values, line in zip(scores, names, strict=True):
        order = np.argsort(-values, kind="stable")
        chosen = selection.choose(values[order], line[order].tolist(), groups)
        best.append(order[chosen[selection.offset :]])
    return best


def _take(lists: list[Array], positions: list[Rows]) -> list[Array]:
    return [line[best] for line, best in zip(lists, positions, strict=True)]


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
    _check_lists(lists, n_queries)
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


def parse_id_lists(candidates: Iterable[Any], n_queries: int) -> list[list[str]]:
    """Return the ids of the candidates of each query, each once, for what takes no texts.

    Raises:
        BadValueError: A candidate is neither an id nor a hit, or the numbers of lists and queries differ.
    """
    lists = list(candidates)
    _check_lists(lists, n_queries)
    ids: list[list[str]] = []
    for line in lists:
        items = [] if isinstance(line, str | Mapping) else _list_items(line)
        if isinstance(line, str | Mapping) or not all(isinstance(item, str) for item in items):
            raise BadValueError("reranking: expected ids of documents, or hits, in a list for each query")
        ids.append(list(dict.fromkeys(items)))
    return ids


def _check_lists(lists: list[Any], n_queries: int) -> None:
    if len(lists) != n_queries:
        raise BadValueError(
            f"reranking: {n_queries} queries and {len(lists)} lists of candidates; expected one each"
        )


def _list_items(candidates: Candidates) -> list[Any]:
    if isinstance(candidates, str) or not isinstance(candidates, Iterable):
        raise BadTypeError(
            f"reranking: candidates are {brief(candidates)}, expected ids in a list, id -> text, or documents"
        )
    items = candidates.items() if isinstance(candidates, Mapping) else candidates
    return [item.id if isinstance(item, Hit) else item for item in items]


def _check_fuse(collection: Collection, fuse: Any, interaction: Interaction | None) -> Any:
    """Return the weights of several representations, None for the default, after a check."""
    heads = heads_of(collection.index)
    check_fuse("reranking", fuse, heads)
    if isinstance(fuse, str):
        raise BadValueError("reranking: fuse is 'rrf', but documents are scored; expected weights by head")
    if interaction is not None and heads is not None:
        raise BadValueError("reranking: an interaction compares one representation, the index has several")
    return fuse


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
