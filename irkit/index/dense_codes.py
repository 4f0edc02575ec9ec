"""Dense vectors stored as codes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from irkit_kernels.dense_search import decode, rotate_rows_back

from irkit.core.representation import Dense, Representation
from irkit.index.array_files import Array, corrupt
from irkit.index.dense_lists import DenseLists
from irkit.index.index_base import StageProgress
from irkit.index.index_settings import DenseConfig
from irkit.index.layout import fitting
from irkit.index.store import Store


def open_dense(store: Store, config: DenseConfig) -> DenseLists:
    """Return the index of a store that keeps vectors, or only their codes."""
    return (DenseCodes if config.keep == "none" else DenseLists)(store, config)


class DenseCodes(DenseLists):
    """Lists and codes of two or four bits per dimension; the vectors are those that the codes stand for.

    Vectors wait in float32 until `finish` codes them. From then on searches, scores and
    `representations` have the vectors that codes stand for, and so does whatever is trained anew.
    """

    scores_codes = True

    def code(self, report: StageProgress, values: Callable[[Array], Array] | None = None) -> None:
        """Code the vectors that wait, and drop them; see `CodedLists.code`."""
        with self.store.update():
            super().code(report, values)
            if self.store.rows("values.bin"):
                self.store.drop("values.bin")
                self.store.append("values.bin", np.empty((0, self.dim), np.float32))

    def stored_arrays(self, rows: Array | slice) -> dict[str, Array]:
        """Return the vectors of the ``rows`` that are not in lists yet."""
        chosen = np.arange(len(self))[rows]
        return {"values": self.store.read("values.bin")[chosen[chosen >= self._covered] - self._covered]}

    def _list_rows(self) -> int:
        """Return rows per list, enough for the int8 centroid of a list to take at most 3 bytes per row."""
        return max(128, self.dim // 3)

    def _represent(self, rows: Array) -> Representation:
        return Dense(torch.from_numpy(self._reader()(rows)))

    def _slice(self, start: int, stop: int) -> Representation:
        return self._represent(np.arange(start, stop))

    def _encode(self, representation: Representation) -> dict[str, Array]:
        return cast(Dense, representation).arrays()

    def _kept(self) -> dict[str, Array]:
        return {}

    def _reader(self) -> Callable[[Array], Array]:
        """Return a function that decodes rows, in any order, with the present codes and centroids."""
        covered, waiting, dim = self._covered, self.store.rows("values.bin"), self.dim
        if waiting != len(self) - covered:
            raise corrupt(self.store.path, f"{waiting} vectors wait, expected {len(self) - covered}")
        if covered:
            coded, rotation = self._coded(), self._rotation()
            with fitting(self.store.path):
                centroids = self._encoder().rotated

        def read(rows: Array) -> Array:
            values = np.empty((len(rows), dim), np.float32)
            old = np.flatnonzero(rows < covered)
            if len(old):
                values[old] = rotate_rows_back(
                    decode(coded.take(rows[old]), centroids), rotation, dim
                ).numpy()
            new = np.flatnonzero(rows >= covered)
            if len(new):
                new = new[np.argsort(rows[new], kind="stable")]
                values[new] = self.store.take("values.bin", rows[new] - covered)
            return values

        return read
