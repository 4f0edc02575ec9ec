"""Measure a model on judged collections: effectiveness, and what storing and comparing its vectors costs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from irkit.core.representation import Representation, Several, concat
from irkit.core.scoring import score
from irkit.data import Document
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.evaluation.measures import Evaluation, evaluate
from irkit.evaluation.run import Run
from irkit.heads import as_multi_vector_head
from irkit.heads.multi_vector_config import TokenPooling
from irkit.index import Hits
from irkit.model import Model
from irkit.model.hardware import with_dtype
from irkit.retrieval.fusing import compare_several
from irkit.training.judged_search import ExactSearch, IndexSearch, Score, Search
from irkit.training.second_pass import score_again
from irkit.training.validation import EvaluationConfig, JudgedCollection
from irkit.utils.progress import progress_bar

FUSION = "fusion"  # name of the sum of several representations in results
_CHUNK = 1024  # documents encoded and scored together


class Measured(NamedTuple):
    """What a model reaches on a collection, and what it costs there.

    Attributes:
        evaluation: The measures.
        costs: Costs by name, see `irkit.training.vector_costs.Costs`; with an index also ``"index bytes"``
            and ``"ms per query"``, the mean time of a search with one query.
    """

    evaluation: Evaluation
    costs: dict[str, float]


def measure(
    model: Model,
    collections: Sequence[JudgedCollection],
    compare: Score = score,
    weights: Mapping[str, float] | None = None,
) -> dict[str, Measured]:
    """Search collections, or rerank their runs, and evaluate the results.

    A search is exact unless the collection names an index. Documents that several collections share are
    encoded once. A model with several heads is measured by each head, and by the weighted sum of the exact
    scores of all heads, the fusion.

    Args:
        model: Model of any kind. The call leaves its mode, training or evaluation, as before.
        collections: See `open_collections`.
        compare: Returns the scores ``(n_q, n_d)`` of queries and documents; higher is better.
        weights: Weight of each head in the fusion; a head that is not named weighs 1.

    Returns:
        Results by the title of the collection, in the order of ``collections``. For a model with several
        heads, the name of the head or ``fusion`` follows the title and a slash.

    Raises:
        BadValueError: The similarity of the model is not an inner product.
        StorageError: An index cannot be written to the folder for temporary files.
    """
    groups: dict[object, list[JudgedCollection]] = {}
    for collection in collections:
        config = collection.config
        groups.setdefault((collection.corpus, *_adjustments(config)), []).append(collection)
    training = model.training
    results: dict[str, dict[str, Measured]] = {}
    try:
        for group in groups.values():
            results |= _measure_group(_adjusted(model, group[0].config), group, compare, weights or {})
    finally:
        model.train(training)
    return {
        f"{title}/{part}" if part else title: measured
        for title in (collection.config.title for collection in collections)
        for part, measured in results[title].items()
    }


def _measure_group(
    model: Model, group: list[JudgedCollection], compare: Score, weights: Mapping[str, float]
) -> dict[str, dict[str, Measured]]:
    """Measure on collections of the same documents; return results by title and part, see `_searches`."""
    title = ", ".join(collection.config.title for collection in group)
    everything = any(collection.chosen is None for collection in group)
    chosen = frozenset().union(*(collection.chosen or () for collection in group))
    total = max(collection.total for collection in group) if everything else len(chosen)

    def documents() -> Iterator[Document]:
        return (document for document in group[0].source if everything or document.id in chosen)

    # encode the documents once, and search them for the queries of all collections
    with ExitStack() as stack:
        searches: list[Search] = []
        for collection in group:
            texts = (query.text for query in collection.queries)
            queries = concat(model.stream_representations(texts, "query"))
            searches += _searches(collection, queries, compare, stack, weights)
        update = stack.enter_context(progress_bar(f"evaluating on {title}", "documents", total))
        texts = (document.full_text for document in documents())
        ids, first = (document.id for document in documents()), 0  # a second time, in step with the chunks
        for chunk in model.stream_representations(texts, "document", chunk_size=_CHUNK, progress=update):
            names = [next(ids) for _ in range(len(chunk))]
            for search in searches:
                search.add(chunk, names, first)
            first += len(chunk)
        hits = [search.hits() for search in searches]
    # ids are read a third time rather than kept for all documents
    rows_of_hits = {row for part in hits for row in part.rows.ravel().tolist()}
    ids_by_row = {row: document.id for row, document in enumerate(documents()) if row in rows_of_hits}
    # score again if the collection says so, then evaluate
    results: dict[str, dict[str, Measured]] = {collection.config.title: {} for collection in group}
    for search, part in zip(searches, hits, strict=True):
        costs = search.costs.means() | search.other_costs
        if (second := search.collection.config.second_pass) is not None:
            part, products = score_again(search.collection, part, second, documents())
            costs["FLOPS"] += products / search.collection.pairs
        evaluation = _evaluate(search.collection, part, ids_by_row)
        measured = Measured(evaluation, costs)
        results[search.collection.config.title][search.part] = measured
    return results


def _searches(
    collection: JudgedCollection,
    queries: Representation,
    compare: Score,
    stack: ExitStack,
    weights: Mapping[str, float],
) -> list[Search]:
    """Return the search of a collection; for several representations, a search of each and of the sum."""
    several: Any = queries
    if not isinstance(several, Several):
        if collection.config.index is None:
            return [ExactSearch(collection, queries, compare)]
        return [IndexSearch(collection, queries, stack)]
    parts = []
    for name, part in several.parts.items():
        (search,) = _searches(collection, part, score, stack, weights)
        search.part = name
        parts.append(search)
    fused: Any = partial(compare_several, weights={name: weights.get(name, 1.0) for name in several.parts})
    fusion = ExactSearch(collection, queries, fused)
    fusion.part, fusion.whole = FUSION, True
    return [*parts, fusion]


def _evaluate(collection: JudgedCollection, hits: Hits, ids: Mapping[int, str]) -> Evaluation:
    config, ranked = collection.config, []
    for query, rows, scores in zip(collection.queries, *hits, strict=True):
        found = [(ids[row], score) for row, score in zip(rows.tolist(), scores, strict=True) if row >= 0]
        if config.drop_identical_ids:
            found = [(name, score) for name, score in found if name != query.id]
        names, values = zip(*found[: config.k], strict=True) if found else ((), ())
        ranked.append((query.id, [*names], np.array(values, np.float32)))
    return evaluate(Run(ranked), collection.qrels, config.measures)


def _adjustments(config: EvaluationConfig) -> tuple[str, int | None, TokenPooling | None]:
    return config.dtype, config.document_length, config.token_pooling


def _adjusted(model: Model, config: EvaluationConfig) -> Model:
    """Return the model, or a copy of it with the precision, lengths and pooling of ``config``."""
    if _adjustments(config) == ("float32", None, None):
        return model
    model = copy.deepcopy(model)
    if config.token_pooling is not None:
        head = as_multi_vector_head(model.head, f"evaluation.token_pooling of {config.title}")
        head.pool_tokens(config.token_pooling)
        head.to(model.device)
    if config.document_length is not None:
        model.set_length("document", config.document_length)
    if config.dtype == "float32":
        return model
    for side in (model, model.query_model):
        if side is not None and not isinstance(side.encoder, InferenceFreeEncoder):
            side.encoder = with_dtype(side.encoder, side.head, side.tokenizer, config.dtype)
    return model
