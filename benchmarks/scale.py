"""Suite ``scale``: what an index costs at 5,000 to a million documents, and how the costs grow.

The rows also go into ``irkit/planning/costs.json``, which `irkit plan` reads. The results ``plan`` have what
it says of 8.8 million, 100 million and a billion passages.

Every index is a fresh process; opening, searching and adding are measured in another one, so that neither
profits from the other. Documents are 50 words, drawn as often as they occur in real text; the vectors of the
dense index and the tokens of the multi-vector one lie around topics. Times of single steps are medians; the
first query includes what is loaded or computed for it, without the compiled code of the kernels, which a
search of a small index loads before.

``python -m benchmarks scale --sizes 10000,100000`` measures less. ``--only plaid --sizes 1000000`` measures a
kind at a size, and leaves the other stored rows as they are.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, data_dir, peak_memory, provenance, read_results, write_results
from irkit.planning import costs, plan

SIZES = (5_000, 10_000, 100_000, 1_000_000)
LARGEST = {"plaid": 100_000, "muvera": 100_000, "hnsw": 100_000}
"""Kinds that are not measured beyond a size, unless they are named."""
KINDS = ("bm25", "inverted", "flat", "dense", "plaid", "muvera", "hnsw")
PLANNED = (8_800_000, 100_000_000, 1_000_000_000)
LATENCY = 0.05  # seconds
WORDS, WEIGHTS, DIM, TOKENS, TOKEN_DIM, TOPICS = 50, 40, 384, 32, 64, 1000
QUERIES, ADDS, CHUNK = 50, 30, 1024
WARM = 3000  # documents of the small index: enough that it is looked up and not scanned


def main(sizes: Sequence[int] = SIZES, only: Sequence[str] = ()) -> None:
    """Measure kinds at every size, and store the rows and what they predict.

    Args:
        sizes: Numbers of documents.
        only: Kinds to measure beside rows that are stored; by default all kinds, in place of these rows.
    """
    if unknown := set(only) - set(KINDS):
        raise SystemExit(
            f"scale: unknown kinds {', '.join(sorted(unknown))}; expected some of {', '.join(KINDS)}"
        )
    pairs = [(kind, size) for size in sizes for kind in only or KINDS]
    rows = [measure(*pair) for pair in sorted(pairs) if only or pair[1] <= LARGEST.get(*pair)]
    if only:
        rows += [row for row in read_results("scale") if (row["index"], row["documents"]) not in pairs]
    rows.sort(key=lambda row: (row["documents"], KINDS.index(row["index"])))
    write_results("scale", rows)
    store(rows)


def store(rows: list[Row]) -> None:
    """Write what `irkit plan` reads, and the suite ``plan``."""
    sources = [row.pop("provenance", None) or provenance() for row in rows]
    places = (f"{one['date'][:10]} on {one['cpu']}, {one['cores']} cores" for one in sources)
    store_costs({"measured": f"measured {' and '.join(dict.fromkeys(places))}", "rows": rows})


def store_costs(facts: dict[str, Any]) -> None:
    """Replace some of what `irkit plan` reads, and write the suite ``plan``.

    A prediction has the provenance of the largest measurement of its kind.
    """
    path = Path(costs.__file__).with_name("costs.json")
    path.write_text(json.dumps(costs.read_costs() | facts, indent=1) + "\n")
    sources = {row["index"]: row["provenance"] for row in read_results("scale")}  # in order of size
    write_results(
        "plan", [row | {"provenance": sources[next(iter(row.values()))]} for row in chain(plans(), checks())]
    )


def plans() -> Iterator[Row]:
    """Yield the predicted costs of collections that were not measured."""
    for size in PLANNED:
        for kind in filter(KINDS.__contains__, costs.measured_kinds()):
            found = plan(size, kind, latency=LATENCY)
            yield {
                "predicted": kind,
                "documents": f"{size / 1e6:g}M",
                "machines": found.machines,
                "GB": found.bytes / 1e9,
                "GB a machine": found.bytes / found.machines / 1e9,
                "GB of memory of a build": found.build_memory / 1e9,
                "GB of memory of a reader": found.memory / 1e9,
                "hours of the build": found.build_hours,
                "ms of a query": found.query_ms,
            }


def checks() -> Iterator[Row]:
    """Yield the largest measurement of each cost, and what the small ones predict for it."""
    for kind in KINDS:
        own = costs.rows_of(kind)
        for cost in costs.POWERS[kind] if own else ():
            item = costs.check(own, cost)
            if item is not None:
                yield {
                    "index": kind,
                    "cost": cost,
                    "fitted to": ", ".join(f"{size:,}" for size in item.fitted),
                    "at": f"{item.documents:,}",
                    "predicted": item.predicted,
                    "measured": item.measured,
                    "measured / predicted": item.measured / item.predicted,
                }


def measure(kind: str, size: int) -> Row:
    """Build an index in a process, and use it in another one."""
    row: Row = {"index": kind, "documents": size}
    with tempfile.TemporaryDirectory() as folder:
        for step in ("build", "read"):
            command = [sys.executable, "-m", "benchmarks.scale", step, kind, str(size), folder]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise SystemExit(f"scale: {step} of {kind} with {size} documents failed:\n{result.stderr}")
            row |= json.loads(result.stdout.splitlines()[-1])
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


# ---- documents ----


@cache
def _vocabulary() -> tuple[Any, Any]:
    """Return words of real text, and the sums of the shares of all up to each."""
    found: Counter[str] = Counter()
    for line in (data_dir() / "english-text" / "train.jsonl").open():
        found.update(re.findall(r"[a-z]+", json.loads(line)["text"].lower()))
    return np.array(list(found), object), np.cumsum(list(found.values())) / found.total()


def texts(count: int, seed: int) -> Iterator[str]:
    """Yield texts of words drawn as often as they occur in real text."""
    words, shares = _vocabulary()
    rng = np.random.default_rng(seed)
    for start in range(0, count, CHUNK):
        drawn = rng.random((min(CHUNK, count - start), WORDS))
        yield from (" ".join(row) for row in words[np.searchsorted(shares, drawn)])


def weights(count: int, seed: int) -> Iterator[dict[str, float]]:
    """Yield weights of 40 terms; few terms are in most documents, as a learned sparse model has it."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        terms = np.unique((30_000 * rng.random(WEIGHTS) ** 3).astype(int))
        values = rng.exponential(1, len(terms)) + 0.05
        yield dict(zip(map(str, terms.tolist()), values.tolist(), strict=True))


def vectors(count: int, seed: int, dim: int = DIM) -> Iterator[Any]:
    """Yield unit vectors around topics."""
    topics = np.random.default_rng(0).standard_normal((TOPICS, dim), dtype=np.float32)
    rng = np.random.default_rng(seed)
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        rows = topics[rng.integers(0, TOPICS, size)] + rng.standard_normal((size, dim), dtype=np.float32)
        yield from rows / np.linalg.norm(rows, axis=1, keepdims=True)


def tokens(count: int, seed: int) -> Iterator[Any]:
    """Yield 32 token vectors per document."""
    rows = vectors(count * TOKENS, seed, TOKEN_DIM)
    for _ in range(count):
        yield np.stack([next(rows) for _ in range(TOKENS)])


CONTENTS: dict[str, tuple[str, Any, Callable[[int, int], Iterator[Any]]]] = {
    "bm25": ("bm25", "inverted", texts),
    "inverted": ("impacts", "inverted", weights),
    "flat": ("vectors", "flat", vectors),
    "dense": ("vectors", "dense", vectors),
    "plaid": ("vectors", "plaid", tokens),
    "muvera": ("vectors", "muvera", tokens),
    "hnsw": ("vectors", {"kind": "faiss", "factory": "hnsw"}, vectors),
}
"""Model, index and documents of each kind."""


def documents(kind: str, count: int, seed: int, prefix: str) -> Iterator[Any]:
    """Yield documents with ids and two keys of metadata."""
    from irkit.data import Document

    for number, content in enumerate(CONTENTS[kind][2](count, seed)):
        metadata = {"year": 1990 + number % 30, "source": f"https://example.org/{number}"}
        text, vector = (content, None) if kind == "bm25" else ("", content)
        yield Document(f"{prefix}{number}", text, metadata=metadata, vector=vector)


# ---- measurements, each in a process of its own ----


def build(kind: str, size: int, folder: str) -> Row:
    """Build an index."""
    from irkit import Retriever

    model, index, _ = CONTENTS[kind]
    Retriever.build(model, documents(kind, WARM, 1, "w"), f"{folder}/tiny", index=index).close()
    sample = min(size, 20 * CHUNK)
    generator = _clock(lambda: deque(documents(kind, sample, 1, "d"), maxlen=0)) / 1000 * size / sample
    before, start = peak_memory(), time.perf_counter()
    Retriever.build(model, documents(kind, size, 1, "d"), f"{folder}/index", index=index).close()
    seconds = time.perf_counter() - start - generator
    used = sum(file.stat().st_size for file in Path(folder, "index").iterdir())
    return {
        "documents/s": size / seconds,
        "build us/document": 1e6 * seconds / size,
        "bytes/document": used / size,
        "memory of the build MB": peak_memory() - before,
    }


def read(kind: str, size: int, folder: str) -> Row:
    """Open, search, and add to an index."""
    from irkit import Retriever

    contents = list(CONTENTS[kind][2](QUERIES, 2))
    queries = [" ".join(text.split()[:4]) for text in contents] if kind == "bm25" else contents
    if kind == "inverted":
        queries = [dict(list(query.items())[:10]) for query in contents]
    Retriever.load(f"{folder}/tiny").search(queries[0], 10)  # imports, and kernels
    before = peak_memory()
    openings = [_clock(lambda: Retriever.load(f"{folder}/index", verify=False).close()) for _ in range(5)]
    index = Retriever.load(f"{folder}/index", verify=False)
    first = _clock(lambda: index.search(queries[0], 10))
    memory = peak_memory() - before
    plain = _searches(index, queries)
    adds, after = [], []
    for item, query in zip(documents(kind, ADDS + 1, 3, "n"), [*queries, queries[0]], strict=False):
        adds.append(_clock(lambda item=item: index.add([item])))
        after.append(_clock(lambda query=query: index.search(query, 10)))
    return {
        "opening ms": float(np.median(openings)),
        "first query ms": first,
        "memory of the reader MB": memory,
        "query ms": plain,
        "first add ms": adds[0],
        "add ms": float(np.median(adds[1:])),
        "query after an add ms": float(np.median(after[1:])),
    }


def _searches(index: Any, queries: list[Any]) -> float:
    return float(np.median([_clock(lambda query=query: index.search(query, 10)) for query in queries]))


def _clock(work: Callable[[], object]) -> float:
    """Return the milliseconds that work takes."""
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    verb, chosen, count, place = sys.argv[1:]
    print(json.dumps((build if verb == "build" else read)(chosen, int(count), place)))
