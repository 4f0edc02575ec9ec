"""Compare the speed of dense search on one core, query by query, with FAISS and with torch.

Vectors are in clusters of clusters, with most of their variance within a cluster in 48 dimensions; queries
are near vectors. FAISS searches an inverted file of as many lists, whose codes have as many bits as the signs
(4 for 4 dimensions), and ranks candidates by the vectors. Each method gets the fastest settings that find .95
and .99 of the 10 best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from irkit_kernels._benching import each, on_cores, print_rows, take_turns
from irkit_kernels.dense_search import Effort, Encoder, Searcher, arrange, make_rotation

__all__ = ["run"]

N, DIM, LISTS, QUERIES, K, ROUNDS = 50_000, 384, 256, 100, 10, 9
RECALLS = (0.95, 0.99)
PROBES, CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 24), (20, 30, 50, 100)

Array = NDArray[Any]
Way = Callable[[int], tuple[Array, Array]]  # rows and scores of a query


def run() -> list[dict[str, Any]]:
    """Time searches on one core; each round runs all of them in turn.

    Returns:
        One dict per method and recall: microseconds per query, in the best round; the median over the rounds
        of FAISS's time divided by its own; the share of the 10 best rows that it finds; bytes of a row.

    Raises:
        RuntimeError: A score is wrong, or a method does not find as many of the best rows as it should.
    """
    with on_cores(1):
        faiss.omp_set_num_threads(1)
        return _measure(Problem())


class Problem:
    """Random vectors and queries."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape, np.float32)

        centres = np.repeat(normal(50, DIM), 40, 0) + 0.8 * normal(2000, DIM)
        spread = normal(48, DIM) / np.float32(48**0.5)
        vectors = centres[rng.integers(0, 2000, N)] + 1.1 * normal(N, 48) @ spread + 0.25 * normal(N, DIM)
        source = vectors[rng.integers(0, N, QUERIES)]
        queries = source + 0.5 * normal(QUERIES, 48) @ spread + 0.3 * normal(QUERIES, DIM)
        self.vectors, self.queries = (
            (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in (vectors, queries)
        )
        scores = self.queries @ self.vectors.T
        self.best = np.argsort(-scores, 1)[:, :K]
        means = faiss.Kmeans(DIM, LISTS, niter=8, seed=1)
        means.train(self.vectors)
        self.centroids = means.centroids

    def recall(self, way: Way) -> float:
        """Return the share of the best rows that are found."""
        return float(np.mean([np.isin(self.best[i], way(i)[0]).mean() for i in range(QUERIES)]))

    def check(self, name: str, way: Way, tolerance: float) -> None:
        """Raise an error if scores are not the products of the query with the rows."""
        for i in range(QUERIES):
            rows, scores = way(i)
            error = float(np.abs(self.vectors[rows] @ self.queries[i] - scores).max())
            if error > tolerance:
                raise RuntimeError(f"dense_search: scores of {name} are wrong by {error:.2g}")


def _measure(problem: Problem) -> list[dict[str, Any]]:
    chosen: dict[str, tuple[Way, float, float]] = {}
    for name, size, tolerance, ways in _methods(problem):
        problem.check(name, ways[-1], tolerance)
        recalls = [problem.recall(way) for way in ways]
        seconds = take_turns({str(i): each(way, QUERIES) for i, way in enumerate(ways)}, 2, 1)
        for least in RECALLS:
            enough = [i for i, recall in enumerate(recalls) if recall >= least]
            if enough:
                best = min(enough, key=lambda i: min(seconds[str(i)]))
                chosen[f"{name}, {least}"] = ways[best], recalls[best], size
            elif least == min(RECALLS):
                raise RuntimeError(f"dense_search: {name} finds only {max(recalls):.3f} of the best rows")
    times = take_turns({name: each(way, QUERIES) for name, (way, *_) in chosen.items()}, ROUNDS, 1)
    return [
        {
            "shape": f"{N} x {DIM}",
            "way": name.rpartition(", ")[0],
            "at least": float(name.rpartition(", ")[2]),
            "recall@10": chosen[name][1],
            "us/query": 1e6 * min(seconds) / QUERIES,
            "x faiss": median(
                a / b for a, b in zip(times[f"faiss, {name.rpartition(', ')[2]}"], seconds, strict=True)
            ),
            "bytes": chosen[name][2],
        }
        for name, seconds in times.items()
    ]


def _methods(problem: Problem) -> Iterator[tuple[str, float, float, list[Way]]]:
    """Yield methods: name, bytes of a row, error of a score, and searches of rising effort."""
    vectors, queries = problem.vectors, problem.queries
    # FAISS
    structure = faiss.index_factory(DIM, f"IVF{LISTS},PQ{DIM // 4}x4fs,RFlat", faiss.METRIC_INNER_PRODUCT)
    structure.train(vectors)
    structure.add(vectors)

    def by_faiss(probes: int, factor: int) -> Way:
        def way(i: int) -> tuple[Array, Array]:
            faiss.extract_index_ivf(structure).nprobe, structure.k_factor = probes, factor
            scores, rows = structure.search(queries[i : i + 1], K)
            return rows[0], scores[0]

        return way

    settings = [by_faiss(probes, count // K) for probes in PROBES for count in CANDIDATES]
    yield "faiss", DIM / 8 + 8 + 4 * DIM, 1e-5, settings

    # an exact scan by torch
    tensor = torch.from_numpy(vectors)

    def by_torch(i: int) -> tuple[Array, Array]:
        scores, rows = torch.topk(tensor @ torch.from_numpy(queries[i]), K)
        return rows.numpy(), scores.numpy()

    yield "torch", 4 * DIM, 1e-5, [by_torch]

    # the kernel, by codes and what is kept beside them
    rotation = make_rotation(DIM)
    for nbits, keep, tolerance in ((1, "float32", 1e-5), (1, "int8", 5e-3), (4, "none", 3e-2)):
        codes = Encoder(problem.centroids, rotation, nbits, keep_int8=keep == "int8").encode(vectors)
        kept = {"float32": vectors, "int8": codes.get("kept"), "none": None}[keep]
        segment, scales = arrange(codes, LISTS), codes.get("kept_scales")
        searcher = Searcher(problem.centroids, rotation, [segment], N, kept=kept, kept_scales=scales)
        size = sum(array.nbytes for array in segment.values()) / N
        size += 0 if kept is None else kept.nbytes / N
        efforts = [Effort(probes, count, 20) for probes in PROBES for count in CANDIDATES]
        yield f"{nbits} bits, keep {keep}", size, tolerance, [_single(searcher, queries, e) for e in efforts]


def _single(searcher: Searcher, queries: Array, effort: Effort) -> Way:
    search = searcher.single(K, effort)

    def way(i: int) -> tuple[Array, Array]:
        rows, scores = search(queries[i])
        return rows[0], scores[0]

    return way


if __name__ == "__main__":
    print_rows(run())
