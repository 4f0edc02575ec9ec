"""Search of dense vectors by lists and codes.

The store has all rows, in order of addition, in the precision that ``keep`` says; `DenseCodes` keeps only
codes of them. `CodedLists` finds candidates, and the kernel ranks them by the stored rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from irkit_kernels.dense_search import Effort, rotate_rows, rotate_rows_back
from irkit_kernels.dense_search.lists import list_biases

from irkit.core.representation import Dense, Representation
from irkit.index.array_files import Array, corrupt
from irkit.index.coded_lists import SIGNS, CodedLists
from irkit.index.dense_device import DeviceLists, needed_bytes
from irkit.index.dense_scores import pair_scores
from irkit.index.device import check_device, on_device
from irkit.index.index_settings import DenseConfig
from irkit.index.lone_query import Single, search_alone
from irkit.index.state import snapshot
from irkit.index.stored_rows import search_in_blocks, to_float16, to_float32
from irkit.index.topk import Hits


class DenseLists(CodedLists):
    """Lists and codes over dense vectors. Scores are exact for the stored vectors."""

    config: DenseConfig

    def _nbits(self) -> int:
        return self.config.bits or (4 if self.config.keep == "none" else 1)

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `CodedLists.stats` returns, and the precision of the stored vectors."""
        return super().stats() | {"keep": self.config.keep}

    # ---- rows as they are stored ----

    def _encode(self, representation: Representation) -> dict[str, Array]:
        if self.config.keep == "float16":
            return to_float16(representation)
        if self.config.keep == "float32":
            return representation.arrays()
        rotated = rotate_rows(cast(Dense, representation).values, self._rotation()).numpy()
        scales = np.abs(rotated).max(1, initial=0) / np.float32(127)
        scales[scales == 0] = 1
        return {"values": np.rint(rotated / scales[:, None]).astype(np.int8), "scales": scales}

    def _decode(self, arrays: dict[str, Array]) -> Representation:
        if "scales" not in arrays:
            return Dense(torch.from_numpy(to_float32(arrays["values"])))
        rotated = arrays["values"] * arrays["scales"][:, None]
        return Dense(rotate_rows_back(torch.from_numpy(rotated), self._rotation(), self.dim))

    def _score_rows(self, queries: Representation, rows: Array) -> Array:
        if self.config.keep != "int8" or self._metric == "euclidean" or not (rows >= 0).any():
            return super()._score_rows(queries, rows)
        rotated = rotate_rows(cast(Dense, queries).values, self._rotation()).numpy()  # instead of rows, back
        values, scales = self.store.read("values.bin"), self.store.read("scales.bin")
        scores = np.full(rows.shape, -np.inf, np.float32)
        for number, chosen in enumerate(rows):
            here = np.arange(len(chosen))[None]
            products = pair_scores("inner_product", rotated[number, None], to_float32(values[chosen]), here)
            scores[number] = np.where(chosen < 0, -np.inf, products[0] * scales[chosen])
        return scores

    def _row_arrays(self) -> list[str]:
        return ["values", "scales"] if self.config.keep == "int8" else ["values"]

    def _reader(self) -> Callable[[Array], Array]:
        """Return a function that reads ascending rows as float32; their file does not stay in memory."""

        def read(rows: Array) -> Array:
            arrays = {name: self.store.take(f"{name}.bin", rows) for name in self._row_arrays()}
            return self._decode(arrays).arrays()["values"]

        return read

    def _kept(self) -> dict[str, Array]:
        names = {"kept": "values.bin"} | ({"kept_scales": "scales.bin"} if self.config.keep == "int8" else {})
        return {name: self.store.read(file)[: self._covered] for name, file in names.items()}

    # ---- searching ----

    def _check_build(self, representation: Representation) -> None:
        super()._check_build(representation)
        check_device(self.config.device)

    def _look_up(self, queries: Representation, k: int, keep: Array | None, live: int) -> Hits:
        on_gpu, effort = self._device_lists(), self._effort(k, live, self._covered)
        if on_gpu is None:
            return super()._look_up(queries, k, keep, live)
        keep = keep if keep is None else keep[: self._covered]
        size = on_gpu.queries_at_once(effort, self.store.limits.scan_gpu_scores)

        def search(block: Representation) -> Hits:
            return on_gpu(cast(Dense, block).values, k, effort, keep)

        return search_in_blocks(search, queries, size)

    def _device_lists(self) -> DeviceLists | None:
        """Return the search on a GPU, if the configuration wants one and its memory suffices."""
        device = self.config.device
        if device == "cpu":
            return None

        def load(_before: DeviceLists | None) -> DeviceLists | None:
            if _before:
                return _before
            segments, kept, encoder = (
                [part.arrays for part in self._segments()],
                self._kept(),
                self._encoder(),
            )
            euclidean, numbers = self._metric == "euclidean", self.store.limits.scan_gpu_scores
            margins = self.store.read("margins.bin") if self.store.rows("margins.bin") else None
            biases = list_biases(encoder.centroids, euclidean, margins)
            # the kernel for the CPU skips wrong numbers, but tensors on a GPU would be read out of bounds
            if any(len(part["rows"]) and part["rows"].max() >= self._covered for part in segments):
                raise corrupt(self.store.path, "a segment has a row that is not there")

            def move(chosen: torch.device) -> DeviceLists | None:
                if chosen.type == "cpu":
                    return None
                arrays = encoder.rotated, biases, self._matrix(), segments, kept
                return DeviceLists(*arrays, euclidean, chosen)

            needed = needed_bytes(segments, kept, numbers)
            return on_device(device, "searching this index", needed, move)

        return self.store.extended(("device", device), ["values.bin", *self._parts()], load)

    def _effort(self, k: int, live: int, covered: int) -> Effort:
        effort = super()._effort(k, live, covered)
        if self._nbits() == 1 or self.config.keep == "none":
            return effort
        return effort._replace(candidates=SIGNS * effort.candidates)

    def _reach(self) -> int:
        """Return more for vectors in 8 bits, whose rounding loses hits: still 99 of 100 are found."""
        return 9 if self.config.keep == "int8" else super()._reach()

    @snapshot
    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """Return the k best documents of every query; see `Index.search`."""
        alone = search_alone(self, queries, k, self._single) if allowed is None else None
        return super().search(queries, k, allowed) if alone is None else alone

    def _single(self, k: int) -> Single | None:
        """Return a function that finds ``k`` hits of one query in this thread, if all rows are in lists."""
        self._check_same()
        n = self._covered
        if self.config.device != "cpu" and self._device_lists() is not None:
            return None
        if self.store.rows("removed.bin") or n < len(self) or k < 1 or self._few(n, n, k):
            return None
        searcher = self._searcher()
        return searcher.single(k, self._effort(k, n, n))
