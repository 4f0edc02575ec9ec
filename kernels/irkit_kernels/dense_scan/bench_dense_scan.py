"""Compare the speed of an exact search that scans codes first with torch's product of all rows, and FAISS.

Vectors are in clusters, as texts have them, and queries are near vectors. All three find the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor

from irkit_kernels._benching import on_cores, take_turns
from irkit_kernels.dense_scan import Codes, best_of, encode, find_candidates

__all__ = ["run"]

N, DIM, TOPICS, QUERIES, ROUNDS = 100_000, 384, 2000, 64, 7


def run() -> list[dict[str, Any]]:
    """Time searches on one core; each round runs all of them in turn.

    Returns:
        One dict per number of hits and of queries at a time: the best milliseconds of a query in each way;
        the medians over the rounds of torch's time and of FAISS's time, each divided by the time of the
        codes.

    Raises:
        RuntimeError: A search finds other rows.
    """
    with on_cores(1):
        faiss.omp_set_num_threads(1)
        generator = torch.Generator().manual_seed(0)
        topics = torch.randn(TOPICS, DIM, generator=generator)
        chosen = torch.randint(TOPICS, (N,), generator=generator)
        vectors = topics[chosen] + 0.5 * torch.randn(N, DIM, generator=generator)
        vectors = torch.nn.functional.normalize(vectors)
        queries = vectors[:QUERIES] + 0.3 / DIM**0.5 * torch.randn(QUERIES, DIM, generator=generator)
        index = faiss.IndexFlatIP(DIM)
        index.add(vectors.numpy())
        codes = encode(vectors)
        return [
            _measure(vectors, codes, index, queries, k, at_once)
            for k in (10, 100, 1000)
            for at_once in (1, QUERIES)
        ]


def _measure(
    vectors: Tensor, codes: Codes, index: Any, queries: Tensor, k: int, at_once: int
) -> dict[str, Any]:
    def scan(block: Tensor) -> Tensor:
        found = [every if rows is None else rows for rows in find_candidates(codes, block, k)]
        chosen = np.full((len(found), max(map(len, found))), -1)
        for line, rows in zip(chosen, found, strict=True):
            line[: len(rows)] = rows
        return torch.from_numpy(best_of(vectors.numpy(), block.numpy(), chosen, k)[0])

    every = np.arange(len(vectors))
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "codes": scan,
        "torch": lambda block: (block @ vectors.T).topk(k).indices,
        "FAISS": lambda block: torch.from_numpy(index.search(block.numpy(), k)[1]),
    }
    scores = {name: way(queries).sort(1).values for name, way in ways.items()}
    if any((rows != scores["codes"]).any() for rows in scores.values()):
        raise RuntimeError(f"dense_scan finds other rows at k={k}")
    blocks = queries.split(at_once)[: 16 if at_once == 1 else 1]
    seconds = take_turns(
        {name: lambda way=way: [way(block) for block in blocks] for name, way in ways.items()}, ROUNDS, 1
    )
    count = len(blocks) * at_once
    ratios = {
        name: [a / b for a, b in zip(times, seconds["codes"], strict=True)] for name, times in seconds.items()
    }
    return {
        "hits": k,
        "queries at a time": at_once,
        **{f"{name} ms": round(1e3 * min(times) / count, 3) for name, times in seconds.items()},
        **{f"x {name}": round(median(ratios[name]), 2) for name in ("torch", "FAISS")},
    }


if __name__ == "__main__":
    for row in run():
        print("  ".join(f"{key} {value}" for key, value in row.items()))
