"""Search of all tokens in 8 bits: a quarter of the bytes, several times as fast, nearly exact."""

from __future__ import annotations

from typing import ClassVar, cast

import numpy as np
import torch
from irkit_kernels.maxsim import maxsim_int8, quantize_rows
from torch import Tensor

from irkit.index.files import Array
from irkit.index.flat import Flat
from irkit.index.topk import Hits, TopK
from irkit.representation import MultiVector, Representation

__all__ = ["FlatInt8"]

_MARGIN = 8  # documents scored exactly, beyond twice those wanted: 8 bits of the query confuse neighbours


class FlatInt8(Flat):
    """Keeps tokens in 8 bits a dimension, each with a scale of its own, and scores all of them as they are.

    The best are scored exactly then, which is to say by float32 queries and the tokens that are kept.
    """

    kinds: ClassVar[tuple[str, ...]] = ("multi_vector",)

    def _stored(self, representation: Representation) -> dict[str, Array]:
        arrays = representation.arrays()
        values, scales = quantize_rows(torch.from_numpy(arrays["values"]))
        return {"values": values.numpy(), "scales": scales.numpy(), "lengths": arrays["lengths"]}

    def _arrays(self) -> dict[str, Array]:
        return {name: self.store.read(f"{name}.bin") for name in ("values", "scales", "lengths")}

    def _make(self, arrays: dict[str, Array]) -> Representation:
        values = arrays["values"] * arrays["scales"][:, None]
        return super()._make({"values": values, "lengths": arrays["lengths"]})

    def _search_block(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        rough = TopK(len(queries), 2 * k + _MARGIN)
        self._scan(queries, rough, 0, keep)
        rows = rough.hits().rows
        best = TopK(len(queries), k)
        best.push_pairs(self._score_rows(queries, rows), rows)
        return best.hits()

    def _scores(self, queries: Representation, rows: Array | slice) -> Tensor:
        tokens, arrays = cast(MultiVector, queries).tokens, self._take(rows)
        offsets = np.concatenate([[0], np.cumsum(arrays["lengths"])]).astype(np.int32)
        documents = (torch.from_numpy(array) for array in (arrays["values"], arrays["scales"], offsets))
        return maxsim_int8(*quantize_rows(tokens.values), tokens.offsets, *documents)
