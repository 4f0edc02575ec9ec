"""What the measurements of the suite ``multi_vector`` come to: ratios to the others, and what is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.harness import Row

__all__ = ["bars", "speeds"]

RECALL = 0.96  # at which speeds are compared
_OURS = "irkit plaid"
_BRUTE_FORCE = {"generated 10k": 55.0, "generated 50k": 110.0}
_SPEED = {"TACHIOM": 2.0, "fast-plaid": 50.0}
_BUILD = {"TACHIOM": 0.5, "xtr-warp-rs": None, "fast-plaid": 0.2}
_BYTES = {  # with codes of as many bytes a token
    "generated": {"TACHIOM": "irkit plaid 2 bits", "xtr-warp-rs": _OURS, "fast-plaid": _OURS},
    "passages": {"xtr-warp-rs": _OURS, "fast-plaid": _OURS},
}

_Bar = tuple[str, float, str, float | None]


def bars(curves: Sequence[Row], builds: Sequence[Row]) -> list[Row]:
    """A row for each thing that is wanted, by collection; what there is no measurement for is left out."""
    rows = []
    for name in dict.fromkeys(row["collection"] for row in curves):
        found = [row for row in curves if row["collection"] == name]
        built = {row["contender"]: row for row in builds if row["collection"] == name and row["build CPU s"]}
        for what, value, sign, wanted in [*_quality(name, found), *_sizes(name, built)]:
            met = "" if wanted is None else "yes" if (value >= wanted) == (sign == ">=") else "no"
            limit = "" if wanted is None else f"{sign} {wanted:g}"
            rows.append({"collection": name, _OURS: what, "is": value, "wanted": limit, "met": met})
    return rows


def speeds(curves: Sequence[Row]) -> list[Row]:
    """A row a contender: the fastest of its settings that reach the recall, else of those that find most."""
    rows = []
    for contender in dict.fromkeys(row["contender"] for row in curves):
        cells: Row = {"one thread, queries/s (recall@10)": contender}
        for name in dict.fromkeys(row["collection"] for row in curves):
            found = [row for row in curves if row["collection"] == name]
            best = _fastest(found, contender, min(RECALL, _highest(found, contender)))
            cells[name] = f"{best['queries/s']:.3g} ({best['recall@10']:.3f})" if best else ""
        rows.append(cells)
    return rows


def _fastest(rows: Sequence[Row], contender: str, recall: float) -> Row | None:
    """The setting of most queries a second among those that find so much."""
    good = [row for row in rows if row["contender"] == contender and row["recall@10"] >= recall]
    return max(good, key=lambda row: row["queries/s"], default=None)


def _quality(name: str, rows: list[Row]) -> Iterator[_Bar]:
    """Recall, and queries a second over those of the others."""
    yield "recall@10 with every document scored by its codes", _highest(rows, _OURS), ">=", 0.985
    kept = _highest(rows, f"{_OURS}, tokens kept")
    if kept:
        yield "recall@10 by codes, the best scored by tokens that are kept", kept, ">=", 0.985
    ours = _fastest(rows, _OURS, RECALL)
    if ours is None:
        return
    what = f"queries/s at recall {RECALL} / "
    yield f"{what}exact bfloat16", ours["x exact bfloat16"], ">=", _BRUTE_FORCE.get(name)
    for peer, times in _SPEED.items():
        highest = _highest(rows, peer)
        theirs = _fastest(rows, peer, min(RECALL, highest))
        if theirs is not None:
            at = "" if highest >= RECALL else f" at its {highest:.3f}"
            yield f"{what}{peer}{at}", ours["queries/s"] / theirs["queries/s"], ">=", times
    ratios = []
    for row in rows:
        same = _fastest(rows, _OURS, row["recall@10"]) if row["contender"] == "xtr-warp-rs" else None
        ratios += [same["queries/s"] / row["queries/s"]] if same else []
    if ratios:
        yield "queries/s / xtr-warp-rs at its recall, the least of its settings", min(ratios), ">=", 4.0


def _sizes(name: str, built: dict[str, Row]) -> Iterator[_Bar]:
    """Time of the build and bytes over those of the others."""
    for peer, share in _BUILD.items():
        if peer in built:
            times = built[_OURS]["build CPU s"] / built[peer]["build CPU s"]
            yield f"processor time of the build / {peer}", times, "<=", share
    for peer, ours in _BYTES[name.split()[0]].items():
        if peer in built:
            bits = " 2 bits" if "2 bits" in ours else ""
            yield f"bytes{bits} / {peer}", built[ours]["bytes/token"] / built[peer]["bytes/token"], "<=", 1.0


def _highest(rows: Sequence[Row], contender: str) -> float:
    return max((row["recall@10"] for row in rows if row["contender"] == contender), default=0.0)
