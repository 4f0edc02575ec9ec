"""Suite ``shards``: what Ray adds to the time of a query over its slowest shard; the bar is 5 ms.

An index in 4 shards is searched one query at a time: by actors (`irkit.ray_engine.ShardedRetriever`), and
each shard alone in this process, in turns. The overhead is the time of the search through Ray less that of
the slowest shard, both without encoding and without reading texts. Medians count. The largest overhead goes
into ``irkit/planning/costs.json``, where `irkit plan` finds it, and the results ``plan`` are written again.

``python -m benchmarks shards --sizes 20000`` sets the number of documents.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, provenance, write_results
from benchmarks.scale import store_costs

SHARDS, QUERIES, ROUNDS, DIM = 4, 20, 10, 384
BAR = 5.0  # ms


def main(sizes: Sequence[int] = (50_000,)) -> str | None:
    """Measure, store the rows, and return what misses the bar."""
    import torch

    from irkit.ray_engine.ray_start import start_ray

    torch.set_num_threads(1)
    ray = start_ray()
    try:
        rows = [measure(kind, size) for size in sizes for kind in ("bm25", "flat")]
    finally:
        ray.shutdown()
    write_results("shards", rows)
    about = provenance()
    measured = f"measured {about['date'][:10]} on {about['cpu']}, {about['cores']} cores"
    store_costs({"shards": {"overhead ms": max(row["overhead ms"] for row in rows), "measured": measured}})
    missed = [f"{row['index']}: {row['overhead ms']} ms" for row in rows if row["overhead ms"] > BAR]
    return f"beyond {BAR} ms: {', '.join(missed)}" if missed else None


def measure(kind: str, size: int) -> Row:
    """Return the times of one kind of index."""
    from irkit import Retriever
    from irkit.ray_engine import ShardedRetriever

    numbers = np.random.default_rng(0)
    if kind == "bm25":
        words = np.array([f"word{number}" for number in range(20_000)])
        texts = (" ".join(words[numbers.zipf(1.3, 50) % len(words)]) for _ in range(size + QUERIES))
        queries: list[Any] = [" ".join(text.split()[:4]) for text in islice(texts, QUERIES)]
        model, documents = "bm25", list(texts)
    else:
        queries = list(numbers.standard_normal((QUERIES, DIM), np.float32))
        model, documents = (
            "vectors",
            [(str(n), numbers.standard_normal(DIM, np.float32)) for n in range(size)],
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        Retriever.build(model, documents, path, shards=SHARDS).close()
        with ShardedRetriever.load(path) as retriever:
            encoded = [retriever.model.encode_representation([query], "query") for query in queries]
            index = retriever.index
            for query in encoded[:3]:  # warm all processes
                index.search(query, 10)
            total, slowest = [], []
            for _ in range(ROUNDS):
                for query in encoded:
                    total.append(timed(index.search, query, 10))
                    slowest.append(max(timed(part.search, query, 10) for part in index.parts))
    through, alone = (1000 * statistics.median(times) for times in (total, slowest))
    return {
        "index": kind,
        "documents": size,
        "shards": SHARDS,
        "slowest shard ms": round(alone, 3),
        "through Ray ms": round(through, 3),
        "overhead ms": round(through - alone, 3),
    }


def timed(search: Any, *arguments: Any) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    search(*arguments)
    return time.perf_counter() - start
