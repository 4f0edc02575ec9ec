"""Suite ``index``: build time, memory and search speed of the dense backends on clustered random vectors.

Every row is a fresh process, at two sizes ten times apart: memory that grows with the documents is what a
backend must hold, not what its build forgot to let go of. Recall is against exact search of the same store.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, interleave, peak_memory, ratio, write_results

SIZES = (100_000, 1_000_000)
KINDS = ("flat", "ivf", "ivfpqfs", "hnsw")
DIM, QUERIES, CHUNK, TOPICS = 128, 100, 8192, 1000
BARE = "ms/query, bare FAISS"


def main() -> None:
    """Measure every backend at both sizes; HNSW, which must hold all vectors, only at the smaller."""
    rows: list[Row] = []
    for size in SIZES:
        for kind in KINDS if size == SIZES[0] else KINDS[:-1]:
            command = [sys.executable, "-m", "benchmarks.index", kind, str(size)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise SystemExit(f"index: {kind} with {size} documents failed:\n{result.stderr}")
            rows.append(json.loads(result.stdout.splitlines()[-1]))
            print(rows[-1], file=sys.stderr, flush=True)
    write_results("index", rows)


def vectors(size: int, seed: int) -> Iterator[Any]:
    """Yield unit vectors around topics, a chunk at a time, never all in memory."""
    import torch

    topics = torch.randn(TOPICS, DIM, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, size, CHUNK):
        count = min(CHUNK, size - start)
        chosen = torch.randint(TOPICS, (count,), generator=generator)
        noise = torch.randn(count, DIM, generator=generator)
        yield torch.nn.functional.normalize(topics[chosen] + noise, dim=1)


def measure(kind: str, size: int) -> Row:
    """Build an index, search one query at a time, and compare with exact search."""
    import numpy as np

    from irkit import Dense
    from irkit.index import Flat, FlatConfig, Store, create_index, open_index

    before = peak_memory()
    with tempfile.TemporaryDirectory() as folder:
        # build
        start = time.perf_counter()
        with Store.build(folder) as store:
            index = create_index(store, kind)
            for chunk in vectors(size, seed=1):
                index.add(Dense(chunk))
            index.finish()
            store.publish()
        build = time.perf_counter() - start
        memory = peak_memory() - before
        bytes_on_disk = sum(file.stat().st_size for file in Path(folder).iterdir())

        # search, after a first call that loads and compiles what is needed
        store = Store.open(folder)
        index = open_index(store)
        queries = Dense(next(vectors(QUERIES, seed=2)))
        index.search(queries, 10)
        found = [index.search(queries[at : at + 1], 10).rows[0] for at in range(QUERIES)]
        seconds = _times(index, queries)

        # recall against the same vectors, searched exactly
        exact = Flat(store, FlatConfig()).search(queries, 10).rows
        recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, exact, strict=True)])
    return {
        "backend": kind,
        "documents": size,
        "build s": build,
        "memory of the build MB": memory,
        "bytes/document": bytes_on_disk / size,
        **{name: 1000 * statistics.median(times) / QUERIES for name, times in seconds.items()},
        **({"x FAISS": ratio(seconds, "ms/query", BARE)} if BARE in seconds else {}),
        "recall@10": float(recall),
    }


def _times(index: Any, queries: Any) -> dict[str, list[float]]:
    """Time all queries one by one, in turns: for 10, 100 and 1,000 hits, and by the bare index of FAISS."""
    from irkit.index.faiss import Faiss, faiss

    single = [queries[at : at + 1] for at in range(QUERIES)]

    def by_irkit(k: int) -> None:
        for query in single:
            index.search(query, k)

    ways = {"ms/query": partial(by_irkit, 10)}
    ways |= {f"ms/query, {k} hits": partial(by_irkit, k) for k in (100, 1000)}
    if isinstance(index, Faiss):  # the same structure, ranked by vectors that FAISS holds
        structure, reach = index.structure, index.reach(10, index.covered, index.covered, False)
        flat, parameters = faiss.IndexFlatIP(DIM), index._parameters(structure, reach, None)
        flat.add(index.store.read("values.bin"))
        bare = structure
        if reach.width > 10:
            bare, factor = faiss.IndexRefine(structure, flat), reach.width / 10
            parameters = faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=parameters)
        arrays = [query.values.numpy() for query in single]

        def by_faiss() -> None:
            for array in arrays:
                bare.search(array, 10, params=parameters)

        ways[BARE] = by_faiss
    return interleave(ways)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
