"""Compare the measurements of the suite ``sparse`` with other engines and with the bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.bars import Bar, bar_rows, built_rows, by_collection, fastest, speed_rows
from benchmarks.harness import Row

__all__ = ["bars", "bm25", "exact", "speeds"]

RECALLS = (0.92, 0.96, 0.98, 0.995)  # at which speeds are compared
_PEER, _EXACT, _BM25 = "pyseismic-lsr", "irkit exact", "irkit BM25"
_HOWS = {"": "one by one", "arrays": "from arrays", "together": "together"}


def bars(curves: Sequence[Row], builds: Sequence[Row]) -> list[Row]:
    """Return a row per bar, by collection; bars without a measurement are left out."""
    rows = []
    for name, found in by_collection(curves):
        bars = [*_speed(found), *_lexical(found), *_sizes(built_rows(builds, name))]
        rows += bar_rows(name, "irkit", bars)
    return rows


def speeds(curves: Sequence[Row]) -> list[Row]:
    """Return a row for each contender: us per query of its fastest setting that reaches a recall."""
    table = []
    for name, found in by_collection(curves):
        usual = [row for row in found if row["settings"].get("heap_factor", 2) <= 1]
        found += [row | {"contender": f"{_PEER}, heap_factor up to 1"} for row in usual]
        table += speed_rows(name, found, (*RECALLS, 1.0), 0, "")
    return table


def exact(curves: Sequence[Row]) -> list[Row]:
    """Return a row per collection and way to ask: microseconds per query of scans and of exact search."""
    rows = []
    for name, found in by_collection(curves):
        for how, words in _HOWS.items():
            ways = {each: fastest(found, 0, each, how) for each in ("numpy scan", "numba scan", _EXACT)}
            cells = {each: round(best["us/query"], 2) if best else None for each, best in ways.items()}
            if ways[_EXACT]:
                rows.append({"exact, us/query": name, "asked": words, **cells})
    return rows


def bm25(curves: Sequence[Row]) -> list[Row]:
    """Return a row per contender that does BM25: queries per second, asked one by one and together."""
    rows = []
    for name, found in by_collection(curves):
        for contender in (_BM25, "bm25s"):
            pair = [fastest(found, 0.99, contender, how) for how in ("", "together")]
            if pair[0] and pair[1]:
                alone, together = (each["queries/s"] for each in pair if each)
                rows.append(
                    {
                        "collection": name,
                        "BM25": contender,
                        "recall@10": pair[0]["recall@10"],
                        "queries/s": round(alone),
                        "together": round(together),
                    }
                )
    return rows


def _speed(rows: list[Row]) -> Iterator[Bar]:
    """Return queries per second relative to the others."""
    for recall in RECALLS:
        ours = max(
            filter(None, (fastest(rows, recall, each, "") for each in ("irkit", _EXACT))),
            key=lambda row: row["queries/s"],
            default=None,
        )
        theirs = fastest(rows, recall, _PEER, "")
        if ours and theirs:
            yield (
                f"queries/s at recall {recall:g} / {_PEER}",
                ours["queries/s"] / theirs["queries/s"],
                ">=",
                1.2,
            )
    for scan, how, wanted in (("numpy", "", 7.0), *(("numba", how, 1.0) for how in _HOWS)):
        ours, theirs = (fastest(rows, 0, each, how) for each in (_EXACT, f"{scan} scan"))
        if ours and theirs:
            speedup = ours["queries/s"] / theirs["queries/s"]
            yield f"queries/s, exact, {_HOWS[how]} / {scan} scan", speedup, ">=", wanted


def _lexical(rows: list[Row]) -> Iterator[Bar]:
    """Return the speed of BM25 relative to bm25s."""
    for how in ("", "together"):
        ours, theirs = (fastest(rows, 0.99, each, how) for each in (_BM25, "bm25s"))
        if ours and theirs:
            yield f"BM25 queries/s {_HOWS[how]} / bm25s", ours["queries/s"] / theirs["queries/s"], ">=", 1.0


def _sizes(built: dict[str, Row]) -> Iterator[Bar]:
    """Yield time of the build and bytes relative to the peer."""
    if "irkit" in built and _PEER in built:
        ours, theirs = built["irkit"], built[_PEER]
        for what, key in (("processor time of the build", "build CPU s"), ("bytes", "bytes/posting")):
            yield f"{what} / {_PEER}", ours[key] / theirs[key], "<=", 1.0
