"""Rows of representations in a store, as most kinds of index keep them, and the exact search of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import torch
from irkit_kernels.maxsim import maxsim_chosen
from torch import Tensor

from irkit.core.representation import Dense, MultiVector, Representation, representation_from_arrays
from irkit.core.scoring import score
from irkit.errors import BadValueError
from irkit.index import bm25_index as bm25
from irkit.index.array_files import Array
from irkit.index.dense_scores import longest_of, push_rows
from irkit.index.index_base import Index, row_list
from irkit.index.layout import element_positions, row_blocks
from irkit.index.state import snapshot
from irkit.index.topk import Hits, TopK

QUERY_BLOCK = {"dense": 512, "multi_vector": 32, "sparse": 64}
"""Queries that are scored together: so many stay in the cache."""

_ROUNDED_UP = 65520.0  # the lowest number that float16 rounds to infinity


class StoredRows(Index):
    """Rows stored in order of addition, one array per component, and scanned for exact results.

    Memory is bounded: arrays are mapped from their files, and scored in blocks. A kind of index adds a
    structure over these rows (`Index.finish`) and its search. Rows that the structure does not cover yet are
    scanned.

    Attributes:
        formula: k1 and b of BM25 for the weights that this object returns, set before the first search. None
            uses those that the index was built with.
    """

    formula: tuple[float, float] | None = None

    @snapshot
    def representations(self, rows: Array) -> Representation:
        """Return the stored documents of ``rows (n,)``, in this order; see `Index.representations`."""
        return self._represent(row_list("representations", rows, len(self)))

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents ``rows (n,)``, ascending, of an index of the same kind, exactly as stored."""
        assert isinstance(source, StoredRows)
        about = source.store.meta["index"]
        with self.store.update():
            bm25.begin_as(self.store, source.store)
            for name, array in source.stored_arrays(rows).items():
                self.store.append(f"{name}.bin", array)
            copied = {key: about[key] for key in ("representation", "dim", "negative") if key in about}
            self.store.meta["index"] |= copied | {"rows": len(self) + len(rows)}

    def stored_arrays(self, rows: Array | slice) -> dict[str, Array]:
        """Return the arrays of rows as they are stored; a slice is not copied."""
        arrays = {name: self.store.read(f"{name}.bin")[rows] for name in self._row_arrays()}
        elements, ends = self._element_arrays(), self._ends()
        if ends is None:
            return arrays
        if isinstance(rows, slice):
            part = slice(*(int(ends[row - 1]) if row else 0 for row in (rows.start, rows.stop)))
            return arrays | {name: self.store.read(f"{name}.bin")[part] for name in elements}
        positions = element_positions(ends[rows], arrays["lengths"])  # take is faster than an index
        return arrays | {name: self.store.read(f"{name}.bin").take(positions, 0) for name in elements}

    # ---- how rows are stored; a kind of index may override these ----

    def _check_build(self, representation: Representation) -> None:
        """Raise an error if an index of such rows cannot be built, before the first ones are stored."""

    def _append(self, representation: Representation) -> None:
        if not len(self):
            self._check_build(representation)
        for name, array in self._encode(representation).items():
            self.store.append(f"{name}.bin", array)

    def _represent(self, rows: Array) -> Representation:
        """Return the stored documents of rows that have been checked."""
        return self._decode(self._weighed_arrays(rows))

    def _encode(self, representation: Representation) -> dict[str, Array]:
        """Return the arrays to be stored."""
        return representation.arrays()

    def _decode(self, arrays: dict[str, Array]) -> Representation:
        """Decode stored arrays to representations."""
        return representation_from_arrays(str(self.representation), self.dim, arrays)

    def _row_arrays(self) -> list[str]:
        """Return the names of the arrays with one element per row."""
        return ["values"] if self.representation == "dense" else ["lengths"]

    def _element_arrays(self) -> list[str]:
        """Return the names of the arrays with one element per token or term."""
        return {"dense": [], "multi_vector": ["values"]}.get(str(self.representation), ["terms", "weights"])

    def _ends(self) -> Array | None:
        """Return ``(n,)`` where the elements of each row end; None for dense vectors."""
        if self.representation == "dense":
            return None
        return bm25.element_ends(self.store, f"{self._element_arrays()[0]}.bin")

    def _weighed_arrays(self, rows: Array | slice) -> dict[str, Array]:
        """Return stored arrays, with weights in place of the counts of BM25."""
        return bm25.weigh(self.store, self.stored_arrays(rows), self.formula)

    def _slice(self, start: int, stop: int) -> Representation:
        """Return rows ``start`` to ``stop``, without a copy if scores need no conversion."""
        return self._decode(self._weighed_arrays(slice(start, stop)))

    # ---- search of a structure over the first rows; a kind of index with one overrides the first two ----

    def _few(self, live: int, covered: int, k: int) -> bool:
        """Return whether a scan takes less time, or finds more, than the structure over ``covered`` rows."""
        raise NotImplementedError

    def _look_up(self, queries: Representation, k: int, keep: Array | None, live: int) -> Hits:
        """Return the best rows that the structure finds; ``live`` rows may be hits."""
        raise NotImplementedError

    def _search_structure(
        self, queries: Representation, k: int, keep: Array | None, covered: int, size: int
    ) -> Hits:
        """Search the structure over the first ``covered`` rows, and scan what it lacks.

        Rows after these are scanned, and so are all rows for a query that gets less than ``k`` hits. ``size``
        queries are searched at a time.
        """
        live = covered if keep is None else int(np.count_nonzero(keep[:covered]))
        if self._few(live, covered, k):
            return self._scan_all(queries, k, keep)

        def search(block: Representation) -> Hits:
            hits = self._look_up(block, k, keep, live)
            if covered < len(self):
                best = TopK(len(block), k)
                best.push_pairs(hits.scores, hits.rows)
                self._scan(block, best, covered, keep)
                hits = best.hits()
            short = np.flatnonzero(hits.rows[:, -1] < 0)
            if len(short):
                hits.rows[short], hits.scores[short] = self._scan_all(block[short], k, keep)
            return hits

        return search_in_blocks(search, queries, size)

    # ---- exact search ----

    def _scan_all(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        """Score every row where ``keep`` is true (None: everywhere)."""

        def search(block: Representation) -> Hits:
            best = TopK(len(block), k)
            self._scan(block, best, 0, keep)
            return best.hits()

        return search_in_blocks(search, queries, QUERY_BLOCK[queries.kind])

    def _scan(self, queries: Representation, best: TopK, first: int, keep: Array | None) -> None:
        """Push the exact scores of the rows from ``first`` on where ``keep`` is true (None: everywhere)."""
        n = len(self)
        if keep is not None and np.count_nonzero(keep[first:]) * 4 < n - first:  # few: read only these
            self._scan_rows(queries, best, first + np.flatnonzero(keep[first:]))
            return
        for start, stop in self._blocks(queries, first, n, self._ends()):
            self._push(queries, best, slice(start, stop), None if keep is None else keep[start:stop])

    def _scan_rows(self, queries: Representation, best: TopK, rows: Array) -> None:
        """Push the exact scores of ``rows (n,)``, ascending."""
        ends = None if self._ends() is None else self.store.read("lengths.bin")[rows].cumsum()
        for start, stop in self._blocks(queries, 0, len(rows), ends):
            self._push(queries, best, rows[start:stop], None)

    def _push(self, queries: Representation, best: TopK, rows: Array | slice, keep: Array | None) -> None:
        """Push the exact scores of ``rows`` where ``keep (n,)`` is true (None: everywhere)."""
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        if isinstance(queries, Dense):
            values, own = self._stored_rows(rows).arrays()["values"], queries.arrays()["values"]
            push_rows(best, self._metric, own, values, numbers, keep, self._longest(rows, values))
            return
        scores = self._scores(queries, rows)
        if keep is not None:
            scores.masked_fill_(torch.from_numpy(~keep), float("-inf"))
        best.push(scores.numpy(), numbers)

    def _stored_rows(self, rows: Array | slice) -> Representation:
        return self._slice(rows.start, rows.stop) if isinstance(rows, slice) else self._represent(rows)

    def _longest(self, rows: Array | slice, values: Array) -> float:
        """Return an upper bound of the length of rows, whose vectors are ``values (n, dim)``."""
        return longest_of(values)

    def _scores(self, queries: Representation, rows: Array | slice) -> Tensor:
        """Return the scores ``(n_q, n)`` of rows of tokens or terms."""
        return score(queries, self._stored_rows(rows))

    def _score_pairs(self, queries: MultiVector, query: Array, rows: Array) -> Array:
        """See `Index._score_pairs`; tokens are read where they are stored."""
        names, read = self._element_arrays(), self.store.read
        ends, lengths = cast(Array, self._ends())[rows] - self._first_stored(), read("lengths.bin")[rows]
        starts = ends - lengths
        if starts.min() < 0 or not self.store.rows("values.bin"):  # their tokens have been compressed
            return super()._score_pairs(queries, query, rows)
        values, *scales = (torch.from_numpy(read(f"{name}.bin")) for name in names)
        asked, spans = queries.tokens, torch.from_numpy(np.stack([starts, ends], axis=1))
        own, chosen_by = asked.values.detach().float(), torch.from_numpy(query)
        return maxsim_chosen(own, asked.offsets, values, spans, chosen_by, *scales).numpy()

    def _first_stored(self) -> int:
        """Return the number of the first token that ``values.bin`` has."""
        return 0

    def _blocks(
        self, queries: Representation, start: int, stop: int, ends: Array | None
    ) -> Iterator[tuple[int, int]]:
        """Cut rows ``start`` to ``stop`` so that neither scores nor documents of a block take much memory."""
        limits, width = self.store.limits, 4 if queries.kind == "sparse" else queries.dim
        if isinstance(queries, MultiVector):
            width = max(width, len(queries.tokens.values))
        rows = max(1, limits.scan_scores // len(queries))
        elements = max(1, limits.scan_numbers // max(1, width))
        return row_blocks(ends, start, stop, elements, rows)


def search_in_blocks(search: Callable[[Representation], Hits], queries: Representation, size: int) -> Hits:
    """Search ``size`` queries at a time, and join the hits."""
    if len(queries) <= size:
        return search(queries)
    parts = [search(queries[start : start + size]) for start in range(0, len(queries), size)]
    return Hits(*map(np.concatenate, zip(*parts, strict=True)))


def to_float32(numbers: Array) -> Array:
    """Return numbers in float32; torch converts float16 several times as fast as NumPy."""
    converted: Array = torch.from_numpy(np.ascontiguousarray(numbers)).float().numpy()
    return converted


def to_float16(representation: Representation) -> dict[str, Array]:
    """Return the arrays of a representation with values in float16.

    Raises:
        BadValueError: A value is too large.
    """
    arrays = representation.arrays()
    numbers = torch.from_numpy(arrays["values"])
    values, largest = numbers.half(), float(numbers.abs().max()) if numbers.numel() else 0.0
    if not largest < _ROUNDED_UP:
        raise BadValueError(
            f"adding documents: got a value of {largest:g}, expected at most "
            "65504, the largest float16; normalise the vectors, or choose the index 'flat' in float32"
        )
    return arrays | {"values": values.numpy()}
