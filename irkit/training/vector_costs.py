"""Count what storing documents, and comparing queries with them, costs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from irkit.core.representation import Dense, MultiVector, Representation, Several

__all__ = ["Costs", "SumOfCosts"]


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
        >>> import torch
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


class SumOfCosts:
    """Count the numbers and the multiplications of several representations together, see `Costs`."""

    def __init__(self, queries: Several) -> None:
        self._parts = {name: Costs(part) for name, part in queries.parts.items()}

    def add(self, documents: Several) -> None:
        """Count some documents."""
        for name, part in self._parts.items():
            part.add(documents.parts[name])

    def means(self) -> dict[str, float]:
        """Return the costs that add up, by name."""
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
