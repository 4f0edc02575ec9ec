"""How a plaid index stores tokens: compressed ones of the first rows, the others as they are.

A compressed token is decoded as ``a * centroid + b * residual + mean``: its nearest centroid (two or four
bytes), two float16 coefficients (a least-squares fit), a residual of ``nbits`` bits per dimension (a trellis
code, see the kernel ``residual_maxsim``), and the mean residual of its document, which is stored once in 8
bits per dimension.

Source: Santhanam et al., PLAID, arXiv 2205.09707, and ColBERTv2, arXiv 2112.01488, which store centroid and
residual alone, with scalar quantisation. Coefficients, trellis code and means make the same bytes fit better.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from irkit_kernels.residual_maxsim import Tokens, decode

from irkit.core.ragged import Ragged
from irkit.core.representation import MultiVector, Representation
from irkit.errors import CorruptError
from irkit.index.array_files import Array, corrupt
from irkit.index.clustering import read_lists
from irkit.index.device import check_device
from irkit.index.index_base import Index
from irkit.index.index_settings import PlaidConfig
from irkit.index.layout import element_positions, fitting, row_ends
from irkit.index.plaid_search import PlaidArrays, select_tokens
from irkit.index.state import snapshot
from irkit.index.stored_rows import StoredRows, to_float16

COMPRESSED_ARRAYS = ("codes.bin", "coefficients.bin", "residuals.bin", "means.bin", "scales.bin")
"""Files of the fields of `Tokens`, then of the means of documents and their factors."""


class PlaidRows(StoredRows):
    """The rows of a plaid index: ``covered`` ones are compressed, and ``listed`` of these have lists.

    ``values.bin`` has the tokens of the other rows in float16; with ``keep_tokens``, the tokens of all rows.
    """

    config: PlaidConfig

    def _represent(self, rows: Array) -> Representation:
        """Return the stored documents of rows that have been checked."""
        read, first = self.store.read, self.first_stored()
        lengths, positions = self._positions(rows)
        values, compressed = np.empty((len(positions), self.dim), np.float32), positions < first
        if compressed.any():
            row = np.repeat(rows, lengths)[compressed]
            tokens = select_tokens(self._tokens(), positions[compressed])
            with fitting(self.store.path):
                values[compressed] = decode(tokens, self.centroids(), self.codebook())
            values[compressed] += read("means.bin")[row] * read("scales.bin")[row, None]
        if not compressed.all():
            values[~compressed] = read("values.bin")[positions[~compressed] - first]
        return MultiVector(Ragged(torch.from_numpy(values), torch.from_numpy(lengths)))

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents ``rows (n,)``, ascending, of another plaid index, exactly as stored."""
        assert isinstance(source, PlaidRows)
        read, compressed = source.store.read, rows[rows < source.covered]
        with self.store.update():
            if len(compressed):
                for name in ("centroids.bin", "codebook.bin") if not self.store.rows("centroids.bin") else ():
                    self.store.append(name, read(name))
                lengths, positions = source._positions(compressed)
                means, scales = (read(name)[compressed] for name in COMPRESSED_ARRAYS[3:])
                parts = (*select_tokens(source._tokens(), positions), means, scales)
                arrays = dict(zip(COMPRESSED_ARRAYS, parts, strict=True))
                if self.config.keep_tokens:
                    arrays["values.bin"] = read("values.bin")[positions]
                for name, array in (arrays | {"lengths.bin": lengths}).items():
                    self.store.append(name, array)
                count = len(self) + len(compressed)
                about = source.store.meta["index"] | {"rows": count, "covered": count, "listed": 0}
                self.store.meta["index"] = about
            if len(compressed) < len(rows) or not len(rows):
                self.add(source.representations(rows[len(compressed) :]))

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `Index.stats` returns, and numbers about centroids and compressed rows."""
        centroids = self.store.rows("centroids.bin")
        more = {"nbits": self.config.nbits, "centroids": centroids, "covered": self.covered}
        return super().stats() | more

    @property
    def covered(self) -> int:
        """Number of rows that are compressed."""
        return self._count("covered")

    @property
    def listed(self) -> int:
        """Number of rows that are in the lists of the centroids."""
        return self._count("listed")

    def total(self) -> int:
        """Return the number of tokens of all rows."""
        return int(self._ends()[-1]) if self.store.rows("lengths.bin") else 0

    def first_added(self) -> int:
        """Return the position of the first token that is not compressed."""
        return int(self._ends()[self.covered - 1]) if self.covered else 0

    def first_stored(self) -> int:
        """Return the position of the first token that is stored as it is, as are all after it."""
        return self.total() - self.store.rows("values.bin")

    def centroids(self) -> Array:
        """Return ``(K, dim)`` float32."""
        return self.store.derived("centroids", lambda: self.store.read("centroids.bin").astype(np.float32))

    def codebook(self) -> Array:
        """Return the levels of residuals, ``(2**(8 - nbits), 2**nbits)`` int8."""
        codebook, bits = self.store.read("codebook.bin"), self.config.nbits
        if codebook.shape != (2 ** (8 - bits), 2**bits):
            raise CorruptError(
                f"index {self.store.path}: an earlier version coded its residuals, or its codebook is "
                "damaged; rebuild the index"
            )
        return codebook

    def arrays(self) -> PlaidArrays:
        """Return what a search reads."""
        covered, count = self.covered, self.store.rows("centroids.bin")
        offsets = np.concatenate([[0], self._ends()[:covered]])
        tokens = select_tokens(self._tokens(), slice(int(offsets[-1])))
        starts, lists = np.zeros(1, np.int64), np.empty(0, np.int32)
        if self.store.rows("lists.bin") and self.store.rows("list_offsets.bin"):
            starts = self.store.read("list_offsets.bin")
            size = self.store.rows("lists.bin") // max(1, int(starts[-1]))
            if starts[0] or (np.diff(starts) < 0).any() or self.store.rows("lists.bin") != size * starts[-1]:
                raise self.damaged()
            lists = read_lists(self.store.read("lists.bin"), int(starts[-1]))
        if starts[-1] != len(lists) or not count:
            raise self.damaged()
        starts = np.pad(starts, (0, count + 1 - len(starts)), mode="edge")  # new centroids have no lists yet
        means, scales = (self.store.read(name)[:covered] for name in COMPRESSED_ARRAYS[3:])
        return PlaidArrays(
            self.centroids(), self.codebook(), tokens, means, scales, offsets, starts, lists, self.listed
        )

    def damaged(self) -> CorruptError:
        """Return the error of arrays that contradict each other."""
        return corrupt(self.store.path, "its arrays do not fit together")

    def _append(self, representation: Representation) -> None:
        if not len(self):
            check_device(self.config.device)  # errors show before the work is done
        super()._append(representation)

    def _encode(self, representation: Representation) -> dict[str, Array]:
        return to_float16(representation)

    def _ends(self) -> Array:
        """Return ``(n,)`` where the tokens of each row end."""

        def make() -> Array:
            store, lengths = self.store, self.store.read("lengths.bin")
            ends = row_ends(store.path, lengths, int(lengths.sum()))
            stored = (int(ends[-1]) if len(ends) else 0) - store.rows("values.bin")
            compressed = int(ends[self.covered - 1]) if self.covered else 0
            most = 0 if self.config.keep_tokens else compressed
            if not 0 <= stored <= most or compressed > store.rows("codes.bin"):
                raise self.damaged()
            return ends

        return self.store.derived("ends", make)

    def _positions(self, rows: Array) -> tuple[Array, Array]:
        """Return the lengths of rows, and the positions of their tokens."""
        lengths = self.store.read("lengths.bin")[rows]
        return lengths, element_positions(self._ends()[rows], lengths)

    def _slice(self, start: int, stop: int) -> Representation:
        ends, stored = self._ends(), self.first_stored()
        first = int(ends[start - 1]) if start else 0
        if first < stored:
            return self._represent(np.arange(start, stop))
        values = self.store.read("values.bin")[first - stored : int(ends[stop - 1]) - stored]  # not copied
        lengths = self.store.read("lengths.bin")[start:stop]
        return MultiVector(Ragged(torch.from_numpy(values), torch.from_numpy(lengths)))

    def _tokens(self) -> Tokens:
        return Tokens(*map(self.store.read, COMPRESSED_ARRAYS[:3]))
