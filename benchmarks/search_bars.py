"""The bars of dense search and of large collections, from the stored rows of several suites.

A bar whose suite has no stored row for it is "not measured".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import harness
from benchmarks.dense_bars import RECALLS
from benchmarks.harness import Row, read_results

__all__ = ["rows"]

_COLLECTIONS = ("generated 200k x 384", "generated 1000k x 384", "passages", "generated 200k x 768")
_LARGE = 1_000_000
_KINDS = ("bm25", "inverted", "dense", "plaid")  # which are measured at a million documents
_TIMES = {"opening ms": 100, "first query ms": 300, "add ms": 20}
_GROWN = ("dense", "bm25")  # that are added to for ten minutes
_RUNS = ("dense", "sparse", "multi_vector")  # whose indexes find 1,000 hits


class _Bar(NamedTuple):
    """A bar: of what, what was measured, its value, ``>=`` or ``<=``, the limit, and the row it is from."""

    of: str
    what: str
    value: float | None
    sign: str
    limit: float
    source: Row


def rows() -> list[Row]:
    """Return a row for each bar: what it is of, its value, the limit, whether it is met, and its origin."""
    return [*_dense(), *map(_row, [*_bare(), *_flat(), *_million(), *_adds(), *_runs(), *_growth()])]


def _row(bar: _Bar) -> Row:
    met = bar.value is not None and (bar.value >= bar.limit if bar.sign == ">=" else bar.value <= bar.limit)
    return {
        "of": bar.of,
        "bar": bar.what,
        "is": "not measured" if bar.value is None else bar.value,
        "wanted": f"{bar.sign} {bar.limit:g}",
        "met": "" if bar.value is None else "yes" if met else "no",
        "measured": _origin(bar.source),
    }


def _origin(row: Row) -> str:
    source = row.get("provenance")
    return f"{source['date'][:10]}, {source['commit']}, {source['cpu']}" if source else ""


def _stored(suite: str) -> list[Row]:
    return read_results(suite) if (harness.RESULTS / f"{suite}.jsonl").exists() else []


def _dense() -> Iterator[Row]:
    """Yield the bars of the suite ``dense``, and those of collections that it has not measured."""
    found = [row for row in _stored("dense") if "met" in row]
    for name in _COLLECTIONS:
        own = [row for row in found if row["collection"] == name]
        for row in own:
            cells = {key: row[key] for key in ("is", "wanted", "met")}
            yield {"of": f"dense, {name}", "bar": row["irkit"]} | cells | {"measured": _origin(row)}
        if not own:
            wanted = 3 if "1000k" in name else 2
            for recall in RECALLS:
                what = f"queries/s at recall {recall:g} / the fastest of the others"
                yield _row(_Bar(f"dense, {name}", what, None, ">=", wanted, {}))
            if "1000k" in name:
                yield _row(_Bar(f"dense, {name}", "memory of the build, MB", None, "<=", 1000, {}))


def _bare() -> Iterator[_Bar]:
    """Yield the times of FAISS kinds over those of the bare index of FAISS."""
    measured = [row for row in _stored("index") if "x FAISS" in row]
    what = "time of a query / the bare index of FAISS"
    for row in measured:
        yield _Bar(f"{row['backend']}, {row['documents']}", what, 1 / row["x FAISS"], "<=", 1.15, row)
    if not measured:
        yield _Bar("hnsw, ivf, ivfpqfs", what, None, "<=", 1.15, {})


def _flat() -> Iterator[_Bar]:
    """Yield the speed of a scan of codes over a product of all vectors, with the same hits."""
    kernels = [row for row in _stored("kernels") if row["kernel"] == "dense_scan"]
    what = "exact search by codes of 8 bits / all vectors in float32, 10 hits"
    of = [row for row in kernels if row["hits"] == 10]
    for row in of:
        name = f"flat, queries at a time: {row['queries at a time']}"
        yield _Bar(name, what, row["x torch"], ">=", 3, row)
    if not of:
        yield _Bar("flat", what, None, ">=", 3, {})


def _million() -> Iterator[_Bar]:
    """Yield times of an index of a million documents."""
    scale = {row["index"]: row for row in _stored("scale") if row["documents"] == _LARGE}
    for kind in _KINDS:
        row = scale.get(kind, {})
        for name, limit in _TIMES.items():
            yield _Bar(f"{kind}, a million documents", name, row.get(name), "<=", limit, row)


def _adds() -> Iterator[_Bar]:
    """Yield what ten minutes of additions did to an index of a million documents."""
    grown = {row["index"]: row for row in _stored("adds") if row["documents"] == _LARGE}
    for kind in _GROWN:
        row, of = grown.get(kind, {}), f"{kind}, a million documents"
        yield _Bar(of, "additions a second for ten minutes", row.get("added/s"), ">=", 100, row)
        yield _Bar(of, "time of a search after them / before", row.get("growth"), "<=", 1.2, row)


def _runs() -> Iterator[_Bar]:
    """Yield the time of 1,000 hits over that of 100, and over that of `flat`."""
    measured = _stored("runs")
    for kind in _RUNS:
        own = [row for row in measured if row["documents"].endswith(f" {kind}")]
        for row in own or [{"documents": kind, "index": "every index"}]:
            of = f"{row['index']}, {row['documents']}"
            yield _Bar(of, "time of 1,000 hits / 100 hits", row.get("x 100 hits"), "<=", 3, row)
            if row["index"] != "flat":
                yield _Bar(of, "time of 1,000 hits / flat", row.get("x flat"), "<=", 1, row)


def _growth() -> Iterator[_Bar]:
    """Yield what ten times the documents cost a search of `plaid`, and what it takes to add three."""
    rows = _stored("growth")
    times = {row["documents"]: row for row in rows if "ms/query" in row}
    small, large = (times.get(size, {}) for size in (50_000, 500_000))
    growth = large["ms/query"] / small["ms/query"] if small and large else None
    of = "plaid, 500,000 documents of 70 tokens"
    yield _Bar(of, "time of a query / 50,000 documents, at recall 0.96", growth, "<=", 2, large)
    added = next((row for row in rows if row.get("documents before") == 90_000), {})
    what = "seconds to add 3 documents, without encoding"
    yield _Bar("plaid, 90,000 documents", what, added.get("median s"), "<=", 0.1, added)
