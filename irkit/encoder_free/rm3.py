"""RM3: pseudo-relevance feedback, which expands queries of BM25 by terms of the documents found first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from irkit.arguments import brief, check_counts
from irkit.core.representation import Representation, Sparse
from irkit.encoder_free.base_model import sparse_from_keys
from irkit.errors import BadTypeError, BadValueError
from irkit.index import Index, StoredRows
from irkit.index import bm25_index as bm25
from irkit.index.array_files import Array

_MAX_SHARE = 0.1  # of all documents; a term that more of them have is not added


@dataclass(frozen=True)
class RM3:
    """RM3 as in Anserini: a relevance model of the documents found first, mixed with the query.

    The weight of a term is the sum of ``score * count / length`` over the documents found first; terms that
    more than a tenth of all documents have are left out. The weights of the best terms and the counts of the
    query terms are normalized to distributions and mixed, and BM25 searches again. This improves recall most.

    Args:
        documents: Number of documents found first that count as relevant.
        terms: Number of terms that are added to the query.
        weight: Weight of the original query, from 0 to 1.

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
            raise BadTypeError(f"RM3: weight is {brief(self.weight)}, expected a number from 0 to 1")
        if not 0 <= self.weight <= 1:
            raise BadValueError(f"RM3: weight is {self.weight}, expected a number from 0 to 1")

    def expand(self, index: Index, queries: Representation, allowed: Array | None = None) -> Sparse:
        """Return the expanded queries.

        Args:
            index: An index of BM25.
            queries: Queries as the model of the index represents them.
            allowed: Rows that a search may return, see `Index.search`.

        Raises:
            BadValueError: The index is not one of BM25.
        """
        if "bm25" not in index.store.meta["index"] or not isinstance(queries, Sparse):
            raise BadValueError(f"RM3: index {index.store.path} is of another model, expected one of BM25")
        with index.store.snapshot():
            return self._expand(index, queries, allowed) if len(index) else queries

    def _expand(self, index: Index, queries: Sparse, allowed: Array | None) -> Sparse:
        keys, weights = _distribution(*self._relevance(index, queries, allowed), self.terms, queries.dim)
        arrays = queries.arrays()
        own = np.repeat(np.arange(len(queries)), arrays["lengths"]) * queries.dim + arrays["terms"]
        counts = arrays["weights"] / bm25.rarity(index.store, arrays["terms"])
        own, counts = _distribution(own, counts, None, queries.dim)
        keys, positions = np.unique(np.concatenate([own, keys]), return_inverse=True)
        mixed = np.bincount(positions, np.concatenate([self.weight * counts, (1 - self.weight) * weights]))
        values = mixed * bm25.rarity(index.store, keys % queries.dim)
        return sparse_from_keys(keys, values, len(queries), queries.dim)

    def _relevance(self, index: Index, queries: Sparse, allowed: Array | None) -> tuple[Array, Array]:
        """Weigh the terms of the documents found first for each query.

        Returns:
            The keys ``query * dim + term`` int64 in rising order, and the weight of each key.
        """
        hits = index.search(queries, min(self.documents, len(index)), allowed)
        owners, ranks = np.nonzero(hits.scores > 0)
        raw = cast(StoredRows, index).stored_arrays(hits.rows[owners, ranks])  # counts of terms
        counts, lengths = raw["weights"].astype(np.float64), raw["lengths"]
        document = np.repeat(np.arange(len(lengths)), lengths)
        totals = np.bincount(document, counts, len(lengths))
        weights = hits.scores[owners, ranks][document] * counts / totals[document]
        terms = raw["terms"].astype(np.int64)
        now = bm25.statistics(index.store)
        rare = now.frequencies[terms] <= _MAX_SHARE * now.documents
        rare &= terms < queries.dim  # a shard may have terms of a change that was interrupted
        keys, positions = np.unique((owners[document] * queries.dim + terms)[rare], return_inverse=True)
        return keys, np.bincount(positions, weights[rare], len(keys))


def _distribution(keys: Array, weights: Array, limit: int | None, dim: int) -> tuple[Array, Array]:
    """Keep the heaviest keys of each query, and normalise their weights.

    Args:
        keys: ``(n,)`` int64, each ``query * dim + term``, in rising order.
        weights: ``(n,)``, the weight of each key.
        limit: Number of keys to keep per query; None keeps all.
        dim: Number of terms.

    Returns:
        The kept keys, ordered by query, and their weights, which add up to 1 per query.
    """
    query = keys // dim
    if limit is not None:
        order = np.lexsort((keys, -weights, query))
        first = np.searchsorted(query[order], query[order], "left")
        best = order[np.arange(len(order)) - first < limit]
        keys, weights, query = keys[best], weights[best], query[best]
    return keys, weights / np.bincount(query, weights)[query] if len(keys) else weights
