"""The base of sparse heads, and their configuration: how many weights of a text are kept."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import PositiveInt

from irkit.config import Config
from irkit.heads.head import Head, Side

_LIMITS = ("query_max_active_dims", "document_max_active_dims")


class SparseConfig(Config):
    """Says how the logits of a text's tokens become the weights of the text.

    Attributes:
        pooling: Pooling over the tokens of a text: ``"max"`` (SPLADE v2 and later) or ``"sum"`` (the first
            SPLADE).
        activation: Function of a logit: ``"relu"``; ``"log1p_relu"``, ``log(1 + relu(x))``; or
            ``"log1p_log1p_relu"``, ``log(1 + log(1 + relu(x)))``, which makes vectors sparser.
        query_max_active_dims: Keep this many weights of a query, the largest; None keeps all.
        document_max_active_dims: The same for documents.

    Source: Formal et al. 2021, "SPLADE", equation 1, and "SPLADE v2", equation 6; Shen et al. 2025,
    "Exploring l0 Sparsification for Inference-free Sparse Retrievers", section 3.
    """

    pooling: Literal["max", "sum"] = "max"
    activation: Literal["log1p_relu", "log1p_log1p_relu", "relu"] = "log1p_relu"
    query_max_active_dims: PositiveInt | None = None
    document_max_active_dims: PositiveInt | None = None

    def max_active_dims(self, side: Side) -> int | None:
        """Return how many weights of a text of ``side`` are kept; None is all."""
        return self.query_max_active_dims if side == "query" else self.document_max_active_dims


def read_limits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``query_max_active_dims`` and ``document_max_active_dims`` by name; None sets no limit.

    Args:
        settings: Content of config_sentence_transformers.json. Its key ``max_active_dims`` stands for a
            side that has no key of its own.
    """
    both = settings.get("max_active_dims")
    return {name: settings.get(name, both) for name in _LIMITS}


class TermHead(Head):
    """Base of the heads that give weights over a vocabulary and keep a limited number of them per text."""

    config: SparseConfig
    kind: ClassVar[str] = "sparse"
    model_type: ClassVar[str] = "SparseEncoder"

    def directory_settings(self, queries: Head) -> dict[str, Any]:
        """Return the numbers of weights to keep, as keys of config_sentence_transformers.json.

        The head ``queries`` has the number for queries, and this head the number for documents. If the two
        numbers differ, a warning says what sentence-transformers makes of it.
        """
        if not isinstance(queries.config, SparseConfig):
            return {}
        limits = [queries.config.query_max_active_dims, self.config.document_max_active_dims]
        if limits[0] == limits[1]:
            return {} if limits[0] is None else {"max_active_dims": limits[0]}
        warnings.warn(
            f"saving a model: queries keep {limits[0] or 'all'} weights and documents {limits[1] or 'all'}; "
            "sentence-transformers has one limit for both and keeps all of this model",
            stacklevel=5,  # whoever called save_pretrained
        )
        return dict(zip(_LIMITS, limits, strict=True))

    def onnx_settings(self) -> dict[str, Any]:
        """Return the number of weights to keep on each side; the graph gives the weights of all terms."""
        sides: tuple[Side, ...] = get_args(Side)
        return {"max_active_dims": {side: self.config.max_active_dims(side) for side in sides}}

    def limited(self, max_active_dims: int) -> Self:
        """Return a copy that keeps the ``max_active_dims`` largest weights per text, on either side.

        The copy shares all parameters.
        """
        twin = copy.copy(self)
        twin.config = self.config.model_copy(update=dict.fromkeys(_LIMITS, max_active_dims))
        return twin
