"""Compare the measurements of the suite ``dense`` with other engines and with the bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.bars import Bar, bar_rows, built_rows, by_collection, fastest, speed_rows
from benchmarks.harness import Row

__all__ = ["DEFAULT", "bars", "speeds"]

RECALLS = (0.95, 0.99, 0.999)  # at which speeds are compared
DEFAULT = "irkit float16"
_PRODUCT, _GRAPH = "FAISS IVF, PQ", "FAISS HNSW"  # whose builds are compared
_LARGE = 1_000_000  # documents of a large collection


def bars(curves: Sequence[Row], builds: Sequence[Row]) -> list[Row]:
    """Return a row per bar, by collection; bars without a measurement are left out."""
    rows = []
    for name, found in by_collection(curves):
        built = built_rows(builds, name)
        rows += bar_rows(name, "irkit", [*_speed(found), *_recalls(found), *_sizes(found, built)])
    return rows


def speeds(curves: Sequence[Row]) -> list[Row]:
    """Return a row for each contender: us per query of its fastest setting that reaches a recall."""
    return [row for name, found in by_collection(curves) for row in speed_rows(name, found, RECALLS, 1)]


def _is_own(row: Row) -> bool:
    return str(row["contender"]).startswith("irkit")


def _speed(rows: list[Row]) -> Iterator[Bar]:
    """Yield queries per second relative to the fastest other engine."""
    wanted = 3.0 if rows[0]["documents"] >= _LARGE else 2.0
    for recall in RECALLS:
        ours = fastest([row for row in rows if _is_own(row)], recall)
        theirs = fastest([row for row in rows if not _is_own(row)], recall)
        if ours and theirs:
            what = f"queries/s at recall {recall:g} / {theirs['contender']}"
            yield what, ours["queries/s"] / theirs["queries/s"], ">=", wanted


def _recalls(rows: list[Row]) -> Iterator[Bar]:
    """Yield what default settings find."""
    for row in rows:
        if _is_own(row) and row["is default"]:
            wanted = 0.95 if row["contender"] == "irkit none" else 0.99
            yield f"recall@10 with default settings, {row['contender'][6:]}", row["recall@10"], ">=", wanted


def _sizes(rows: list[Row], built: dict[str, Row]) -> Iterator[Bar]:
    """Yield bytes, and what builds take relative to the other engines."""
    dim = rows[0]["dimensions"]
    if "irkit int8" in built:
        yield "bytes with keep: int8 / float32", built["irkit int8"]["bytes/document"] / (4 * dim), "<=", 0.5
    if "irkit none" in built:
        more = built["irkit none"]["bytes/document"] - dim / 2
        yield "bytes of a document beyond d/2, keep: none", more, "<=", 16.0
    for peer, share in ((_PRODUCT, 1.0), (_GRAPH, 0.2)):
        if peer in built and DEFAULT in built:
            times = built[DEFAULT]["build CPU s"] / built[peer]["build CPU s"]
            yield f"processor time of the build / {peer}", times, "<=", share
    if DEFAULT in built and rows[0]["documents"] >= _LARGE:
        for name, row in built.items():
            if name.startswith("irkit"):
                yield f"memory of the build, MB, {name[6:]}", row["memory of the build MB"], "<=", 1000.0
