"""Suite ``runs``: what 1,000 hits take beside 100 and 10, of every kind of index, one query at a time.

All indexes of a collection are searched in turns, in one process and one thread, so ratios hold on a busy
machine. Two bars: 1,000 hits take at most 3 times the time of 100, and at most that of `flat`.

``python -m benchmarks runs --sizes 100000`` sets the number of dense vectors, and of sparse ones.
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

from benchmarks.harness import Row, write_results

HITS = (10, 100, 1000)
QUERIES, ROUNDS = 8, 5
ABSTRACTS, TOKEN_DIM = 3204, 384
DENSE: dict[str, Any] = {
    "flat": {"kind": "flat"},
    "flat float16": {"kind": "flat", "dtype": "float16"},
    "flat int8": {"kind": "flat", "dtype": "int8"},
    "dense": {"kind": "dense"},
    "dense int8": {"kind": "dense", "keep": "int8"},
    "dense none": {"kind": "dense", "keep": "none"},
    **{name: {"kind": "faiss", "factory": name} for name in ("hnsw", "ivf", "pq", "ivfpqfs")},
}
TOKENS = {name: {"kind": name} for name in ("flat", "plaid", "muvera")}
TOKENS["flat int8"] = {"kind": "flat", "dtype": "int8"}
SPARSE = {
    "flat": {"kind": "flat"},
    "inverted": {"kind": "inverted", "mode": "exact"},
    "inverted approximate": {"kind": "inverted", "mode": "approximate"},
}


def main(sizes: Sequence[int] = (100_000,)) -> None:
    """Measure the three kinds of representation, and store the rows."""
    import torch

    torch.set_num_threads(1)
    rows = [row for size in sizes for row in [*measure("dense", size), *measure("sparse", size)]]
    write_results("runs", [*rows, *measure("multi_vector", ABSTRACTS)])


def collection(name: str, size: int) -> tuple[dict[str, Any], Iterator[Any], list[Any]]:
    """Return settings of indexes, blocks of documents, and queries."""
    import torch

    from benchmarks import scale
    from benchmarks.index import vectors
    from benchmarks.token_vectors import generate
    from irkit import Dense, MultiVector, Ragged, Sparse

    if name == "dense":
        queries = next(vectors(QUERIES, seed=2))
        return DENSE, map(Dense, vectors(size, seed=1)), [Dense(query[None]) for query in queries]
    if name == "multi_vector":
        made = generate(size, size, TOKEN_DIM)

        def texts(values: Any, offsets: Any) -> MultiVector:
            lengths = torch.from_numpy(np.diff(offsets))
            return MultiVector(Ragged(torch.from_numpy(values[offsets[0] : offsets[-1]]).float(), lengths))

        blocks = (texts(made.tokens, made.offsets[at : at + 257]) for at in range(0, size, 256))
        places = range(QUERIES)
        return TOKENS, blocks, [texts(made.queries, made.query_offsets[at : at + 2]) for at in places]

    def sparse(rows: list[dict[str, float]]) -> Sparse:
        terms = Ragged.from_rows([[*map(int, row)] for row in rows])
        weights = torch.tensor([weight for row in rows for weight in row.values()])
        return Sparse(terms, weights, dim=30_000)

    drawn = scale.weights(size, 1)
    blocks = (sparse(part) for part in iter(lambda: [*islice(drawn, 1024)], []))
    return SPARSE, blocks, [sparse([dict([*row.items()][:10])]) for row in scale.weights(QUERIES, 2)]


def measure(name: str, size: int) -> list[Row]:
    """Build every kind of index of a collection, and time them."""
    from irkit.index import Store, create_index, open_index

    settings, blocks, queries = collection(name, size)
    with tempfile.TemporaryDirectory() as folder:
        stores = {each: Store.build(Path(folder, each)) for each in settings}
        indexes = {each: create_index(store, settings[each]) for each, store in stores.items()}
        for block in blocks:
            for index in indexes.values():
                index.add(block)
        for each, index in indexes.items():
            index.finish()
            stores[each].publish()
            stores[each].close()
        indexes = {each: open_index(Store.open(Path(folder, each), verify=False)) for each in settings}
        return compare(name, size, indexes, queries)


def compare(name: str, size: int, indexes: dict[str, Any], queries: list[Any]) -> list[Row]:
    """Time indexes in turns; return a row for each."""
    times: dict[tuple[str, int], list[float]] = {}
    found: dict[tuple[str, int], list[Any]] = {}
    for turn in range(ROUNDS + 1):  # the first is not measured
        for each, index in indexes.items():
            for k in HITS:
                start = time.perf_counter()
                hits = [index.search(query, k).rows[0] for query in queries]
                if turn:
                    times.setdefault((each, k), []).append(time.perf_counter() - start)
                found[each, k] = hits
    rows = []
    for each in indexes:
        taken = {k: 1000 * statistics.median(times[each, k]) / len(queries) for k in HITS}
        more = [many / few for many, few in zip(times[each, HITS[2]], times[each, HITS[1]], strict=True)]
        flat = [own / scan for own, scan in zip(times[each, HITS[2]], times["flat", HITS[2]], strict=True)]
        pairs = zip(found[each, HITS[2]], found["flat", HITS[2]], strict=True)
        recall = float(np.mean([len(np.intersect1d(own, best)) / HITS[2] for own, best in pairs]))
        rows.append(
            {"documents": f"{size} {name}", "index": each}
            | {f"ms, {k} hits": taken[k] for k in HITS}
            | {"x 100 hits": statistics.median(more), "x flat": statistics.median(flat)}
            | {"recall@1000": recall}
        )
    return rows
