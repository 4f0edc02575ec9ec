"""Suite ``growth``: what ten times the documents cost a search of `plaid`, and what adding three takes.

Documents are generated, with 70 tokens of 128 dimensions on average. The time of a query is that of the
fastest setting that finds 96 % of the exact ten best, on one thread. Three documents are added at a time,
each addition in a commit of its own; vectors are given.

``python -m benchmarks growth --sizes 5000,50000`` sets the two numbers of documents.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contest import Contender, build_row, measure, work_folder
from benchmarks.harness import Row, write_results
from benchmarks.token_vectors import TokenVectors, generate, read
from benchmarks.worker import K, Options

SIZES = (50_000, 500_000)
RECALL = 0.96
QUERIES, ROUNDS = 100, 3
_LIMIT = 2.0  # seconds that a setting may take in a round, if five queries take no more
_SETTINGS: tuple[Options, ...] = (
    {},
    *(
        {"nprobe": probed, "candidates": scored}
        for probed in (1, 2, 4, 8)
        for scored in (64, 128, 256, 512, 1024, 2048)
    ),
)
DOCUMENTS, ADDED, TIMES = 90_000, 3, 20  # documents before the additions, in one of them, and their number


def main(sizes: Sequence[int] = SIZES) -> None:
    """Measure searches at every size, then additions, and store the rows."""
    rows: list[Row] = []
    with work_folder() as work:
        for size in sizes:
            rows.append(measure_searches(size, work))
            write_results("growth", rows)
    write_results("growth", [*rows, measure_additions()])


def measure_searches(size: int, work: Path) -> Row:
    """Build an index of generated documents; return the fastest setting that finds enough.

    Raises:
        SystemExit: No setting does, or the build takes too long.
    """
    folder = work / f"growth-{size}"
    if not folder.exists():
        generate(size, size, queries=QUERIES).write(folder)
    vectors = read(folder)
    known = {"plaid": Contender("benchmarks.engines", "irkit", {"kind": "plaid"}, _SETTINGS)}
    builds, hits, times = measure(known, folder, QUERIES, ROUNDS, _LIMIT)
    if "skipped" in builds["plaid"]:
        raise SystemExit(f"growth: {size} documents: {builds['plaid']['skipped']}")
    found = [
        {
            "settings": chosen,
            "recall@10": recall(hits[label, chosen], vectors),
            "ms/query": 1000 * statistics.median(cpu for cpu, _ in taken),
        }
        for (label, chosen), taken in times.items()
    ]
    for row in found:
        print(size, json.dumps(row), file=sys.stderr, flush=True)
    enough = [row for row in found if row["recall@10"] >= RECALL]
    if not enough:
        raise SystemExit(f"growth: no setting finds {RECALL:.0%} of {size} documents")
    built = build_row("", "plaid", builds["plaid"], "token", len(vectors.tokens))
    costs = {name: built[name] for name in ("build CPU s", "memory of the build MB", "bytes/token")}
    default = {f"default {name}": found[0][name] for name in ("recall@10", "ms/query")}
    return {"documents": size} | min(enough, key=lambda row: row["ms/query"]) | default | costs


def recall(hits: list[list[int]], vectors: TokenVectors) -> float:
    """Return the share of the exact ten best that are hits."""
    pairs = zip(hits, vectors.exact[:, :K].tolist(), strict=True)
    return statistics.mean(len(set(found) & set(best)) / K for found, best in pairs)


def measure_additions(size: int = DOCUMENTS) -> Row:
    """Build an index through `Retriever`, add documents to it, and return what the additions took."""
    from irkit import Retriever

    vectors = generate(size + ADDED * TIMES, size + ADDED * TIMES, queries=1)
    with tempfile.TemporaryDirectory() as folder:
        made = _documents(vectors)
        first = (next(made) for _ in range(size))
        with Retriever.build("vectors", first, f"{folder}/index", index="plaid") as index:
            took = []
            for _ in range(TIMES):
                documents = [next(made) for _ in range(ADDED)]
                start = time.perf_counter()
                index.add(documents)
                took.append(time.perf_counter() - start)
            if len(index) != size + ADDED * TIMES:
                raise SystemExit(f"growth: the index has {len(index)} documents")
    return {
        "documents before": size,
        "added at once": ADDED,
        "median s": statistics.median(took),
        "longest s": max(took),
    }


def _documents(vectors: TokenVectors) -> Iterator[Any]:
    from irkit.data import Document

    for number, (start, stop) in enumerate(zip(vectors.offsets[:-1], vectors.offsets[1:], strict=True)):
        yield Document(f"d{number}", "", vector=vectors.tokens[start:stop].astype("float32"))
