"""Compare the measurements of the suite ``multi_vector`` with other engines and with the bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.bars import Bar, bar_rows, built_rows, by_collection, fastest
from benchmarks.harness import Row

__all__ = ["bars", "speeds"]

RECALL = 0.96  # at which speeds are compared
_OURS = "irkit plaid"
_BRUTE_FORCE = {"generated 10k": 55.0, "generated 50k": 110.0}
_SPEED = {"TACHIOM": 2.0, "fast-plaid": 50.0}
_BUILD = {"TACHIOM": 0.5, "xtr-warp-rs": None, "fast-plaid": 0.2}
_BYTES = {  # with codes of as many bytes per token
    "generated": {"TACHIOM": "irkit plaid 2 bits", "xtr-warp-rs": _OURS, "fast-plaid": _OURS},
    "passages": {"xtr-warp-rs": _OURS, "fast-plaid": _OURS},
}


def bars(curves: Sequence[Row], builds: Sequence[Row]) -> list[Row]:
    """Return a row per bar, by collection; bars without a measurement are left out."""
    rows = []
    for name, found in by_collection(curves):
        rows += bar_rows(name, _OURS, [*_quality(name, found), *_sizes(name, built_rows(builds, name))])
    return rows


def speeds(curves: Sequence[Row]) -> list[Row]:
    """Return a row per contender: its fastest setting that reaches the recall, else the most precise one."""
    rows = []
    for contender in dict.fromkeys(row["contender"] for row in curves):
        cells: Row = {"one thread, queries/s (recall@10)": contender}
        for name in dict.fromkeys(row["collection"] for row in curves):
            found = [row for row in curves if row["collection"] == name]
            best = fastest(found, min(RECALL, _highest(found, contender)), contender)
            cells[name] = f"{best['queries/s']:.3g} ({best['recall@10']:.3f})" if best else ""
        rows.append(cells)
    return rows


def _quality(name: str, rows: list[Row]) -> Iterator[Bar]:
    """Return recall, and queries per second relative to the others."""
    yield "recall@10 with every document scored by its codes", _highest(rows, _OURS), ">=", 0.985
    kept = _highest(rows, f"{_OURS}, tokens kept")
    if kept:
        yield "recall@10 by codes, the best scored by tokens that are kept", kept, ">=", 0.985
    ours = fastest(rows, RECALL, _OURS)
    if ours is None:
        return
    what = f"queries/s at recall {RECALL} / "
    yield f"{what}exact bfloat16", ours["x exact bfloat16"], ">=", _BRUTE_FORCE.get(name)
    for peer, times in _SPEED.items():
        highest = _highest(rows, peer)
        theirs = fastest(rows, min(RECALL, highest), peer)
        if theirs is not None:
            at = "" if highest >= RECALL else f" at its {highest:.3f}"
            yield f"{what}{peer}{at}", ours["queries/s"] / theirs["queries/s"], ">=", times
    ratios = []
    for row in rows:
        same = fastest(rows, row["recall@10"], _OURS) if row["contender"] == "xtr-warp-rs" else None
        ratios += [same["queries/s"] / row["queries/s"]] if same else []
    if ratios:
        yield "queries/s / xtr-warp-rs at its recall, the least of its settings", min(ratios), ">=", 4.0


def _sizes(name: str, built: dict[str, Row]) -> Iterator[Bar]:
    """Yield time of the build and bytes relative to the others."""
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
