"""Compare measured rows with bars, the values that are wanted; shared by the suites of engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.harness import Row

__all__ = ["Bar", "bar_rows", "built_rows", "by_collection", "fastest", "speed_rows"]

Bar = tuple[str, float, str, float | None]
"""What was measured, its value, ``>=`` or ``<=``, and the value that is wanted (None: only reported)."""

_ALL = 0.999  # counts as a recall of 1: weights of 16 bits round some scores past each other


def by_collection(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield each collection with its rows, in order of appearance."""
    for name in dict.fromkeys(row["collection"] for row in rows):
        yield name, [row for row in rows if row["collection"] == name]


def built_rows(builds: Sequence[Row], collection: str) -> dict[str, Row]:
    """Return the builds of a collection that were measured, by contender."""
    return {row["contender"]: row for row in builds if row["collection"] == collection and row["build CPU s"]}


def bar_rows(collection: str, title: str, bars: Iterable[Bar]) -> list[Row]:
    """Return a row for each bar that says if it is met. ``title`` names the column of the bars."""
    rows = []
    for what, value, sign, wanted in bars:
        met = "" if wanted is None else "yes" if (value >= wanted) == (sign == ">=") else "no"
        limit = "" if wanted is None else f"{sign} {wanted:g}"
        rows.append({"collection": collection, title: what, "is": value, "wanted": limit, "met": met})
    return rows


def fastest(rows: Sequence[Row], recall: float, contender: str = "", how: str | None = None) -> Row | None:
    """Return the setting of most queries per second among those that reach a recall.

    Args:
        rows: Rows of one collection.
        recall: Recall@10 that a setting must reach.
        contender: Name of the contender. Empty: all contenders.
        how: The setting ``how`` that a row must have. None: any.
    """
    good = [
        row
        for row in rows
        if row["recall@10"] >= recall
        and contender in ("", row["contender"])
        and (how is None or row["settings"].get("how", "") == how)
    ]
    return max(good, key=lambda row: row["queries/s"], default=None)


def speed_rows(
    collection: str, rows: Sequence[Row], recalls: Iterable[float], digits: int, how: str | None = None
) -> list[Row]:
    """Return a row for each contender: us per query of its fastest setting that reaches a recall."""
    table = []
    for contender in dict.fromkeys(row["contender"] for row in rows):
        cells: Row = {"collection": collection, "us/query at recall@10 of": contender}
        for recall in recalls:
            best = fastest(rows, min(recall, _ALL), contender, how)
            cells[f">= {recall:g}"] = f"{best['us/query']:.{digits}f}" if best else ""
        table.append(cells)
    return table
