"""Exact search: every stored document is scored. All other indexes are compared with it."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from irkit_kernels.dense_scan import products
from irkit_kernels.maxsim import maxsim_int8, quantize_rows
from torch import Tensor

from irkit.core.representation import Dense, MultiVector, Representation
from irkit.errors import ConfigError
from irkit.index import bm25_index as bm25
from irkit.index.array_files import Array
from irkit.index.coded_scan import has_codes, scan_pays, search_codes
from irkit.index.dense_scores import pair_scores
from irkit.index.device import check_device, on_device
from irkit.index.flat_dense import CODES, decode_dense, encode_dense
from irkit.index.index_base import StageProgress
from irkit.index.index_settings import FlatConfig
from irkit.index.store import Store
from irkit.index.stored_rows import QUERY_BLOCK, StoredRows, search_in_blocks
from irkit.index.topk import Hits, TopK, tensor_keys

_WORK = 1 << 29  # bytes on a GPU of scores, keys and their choice
_CONVERTED = 2  # the share of `Limits.flat_share` where vectors have to be converted before they are scored
_MOST = 100  # documents scored exactly beyond the hits, which are twice as many up to here
_MARGIN = 8  # and these: 8 bits of the query confuse neighbours


_KINDS = {
    "float32": ("dense", "multi_vector", "sparse"),
    "float16": ("dense",),
    "bfloat16": ("dense",),
    "int8": ("dense", "multi_vector"),
}


def open_flat(store: Store, config: FlatConfig) -> Flat:
    """Return the index of a store that holds tokens in 8 bits, or representations as they are."""
    return (FlatInt8 if config.dtype == "int8" else Flat)(store, config)


class Flat(StoredRows):
    """Finds the best of all rows, on the CPU or, for dense vectors, on a GPU.

    Dense vectors have codes beside them, see `irkit.index.flat_dense`. A scan of the codes leaves the few
    rows that may be among the best, and only these are scored.
    """

    config: FlatConfig

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of representation that it can hold."""
        return _KINDS[self.config.dtype]

    def finish(self, progress: StageProgress | None = None) -> None:
        """Store the statistics of BM25; other representations need nothing.

        Args:
            progress: Is not called.
        """
        if "bm25" in self.store.meta["index"]:
            with self.store.update():
                bm25.renew(self.store)

    # ---- dense vectors as they are stored ----

    def _encode(self, representation: Representation) -> dict[str, Array]:
        if not isinstance(representation, Dense):
            return super()._encode(representation)
        arrays = encode_dense(representation.values, self.config.dtype)
        wanted = self.config.codes and self._metric != "euclidean"
        coded = self._has_codes() if len(self) or self.config.dtype == "int8" else wanted
        return {name: array for name, array in arrays.items() if coded or name not in CODES}

    def _decode(self, arrays: dict[str, Array]) -> Representation:
        if self.representation != "dense":
            return super()._decode(arrays)
        return Dense(decode_dense(arrays, self.config.dtype, self.dim))

    def _row_arrays(self) -> list[str]:
        names = super()._row_arrays()
        if self.representation != "dense":
            return names
        return [*(names if self.config.dtype != "int8" else []), *(CODES if self._has_codes() else [])]

    def _weighed_arrays(self, rows: Array | slice) -> dict[str, Array]:
        if self.representation != "dense":
            return super()._weighed_arrays(rows)
        names = ["values"] if self.config.dtype != "int8" else ["codes", "scales"]
        return {name: self.store.read(f"{name}.bin")[rows] for name in names}

    def _has_codes(self) -> bool:
        return self.config.dtype == "int8" or has_codes(self.store)

    # ---- searching ----

    @property
    def _share(self) -> int:
        """Return how many rows a full scan scores in the time of one row that the codes leave."""
        return self.store.limits.flat_share if self.config.dtype == "float32" else _CONVERTED

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        on_gpu = self._device_search(queries)
        if on_gpu is not None:
            return search_in_blocks(
                lambda block: on_gpu(cast(Dense, block).values, k, keep), queries, QUERY_BLOCK["dense"]
            )
        coded = queries.kind == "dense" and self._has_codes() and self._metric != "euclidean"
        if not coded or not scan_pays(self.store, len(self), k, keep, self._share):  # codes bound products
            return self._scan_all(queries, k, keep)
        return search_codes(
            self.store,
            queries,
            k,
            keep,
            len(self) // self._share,
            self._chosen_scores,
            lambda queries: self._scan_all(queries, k, keep),
        )

    def _chosen_scores(self, queries: Dense, chosen: Array) -> Array:
        """Return the exact scores ``(n_q, width)`` of the rows that are chosen for each query; -1 is none."""
        own, read = queries.arrays()["values"], self.store.read
        if self.config.dtype != "int8":
            return pair_scores(self._metric, own, read("values.bin"), chosen)
        return products(read("codes.bin"), np.ascontiguousarray(own), chosen, read("scales.bin"))

    def _longest(self, rows: Array | slice, values: Array) -> float:
        if not self._has_codes():
            return super()._longest(rows, values)
        norms, margins = (self.store.read(f"{name}.bin")[rows] for name in ("norms", "margins"))
        return float((norms + margins).max(initial=0))

    def _device_search(self, queries: Representation) -> DenseSearch | None:
        """Return the search on a GPU, if the configuration wants one and its memory suffices."""
        self._check_build(queries)
        device = self.config.device
        inexact = self.config.dtype != "float32" or self._metric == "euclidean"
        if device == "cpu" or queries.kind != "dense" or inexact:
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
        """Raise ConfigError if a GPU or a metric is chosen that such representations do not have."""
        if self._metric != "inner_product" and representation.kind != "dense":
            raise ConfigError(
                f"index: metric {self._metric!r} compares dense vectors, got {representation.kind}; leave "
                "metric out"
            )
        if self.config.device == "gpu" and self._metric == "euclidean":
            raise ConfigError(
                "index: 'flat' has no GPU search for metric 'euclidean'; set device to 'auto' or 'cpu'"
            )
        if self.config.device == "gpu" and representation.kind != "dense":
            other = ", or choose 'plaid'" if representation.kind == "multi_vector" else ""
            raise ConfigError(
                f"index: 'flat' uses a GPU for dense vectors, got {representation.kind}; "
                f"set device to 'auto' or 'cpu'{other}"
            )
        if self.config.device == "gpu" and self.config.dtype != "float32":
            raise ConfigError(
                f"index: 'flat' uses a GPU for vectors in float32, got dtype {self.config.dtype!r}; set "
                "device to 'auto' or 'cpu', or dtype to 'float32'"
            )
        check_device(self.config.device)


class FlatInt8(Flat):
    """Stores 8 bits per dimension and a scale per vector or token, and scores the decoded numbers.

    A scan with queries in 8 bits chooses documents. Float32 queries then score these documents. The index has
    a quarter of the bytes of `Flat`. Searches of tokens are several times as fast if the CPU has AVX512-VNNI,
    and take as long as those of `Flat` if not.
    """

    def examined(self, k: int) -> int:
        """Return how many documents are scored exactly for ``k`` hits."""
        return k + min(k, _MOST) + _MARGIN

    def _encode(self, representation: Representation) -> dict[str, Array]:
        if representation.kind == "dense":
            return super()._encode(representation)
        arrays = representation.arrays()
        values, scales = quantize_rows(torch.from_numpy(arrays["values"]))
        return {"values": values.numpy(), "scales": scales.numpy(), "lengths": arrays["lengths"]}

    def _decode(self, arrays: dict[str, Array]) -> Representation:
        if self.representation == "dense":
            return super()._decode(arrays)
        numbers, scales = (torch.from_numpy(arrays[name]) for name in ("values", "scales"))
        values = numbers.float().mul_(scales[:, None]).numpy()  # half the time of numpy's product
        return super()._decode({"values": values, "lengths": arrays["lengths"]})

    def _element_arrays(self) -> list[str]:
        return ["values", "scales"] if self.representation == "multi_vector" else []

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        if queries.kind == "dense":
            return super()._search(queries, k, keep)
        rows = self._scan_all(queries, self.examined(k), keep).rows
        best = TopK(len(queries), k)
        best.push_pairs(self._score_rows(queries, rows), rows)
        return best.hits()

    def _scores(self, queries: Representation, rows: Array | slice) -> Tensor:
        tokens = cast(MultiVector, queries).tokens
        return maxsim_int8(*quantize_rows(tokens.values), tokens.offsets, *self._documents(rows))

    def _documents(self, rows: Array | slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens of rows as they are stored: numbers, scales, and where documents begin."""
        arrays = self.stored_arrays(rows)
        offsets = np.concatenate([[0], np.cumsum(arrays["lengths"])]).astype(np.int32)
        values, scales, ends = (
            torch.from_numpy(array) for array in (arrays["values"], arrays["scales"], offsets)
        )
        return values, scales, ends


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
            rows = torch.arange(start, start + scores.shape[1], device=device)
            best = torch.cat([best, tensor_keys(scores, rows)], dim=1)
            best = best.topk(min(k, best.shape[1]), dim=1).values
        hits = TopK(len(queries), k)
        hits.push_keys(best.cpu().numpy())
        return hits.hits()
