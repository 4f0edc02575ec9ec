"""Approximate MaxSim over compressed tokens: storage, building and search put together."""

from __future__ import annotations

import contextlib
from typing import cast

import numpy as np
import torch

from irkit.core.representation import MultiVector, Representation
from irkit.index.array_files import Array
from irkit.index.device import on_device
from irkit.index.index_base import StageProgress
from irkit.index.layout import fitting
from irkit.index.plaid_build import PlaidBuilder
from irkit.index.plaid_rows import PlaidRows
from irkit.index.plaid_search import CpuSearch, PlaidArrays, plan_search
from irkit.index.plaid_tensors import TensorSearch
from irkit.index.stored_rows import QUERY_BLOCK, search_in_blocks
from irkit.index.topk import Hits, TopK


class Plaid(PlaidRows):
    """Searches compressed tokens by their centroids, lists and residuals, and scans the other rows.

    `irkit.index.plaid_rows` says what is stored, `irkit.index.plaid_build` how it is made, and
    `irkit.index.plaid_search` how it is searched.
    """

    def finish(self, progress: StageProgress | None = None) -> None:
        """Train centroids, compress what was added and list it, if these are many tokens.

        A build commits every block; a killed build resumes after the last one.

        Args:
            progress: Called with the stages "training", "compressing" and "listing".
        """
        with contextlib.nullcontext() if self.store.building else self.store.update():
            PlaidBuilder(self, progress or (lambda stage, count, total: None)).run()

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        if not self.covered:
            return self._scan_all(queries, k, keep)

        def search(block: Representation) -> Hits:
            return self._search_block(cast(MultiVector, block), k, keep)

        return search_in_blocks(search, queries, QUERY_BLOCK["multi_vector"])

    def _search_block(self, queries: MultiVector, k: int, keep: Array | None) -> Hits:
        covered = self.covered
        arrays, search = self.store.derived(("search", self.config.device), self._load)
        allowed = arrays.filled if keep is None else arrays.filled & keep[:covered]
        budget = plan_search(self.config, self.store.limits, k, allowed, self.listed)
        empty = queries.tokens.lengths.numpy() == 0
        filled = queries.tokens[~empty] if empty.any() else queries.tokens
        scores = np.full((len(queries), budget.exact), -np.inf, np.float32)
        rows = np.full(scores.shape, -1)
        # compressed rows
        if len(filled):
            with fitting(self.store.path):
                scores[~empty], rows[~empty] = search(filled, budget, allowed)
            if self.config.keep_tokens:
                scores[~empty] = self._score_rows(MultiVector(filled), rows[~empty])
        if empty.any():  # a query without tokens scores 0 with everything
            first = np.flatnonzero((self.live if keep is None else keep)[:covered])[:k]
            scores[empty, : len(first)], rows[empty, : len(first)] = 0, first
        best = TopK(len(queries), k)
        best.push_pairs(scores, rows)
        # the rows added since
        if covered < len(self):
            self._scan(queries, best, covered, keep)
        return best.hits()

    def _load(self) -> tuple[PlaidArrays, CpuSearch | TensorSearch]:
        """Return what is searched, and its search on the configured device."""
        arrays = self.arrays()

        def load(device: torch.device) -> CpuSearch | TensorSearch:
            if device.type == "cpu":
                with fitting(self.store.path):
                    return CpuSearch(arrays)
            # kernels for the CPU skip wrong numbers, but tensors on a GPU would be read out of bounds
            count = len(arrays.centroids)
            for numbers, limit in ((arrays.tokens.codes, count), (arrays.lists, arrays.listed)):
                if len(numbers) and not 0 <= numbers.min() <= numbers.max() < limit:
                    raise self.damaged()
            return TensorSearch(arrays, device)

        needed = TensorSearch.needed(arrays)
        return arrays, on_device(self.config.device, "searching this index", needed, load)
