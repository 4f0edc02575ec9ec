"""Checks of a manifest and of arrays that must fit together, done before anything relies on them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from irkit.errors import ConfigError, IrkitError
from irkit.index.array_files import SHARD, Array, corrupt, lengthen, part_entries
from irkit.index.index_kinds import (
    INDEX_KINDS,
    Entries,
    Expected,
    SeveralConfig,
    common_arrays,
    count_rows,
    index_config,
)

_COUNTS = ("rows", "dim", "covered", "listed", "trained")
_MOST = 1 << 32  # rows, dimensions or terms: 32 bits hold them
_ALIGNMENT = 64  # bytes: arrays in a segment start at multiples


def check_layout(path: Path, entries: Entries, meta: Mapping[str, Any], documents: int | None = None) -> None:
    """Refuse a manifest whose arrays and numbers do not fit together, without a look into the files.

    The contents of files are checked when they are read.

    Args:
        path: Path of the index, for messages.
        entries: Arrays by name.
        meta: Other values of the manifest.
        documents: Number of documents; None counts their hashes in ``entries``.

    Raises:
        CorruptError: They do not fit together, so irkit did not write them.
    """

    def need(condition: object, what: str) -> None:
        if not condition:
            raise corrupt(path, f"its manifest does not fit together: {what}")

    if "index" not in meta:
        return
    # numbers and configuration
    about = meta["index"]
    need(isinstance(about, dict) and {"config", "representation", "dim", "rows"} <= set(about), "no index")
    for name in _COUNTS:
        need(_whole(about.get(name, 0), _MOST), f"{name} is {about.get(name)!r:.60}")
    try:
        config = index_config(about["config"])
    except ConfigError:  # of another version or package, as `open_index` will say
        return
    need(_whole(meta.get("change", 0)), "the number of the last change")
    need(_whole(meta.get("dropped", 0)), "the number of rows that compactions have dropped")
    names = meta.get("shards", ["shard-1-000"])
    is_valid = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    need(is_valid and all(map(SHARD.fullmatch, names)) and len(set(names)) == len(names), "names of shards")
    if isinstance(config, SeveralConfig):
        _check_several(path, entries, meta, config, need)
        return
    need(config.kind in INDEX_KINDS, "no kind of a stored index")
    if "shards" in meta:  # whose manifests have all else
        need(_number(about.get("bm25", {}).get("mean") or 1), "mean length")
        return
    # the arrays that this configuration and these numbers need
    _check_structure(entries, about, need)
    kind, representation = INDEX_KINDS[config.kind], about["representation"]
    need(representation is None or representation in kind.holds, f"kind {representation!r:.60}")
    need(representation or not about["rows"], "rows of no kind")
    expected = [*common_arrays(entries), *_window_arrays(entries, about, documents, need)]
    if representation and kind.arrays:
        expected += kind.arrays(entries, about, config)
    _check_expected(entries, expected, need)


def _window_arrays(
    entries: Entries, about: Mapping[str, Any], documents: int | None, need: Callable[[object, str], None]
) -> Iterator[Expected]:
    """Yield the arrays that divide windows among documents, if documents are cut."""
    windows = about.get("windows")
    need(windows is None or isinstance(windows, dict), f"windows {windows!r:.60}")
    if windows:
        count = count_rows(entries, "hashes.bin") if documents is None else documents
        yield "window_spans.bin", "<i8", (2,), about["rows"]
        yield "window_ends.bin", "<i8", (), count


def _check_several(
    path: Path,
    entries: Entries,
    meta: Mapping[str, Any],
    config: SeveralConfig,
    need: Callable[[object, str], None],
) -> None:
    """Check the parts of an index with several representations, and the arrays that they share."""
    about, count = meta["index"], count_rows(entries, "hashes.bin")
    parts = about.get("parts")
    is_valid = isinstance(parts, dict) and parts and all(isinstance(part, dict) for part in parts.values())
    parts = parts if isinstance(parts, dict) else {}
    need(is_valid and list(parts) == list(config.indexes), "parts")
    for name, part in parts.items():
        need(isinstance(part.get("config"), dict) and part["config"].get("kind") != "several", f"part {name}")
        need(part.get("windows") == about.get("windows"), f"windows of {name}")
        check_layout(path, part_entries(entries, name), {**meta, "index": part}, count)
        need(part["rows"] == about["rows"], f"rows of {name}")
    need(about["representation"] in (None, "several"), "kind")
    need(count_rows(entries, "sorted_rows.bin") <= count, "sorted ids")
    need(("field_groups.bin" in entries) == ("field_order.bin" in entries), "sorted columns")
    _check_expected(entries, common_arrays(entries), need)


def _check_expected(
    entries: Entries, expected: Iterable[Expected], need: Callable[[object, str], None]
) -> None:
    """Compare arrays with what an index of their kind has."""
    for name, dtypes, shape, rows in expected:
        entry = entries.get(name)
        stored = (entry.dtype, entry.shape, entry.rows) if entry else ("", shape, 0)
        fits = stored[0] in dtypes.split() and stored[1] == shape and rows in (None, stored[2])
        need(fits if entry else not rows, f"{name} is {stored}, expected {dtypes} {shape} {rows}")


@contextlib.contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Turn errors of kernels about arrays into a CorruptError, where the arrays come from files.

    Args:
        path: Path of the index, for messages.
    """
    try:
        yield
    except IrkitError:
        raise
    except (ValueError, TypeError) as error:
        raise corrupt(path, f"its arrays do not fit together ({error})") from error


def removed_rows(path: Path, rows: Array, count: int) -> Array:
    """Return ``rows``, if they are below ``count``.

    Raises:
        CorruptError: One is not.
    """
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        raise corrupt(path, f"rows {rows.min()} to {rows.max()} of {count} were removed")
    return rows


def row_ends(path: Path, lengths: Array, total: int, before: Array | None = None) -> Array:
    """Return ``(n,)`` where the elements of each row end.

    Args:
        path: Path of the index, for messages.
        lengths: ``(n,)`` elements of each row.
        total: Elements of all rows.
        before: Ends of the first rows, as returned by an earlier call; None for no rows.

    Raises:
        CorruptError: A length is below 0, or lengths do not add up to the total.
    """
    before = np.empty(0, np.int64) if before is None else before
    first, new = int(before[-1]) if len(before) else 0, lengths[len(before) :]
    ends = np.cumsum(new, dtype=np.int64) + first
    last = int(ends[-1]) if len(ends) else first
    wrong = new.min(initial=0) < 0 or new.max(initial=0) > total or ends.min(initial=0) < 0
    if len(lengths) and (wrong or last != total):
        raise corrupt(path, f"lengths of its rows do not add up to {total}")
    return lengthen(before, ends)


def row_blocks(
    ends: Array | None, start: int, stop: int, elements: int, rows: int = _MOST
) -> Iterator[tuple[int, int]]:
    """Cut rows ``start`` to ``stop`` into blocks; yield the first row of each, and the row after its last.

    Args:
        ends: Where the elements of each row end; None means one element per row.
        start: First row.
        stop: Row after the last.
        elements: Elements of a block, at most, unless its only row has more.
        rows: Rows of a block, at most.
    """
    while start < stop:
        end = start + elements
        if ends is not None:
            before = int(ends[start - 1]) if start else 0
            end = max(start + 1, int(np.searchsorted(ends, before + elements, "right")))
        end = min(end, start + rows, stop)
        yield start, end
        start = end


def element_positions(ends: Array, lengths: Array) -> Array:
    """Return the positions of the elements of rows, row by row.

    Args:
        ends: ``(n,)`` position after the last element of each row.
        lengths: ``(n,)`` elements of each row.
    """
    before = np.cumsum(lengths) - lengths
    positions: Array = np.repeat(ends - lengths - before, lengths) + np.arange(int(lengths.sum()))
    return positions


def _check_structure(entries: Entries, about: Mapping[str, Any], need: Callable[[object, str], None]) -> None:
    """Check segments, rows that a structure covers, and statistics of BM25."""
    n, covered, listed = about["rows"], about.get("covered", 0), about.get("listed", 0)
    need(about["dim"] or not count_rows(entries, "values.bin"), "vectors of no numbers")
    need(("field_groups.bin" in entries) == ("field_order.bin" in entries), "sorted columns")
    need(count_rows(entries, "sorted_rows.bin") <= count_rows(entries, "hashes.bin"), "sorted ids")
    need(listed <= covered <= n, f"{listed} rows listed and {covered} covered of {n}")
    if "codes.bin" in entries or covered:
        enough = about["config"].get("kind") != "plaid" or count_rows(entries, "means.bin") >= covered
        need(
            enough and count_rows(entries, "list_offsets.bin") <= count_rows(entries, "centroids.bin") + 1,
            "rows covered",
        )
    for name in ("misfit", "length"):
        need(_number(about.get(name, 0)), f"{name} is {about.get(name)!r:.60}")
    segments = about.get("segments", [])
    need(isinstance(segments, list) and len(segments) <= 26 * 27, "segments")
    for number, segment in enumerate(segments):
        _check_segment(segment, need)
        need(segment_name(number) in entries, "a segment without a file")
    stops = [0, *(segment["stop"] for segment in segments)]
    starts = [*(segment["start"] for segment in segments), n]
    need(starts[:-1] == stops[:-1] and all(a <= b for a, b in pairwise([*stops, n])), "rows of segments")
    if "vocabulary.txt" in entries:
        need(about["dim"] <= max(1, entries["vocabulary.txt"].rows), "more terms than vocabulary.txt has")
    if "bm25" in about:
        _check_bm25(entries, about, need)


def segment_name(number: int) -> str:
    """Return the name of the array of a segment: ``segment_a.bin``, after ``z`` with two letters."""
    first, last = divmod(number, 26)
    letters = (chr(ord("a") + first - 1) if first else "") + chr(ord("a") + last)
    return f"segment_{letters}.bin"


def _check_segment(segment: Any, need: Callable[[object, str], None]) -> None:
    keys = {"start", "stop", "fields"}
    need(isinstance(segment, dict) and set(segment) == keys, f"a segment is {segment!r:.60}")
    need(_whole(segment["start"]) and _whole(segment["stop"]), "rows of a segment")
    need(isinstance(segment["fields"], dict), "fields of a segment")
    for name, field in segment["fields"].items():
        is_valid = isinstance(field, list) and len(field) == 3
        is_valid = is_valid and _whole(field[0]) and field[0] % _ALIGNMENT == 0 and isinstance(field[2], list)
        is_valid = is_valid and field[1] in _DTYPES and len(field[2]) <= 2 and all(map(_whole, field[2]))
        need(is_valid, f"field {name!r:.60} of a segment is {field!r:.60}")


def _check_bm25(entries: Entries, about: Mapping[str, Any], need: Callable[[object, str], None]) -> None:
    bm25, n = about["bm25"], about["rows"]
    need(isinstance(bm25, dict) and {"k1", "b", "mean", "counted"} <= set(bm25), "bm25")
    need(_number(bm25["k1"]) and bm25["k1"] >= 0 and _number(bm25["b"]) and 0 <= bm25["b"] <= 1, "k1 and b")
    need(_number(bm25.get("shared", 1)) and bm25.get("shared", 1) > 0, "shared mean length")
    need(bm25["mean"] is None or (_number(bm25["mean"]) and bm25["mean"] > 0), "mean length")
    counted = bm25["counted"]
    limits = {"rows": n, "removed": count_rows(entries, "removed.bin"), "documents": n, "tokens": 1 << 48}
    need(isinstance(counted, dict) and set(counted) == set(limits), "counted documents")
    for name, most in limits.items():
        need(_whole(counted[name], most), f"counted {name}: {counted[name]!r:.60}")
    size = count_rows(entries, "frequencies.bin")
    need(size % 4 == 0 and size <= 4 * max(1, about["dim"]), "frequencies of terms")


_DTYPES = ("|u1", "|i1", "<u2", "<u4", "<i4", "<i8", "<f2", "<f4")


def _whole(value: Any, most: int = 1 << 48) -> bool:
    return type(value) is int and 0 <= value <= most


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e300
