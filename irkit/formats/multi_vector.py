"""Multi-vector models in directories of sentence-transformers: their modules, both ways.

Source: MultiVectorEncoder of sentence-transformers 6.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from irkit.config import read_json
from irkit.errors import ConfigError
from irkit.formats.layers import Module, layer_module, read_layer
from irkit.formats.parts import Opened
from irkit.heads import Head, MultiVectorConfig, MultiVectorHead
from irkit.tokenizer import Tokenizer

__all__ = ["make_head", "modules", "read_head", "settings", "transformer_settings"]

_FEATURE, _POOLED = "token_embeddings", "pooled_sides"
_POOLING = {
    "pool_factor": 1.0,
    "num_protected_tokens": 1,
    "normalize_embeddings": False,
    "tasks": ["document"],
}


def make_head(
    hidden_size: int, layers: Iterable[nn.Module], config: MultiVectorConfig, tokenizer: Tokenizer
) -> MultiVectorHead:
    """A head whose query expansion is looked up in a vocabulary."""
    expansion = config.query_expansion
    special = tokenizer.special_ids
    filler = special.get("mask", special.get("sep"))
    if expansion is not None and expansion.token is not None:
        filler = next(iter(tokenizer.ids([expansion.token])), None)
    return MultiVectorHead(hidden_size, layers, config, expansion_id=filler)


def read_head(opened: Opened) -> MultiVectorHead:
    """Dense, Normalize, MultiVectorMask and HierarchicalTokenPooling in any order, the last at the end."""
    layers: list[nn.Module | None] = []
    mask: dict[str, Any] | None = None
    pooling: dict[str, Any] | None = None
    for name, place in opened.modules:
        if pooling is not None:
            raise ConfigError(f"loading {opened.folder}: module {name} follows token pooling, expected none")
        if name == "MultiVectorMask":
            mask = _mask(place)
        elif name == "HierarchicalTokenPooling":
            pooling = _POOLING | read_json(place / "config.json")
        else:
            layers.append(read_layer(name, place, _FEATURE))
    settings = {key: opened.transformer.get(key) for key in ("query_length", "document_length")}
    expansion = opened.transformer.get("query_expansion")
    if expansion is not None and mask is None and not expansion.get("attend"):
        expansion = None  # nobody sees what is added, and it gives no vectors
    settings |= {"query_expansion": expansion, "skiplist_words": (), **(mask or {})}
    if _POOLED in opened.settings:
        settings[_POOLED] = opened.settings[_POOLED]
    if pooling is not None:
        settings["token_pooling"] = {
            "pool_factor": pooling["pool_factor"],
            "protected_tokens": pooling["num_protected_tokens"],
            "normalize": pooling["normalize_embeddings"],
            "sides": pooling["tasks"],
        }
    config = MultiVectorConfig.parse(settings, f"loading {opened.folder}")
    kept = [layer for layer in layers if layer is not None]
    return make_head(opened.hidden_size, kept, config, opened.tokenizer)


def modules(head: Head) -> list[Module]:
    """What follows the Transformer."""
    assert isinstance(head, MultiVectorHead)  # by its kind
    config, pooling = head.config, head.config.token_pooling
    mask = {
        "skiplist_words": list(config.skiplist_words),
        "skiplist_tasks": list(config.skiplist_sides),
        "keep_only_token_ids": None,
    }
    result = [layer_module(layer, _FEATURE) for layer in head.layers]
    result.append(("MultiVectorMask", mask, {}))
    if pooling is not None:
        settings = {
            "pool_factor": pooling.pool_factor,
            "num_protected_tokens": pooling.protected_tokens,
            "normalize_embeddings": pooling.normalize,
            "tasks": list(pooling.sides),
        }
        result.append(("HierarchicalTokenPooling", settings, {}))
    return result


def transformer_settings(head: MultiVectorHead) -> dict[str, Any]:
    """What the Transformer is told of either side."""
    config = head.config
    return {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": _FEATURE,
        "query_length": config.query_length,
        "document_length": config.document_length,
        "query_expansion": None if config.query_expansion is None else config.query_expansion.model_dump(),
    }


def settings(head: Head) -> dict[str, Any]:
    """What config_sentence_transformers.json says that is irkit's own, and sentence-transformers ignores."""
    default = MultiVectorConfig.model_fields[_POOLED].default
    if not isinstance(head, MultiVectorHead) or head.config.pooled_sides == default:
        return {}
    return {_POOLED: list(head.config.pooled_sides)}


def _mask(place: Path) -> dict[str, Any]:
    settings = read_json(place / "config.json")
    if settings.get("keep_only_token_ids"):
        raise ConfigError(f"loading {place}: keep_only_token_ids is for images; irkit encodes plain text")
    return {
        "skiplist_words": settings.get("skiplist_words") or (),
        "skiplist_sides": settings.get("skiplist_tasks") or ("document",),
    }
