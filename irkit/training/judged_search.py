"""Search the documents of a judged collection as they are encoded: exactly, or in an index of its own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from irkit.core.late_interaction import MultiVectorAttention
from irkit.core.representation import MultiVector, Representation, Several
from irkit.errors import BadValueError
from irkit.index import AutoConfig, Hits, Store, create_index
from irkit.index.topk import TopK, query_table
from irkit.training.validation import EvaluationConfig, JudgedCollection
from irkit.training.vector_costs import Costs, SumOfCosts
from irkit.utils.atomic import explained

__all__ = ["ExactSearch", "IndexSearch", "Score", "Search"]

Score = Callable[[Representation, Representation], Tensor]


def _depth(config: EvaluationConfig) -> int:
    """Return how many documents a search returns: one more where a query itself may be among them."""
    return config.k + config.drop_identical_ids


class Search(ABC):
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


class ExactSearch(Search):
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
        self.costs = SumOfCosts(several) if isinstance(several, Several) else Costs(queries, attends)
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
        """Return the best documents of each query."""
        return self._best.hits()


class IndexSearch(Search):
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
