"""Suite ``shards``: what Ray adds to the time of a query; the bar is 5 ms.

The same documents in 1, 2 and 4 shards are searched one query at a time, in turns: by actors
(`irkit.ray_engine.ShardedRetriever`), and in this process each shard alone. The overhead is the time of the
search through Ray less that of the slowest shard, both without encoding and without reading texts. Medians
count. Where one actor searches all shards for a query, the overhead includes the other shards; with more
shards than cores, it includes that shards wait for each other, and the bar is for no more shards than cores.
The largest overhead of those goes into ``irkit/planning/costs.json``, where `irkit plan` finds it, and the
results ``plan`` are written again. "queries/s" are those of a batch of 1,024, as many as
`irkit.Retriever.run` searches for at once.

``python -m benchmarks shards --sizes 20000`` sets the number of documents; ``--only plaid`` measures a kind
beside the stored rows of others.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, provenance, read_results, write_results
from benchmarks.scale import CONTENTS, store_costs

KINDS = ("bm25", "flat", "dense", "plaid", "muvera")
SHARDS, QUERIES, ROUNDS = (1, 2, 4), 20, 10
BATCH = 1024  # queries
BAR = 5.0  # ms


def main(sizes: Sequence[int] = (50_000,), only: Sequence[str] = ()) -> str | None:
    """Measure, store the rows, and return what misses the bar.

    Args:
        sizes: Numbers of documents.
        only: Kinds to measure beside rows that are stored; by default all kinds, in place of these rows.
    """
    if unknown := set(only) - set(KINDS):
        raise SystemExit(
            f"shards: unknown kinds {', '.join(sorted(unknown))}; expected some of {', '.join(KINDS)}"
        )
    import torch

    from irkit.ray_engine.ray_start import start_ray

    torch.set_num_threads(1)
    ray = start_ray()
    try:
        rows = [row for size in sizes for kind in only or KINDS for row in measure(kind, size)]
    finally:
        ray.shutdown()
    if only:
        rows += [row for row in read_results("shards") if row["index"] not in only]
        rows.sort(key=lambda row: (row["documents"], KINDS.index(row["index"]), row["shards"]))
    write_results("shards", rows)
    about = provenance()
    measured = f"measured {about['date'][:10]} on {about['cpu']}, {about['cores']} cores"
    parallel = [row for row in rows if row["shards"] <= about["cores"]]
    largest = max(row["overhead ms"] for row in parallel)
    store_costs({"shards": {"overhead ms": largest, "measured": measured}})
    missed = [
        f"{row['index']} in {row['shards']}: {row['overhead ms']} ms"
        for row in parallel
        if row["overhead ms"] > BAR
    ]
    return f"beyond {BAR} ms: {', '.join(missed)}" if missed else None


def measure(kind: str, size: int) -> Iterator[Row]:
    """Yield the times of one kind of index for each number of shards."""
    from irkit import Retriever

    if kind == "bm25":
        numbers, words = np.random.default_rng(0), np.array([f"word{number}" for number in range(20_000)])
        texts = (" ".join(words[numbers.zipf(1.3, 50) % len(words)]) for _ in range(size + QUERIES))
        queries: list[Any] = [" ".join(text.split()[:4]) for text in islice(texts, QUERIES)]
        model, index, documents = "bm25", None, list(texts)
    else:
        model, index, make = CONTENTS[kind]
        queries = [*make(QUERIES, 2)]
        documents = [(str(number), content) for number, content in enumerate(make(size, 1))]
    for shards in SHARDS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "index"
            Retriever.build(model, documents, path, index=index, shards=shards).close()
            yield {"index": kind, "documents": size, "shards": shards} | search(path, queries)


def search(path: Path, queries: list[Any]) -> Row:
    """Return the times of searches of an index in shards."""
    from irkit import Retriever
    from irkit.ray_engine import ShardedRetriever

    with ShardedRetriever.load(path) as retriever, Retriever.load(path) as here:
        encoded = [retriever.model.encode_representation([query], "query") for query in queries]
        batch = retriever.model.encode_representation((queries * (1 + BATCH // QUERIES))[:BATCH], "query")
        index = retriever.index
        for query in [*encoded[:3], batch]:  # warm all processes
            index.search(query, 10)
        total, slowest, batches = [], [], []
        for _ in range(ROUNDS):
            for query in encoded:
                total.append(timed(index.search, query, 10))
                slowest.append(max(timed(part.search, query, 10) for part in here.index.parts))
            batches.append(timed(index.search, batch, 10))
    through, alone = (1000 * statistics.median(times) for times in (total, slowest))
    return {
        "slowest shard ms": round(alone, 3),
        "through Ray ms": round(through, 3),
        "overhead ms": round(through - alone, 3),
        "queries/s": round(BATCH / statistics.median(batches)),
    }


def timed(search: Any, *arguments: Any) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    search(*arguments)
    return time.perf_counter() - start
