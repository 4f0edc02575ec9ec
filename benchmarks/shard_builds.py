"""Suite ``shard_builds``: a build of shards on Ray beside the same build in one process.

Documents are those of the suite ``scale``: texts for BM25, and vectors that are given for a flat index. Ray
runs on this machine; its start, which is not part of a build, is timed apart. Both builds must have the same
files, with the same checksums, or the suite fails.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, write_results
from benchmarks.scale import texts, vectors

SHARDS = 2


def main(sizes: Sequence[int] = (100_000,)) -> None:
    """Build both collections at every size, and store the rows."""
    from irkit.ray_engine.ray_start import start_ray

    start = time.perf_counter()
    ray = start_ray()
    started = time.perf_counter() - start
    try:
        rows = [measure(kind, size) for size in sizes for kind in ("bm25", "vectors")]
    finally:
        ray.shutdown()
    write_results("shard_builds", [row | {"s of the start of Ray": started} for row in rows])


def measure(kind: str, size: int) -> Row:
    """Build an index in one process and on Ray."""
    from irkit import Retriever
    from irkit.ray_engine import build_shards

    with tempfile.TemporaryDirectory() as folder:
        corpus, seconds = write(kind, size, Path(folder)), {}
        for name, build in (("one process", Retriever.build), ("Ray", build_shards)):
            start = time.perf_counter()
            build(kind, corpus, Path(folder, name), shards=SHARDS).close()
            seconds[name] = time.perf_counter() - start
        if files(Path(folder, "one process")) != files(Path(folder, "Ray")):
            raise SystemExit(f"shard_builds: the builds of {size:,} documents of {kind} have other files")
    return {
        "model": kind,
        "documents": size,
        "shards": SHARDS,
        "s of a build in one process": seconds["one process"],
        "s of a build on Ray": seconds["Ray"],
        "Ray / one process": seconds["Ray"] / seconds["one process"],
    }


def write(kind: str, size: int, folder: Path) -> Path:
    """Write the documents to a file."""
    if kind == "vectors":
        path = folder / "vectors.npy"
        np.save(path, np.stack(list(vectors(size, 1))))
        return path
    path = folder / "corpus.jsonl"
    with path.open("w") as stream:
        for number, text in enumerate(texts(size, 1)):
            stream.write(json.dumps({"_id": str(number), "text": text}) + "\n")
    return path


def files(path: Path) -> list[Any]:
    """Return names, rows and checksums of all arrays of all shards, compared with what is on the disk."""
    from irkit.shards import open_store

    store = open_store(path, verify=True)
    return [each.committed.arrays for each in (store, *store.parts)]
