"""An index kind: signs of vectors choose candidates, exact inner products rank them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from irkit.core.representation import Representation
from irkit.index import Hits, IndexConfig, IndexKind, StoredRows
from irkit.index.array_files import Array
from irkit.index.index_kinds import Entries, Expected

__all__ = ["KIND", "SignConfig", "SignIndex"]


class SignConfig(IndexConfig):
    """Approximate search of dense vectors by one bit per dimension.

    Attributes:
        candidates: Documents per query that are ranked by their exact scores, at least twice the hits.
    """

    kind: Literal["signs"] = "signs"
    candidates: int = Field(100, ge=1)


class SignIndex(StoredRows):
    """Stores the vectors and their signs. Scores are exact."""

    config: SignConfig

    def _encode(self, representation: Representation) -> dict[str, Array]:
        arrays = representation.arrays()
        return arrays | {"signs": np.packbits(arrays["values"] > 0, axis=1)}

    def _decode(self, arrays: dict[str, Array]) -> Representation:
        return super()._decode({"values": arrays["values"]})

    def _row_arrays(self) -> list[str]:
        return ["values", "signs"]

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        rows = np.arange(len(self)) if keep is None else np.flatnonzero(keep)
        signs = self.store.read("signs.bin")[rows]
        n_candidates = min(len(rows), max(self.config.candidates, 2 * k))
        # 1. the documents with the most signs in common with the query
        candidates = np.empty((len(queries), n_candidates), np.int64)
        for position, query in enumerate(queries.arrays()["values"]):
            differences = np.bitwise_count(signs ^ np.packbits(query > 0)).sum(1)
            candidates[position] = rows[np.argsort(differences, kind="stable")[:n_candidates]]
        # 2. the best of them by exact score; equal scores go to the lower row
        candidates.sort(axis=1)
        scores = self.rescore(queries, candidates)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return Hits(np.take_along_axis(candidates, order, 1), np.take_along_axis(scores, order, 1))


def sign_arrays(entries: Entries, about: Mapping[str, Any], config: SignConfig) -> Iterator[Expected]:
    """Yield the arrays that a stored index has; irkit compares them with the manifest when it opens one."""
    yield "values.bin", "<f4", (about["dim"],), about["rows"]
    yield "signs.bin", "|u1", (-(-about["dim"] // 8),), about["rows"]


KIND = IndexKind(SignConfig, "irkit_example.sign_index:SignIndex", ("dense",), sign_arrays)
