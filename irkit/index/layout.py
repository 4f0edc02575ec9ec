"""What a manifest may say of an index, and how arrays fit together: checked before anything follows them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from irkit.errors import ConfigError, CorruptError, IrkitError
from irkit.index.config import (
    FlatConfig,
    IndexConfig,
    InvertedConfig,
    MuveraConfig,
    PlaidConfig,
    index_config,
)
from irkit.index.files import REMEDY, Array, Entry
from irkit.index.quantization import LARGEST

__all__ = ["check_layout", "fitting", "removed_rows", "row_ends"]

Entries: TypeAlias = Mapping[str, Entry]
Expected: TypeAlias = tuple[str, str, tuple[int, ...], int | None]
"""Name of an array, its dtypes in words, shape of a row, and rows, or None where any number will do."""

_KINDS = {
    "dense": ("flat", "faiss"),
    "multi_vector": ("flat", "plaid", "muvera"),
    "sparse": ("flat", "inverted"),
}
_COUNTS = ("rows", "dim", "covered", "listed", "trained")
_MOST = 1 << 32  # rows, and numbers of a vector or terms: what 32 bits hold
_ALIGNMENT = 64  # of the arrays in a segment


def check_layout(path: Path, entries: Entries, meta: Mapping[str, Any]) -> None:
    """Refuse a manifest whose arrays and numbers do not fit together; looks into no file.

    What files say in their turn is checked by who reads it.

    Args:
        path: Of the index, for messages.
        entries: The arrays by name.
        meta: The free values of the manifest.

    Raises:
        CorruptError: It does not fit, so it was made by something else than irkit.
    """

    def need(fine: object, what: str) -> None:
        if not fine:
            raise CorruptError(f"index {path}: its manifest does not fit together: {what}; {REMEDY}")

    if "index" not in meta:
        return
    about = meta["index"]
    need(isinstance(about, dict) and {"config", "representation", "dim", "rows"} <= set(about), "no index")
    for name in _COUNTS:
        need(_whole(about.get(name, 0), _MOST), f"{name} is {about.get(name)!r:.60}")
    try:
        config = index_config(about["config"])
    except ConfigError:  # of another version, perhaps, as `open_index` says
        return
    kind = about["representation"]
    need(
        kind is None or (isinstance(kind, str) and config.kind in _KINDS.get(kind, ())), f"kind {kind!r:.60}"
    )
    need(kind or not about["rows"], "rows of no kind")
    for name, dtypes, shape, rows in (*_documents(entries), *_arrays(entries, about, config)):
        entry = entries.get(name)
        found = (entry.dtype, entry.shape, entry.rows) if entry else ("", shape, 0)
        fits = found[0] in dtypes.split() and found[1] == shape and rows in (None, found[2])
        need(fits if entry else not rows, f"{name} is {found}, expected {dtypes} {shape} {rows}")
    _check_parts(entries, about, need)


@contextlib.contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Turn what kernels say of arrays, which a file has and no caller gave, into a CorruptError.

    Args:
        path: Of the index, for messages.
    """
    try:
        yield
    except IrkitError:
        raise
    except (ValueError, TypeError) as error:
        raise CorruptError(f"index {path}: its arrays do not fit together ({error}); {REMEDY}") from error


def removed_rows(path: Path, rows: Array, count: int) -> Array:
    """``rows``, if they are of the first ``count``.

    Raises:
        CorruptError: One is not.
    """
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        raise CorruptError(
            f"index {path}: rows {rows.min()} to {rows.max()} of {count} were removed; {REMEDY}"
        )
    return rows


def row_ends(path: Path, lengths: Array, total: int) -> Array:
    """``(n,)`` where the elements of each row end.

    Args:
        path: Of the index, for messages.
        lengths: ``(n,)`` of the rows.
        total: Elements of all rows.

    Raises:
        CorruptError: A length is below 0, or they do not add up.
    """
    ends: Array = np.cumsum(lengths)
    if len(ends) and (lengths.min() < 0 or lengths.max() > total or ends.min() < 0 or ends[-1] != total):
        raise CorruptError(f"index {path}: lengths of its rows do not add up to {total}; {REMEDY}")
    return ends


def _documents(entries: Entries) -> Iterator[Expected]:
    """Arrays of any index: what was removed, documents, vocabularies."""
    yield "removed.bin", "<i8", (), None
    yield "hashes.bin", "<u8", (), None
    yield "ends.bin", "<i8", (3,), _rows(entries, "hashes.bin")
    for name in ("ids.bin", "documents.jsonl", "metadata.jsonl", "vocabulary.txt", "frequencies.bin"):
        yield name, "|u1", (), None


def _arrays(entries: Entries, about: Mapping[str, Any], config: IndexConfig) -> Iterator[Expected]:
    """Arrays of representations, and of what a kind of index makes of them."""
    n, dim, kind = about["rows"], about["dim"], about["representation"]
    if kind is None:
        return
    if kind != "dense":
        yield "lengths.bin", "<i8", (), n
    if kind == "sparse":
        yield from _sparse_arrays(entries, about, config)
    elif isinstance(config, PlaidConfig):
        yield from _plaid_arrays(entries, about)
    elif isinstance(config, FlatConfig) and config.dtype == "int8":
        yield "values.bin", "|i1", (dim,), None
        yield "scales.bin", "<f4", (), _rows(entries, "values.bin")
    else:
        dtype = "<f2" if isinstance(config, MuveraConfig) else "<f4"
        yield "values.bin", dtype, (dim,), n if kind == "dense" else None
    covers = config.kind in ("faiss", "muvera") and about.get("covered", 0)
    yield "faiss.index", "|u1", (), _rows(entries, "faiss.index") or 1 if covers else None


def _sparse_arrays(entries: Entries, about: Mapping[str, Any], config: IndexConfig) -> Iterator[Expected]:
    total, weights = _rows(entries, "terms.bin"), "<f4"
    if isinstance(config, InvertedConfig):
        weights = "<u2" if "bm25" in about else np.dtype(config.dtype).newbyteorder("<").str
        if "bm25" not in about and config.dtype in LARGEST:
            yield "scales.bin", "<f4", (), about["rows"]
    yield "terms.bin", "<u2 <u4" if isinstance(config, InvertedConfig) else "<i4", (), None
    yield "weights.bin", weights, (), total


def _plaid_arrays(entries: Entries, about: Mapping[str, Any]) -> Iterator[Expected]:
    dim, tokens = about["dim"], _rows(entries, "codes.bin")
    residuals, means = entries.get("residuals.bin"), _rows(entries, "means.bin")
    yield "values.bin", "<f2", (dim,), None
    yield "centroids.bin", "<f2", (dim,), None
    yield "codes.bin", "<u2 <i4", (), None
    yield "coefficients.bin", "<f2", (2,), tokens
    yield "residuals.bin", "|u1", residuals.shape[:1] if residuals else (0,), tokens
    yield "means.bin", "|i1", (dim,), None
    yield "scales.bin", "<f4", (), means
    yield "list_offsets.bin", "<i8", (), None
    yield "lists.bin", "|u1", (), None


def _check_parts(entries: Entries, about: Mapping[str, Any], need: Callable[[object, str], None]) -> None:
    """Segments, rows that a structure covers, statistics of BM25."""
    n, covered, listed = about["rows"], about.get("covered", 0), about.get("listed", 0)
    need(about["dim"] or not _rows(entries, "values.bin"), "vectors of no numbers")
    need(listed <= covered <= n, f"{listed} rows listed and {covered} covered of {n}")
    if "codes.bin" in entries or covered:
        some = about["config"].get("kind") != "plaid" or _rows(entries, "means.bin") >= covered
        need(
            some and _rows(entries, "list_offsets.bin") <= _rows(entries, "centroids.bin") + 1, "rows covered"
        )
    for name in ("misfit", "length"):
        need(_number(about.get(name, 0)), f"{name} is {about.get(name)!r:.60}")
    segments = about.get("segments", [])
    need(isinstance(segments, list) and len(segments) <= 26, "segments")
    for place, segment in enumerate(segments):
        _check_segment(segment, need)
        need(f"segment_{chr(ord('a') + place)}.bin" in entries, "a segment without a file")
    stops = [0, *(segment["stop"] for segment in segments)]
    starts = [*(segment["start"] for segment in segments), n]
    need(starts[:-1] == stops[:-1] and all(a <= b for a, b in pairwise([*stops, n])), "rows of segments")
    for name in ("vocabulary.txt",) if "vocabulary.txt" in entries else ():
        need(about["dim"] <= max(1, entries[name].rows), f"more terms than {name} has")
    if "bm25" in about:
        _check_bm25(entries, about, need)


def _check_segment(segment: Any, need: Callable[[object, str], None]) -> None:
    keys = {"start", "stop", "fields"}
    need(isinstance(segment, dict) and set(segment) == keys, f"a segment is {segment!r:.60}")
    need(_whole(segment["start"]) and _whole(segment["stop"]), "rows of a segment")
    need(isinstance(segment["fields"], dict), "fields of a segment")
    for name, field in segment["fields"].items():
        fine = isinstance(field, list) and len(field) == 3
        fine = fine and _whole(field[0]) and field[0] % _ALIGNMENT == 0 and isinstance(field[2], list)
        fine = fine and field[1] in _DTYPES and len(field[2]) <= 2 and all(map(_whole, field[2]))
        need(fine, f"field {name!r:.60} of a segment is {field!r:.60}")


def _check_bm25(entries: Entries, about: Mapping[str, Any], need: Callable[[object, str], None]) -> None:
    bm25, n = about["bm25"], about["rows"]
    need(isinstance(bm25, dict) and {"k1", "b", "mean", "counted"} <= set(bm25), "bm25")
    need(_number(bm25["k1"]) and bm25["k1"] >= 0 and _number(bm25["b"]) and 0 <= bm25["b"] <= 1, "k1 and b")
    need(bm25["mean"] is None or (_number(bm25["mean"]) and bm25["mean"] > 0), "mean length")
    counted = bm25["counted"]
    limits = {"rows": n, "removed": _rows(entries, "removed.bin"), "documents": n, "tokens": 1 << 48}
    need(isinstance(counted, dict) and set(counted) == set(limits), "counted documents")
    for name, most in limits.items():
        need(_whole(counted[name], most), f"counted {name}: {counted[name]!r:.60}")
    size = _rows(entries, "frequencies.bin")
    need(size % 4 == 0 and size <= 4 * max(1, about["dim"]), "frequencies of terms")


_DTYPES = ("|u1", "|i1", "<u2", "<u4", "<i4", "<i8", "<f2", "<f4")


def _rows(entries: Entries, name: str) -> int:
    return entries[name].rows if name in entries else 0


def _whole(value: Any, most: int = 1 << 48) -> bool:
    return type(value) is int and 0 <= value <= most


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e300
