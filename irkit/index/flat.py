"""Exact search: every stored document is scored. The oracle of all other indexes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor

from irkit.errors import BadValueError, ConfigError
from irkit.index import bm25
from irkit.index.base import Index, StageProgress
from irkit.index.config import FlatConfig
from irkit.index.device import check_device, on_device
from irkit.index.files import Array
from irkit.index.flat_device import DenseSearch
from irkit.index.layout import row_ends
from irkit.index.state import pinned
from irkit.index.topk import Hits, TopK
from irkit.representation import Dense, MultiVector, Representation, representation_from_arrays
from irkit.scoring import score

__all__ = ["Flat", "halved", "query_blocks"]

_QUERIES = {"dense": 512, "multi_vector": 32, "sparse": 64}  # scored together: their side stays in cache
_SCORES = 1 << 21  # made at a time: 8 MB
_NUMBERS = 1 << 23  # of documents read, or made in between, at a time: 32 MB


class Flat(Index):
    """Keeps representations as they are, an array for each component, and scores all of them.

    Memory is bounded: documents come from mapped files and are scored in blocks.

    Attributes:
        formula: k1 and b of BM25 for what this object gives back, chosen before the first search; None is
            those that the index was built with.
    """

    formula: tuple[float, float] | None = None

    @pinned
    def representations(self, rows: Array) -> Representation:
        """The stored documents of ``rows (n,)``, in this order."""
        return self._make(self._take(rows))

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents ``rows (n,)``, rising, of another index of the same kind, as they are kept there."""
        settings = source.store.meta["index"].get("bm25")
        if settings is None:
            super().copy(source, rows)
            return
        assert isinstance(source, Flat)  # of the same kind
        with self.store.update():
            bm25.begin(self.store, settings["k1"], settings["b"])
            self.add(source._make(source._raw(rows)))

    def finish(self, progress: StageProgress | None = None) -> None:
        """Keep the statistics of an index of BM25; nothing else is to be done.

        Args:
            progress: Is told nothing.
        """
        if "bm25" in self.store.meta["index"]:
            with self.store.update():
                bm25.renew(self.store)

    def _append(self, representation: Representation) -> None:
        if not len(self):
            self._check_device(representation)  # what is wrong shows before the work is done
        for name, array in self._stored(representation).items():
            self.store.append(f"{name}.bin", array)

    def _stored(self, representation: Representation) -> dict[str, Array]:
        return representation.arrays()

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        parts = [self._search_block(some, k, keep) for some in query_blocks(queries, _QUERIES[queries.kind])]
        return Hits(*map(np.concatenate, zip(*parts, strict=True)))

    def _search_block(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        on_gpu = self._device_search(queries)
        if on_gpu:
            return on_gpu(cast(Dense, queries).values, k, keep)
        best = TopK(len(queries), k)
        self._scan(queries, best, 0, keep)
        return best.hits()

    def _device_search(self, queries: Representation) -> DenseSearch | None:
        """The search on a GPU, if the configuration is for one and its memory suffices."""
        self._check_device(queries)
        config = self.config
        if not isinstance(config, FlatConfig) or config.device == "cpu" or queries.kind != "dense":
            return None

        def load() -> DenseSearch | None:
            values = self.store.read("values.bin")
            return on_device(
                config.device,
                "searching this index",
                DenseSearch.needed(values),
                lambda device: None if device.type == "cpu" else DenseSearch(values, device),
            )

        return self.store.derived(("search", config.device), load)

    def _check_device(self, given: Representation) -> None:
        """Refuse a GPU that is asked for and not there, or is for vectors of another kind."""
        if not isinstance(self.config, FlatConfig) or self.config.device != "gpu":
            return
        if given.kind != "dense":
            raise ConfigError(
                f"index: 'flat' uses a GPU for dense vectors, got {given.kind}; set device to 'auto' or 'cpu'"
                + (", or choose 'plaid'" if given.kind == "multi_vector" else "")
            )
        check_device("gpu")

    def _scan(self, queries: Representation, best: TopK, first: int, keep: Array | None) -> None:
        """Push the exact scores of the rows from ``first`` on where ``keep`` is true (None: everywhere)."""
        n = len(self)
        if keep is not None and np.count_nonzero(keep[first:]) * 4 < n - first:  # few: read only those
            rows = first + np.flatnonzero(keep[first:])
            lengths = self._arrays().get("lengths")
            for start, stop in _blocks(
                queries, 0, len(rows), None if lengths is None else lengths[rows].cumsum()
            ):
                chosen = rows[start:stop]
                best.push(self._scores(queries, chosen).numpy(), chosen)
            return
        for start, stop in _blocks(queries, first, n, self._ends()):
            scores = self._scores(queries, slice(start, stop))
            if keep is not None:
                scores.masked_fill_(torch.from_numpy(~keep[start:stop]), float("-inf"))
            best.push(scores.numpy(), np.arange(start, stop))

    def _scores(self, queries: Representation, rows: Array | slice) -> Tensor:
        """Scores ``(n_q, n)`` of some rows."""
        part = self._slice(rows.start, rows.stop) if isinstance(rows, slice) else self.representations(rows)
        return score(queries, part)

    def _slice(self, start: int, stop: int) -> Representation:
        """Rows ``start`` to ``stop``, not copied."""
        return self._make(self._take(slice(start, stop)))

    def _take(self, rows: Array | slice) -> dict[str, Array]:
        """The arrays of some rows; those of a slice are not copied."""
        return bm25.weigh(self.store, self._raw(rows), self.formula)

    def _raw(self, rows: Array | slice) -> dict[str, Array]:
        """The same as they are stored."""
        arrays, ends = self._arrays(), self._ends()
        if ends is None:
            return {name: array[rows] for name, array in arrays.items()}
        lengths, places = arrays.pop("lengths")[rows], rows
        if isinstance(rows, slice):
            places = slice(*(int(ends[row - 1]) if row else 0 for row in (rows.start, rows.stop)))
        else:
            starts = ends[rows] - lengths
            places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        return {"lengths": lengths} | {name: array[places] for name, array in arrays.items()}

    def _arrays(self) -> dict[str, Array]:
        names = {"dense": ["values"], "multi_vector": ["values", "lengths"]}
        wanted = names.get(str(self.representation), ["terms", "weights", "lengths"])
        return {name: self.store.read(f"{name}.bin") for name in wanted}

    def _ends(self) -> Array | None:
        """``(n,)`` where the elements of each row end; None for kinds of one element a row."""
        if self.representation == "dense":
            return None
        elements = "values.bin" if self.representation == "multi_vector" else "terms.bin"
        read, total = self.store.read, self.store.rows(elements)
        return self.store.derived("ends", lambda: row_ends(self.store.path, read("lengths.bin"), total))

    def _make(self, arrays: dict[str, Array]) -> Representation:
        return representation_from_arrays(str(self.representation), self.dim, arrays)


def halved(representation: Representation) -> dict[str, Array]:
    """Its arrays to be stored, values in float16.

    Raises:
        BadValueError: A value is too large.
    """
    arrays = representation.arrays()
    with np.errstate(over="ignore"):
        values = arrays["values"].astype(np.float16)
    if not np.isfinite(values).all():
        raise BadValueError(
            f"adding documents: got a value of {np.abs(arrays['values']).max():g}, expected at most "
            "65504, the largest float16; normalise the vectors, or choose the index 'flat'"
        )
    return arrays | {"values": values}


def query_blocks(queries: Representation, size: int) -> Iterator[Representation]:
    """``size`` queries at a time."""
    if len(queries) <= size:
        yield queries
        return
    for start in range(0, len(queries), size):
        yield queries[start : start + size]


def _blocks(queries: Representation, start: int, stop: int, ends: Array | None) -> Iterator[tuple[int, int]]:
    """Cut rows ``start`` to ``stop`` so that neither scores nor documents of a block take much memory."""
    width = 4 if queries.kind == "sparse" else queries.dim
    if isinstance(queries, MultiVector):
        width = max(width, len(queries.tokens.values))
    rows, elements = max(1, _SCORES // len(queries)), max(1, _NUMBERS // max(1, width))
    while start < stop:
        end = min(stop, start + rows)
        if ends is None:
            end = min(end, start + elements)
        else:
            before = int(ends[start - 1]) if start else 0
            end = min(end, max(start + 1, int(np.searchsorted(ends, before + elements, "right"))))
        yield start, end
        start = end
