"""Indexes: exact and approximate search over representations that one directory stores.

The directory of an index::

    irkit.json             the manifest: arrays by name (file, dtype, rows, crc32), free values, its own crc32
    irkit.building.json    the manifest of an unfinished build; renamed to irkit.json when it is published
    irkit.lock             locked by the process that writes
    values.g1.bin ...      the arrays: plain little-endian rows, which are only appended to
    documents.g4.jsonl     the documents, one JSON object per line (BEIR's corpus.jsonl)
    hashes.g5.bin ...      hashes of the ids; sorted_*: the same in order, and their rows
    field_entries.g6.bin   metadata by key and type; field_order, field_sorted: sorted by value
    removed.g8.bin         rows that were removed
    faiss.g9.index         what FAISS built, as FAISS writes it
    codes.g9.bin ...       plaid: centroid, coefficients and residual per token; mean per document
    lists.g9.bin ...       plaid: the documents of each centroid
    segment_a.g9.bin ...   inverted, dense: the lists of a range of rows
    centroids.g9.bin ...   dense, plaid: what lists are around
    vocabulary.g2.txt      BM25, impacts: the terms, one per line; they grow with the documents
    frequencies.g9.bin     BM25: the number of documents that have each term

``g1`` numbers files in order of creation: a rewritten array is a new file. `irkit.index.store` explains how
changes survive a crash, `irkit.index.index_kinds` how to add a kind of index, here or in another package.
"""

from __future__ import annotations

from irkit.index.documents import Documents
from irkit.index.flat import Flat
from irkit.index.index_base import Index, StageProgress
from irkit.index.index_kinds import INDEX_KINDS, IndexKind, SeveralConfig, index_config, index_names
from irkit.index.index_settings import (
    AutoConfig,
    DenseConfig,
    FaissConfig,
    FlatConfig,
    IndexConfig,
    InvertedConfig,
    MuveraConfig,
    PlaidConfig,
    WindowsConfig,
)
from irkit.index.limits import Limits, use_limits
from irkit.index.opening import check_index, compact, create_index, open_index
from irkit.index.several_index import SeveralIndex
from irkit.index.store import Store
from irkit.index.stored_rows import StoredRows
from irkit.index.topk import Hits
from irkit.index.windowed import WindowedIndex

__all__ = [
    "INDEX_KINDS",
    "AutoConfig",
    "DenseConfig",
    "Documents",
    "FaissConfig",
    "Flat",
    "FlatConfig",
    "Hits",
    "Index",
    "IndexConfig",
    "IndexKind",
    "InvertedConfig",
    "Limits",
    "MuveraConfig",
    "PlaidConfig",
    "SeveralConfig",
    "SeveralIndex",
    "StageProgress",
    "Store",
    "StoredRows",
    "WindowedIndex",
    "WindowsConfig",
    "check_index",
    "compact",
    "create_index",
    "index_config",
    "index_names",
    "open_index",
    "use_limits",
]
