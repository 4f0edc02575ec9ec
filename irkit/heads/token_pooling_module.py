"""Token pooling as a module of a sentence-transformers directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from irkit.config import read_json
from irkit.heads.layer_modules import Module
from irkit.heads.multi_vector_config import TokenPooling
from irkit.utils.weights import read_weights

_TYPE = "sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling"
_KEYS = {  # key of `TokenPooling`: key of HierarchicalTokenPooling, and its default
    "pool_factor": ("pool_factor", 1.0),
    "protected_tokens": ("num_protected_tokens", 1),
    "normalize": ("normalize_embeddings", False),
    "sides": ("tasks", ["document"]),
}


def read_pooling(name: str, folder: Path) -> tuple[dict[str, Any], Tensor | None]:
    """Return the settings of a module that pools tokens, and its learned vector.

    Args:
        name: Class name of the module, HierarchicalTokenPooling or TokenPooling.
        folder: Folder of the module.
    """
    saved = read_json(folder / "config.json")
    if name == "HierarchicalTokenPooling":
        return {ours: saved.get(key, missing) for ours, (key, missing) in _KEYS.items()}, None
    attends = saved.get("method") == "attention"
    return saved, read_weights(folder).get("attending") if attends else None


def pooling_module(pooling: TokenPooling, attending: Tensor | None) -> Module:
    """Return the module to write.

    Pooling by a factor is a module of sentence-transformers; that to a fixed number is irkit's own.

    Args:
        pooling: Settings.
        attending: Learned vector of pooling by attention; None for other pooling.
    """
    saved = pooling.model_dump(mode="json")
    if pooling.vectors is not None:
        return "irkit.TokenPooling", saved, {} if attending is None else {"attending": attending.detach()}
    return _TYPE, {key: saved[ours] for ours, (key, _) in _KEYS.items()}, {}
