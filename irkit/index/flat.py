"""Exact search: every stored document is scored. All other indexes are compared with it."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from irkit_kernels.maxsim import maxsim_int8, quantize_rows
from torch import Tensor

from irkit.core.representation import Dense, MultiVector, Representation
from irkit.errors import ConfigError
from irkit.index import bm25_index as bm25
from irkit.index.array_files import Array
from irkit.index.device import check_device, on_device
from irkit.index.index_base import StageProgress
from irkit.index.index_settings import FlatConfig
from irkit.index.store import Store
from irkit.index.stored_rows import QUERY_BLOCK, StoredRows, search_in_blocks
from irkit.index.topk import Hits, TopK

_WORK = 1 << 29  # bytes on a GPU of scores, keys and their choice
_MARGIN = 8  # documents scored exactly beyond twice the hits: 8 bits of the query confuse neighbours


def open_flat(store: Store, config: FlatConfig) -> Flat:
    """Return the index of a store that holds tokens in 8 bits, or representations as they are."""
    return (FlatInt8 if config.dtype == "int8" else Flat)(store, config)


class Flat(StoredRows):
    """Scores all rows, on the CPU or, for dense vectors, on a GPU."""

    config: FlatConfig

    def finish(self, progress: StageProgress | None = None) -> None:
        """Store the statistics of BM25; other representations need nothing.

        Args:
            progress: Is not called.
        """
        if "bm25" in self.store.meta["index"]:
            with self.store.update():
                bm25.renew(self.store)

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        on_gpu = self._device_search(queries)
        if on_gpu is None:
            return self._scan_all(queries, k, keep)
        return search_in_blocks(
            lambda block: on_gpu(cast(Dense, block).values, k, keep), queries, QUERY_BLOCK["dense"]
        )

    def _device_search(self, queries: Representation) -> DenseSearch | None:
        """Return the search on a GPU, if the configuration wants one and its memory suffices."""
        self._check_build(queries)
        device = self.config.device
        if device == "cpu" or queries.kind != "dense":
            return None

        def load() -> DenseSearch | None:
            values, scores = self.store.read("values.bin"), self.store.limits.scan_gpu_scores
            return on_device(
                device,
                "searching this index",
                values.nbytes + _WORK,
                lambda device: None if device.type == "cpu" else DenseSearch(values, device, scores),
            )

        return self.store.derived(("search", device), load)

    def _check_build(self, representation: Representation) -> None:
        """Raise ConfigError if a GPU is chosen, but there is none, or the vectors are not dense."""
        if self.config.device == "gpu" and representation.kind != "dense":
            other = ", or choose 'plaid'" if representation.kind == "multi_vector" else ""
            raise ConfigError(
                f"index: 'flat' uses a GPU for dense vectors, got {representation.kind}; "
                f"set device to 'auto' or 'cpu'{other}"
            )
        check_device(self.config.device)


class FlatInt8(Flat):
    """Stores tokens with 8 bits per dimension and a scale per token, and scores all of them as they are.

    A scan with queries in 8 bits chooses documents. These are then scored by float32 queries and the tokens
    that are stored, which takes a quarter of the bytes of `Flat` and is several times as fast.
    """

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of representation that it can hold."""
        return ("multi_vector",)

    def _encode(self, representation: Representation) -> dict[str, Array]:
        arrays = representation.arrays()
        values, scales = quantize_rows(torch.from_numpy(arrays["values"]))
        return {"values": values.numpy(), "scales": scales.numpy(), "lengths": arrays["lengths"]}

    def _decode(self, arrays: dict[str, Array]) -> Representation:
        values = arrays["values"] * arrays["scales"][:, None]
        return super()._decode({"values": values, "lengths": arrays["lengths"]})

    def _element_arrays(self) -> list[str]:
        return ["values", "scales"]

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        rows = self._scan_all(queries, 2 * k + _MARGIN, keep).rows
        best = TopK(len(queries), k)
        best.push_pairs(self._score_rows(queries, rows), rows)
        return best.hits()

    def _scores(self, queries: Representation, rows: Array | slice) -> Tensor:
        tokens, arrays = cast(MultiVector, queries).tokens, self.stored_arrays(rows)
        offsets = np.concatenate([[0], np.cumsum(arrays["lengths"])]).astype(np.int32)
        documents = (torch.from_numpy(array) for array in (arrays["values"], arrays["scales"], offsets))
        return maxsim_int8(*quantize_rows(tokens.values), tokens.offsets, *documents)


class DenseSearch:
    """Keeps vectors on a device and scores all of them.

    A hit is one 64-bit key, as in `TopK`, so that ties go to the lower row; ``torch.topk`` alone leaves the
    order of ties open.
    """

    def __init__(self, values: Array, device: torch.device, scores: int) -> None:
        """Move vectors ``(n, dim)`` float32 to the device; a search makes ``scores`` at once."""
        self._values, self._scores = torch.from_numpy(values).to(device), scores

    def __call__(self, queries: Tensor, k: int, keep: Array | None) -> Hits:
        """Return the ``k`` best rows of each query.

        Args:
            queries: ``(n_q, dim)`` float32 on the CPU.
            k: At most the number of rows where ``keep`` is true.
            keep: ``(n,)`` bool: rows that may be hits; None allows all.
        """
        device, n = self._values.device, len(self._values)
        queries = queries.detach().to(device)
        hidden = None if keep is None else torch.from_numpy(~keep).to(device)
        best = torch.empty(len(queries), 0, dtype=torch.int64, device=device)
        width = max(1, self._scores // len(queries))
        for start in range(0, n, width):
            scores = queries @ self._values[start : start + width].T
            if hidden is not None:
                scores.masked_fill_(hidden[start : start + width], -torch.inf)
            best = torch.cat([best, _keys(scores, start)], dim=1)
            best = best.topk(min(k, best.shape[1]), dim=1).values
        hits = TopK(len(queries), k)
        hits.push_keys(best.cpu().numpy())
        return hits.hits()


def _keys(scores: Tensor, first: int) -> Tensor:
    """Return the keys of `TopK` for ``scores (n_q, n)`` float32 of the rows from ``first`` on."""
    bits = (scores + 0).view(torch.int32)  # + 0 makes -0.0, which would sort lower, 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rows = torch.arange(first, first + scores.shape[1], device=scores.device)
    return (ordered.long() << 32) | (0xFFFFFFFF - rows)
