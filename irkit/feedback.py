"""Pseudo-relevance feedback: a query of BM25 gets terms of the documents that it finds first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from irkit.arguments import check_counts, shown
from irkit.errors import BadTypeError, BadValueError
from irkit.index import Flat, Index, bm25
from irkit.index.files import Array
from irkit.ragged import Ragged
from irkit.representation import Representation, Sparse

__all__ = ["RM3"]

_COMMON = 0.1  # of all documents: a term that more of them have says nothing


@dataclass(frozen=True)
class RM3:
    """RM3, the relevance model mixed with the query, as Anserini has it; it helps most where recall counts.

    A term of the documents found first weighs ``sum of score * count / length``, unless a tenth of all
    documents have it. The best of them, and the terms of the query by their counts, each as a distribution,
    are mixed; BM25 then searches once more.

    Args:
        documents: Taken for relevant.
        terms: Of these, that the query gets.
        weight: Of the query itself, from 0 to 1.

    Examples:
        >>> from irkit import Retriever
        >>> retriever = Retriever.load("words")  # doctest: +SKIP
        >>> retriever.search("hibernation", feedback=RM3(documents=5))  # doctest: +SKIP

    Source: Abdul-Jaleel et al., UMass at TREC 2004: Novelty and HARD.
    """

    documents: int = 10
    terms: int = 10
    weight: float = 0.5

    def __post_init__(self) -> None:
        check_counts("RM3", documents=self.documents, terms=self.terms)
        if not isinstance(self.weight, int | float) or isinstance(self.weight, bool):
            raise BadTypeError(f"RM3: weight is {shown(self.weight)}, expected a number from 0 to 1")
        if not 0 <= self.weight <= 1:
            raise BadValueError(f"RM3: weight is {self.weight}, expected a number from 0 to 1")

    def expand(self, index: Index, queries: Representation, allowed: Array | None = None) -> Sparse:
        """Queries with the terms they get.

        Args:
            index: Of BM25.
            queries: As its model represents them.
            allowed: Rows that may be found, see `Index.search`.

        Raises:
            BadValueError: The index is another one.
        """
        if "bm25" not in index.store.meta["index"] or not isinstance(queries, Sparse):
            raise BadValueError(f"RM3: index {index.store.path} is of another model, expected one of BM25")
        with index.store.pinned():
            return self._expand(index, queries, allowed) if len(index) else queries

    def _expand(self, index: Index, queries: Sparse, allowed: Array | None) -> Sparse:
        keys, weights = _distribution(*self._relevance(index, queries, allowed), self.terms, queries.dim)
        arrays = queries.arrays()
        own = np.repeat(np.arange(len(queries)), arrays["lengths"]) * queries.dim + arrays["terms"]
        counts = arrays["weights"] / bm25.rarity(index.store, arrays["terms"])
        own, counts = _distribution(own, counts, None, queries.dim)
        keys, place = np.unique(np.concatenate([own, keys]), return_inverse=True)
        mixed = np.bincount(place, np.concatenate([self.weight * counts, (1 - self.weight) * weights]))
        lengths = np.bincount(keys // queries.dim, minlength=len(queries))
        terms = keys % queries.dim
        values = (mixed * bm25.rarity(index.store, terms)).astype(np.float32)
        rows = Ragged(torch.from_numpy(terms.astype(np.int32)), torch.from_numpy(lengths))
        return Sparse(rows, torch.from_numpy(values), queries.dim)

    def _relevance(self, index: Index, queries: Sparse, allowed: Array | None) -> tuple[Array, Array]:
        """Keys, query * dim + term, in order, and the weight that the documents found give to each."""
        found = index.search(queries, min(self.documents, len(index)), allowed)
        places, ranks = np.nonzero(found.scores > 0)
        raw = cast(Flat, index)._raw(found.rows[places, ranks])  # counts: several queries may share a row
        counts, lengths = raw["weights"].astype(np.float64), raw["lengths"]
        document = np.repeat(np.arange(len(lengths)), lengths)
        totals = np.bincount(document, counts, len(lengths))
        weights = found.scores[places, ranks][document] * counts / totals[document]
        terms = raw["terms"].astype(np.int64)
        now = bm25.statistics(index.store)
        rare = now.frequencies[terms] <= _COMMON * now.documents
        keys, place = np.unique((places[document] * queries.dim + terms)[rare], return_inverse=True)
        return keys, np.bincount(place, weights[rare], len(keys))


def _distribution(keys: Array, weights: Array, most: int | None, dim: int) -> tuple[Array, Array]:
    """The ``most`` heaviest keys of each query, all for None; their weights add up to 1."""
    query = keys // dim
    if most is not None:
        order = np.lexsort((keys, -weights, query))
        first = np.searchsorted(query[order], query[order], "left")
        kept = order[np.arange(len(order)) - first < most]
        keys, weights, query = keys[kept], weights[kept], query[kept]
    return keys, weights / np.bincount(query, weights)[query] if len(keys) else weights
