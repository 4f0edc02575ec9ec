"""Directories that PyLate wrote: like sentence-transformers' own, with additional settings.

Source: the saving code of PyLate 1.6.
"""

from __future__ import annotations

from typing import Any

from irkit.heads import MultiVectorHead, Normalize, OpenedModel
from irkit.heads.layer_modules import read_layers


def model_type(settings: dict[str, Any]) -> str | None:
    """ColBERT for a directory of an early version, which did not write its type."""
    return "ColBERT" if "query_prefix" in settings or "do_query_expansion" in settings else None


def read_head(opened: OpenedModel) -> MultiVectorHead:
    """Read the Dense modules and the settings in config_sentence_transformers.json.

    A missing setting has PyLate's default. A marker that is in the vocabulary becomes one token wherever a
    text holds it, because PyLate inserts it as one token.
    """
    settings = opened.settings
    for key in ("query_prefix", "document_prefix"):
        opened.tokenizer.add_marker(settings.get(key) or "", new=False)
    length = settings.get("query_length") or 32
    attend = bool(settings.get("attend_to_expansion_tokens"))
    expands = settings.get("do_query_expansion") is not False
    words = settings.get("skiplist_words")  # punctuation where there are none
    config = {
        "query_length": None if expands else length,  # that of the expansion
        "document_length": settings.get("document_length") or 180,
        "query_expansion": {"length": length, "attend": attend} if expands else None,
        **({} if words is None else {"skiplist_words": words}),
    }
    layers = [*read_layers(opened.modules, "token_embeddings"), Normalize()]
    source = f"loading {opened.folder}"
    return MultiVectorHead.from_layers(opened.hidden_size, layers, config, opened.tokenizer, source)
