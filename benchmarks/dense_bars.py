"""What the measurements of the suite ``dense`` come to: ratios to the others, and what is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.harness import Row

__all__ = ["DEFAULT", "bars", "speeds"]

RECALLS = (0.95, 0.99, 0.999)  # at which speeds are compared
DEFAULT = "irkit float16"
_PRODUCT, _GRAPH = "FAISS IVF, PQ", "FAISS HNSW"  # whose builds are compared
_LARGE = 1_000_000  # documents of a large collection
_Bar = tuple[str, float, str, float | None]


def bars(curves: Sequence[Row], builds: Sequence[Row]) -> list[Row]:
    """Return a row for each thing that is wanted, by collection; what was not measured is left out."""
    rows = []
    for name in dict.fromkeys(row["collection"] for row in curves):
        found = [row for row in curves if row["collection"] == name]
        built = {row["contender"]: row for row in builds if row["collection"] == name and row["build CPU s"]}
        for what, value, sign, wanted in [*_speed(found), *_recalls(found), *_sizes(found, built)]:
            met = "" if wanted is None else "yes" if (value >= wanted) == (sign == ">=") else "no"
            limit = "" if wanted is None else f"{sign} {wanted:g}"
            rows.append({"collection": name, "irkit": what, "is": value, "wanted": limit, "met": met})
    return rows


def speeds(curves: Sequence[Row]) -> list[Row]:
    """Return a row for each contender: microseconds a query of its fastest setting that reaches a recall."""
    rows = []
    for name in dict.fromkeys(row["collection"] for row in curves):
        found = [row for row in curves if row["collection"] == name]
        for contender in dict.fromkeys(row["contender"] for row in found):
            cells: Row = {"collection": name, "us/query at recall@10 of": contender}
            for recall in RECALLS:
                best = _fastest([row for row in found if row["contender"] == contender], recall)
                cells[f">= {recall:g}"] = f"{best['us/query']:.1f}" if best else ""
            rows.append(cells)
    return rows


def _fastest(rows: Sequence[Row], recall: float) -> Row | None:
    """Return the setting of most queries a second among those that find so much."""
    good = [row for row in rows if row["recall@10"] >= recall]
    return max(good, key=lambda row: row["queries/s"], default=None)


def _is_own(row: Row) -> bool:
    return str(row["contender"]).startswith("irkit")


def _speed(rows: list[Row]) -> Iterator[_Bar]:
    """Yield queries a second over those of the fastest of the others."""
    wanted = 3.0 if rows[0]["documents"] >= _LARGE else 2.0
    for recall in RECALLS:
        ours = _fastest([row for row in rows if _is_own(row)], recall)
        theirs = _fastest([row for row in rows if not _is_own(row)], recall)
        if ours and theirs:
            what = f"queries/s at recall {recall:g} / {theirs['contender']}"
            yield what, ours["queries/s"] / theirs["queries/s"], ">=", wanted


def _recalls(rows: list[Row]) -> Iterator[_Bar]:
    """Yield what default settings find."""
    for row in rows:
        if _is_own(row) and row["is default"]:
            wanted = 0.95 if row["contender"] == "irkit none" else 0.99
            yield f"recall@10 with default settings, {row['contender'][6:]}", row["recall@10"], ">=", wanted


def _sizes(rows: list[Row], built: dict[str, Row]) -> Iterator[_Bar]:
    """Yield bytes, and what builds take beside those of the others."""
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
