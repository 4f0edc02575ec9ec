"""What the measurements of the suite ``sparse`` come to: ratios to the others, and what is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.harness import Row

__all__ = ["bars", "bm25", "exact", "speeds"]

RECALLS = (0.92, 0.96, 0.98, 0.995)  # at which speeds are compared
_ALL = 0.999  # of weights of 16 bits, some are rounded past each other
_PEER, _EXACT, _BM25 = "pyseismic-lsr", "irkit exact", "irkit BM25"
_HOWS = {"": "one by one", "arrays": "from arrays", "together": "together"}
_Bar = tuple[str, float, str, float | None]


def bars(curves: Sequence[Row], builds: Sequence[Row]) -> list[Row]:
    """A row for each thing that is wanted, by collection; what there is no measurement for is left out."""
    rows = []
    for name in dict.fromkeys(row["collection"] for row in curves):
        found = [row for row in curves if row["collection"] == name]
        built = [row for row in builds if row["collection"] == name and row["build CPU s"]]
        for what, value, sign, wanted in [*_speed(found), *_lexical(found), *_sizes(built)]:
            met = "" if wanted is None else "yes" if (value >= wanted) == (sign == ">=") else "no"
            limit = "" if wanted is None else f"{sign} {wanted:g}"
            rows.append({"collection": name, "irkit": what, "is": value, "wanted": limit, "met": met})
    return rows


def speeds(curves: Sequence[Row]) -> list[Row]:
    """A row a contender: microseconds a query of the fastest of its settings that reach a recall."""
    rows = []
    for name in dict.fromkeys(row["collection"] for row in curves):
        found = [row for row in curves if row["collection"] == name]
        usual = [row for row in found if row["settings"].get("heap_factor", 2) <= 1]
        found += [row | {"contender": f"{_PEER}, heap_factor up to 1"} for row in usual]
        for contender in dict.fromkeys(row["contender"] for row in found):
            cells: Row = {"collection": name, "us/query at recall@10 of": contender}
            for recall in (*RECALLS, 1.0):
                best = _fastest(found, contender, min(recall, _ALL))
                cells[f">= {recall:g}"] = f"{best['us/query']:.0f}" if best else ""
            rows.append(cells)
    return rows


def exact(curves: Sequence[Row]) -> list[Row]:
    """A row a collection and way to ask: microseconds a query of scans and of exact search."""
    rows = []
    for name in dict.fromkeys(row["collection"] for row in curves):
        found = [row for row in curves if row["collection"] == name]
        for how, words in _HOWS.items():
            ways = {each: _fastest(found, each, 0, how) for each in ("numpy scan", "numba scan", _EXACT)}
            cells = {each: round(best["us/query"], 2) if best else None for each, best in ways.items()}
            if ways[_EXACT]:
                rows.append({"exact, us/query": name, "asked": words, **cells})
    return rows


def bm25(curves: Sequence[Row]) -> list[Row]:
    """A row a contender that does BM25: queries a second, asked one by one and together."""
    rows = []
    for name in dict.fromkeys(row["collection"] for row in curves if row["contender"] == _BM25):
        found = [row for row in curves if row["collection"] == name]
        for contender in (_BM25, "bm25s"):
            pair = [_fastest(found, contender, 0.99, how) for how in ("", "together")]
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


def _fastest(rows: Sequence[Row], contender: str, recall: float, how: str = "") -> Row | None:
    """The setting of most queries a second among those that find so much, asked one by one or as said."""
    good = [
        row
        for row in rows
        if row["contender"] == contender
        and row["recall@10"] >= recall
        and row["settings"].get("how", "") == how
    ]
    return max(good, key=lambda row: row["queries/s"], default=None)


def _speed(rows: list[Row]) -> Iterator[_Bar]:
    """Queries a second over those of the others."""
    for recall in RECALLS:
        ours = max(
            filter(None, (_fastest(rows, each, recall) for each in ("irkit", _EXACT))),
            key=lambda row: row["queries/s"],
            default=None,
        )
        theirs = _fastest(rows, _PEER, recall)
        if ours and theirs:
            yield (
                f"queries/s at recall {recall:g} / {_PEER}",
                ours["queries/s"] / theirs["queries/s"],
                ">=",
                1.2,
            )
    for scan, how, wanted in (("numpy", "", 7.0), *(("numba", how, 1.0) for how in _HOWS)):
        ours, theirs = (_fastest(rows, each, 0, how) for each in (_EXACT, f"{scan} scan"))
        if ours and theirs:
            speedup = ours["queries/s"] / theirs["queries/s"]
            yield f"queries/s, exact, {_HOWS[how]} / {scan} scan", speedup, ">=", wanted


def _lexical(rows: list[Row]) -> Iterator[_Bar]:
    """BM25 over bm25s."""
    for how in ("", "together"):
        ours, theirs = (_fastest(rows, each, 0.99, how) for each in (_BM25, "bm25s"))
        if ours and theirs:
            yield f"BM25 queries/s {_HOWS[how]} / bm25s", ours["queries/s"] / theirs["queries/s"], ">=", 1.0


def _sizes(built: list[Row]) -> Iterator[_Bar]:
    """Time of the build and bytes over those of the peer."""
    ours, theirs = (
        next((row for row in built if row["contender"] == each), None) for each in ("irkit", _PEER)
    )
    if ours and theirs:
        for what, key in (("processor time of the build", "build CPU s"), ("bytes", "bytes/posting")):
            yield f"{what} / {_PEER}", ours[key] / theirs[key], "<=", 1.0
