"""Measure a model on judged collections: effectiveness, and what storing and comparing its vectors costs."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from irkit.core.late_interaction import MultiVectorAttention
from irkit.core.representation import Dense, MultiVector, Representation, Several, concat
from irkit.core.scoring import score
from irkit.data import Document
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadValueError
from irkit.evaluation.measures import Evaluation, evaluate
from irkit.evaluation.run import Run
from irkit.heads import as_multi_vector_head
from irkit.heads.multi_vector_config import TokenPooling
from irkit.index import AutoConfig, Hits, Store, create_index
from irkit.index.topk import TopK, query_table
from irkit.model import Model
from irkit.model.hardware import with_dtype
from irkit.retrieval.fusing import compare_several
from irkit.training.second_pass import score_again
from irkit.training.validation import EvaluationConfig, JudgedCollection
from irkit.utils.atomic import explained
from irkit.utils.progress import progress_bar

Score = Callable[[Representation, Representation], Tensor]

FUSION = "fusion"  # name of the sum of several representations in results
_CHUNK = 1024  # documents encoded and scored together


class Measured(NamedTuple):
    """What a model reaches on a collection, and what it costs there.

    Attributes:
        evaluation: The measures.
        costs: Costs by name, see `Costs`; with an index also ``"index bytes"`` and ``"ms per query"``, the
            mean time of a search with one query.
    """

    evaluation: Evaluation
    costs: dict[str, float]


class Costs:
    """Count the stored numbers of documents, and the operations of comparing them with queries.

    * ``query length`` and ``document length``: terms of a sparse vector, token vectors, or 1; the mean.
    * ``floats``: numbers stored per document; of a sparse vector its weights.
    * ``FLOPS``: multiplications per pair of a query and a document, the mean over all pairs. For sparse
      vectors this is the number of terms that both have. The multiplications of a cross-encoder in a second
      pass are added.

    Source: Paria et al. 2020, "Minimizing FLOPs to Learn Efficient Sparse Representations", section 3;
    Multi-Vector Attention Models for Deep Re-ranking, table 5, which counts for 1,000 documents.

    Examples:
        >>> costs = Costs(Dense(torch.eye(3)))
        >>> costs.add(Dense(torch.eye(3)))
        >>> costs.means()["FLOPS"]
        3.0
    """

    def __init__(self, queries: Representation, attention: bool = False) -> None:
        """Begin to count for ``queries``; ``attention`` says that vectors are keys followed by values."""
        self._attention, self._width = attention, queries.dim
        self._query_length, self._query_terms = _lengths(queries)
        self._n_q, self._n_d = max(1, len(queries)), 0
        self._total = 0  # terms or vectors of all documents
        self._terms = np.zeros(queries.dim, np.int64)  # how many documents have each

    def add(self, documents: Representation) -> None:
        """Count some documents."""
        total, terms = _lengths(documents)
        self._n_d, self._total = self._n_d + len(documents), self._total + total
        if terms is not None:
            self._terms += terms

    def means(self) -> dict[str, float]:
        """Return the costs by name."""
        n_d = max(1, self._n_d)
        queries, documents, width = self._query_length / self._n_q, self._total / n_d, self._width
        if self._query_terms is not None:
            width, flops = 1, float(self._query_terms @ self._terms) / (self._n_q * n_d)
        else:
            own = queries * width / 2 if self._attention else 0  # the product with the query's value
            flops = queries * documents * width + own
        return {
            "query length": queries,
            "document length": documents,
            "floats": documents * width,
            "FLOPS": flops,
        }


class _SumOfCosts:
    """Count the numbers and the multiplications of several representations together, see `Costs`."""

    def __init__(self, queries: Several) -> None:
        self._parts = {name: Costs(part) for name, part in queries.parts.items()}

    def add(self, documents: Several) -> None:
        for name, part in self._parts.items():
            part.add(documents.parts[name])

    def means(self) -> dict[str, float]:
        means = [part.means() for part in self._parts.values()]
        return {cost: sum(part[cost] for part in means) for cost in ("floats", "FLOPS")}


def _lengths(vectors: Representation) -> tuple[int, npt.NDArray[np.int64] | None]:
    """Return the number of vectors or terms of all rows; of sparse ones also how many rows have each term."""
    if isinstance(vectors, Dense):
        return len(vectors), None
    if isinstance(vectors, MultiVector):
        return int(vectors.tokens.lengths.sum()), None
    terms = vectors.terms.values[vectors.weights != 0].cpu().numpy()
    return len(terms), np.bincount(terms, minlength=vectors.dim)


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
        searches: list[_Search] = []
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
) -> list[_Search]:
    """Return the search of a collection; for several representations, a search of each and of the sum."""
    several: Any = queries
    if not isinstance(several, Several):
        if collection.config.index is None:
            return [_ExactSearch(collection, queries, compare)]
        return [_IndexSearch(collection, queries, stack)]
    parts = []
    for name, part in several.parts.items():
        (search,) = _searches(collection, part, score, stack, weights)
        search.part = name
        parts.append(search)
    fused: Any = partial(compare_several, weights={name: weights.get(name, 1.0) for name in several.parts})
    fusion = _ExactSearch(collection, queries, fused)
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


def _depth(config: EvaluationConfig) -> int:
    """Return how many documents a search returns: one more where a query itself may be among them."""
    return config.k + config.drop_identical_ids


class _Search(ABC):
    """Search of one collection among the documents of several.

    Attributes:
        collection: The collection.
        part: Name of the representation that is searched, of several; empty if there is one.
        whole: Whether all of several representations are searched.
        costs: The costs of its queries and documents.
        other_costs: Costs of an index.
    """

    collection: JudgedCollection
    part: str = ""
    whole: bool = False
    costs: Any
    other_costs: dict[str, float]

    def add(self, chunk: Representation, names: Sequence[str], first: int) -> None:
        """Add the documents of a chunk that belong to the collection; ``names`` start at row ``first``."""
        if self.part and not self.whole:
            chunk = cast(Any, chunk).parts[self.part]
        chosen, columns = self.collection.chosen, np.arange(len(names))
        if chosen is not None:
            columns = columns[[name in chosen for name in names]]
        if len(columns) < len(names):
            chunk = chunk[torch.from_numpy(columns)]
        if len(columns):
            self._add(chunk, [names[column] for column in columns.tolist()], first + columns)

    @abstractmethod
    def _add(self, documents: Representation, names: Sequence[str], rows: npt.NDArray[np.int64]) -> None:
        """Add documents of the collection, with their ids and their rows among all documents."""

    @abstractmethod
    def hits(self) -> Hits:
        """Return the best documents of each query."""


class _ExactSearch(_Search):
    """Compares every query with every document, or with the documents of a run."""

    def __init__(self, collection: JudgedCollection, queries: Representation, compare: Score) -> None:
        self.collection = collection
        self._compare: Callable[..., Tensor] = compare
        if isinstance(compare, MultiVectorAttention):  # keys and values are computed once
            self._compare, queries = compare.attend, _project(compare, queries, "queries")
        self._attention = compare if isinstance(compare, MultiVectorAttention) else None
        self._queries = queries
        several: Any = queries
        attends = self._attention is not None
        self.costs = _SumOfCosts(several) if isinstance(several, Several) else Costs(queries, attends)
        self.other_costs = {}
        self._best = TopK(len(queries), _depth(collection.config))

    def _add(self, documents: Representation, names: Sequence[str], rows: npt.NDArray[np.int64]) -> None:
        if self._attention is not None:
            documents = _project(self._attention, documents, "documents")
        self.costs.add(documents)
        candidates = self.collection.candidates
        if candidates is None:
            self._best.push(self._scores(self._queries, documents), rows)
            return
        # compare each query with the documents that its run has among these
        pairs = sorted({(query, column) for column, name in enumerate(names) for query in candidates[name]})
        query, column = np.asarray(pairs, np.int64).T
        columns = query_table(query, column, len(self._queries), -1)
        scores = np.full(columns.shape, -np.inf, np.float32)
        for number in np.unique(query).tolist():
            own = torch.from_numpy(columns[number][columns[number] >= 0])
            scores[number, : len(own)] = self._scores(self._queries[number : number + 1], documents[own])[0]
        self._best.push_pairs(scores, np.where(columns < 0, -1, rows[columns]))

    def _scores(self, queries: Representation, documents: Representation) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            return np.asarray(self._compare(queries, documents).cpu())

    def hits(self) -> Hits:
        return self._best.hits()


class _IndexSearch(_Search):
    """Searches an index that lives as long as the evaluation."""

    def __init__(self, collection: JudgedCollection, queries: Representation, stack: ExitStack) -> None:
        self.collection, self._queries = collection, queries
        self.costs, self.other_costs = Costs(queries), {}
        self._rows: list[npt.NDArray[np.int64]] = []
        with explained("evaluating with an index", "set TMPDIR to a folder that can be written"):
            self._store = stack.enter_context(Store.build(stack.enter_context(TemporaryDirectory())))
        config = collection.config.index
        assert config is not None
        if isinstance(config, AutoConfig):
            config = config.choose(queries, collection.total)
        self._index = create_index(self._store, config)

    def _add(self, documents: Representation, names: Sequence[str], rows: npt.NDArray[np.int64]) -> None:
        self.costs.add(documents)
        self._index.add(documents)
        self._rows.append(rows)

    def hits(self) -> Hits:
        """Search each query on its own, and return the best documents."""
        self._index.finish()
        self._store.publish()
        k = _depth(self.collection.config)
        self._index.search(self._queries[:1], k)  # loads what every search needs
        start = time.perf_counter()
        parts = [self._index.search(self._queries[i : i + 1], k) for i in range(len(self._queries))]
        seconds = time.perf_counter() - start
        self.other_costs["index bytes"] = float(self._index.stats()["bytes"])
        self.other_costs["ms per query"] = 1000 * seconds / len(parts)
        numbers = np.append(np.concatenate(self._rows), -1)  # the last one stands for a missing result
        rows = np.concatenate([part.rows for part in parts])
        return Hits(numbers[rows], np.concatenate([part.scores for part in parts]))


def _project(attention: MultiVectorAttention, vectors: Representation, side: str) -> MultiVector:
    """Return keys and values of attention for token vectors of ``"queries"`` or ``"documents"``."""
    if not isinstance(vectors, MultiVector):
        raise BadValueError(f"attention: got {vectors.kind} representations, expected a vector a token")
    project = attention.project_queries if side == "queries" else attention.project_documents
    with torch.no_grad():
        return project(vectors.to(attention.query_key.weight.device))


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
