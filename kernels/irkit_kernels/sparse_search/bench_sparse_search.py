"""Compare the speed of sparse search on one core, query by query, with torch and with a plain inverted index.

Vectors are random and of the shape of SPLADE's: 30,522 terms, some popular, 110 in a document and 40 in a
query; half of a document's terms are of its topic. A query has terms of a document, with weights like its
own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from irkit_kernels._benching import each, on_cores, print_rows, take_turns
from irkit_kernels.sparse_search import Searcher, build
from irkit_kernels.sparse_search.reference import reference

__all__ = ["run"]

DIM, TOPICS, OF_TOPIC = 30522, 200, 400
TERMS, QUERY_TERMS = 110, 40  # of a document, of a query
DOCUMENTS = (1000, 50_000)
QUERIES, K, ROUNDS = 50, 10, 9
EFFORT = 0.3
LEAST_RECALL = {"approximate": 0.9}  # of all others 1

Array = NDArray[Any]
Hits = tuple[Array, Array]
Way = Callable[[int], Hits]  # rows and scores of a query


def run() -> list[dict[str, Any]]:
    """Time exact and approximate search on one core; each round runs all functions in turn.

    Returns:
        One dict per function: microseconds per query, in the best round; the median over the rounds of
        torch's time divided by its own; and the share of the 10 best documents that it finds.

    Raises:
        RuntimeError: A result is wrong.
    """
    with on_cores(1):
        return [row for n in DOCUMENTS for row in _measure(Problem(n))]


class Problem:
    """Random documents and queries."""

    def __init__(self, n: int) -> None:
        rng = np.random.default_rng(0)
        popularity = 1 / (np.arange(DIM) + 20) ** 0.9
        popularity = np.cumsum(rng.permutation(popularity / popularity.sum()))

        def draw(*shape: int) -> Array:
            """Draw terms in proportion to their popularity."""
            return np.minimum(np.searchsorted(popularity, rng.random(shape)), DIM - 1)

        topics = draw(TOPICS, OF_TOPIC)
        half = TERMS // 2
        subject = rng.integers(0, TOPICS, n)
        own = topics[subject[:, None], rng.integers(0, OF_TOPIC, (n, half))]
        pairs = np.unique(np.arange(n)[:, None] * DIM + np.concatenate([own, draw(n, half)], 1))
        self.n, terms = n, (pairs % DIM).astype(np.uint16)
        offsets = np.searchsorted(pairs, np.arange(n + 1) * DIM)
        weights = rng.lognormal(-0.5, 0.7, len(terms)).astype(np.float16)
        self.forward = offsets, terms, weights, None

        chosen = [
            np.sort(rng.permutation(np.arange(offsets[row], offsets[row + 1]))[:QUERY_TERMS])
            for row in rng.integers(0, n, QUERIES)
        ]
        positions = np.concatenate(chosen)
        query_weights = (weights[positions] * rng.lognormal(0, 0.3, len(positions))).astype(np.float32)
        self.queries = np.cumsum([0, *map(len, chosen)]), terms[positions].astype(np.int32), query_weights

    def query(self, i: int) -> tuple[Array, Array]:
        """Terms and weights of a query."""
        offsets, terms, weights = self.queries
        return terms[offsets[i] : offsets[i + 1]], weights[offsets[i] : offsets[i + 1]]

    def scores(self, i: int, rows: Array) -> Array:
        """Scores of documents for a query, in float64."""
        offsets, terms, weights, _ = self.forward
        table, (own_terms, own_weights) = np.zeros(DIM), self.query(i)
        table[own_terms] = own_weights
        parts = [slice(offsets[row], offsets[row + 1]) for row in rows]
        return np.array([table[terms[part]] @ weights[part].astype(np.float64) for part in parts])

    def ways(self) -> dict[str, Way]:
        """Functions that search for a query."""
        searcher = Searcher(build(self.forward, DIM), self.forward)
        exact, approximate = searcher.single(K), searcher.single(K, EFFORT)
        queries = [tuple(map(torch.from_numpy, self.query(i))) for i in range(QUERIES)]

        def single(search: Any) -> Way:
            def way(i: int) -> Hits:
                rows, scores = search(*queries[i])
                return rows[0], scores[0]

            return way

        ways = {"torch": self._torch(), "numba lists": self._lists(), "exact": single(exact)}
        if self.n == max(DOCUMENTS):  # few documents are searched exactly anyway
            ways["approximate"] = single(approximate)
        return ways

    def _torch(self) -> Way:
        """Return a search by the product of a sparse matrix with a dense query."""
        offsets, terms, weights, _ = self.forward
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch's sparse tensors are in beta
            matrix = torch.sparse_csr_tensor(
                torch.from_numpy(offsets),
                torch.from_numpy(terms.astype(np.int64)),
                torch.from_numpy(weights.astype(np.float32)),
                (self.n, DIM),
            )
        query = torch.zeros(DIM)

        def way(i: int) -> Hits:
            terms, weights = self.query(i)
            query[terms.astype(np.int64)] = torch.from_numpy(weights)
            best: tuple[Tensor, Tensor] = torch.topk(matrix @ query, K)
            query.zero_()
            return best[1].numpy(), best[0].numpy()

        return way

    def _lists(self) -> Way:
        """Return a search by an inverted index in numba, which adds up the lists of all terms."""
        offsets, terms, weights, _ = self.forward
        order = np.argsort(terms, kind="stable")
        rows = np.repeat(np.arange(self.n, dtype=np.int32), np.diff(offsets))[order]
        values = weights[order].astype(np.float32)
        lists = np.searchsorted(terms[order], np.arange(DIM + 1))

        def way(i: int) -> Hits:
            scores = _add_lists(self.n, lists, rows, values, *self.query(i))
            best = np.argpartition(scores, -K)[-K:]
            best = best[np.argsort(-scores[best], kind="stable")]
            return best, scores[best]

        return way


@numba.njit
def _add_lists(n: int, lists: Array, rows: Array, values: Array, terms: Array, weights: Array) -> Array:
    scores = np.zeros(n, np.float32)
    for j in range(len(terms)):
        for position in range(lists[terms[j]], lists[terms[j] + 1]):
            scores[rows[position]] += weights[j] * values[position]
    return scores


def _measure(problem: Problem) -> list[dict[str, Any]]:
    ways = problem.ways()
    expected = reference(problem.forward, problem.queries, K)
    recalls = {name: _check(name, way, problem, expected) for name, way in ways.items()}
    times = take_turns({name: each(way, QUERIES) for name, way in ways.items()}, ROUNDS, 1)
    return [
        {
            "shape": f"{problem.n} documents",
            "way": name,
            "us/query": 1e6 * min(seconds) / QUERIES,
            "x torch": median(a / b for a, b in zip(times["torch"], seconds, strict=True)),
            "recall@10": recalls[name],
        }
        for name, seconds in times.items()
    ]


def _check(name: str, way: Way, problem: Problem, expected: Hits) -> float:
    """Compare the hits' scores with those in float64, and return the share of the best documents found."""
    recalls = []
    for i in range(QUERIES):
        rows, scores = way(i)
        error = np.abs(scores / problem.scores(i, rows) - 1).max()
        if error > 2 * QUERY_TERMS * 2.0**-24:  # of a sum of as many products in float32
            raise RuntimeError(f"sparse_search: scores of {name} are wrong by {error:.2g}")
        recalls.append(np.isin(expected[0][i], rows).mean())
    recall = float(np.mean(recalls))
    if recall < LEAST_RECALL.get(name, 1):
        raise RuntimeError(f"sparse_search: {name} finds {recall:.3f} of the best of {problem.n} documents")
    return recall


if __name__ == "__main__":
    print_rows(run())
