"""Search of encoded multi-vector documents: a token is ``a * centroid + b * levels``, levels of 1 to 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import reference as ref
from .reference import CentroidTable, Tokens, train_codebook

__all__ = [
    "PackedCentroids",
    "QueryTable",
    "Tokens",
    "assign",
    "decode",
    "encode",
    "interaction",
    "pack_centroids",
    "probe",
    "query_table",
    "residual_maxsim",
    "train_codebook",
]


class PackedCentroids(NamedTuple):
    """Centroids as `query_table` reads them; made by `pack_centroids`."""

    centroids: NDArray[np.float32]


class QueryTable(NamedTuple):
    """A query and what it makes of every centroid; made by `query_table`."""

    query: NDArray[np.float32]
    table: CentroidTable


def assign(values: NDArray[np.float32], centroids: NDArray[np.float32]) -> NDArray[np.int32]:
    """The centroid ``(K, d)`` of largest inner product with each row of ``values (n, d)``, ``(n,)`` int32."""
    return ref.assign_reference(values, centroids)


def encode(
    values: NDArray[np.float32],
    centroids: NDArray[np.float32],
    codes: NDArray[np.int32] | NDArray[np.uint16],
    codebook: NDArray[np.int8],
) -> Tokens:
    """Encode ``values (n, d)``, given the centroid of each."""
    return ref.encode_reference(values, centroids, codes, codebook)


def decode(tokens: Tokens, centroids: NDArray[np.float32], codebook: NDArray[np.int8]) -> NDArray[np.float32]:
    """``a * centroid + b * levels``, ``(n, d)`` float32."""
    return ref.decode_reference(tokens, centroids, codebook)


def pack_centroids(centroids: NDArray[np.float32]) -> PackedCentroids:
    """Prepare centroids ``(K, d)`` for `query_table`, once."""
    return PackedCentroids(centroids)


def query_table(query: NDArray[np.float32], centroids: PackedCentroids) -> QueryTable:
    """Score every centroid for the tokens of a query ``(m, d)``."""
    return QueryTable(query, ref.centroid_table_reference(query, centroids.centroids))


def probe(
    table: QueryTable,
    nprobe: int,
    list_offsets: NDArray[np.int64],
    list_rows: NDArray[np.int32],
    keep: NDArray[np.bool_],
) -> NDArray[np.int32]:
    """Documents, rising, that have a token at one of the ``nprobe`` best centroids of a query token."""
    return ref.probe_reference(table.table, nprobe, list_offsets, list_rows, keep)


def interaction(
    table: QueryTable,
    codes: NDArray[np.int32] | NDArray[np.uint16],
    offsets: NDArray[np.int64],
    rows: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Rough MaxSim of documents ``rows``, tokens replaced by their centroids; comparable within a query."""
    return ref.interaction_reference(table.table, codes, offsets, rows)


def residual_maxsim(
    table: QueryTable,
    tokens: Tokens,
    offsets: NDArray[np.int64],
    codebook: NDArray[np.int8],
    rows: NDArray[np.int32],
) -> NDArray[np.float32]:
    """MaxSim of documents ``rows``, ``(len(rows),)`` float32; -inf for one without tokens."""
    return ref.residual_maxsim_reference(table.query, table.table, tokens, offsets, codebook, rows)
