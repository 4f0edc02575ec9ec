"""MaxSim by inner products: one long vector per document, found by lists and codes, then exact MaxSim.

The encodings follow MUVERA (Dhulipala et al., arXiv 2405.19504, section 2). Random hyperplanes cut the space
of tokens into cells. A query is encoded as the sum of its tokens in each cell, a document as their mean, both
projected to a few dimensions by random signs, and the cells are concatenated. The inner product of two
encodings then adds, for every token of the query, its product with the mean of the document's tokens in the
same cell: if the cells are small, that mean is close to the best match, and the sum is close to MaxSim. A
cell without tokens of the document takes the tokens of the nearest cell that has some (the paper takes one),
so that no query token goes unmatched. All of this is repeated with other hyperplanes, and the encodings are
concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from irkit_kernels.dense_search import Candidates, Effort
from torch import Tensor

from irkit.core.ragged import Ragged
from irkit.core.representation import MultiVector, Representation
from irkit.index.array_files import Array
from irkit.index.coded_lists import SIGNS, CodedLists
from irkit.index.index_settings import MuveraConfig
from irkit.index.state import snapshot
from irkit.index.stored_rows import to_float16
from irkit.index.topk import Hits, TopK, query_table

_NUMBERS = 1 << 23  # numbers of encodings made at once: 32 MB
_SCAN = 1.75  # documents per candidate up to which all are scored: it takes little longer, and misses none
_TRAIN = 4096  # documents that centroids are trained on, at least
_TRAIN_NUMBERS = 1 << 27  # or as many as make 512 MB


class Encoder:
    """Encodings of fixed width, whose inner products approximate MaxSim; see the module.

    Attributes:
        width: Dimensions of an encoding: ``repetitions * 2**bits * projection``.
    """

    def __init__(self, dim: int, config: MuveraConfig) -> None:
        rng = np.random.default_rng(config.seed)
        self._cells, self._projection = 1 << config.bits, config.projection
        planes = rng.standard_normal((dim, config.repetitions, config.bits))
        signs = rng.integers(0, 2, (dim, config.repetitions * config.projection)) * 2 - 1
        self._planes = torch.from_numpy(planes.reshape(dim, -1).astype(np.float32)).double()
        self._signs = torch.from_numpy((signs / np.sqrt(config.projection)).astype(np.float32)).double()
        self._repetitions, self._weights = config.repetitions, 2 ** torch.arange(config.bits, device="cpu")
        # cells by the number of hyperplanes between them and each cell
        numbers = np.arange(self._cells)
        distance = np.bitwise_count(numbers[:, None] ^ numbers)
        self._nearest = torch.from_numpy(np.argsort(distance, axis=1, kind="stable"))
        self.width = config.repetitions * self._cells * config.projection

    def queries(self, tokens: Ragged) -> Tensor:
        """Return encodings ``(n, width)`` of queries."""
        return self._sums(tokens)[0].reshape(len(tokens), -1)

    def documents(self, tokens: Ragged) -> Tensor:
        """Return encodings ``(n, width)`` of documents."""
        sums, counts = self._sums(tokens)  # (n * repetitions, cells, projection), (n * repetitions, cells)
        means, filled = sums / counts.clamp(min=1)[..., None], counts > 0
        row, cell = torch.nonzero(~filled, as_tuple=True)
        order = self._nearest[cell]  # (empty cells, cells)
        first = filled[row[:, None], order].int().argmax(1, keepdim=True)  # the nearest that is filled
        means[row, cell] = means[row, order.gather(1, first)[:, 0]]
        return means.reshape(len(tokens), -1)

    def _sums(self, tokens: Ragged) -> tuple[Tensor, Tensor]:
        """Return the sum of the projected tokens, and their number, per text and repetition, and per cell."""
        values, groups = tokens.values.double(), len(tokens) * self._repetitions  # rounded as if alone
        above = (values @ self._planes > 0).view(len(values), self._repetitions, len(self._weights))
        cell = (above * self._weights).sum(2)  # (tokens, repetitions)
        group = tokens.row_ids()[:, None] * self._repetitions + torch.arange(self._repetitions, device="cpu")
        position = (group * self._cells + cell).view(-1)
        projected = (values @ self._signs).float().view(-1, self._projection)
        sums = torch.zeros(groups * self._cells, self._projection, device="cpu")
        sums.index_add_(0, position, projected)
        counts = torch.bincount(position, minlength=groups * self._cells)
        return sums.view(groups, self._cells, -1), counts.view(groups, self._cells)


_encoder = lru_cache(maxsize=4)(Encoder)


class Muvera(CodedLists):
    """Lists and codes of encodings; exact MaxSim ranks the documents that they find.

    Tokens are stored in float16, encodings only as codes of two bits per dimension.
    """

    config: MuveraConfig

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `CodedLists.stats` returns, and the width of an encoding."""
        return super().stats() | {"width": self._width(self.dim)}

    @property
    def _encodings(self) -> Encoder:
        return _encoder(self.dim, self.config)

    def _nbits(self) -> int:
        return 2

    def _width(self, dim: int) -> int:
        return self.config.repetitions * (1 << self.config.bits) * self.config.projection

    def _encode(self, representation: Representation) -> dict[str, Array]:
        return to_float16(representation)

    def _reader(self) -> Callable[[Array], Array]:
        width = self._width(self.dim)
        size = max(1, _NUMBERS // max(width, self.config.repetitions << 2 * self.config.bits))

        def read(rows: Array) -> Array:
            vectors = np.empty((len(rows), width), np.float32)
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                documents = cast(MultiVector, self._represent(rows[part]))
                vectors[part] = self._encodings.documents(documents.tokens).numpy()
            return vectors

        return read

    def _query_vectors(self, queries: Representation) -> Array:
        vectors: Array = self._encodings.queries(cast(MultiVector, queries).tokens).numpy()
        return vectors

    def _list_rows(self) -> int:
        """Return rows per list, enough for the int8 centroid of a list to take at most 20 bytes per row."""
        return max(self.store.limits.dense_points, self._width(self.dim) // 20)

    def _sample_size(self, lists: int) -> int:
        most = max(_TRAIN, _TRAIN_NUMBERS // self._width(self.dim))
        return max(lists, min(super()._sample_size(lists), most))

    def _few(self, live: int, covered: int, k: int) -> bool:
        return live <= max(covered // 20, _SCAN * self._candidates(k, live, covered))

    def _effort(self, k: int, live: int, covered: int) -> Effort:
        width = min(self._candidates(k, live, covered), covered)
        return Effort(self._probes(width, live), SIGNS * width, width)

    def _candidates(self, k: int, live: int, covered: int) -> int:
        """Return how many documents are ranked by MaxSim for ``k`` hits among ``live`` rows of lists."""
        return math.ceil(max(self.config.candidates, 2 * k) * self._spare(live, covered))

    def candidate_scores(
        self, queries: Representation, found: Candidates, query: Array, column: Array
    ) -> Array:
        """See `CodedLists.candidate_scores`."""
        rows = query_table(query, found.rows[query, column], len(queries), -1)
        return self._score_rows(queries, rows)[rows >= 0]

    def _look_up(self, queries: Representation, k: int, keep: Array | None, live: int) -> Hits:
        assert isinstance(queries, MultiVector)
        covered, effort = self._covered, self._effort(k, live, self._covered)
        width = effort.refined
        keep = keep if keep is None else keep[:covered]
        rows, _ = self._searcher().find(self._query_vectors(queries), width, effort, keep)
        empty = (queries.tokens.lengths == 0).numpy()
        first = np.flatnonzero((self.live if keep is None else keep)[:covered])[:width]
        rows[empty], rows[empty, : len(first)] = -1, first  # all documents score 0
        best = TopK(len(queries), k)
        best.push_pairs(self._score_rows(queries, rows), rows)
        return best.hits()
