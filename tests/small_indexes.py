"""Indexes of a few documents whose searches still look up, not scan: settings by name, and their limits."""

from __future__ import annotations

from typing import Any

from irkit.index import Limits

CONFIGS: dict[str, Any] = {
    "faiss": {"kind": "faiss", "factory": "IVF4,Flat"},
    "dense": {"kind": "dense", "keep": "int8"},
    "dense_codes": {"kind": "dense", "keep": "none"},
    "plaid": {"kind": "plaid", "centroids": 8},
    "inverted": {"kind": "inverted", "dtype": "uint8", "mode": "exact"},
    "muvera": {"kind": "muvera", "repetitions": 2, "bits": 2, "projection": 2, "lists": 4},
}

LIMITS = Limits(
    unsorted=4,
    dense_scan=8,
    dense_scan_per_hit=1,
    dense_points=2,
    faiss_scan=8,
    faiss_scan_per_hit=1,
    inverted_unlisted=8,
    plaid_uncompressed=8,
    plaid_scan=8,
)
