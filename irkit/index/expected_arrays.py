"""The arrays that a stored index of each kind has, to compare a manifest with before anything is read.

Each function yields ``(name, dtypes, row shape, rows)``: the dtypes that are possible, in one string, and
None for rows where any number will do. Its arguments are the arrays of the manifest by name, the values that
the manifest has of the index (``rows``, ``dim``, ``representation``, ...), and its configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from irkit.index.array_files import Entry
from irkit.index.index_settings import FlatConfig, InvertedConfig

Entries: TypeAlias = Mapping[str, Entry]
Expected: TypeAlias = tuple[str, str, tuple[int, ...], int | None]


def count_rows(entries: Entries, name: str) -> int:
    """Return the rows of an array, 0 if there is none of this name."""
    return entries[name].rows if name in entries else 0


def common_arrays(entries: Entries) -> Iterator[Expected]:
    """Yield the arrays of any index: removed rows, documents, vocabularies."""
    yield "removed.bin", "<i8", (), None
    yield "hashes.bin", "<u8", (), None
    yield "ends.bin", "<i8", (3,), count_rows(entries, "hashes.bin")
    for name in ("ids.bin", "documents.jsonl", "metadata.jsonl", "vocabulary.txt", "frequencies.bin"):
        yield name, "|u1", (), None


def flat_arrays(entries: Entries, about: Mapping[str, Any], config: FlatConfig) -> Iterator[Expected]:
    """Yield the representations as `StoredRows` keeps them, or tokens in 8 bits with their scales."""
    n, dim = about["rows"], about["dim"]
    if about["representation"] != "dense":
        yield "lengths.bin", "<i8", (), n
    if about["representation"] == "sparse":
        yield "terms.bin", "<i4", (), None
        yield "weights.bin", "<f4", (), count_rows(entries, "terms.bin")
    elif config.dtype == "int8":
        yield "values.bin", "|i1", (dim,), None
        yield "scales.bin", "<f4", (), count_rows(entries, "values.bin")
    else:
        yield "values.bin", "<f4", (dim,), n if about["representation"] == "dense" else None


def inverted_arrays(entries: Entries, about: Mapping[str, Any], config: InvertedConfig) -> Iterator[Expected]:
    """Yield file name, dtype, row shape and row count expected for each array of an inverted index.

    The weights of BM25 are counts.
    """
    weights = "<u2" if "bm25" in about else np.dtype(config.dtype).newbyteorder("<").str
    yield "lengths.bin", "<i8", (), about["rows"]
    if "bm25" not in about and config.dtype.startswith("uint"):
        yield "scales.bin", "<f4", (), about["rows"]
    yield "terms.bin", "<u2 <u4", (), None
    yield "weights.bin", weights, (), count_rows(entries, "terms.bin")


def faiss_arrays(entries: Entries, about: Mapping[str, Any], config: Any) -> Iterator[Expected]:
    """Yield the vectors, and the structure if it covers rows."""
    yield "values.bin", "<f4", (about["dim"],), about["rows"]
    yield from _structure(entries, about)


def muvera_arrays(entries: Entries, about: Mapping[str, Any], config: Any) -> Iterator[Expected]:
    """Yield the tokens in float16, and the structure over encodings if it covers rows."""
    yield "lengths.bin", "<i8", (), about["rows"]
    yield "values.bin", "<f2", (about["dim"],), None
    yield from _structure(entries, about)


def _structure(entries: Entries, about: Mapping[str, Any]) -> Iterator[Expected]:
    rows = count_rows(entries, "faiss.index")
    yield "faiss.index", "|u1", (), rows or 1 if about.get("covered", 0) else None


def plaid_arrays(entries: Entries, about: Mapping[str, Any], config: Any) -> Iterator[Expected]:
    """Yield what stands for compressed tokens, the tokens that are stored as they are, and the lists."""
    dim, tokens = about["dim"], count_rows(entries, "codes.bin")
    residuals, means = entries.get("residuals.bin"), count_rows(entries, "means.bin")
    yield "lengths.bin", "<i8", (), about["rows"]
    yield "values.bin", "<f2", (dim,), None
    yield "centroids.bin", "<f2", (dim,), None
    yield "codes.bin", "<u2 <i4", (), None
    yield "coefficients.bin", "<f2", (2,), tokens
    yield "residuals.bin", "|u1", residuals.shape[:1] if residuals else (0,), tokens
    yield "means.bin", "|i1", (dim,), None
    yield "scales.bin", "<f4", (), means
    yield "list_offsets.bin", "<i8", (), None
    yield "lists.bin", "|u1", (), None
