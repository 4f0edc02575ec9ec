"""MaxSim by way of inner products: one long vector a document, searched with FAISS, then exact MaxSim."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from irkit.index.config import FaissConfig, MuveraConfig
from irkit.index.faiss import Faiss
from irkit.index.files import Array
from irkit.index.flat import halved
from irkit.index.state import pinned
from irkit.ragged import Ragged
from irkit.representation import MultiVector, Representation

__all__ = ["Encoder", "Muvera"]

_NUMBERS = 1 << 23  # made at a time: 32 MB
_TRAIN = 4096  # documents that FAISS is trained on, at least
_TRAIN_NUMBERS = 1 << 27  # or as many as make 512 MB


class Encoder:
    """Fixed-dimensional encodings: vectors whose inner product approximates MaxSim.

    Hyperplanes cut the space of tokens into cells. Of the tokens in a cell a query has the sum and a document
    the mean, projected at random; a cell without tokens of the document has what its nearest cell has. All
    this is done several times over.

    Attributes:
        width: Of an encoding: ``repetitions * 2**bits * projection``.

    Source: Dhulipala et al., MUVERA, arXiv 2405.19504, section 2. There, an empty cell has one token.
    """

    def __init__(self, dim: int, config: MuveraConfig) -> None:
        rng = np.random.default_rng(config.seed)
        self._cells, self._projection = 1 << config.bits, config.projection
        planes = rng.standard_normal((dim, config.repetitions, config.bits))
        signs = rng.integers(0, 2, (dim, config.repetitions * config.projection)) * 2 - 1
        self._planes = torch.from_numpy(planes.reshape(dim, -1).astype(np.float32))
        self._signs = torch.from_numpy((signs / np.sqrt(config.projection)).astype(np.float32))
        self._repetitions, self._weights = config.repetitions, 2 ** torch.arange(config.bits, device="cpu")
        numbers = np.arange(self._cells)
        distance = np.bitwise_count(numbers[:, None] ^ numbers)
        self._nearest = torch.from_numpy(np.argsort(distance, axis=1, kind="stable"))
        self.width = config.repetitions * self._cells * config.projection

    def queries(self, tokens: Ragged) -> Tensor:
        """``(n, width)`` encodings of queries."""
        return self._sums(tokens)[0].reshape(len(tokens), -1)

    def documents(self, tokens: Ragged) -> Tensor:
        """``(n, width)`` encodings of documents."""
        sums, counts = self._sums(tokens)  # (n * repetitions, cells, projection), (n * repetitions, cells)
        means, filled = sums / counts.clamp(min=1)[..., None], counts > 0
        row, cell = torch.nonzero(~filled, as_tuple=True)
        order = self._nearest[cell]  # (empty cells, cells)
        place = filled[row[:, None], order].int().argmax(1, keepdim=True)  # the first that is filled
        means[row, cell] = means[row, order.gather(1, place)[:, 0]]
        return means.reshape(len(tokens), -1)

    def _sums(self, tokens: Ragged) -> tuple[Tensor, Tensor]:
        """Projected tokens summed, and their number, by text and repetition and by cell."""
        values, groups = tokens.values.float(), len(tokens) * self._repetitions
        above = (values @ self._planes > 0).view(len(values), self._repetitions, len(self._weights))
        cell = (above * self._weights).sum(2)  # (tokens, repetitions)
        group = tokens.row_ids()[:, None] * self._repetitions + torch.arange(self._repetitions, device="cpu")
        place = (group * self._cells + cell).view(-1)
        projected = (values @ self._signs).view(-1, self._projection)
        sums = torch.zeros(groups * self._cells, self._projection, device="cpu").index_add_(
            0, place, projected
        )
        counts = torch.bincount(place, minlength=groups * self._cells)
        return sums.view(groups, self._cells, -1), counts.view(groups, self._cells)


@lru_cache(maxsize=4)
def _encoder(dim: int, config: MuveraConfig) -> Encoder:
    return Encoder(dim, config)


class Muvera(Faiss):
    """A FAISS structure over encodings of the first rows, whose finds are ranked by exact MaxSim.

    Tokens are kept in float16, encodings only as FAISS codes them. Otherwise as `Faiss`.
    """

    kinds: ClassVar[tuple[str, ...]] = ("multi_vector",)
    config: MuveraConfig

    @pinned
    def stats(self) -> dict[str, Any]:
        """As of `Faiss`, and the width of an encoding."""
        return super().stats() | {"width": self._width(self.dim)}

    @property
    def _encoder(self) -> Encoder:
        return _encoder(self.dim, self.config)

    @property
    def _options(self) -> FaissConfig:
        train_size = max(_TRAIN, _TRAIN_NUMBERS // self._width(self.dim))
        options = {"factory": self.config.factory, "seed": self.config.seed, "train_size": train_size}
        return FaissConfig.model_validate(options)

    def _width(self, dim: int) -> int:
        return self.config.repetitions * (1 << self.config.bits) * self.config.projection

    def _stored(self, representation: Representation) -> dict[str, Array]:
        return halved(representation)

    def _vectors(self, start: int) -> Iterator[Array]:
        for first in range(start, len(self), self._block):
            yield self._encode(self._slice(first, min(first + self._block, len(self))))

    def _vectors_of(self, rows: Array) -> Array:
        vectors = np.empty((len(rows), self._width(self.dim)), np.float32)
        for start in range(0, len(rows), self._block):
            part = slice(start, start + self._block)
            vectors[part] = self._encode(self.representations(rows[part]))
        return vectors

    @property
    def _block(self) -> int:
        """Documents encoded at a time."""
        return max(1, _NUMBERS // max(self._width(self.dim), self.config.repetitions << 2 * self.config.bits))

    def _encode(self, documents: Representation) -> Array:
        assert isinstance(documents, MultiVector)
        return self._encoder.documents(documents.tokens).numpy()

    def _candidates(
        self, queries: Representation, k: int, keep: Array | None, share: float
    ) -> tuple[Array, Array]:
        assert isinstance(queries, MultiVector)
        wanted = min(max(self.config.candidates, 2 * k), self._state("covered"))
        _, rows = self._look_up(self._encoder.queries(queries.tokens).numpy(), wanted, keep, share)
        empty = (queries.tokens.lengths == 0).numpy()
        kept = (self.live if keep is None else keep)[: self._state("covered")]
        first = np.flatnonzero(kept)[: rows.shape[1]]
        rows[empty], rows[empty, : len(first)] = -1, first  # all score 0
        return self._score_rows(queries, rows), rows
