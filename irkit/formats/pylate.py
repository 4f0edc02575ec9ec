"""Directories that PyLate wrote: those of sentence-transformers with settings of their own.

Source: the saving code of PyLate 1.6.
"""

from __future__ import annotations

from typing import Any

from irkit.formats.layers import read_layer
from irkit.formats.multi_vector import make_head
from irkit.formats.parts import Opened
from irkit.heads import MultiVectorConfig, MultiVectorHead, Normalize

__all__ = ["model_type", "read_head"]


def model_type(settings: dict[str, Any]) -> str | None:
    """ColBERT for a directory of an early version, which did not write its type."""
    return "ColBERT" if "query_prefix" in settings or "do_query_expansion" in settings else None


def read_head(opened: Opened) -> MultiVectorHead:
    """Dense modules; the rest is in config_sentence_transformers.json, or PyLate's default.

    Markers that the vocabulary has are tokens wherever they stand, as which PyLate inserts them.
    """
    given = opened.settings
    for key in ("query_prefix", "document_prefix"):
        opened.tokenizer.add_marker(given.get(key) or "", new=False)
    layers = [read_layer(name, place, "token_embeddings") for name, place in opened.modules]
    length = given.get("query_length") or 32
    attend = bool(given.get("attend_to_expansion_tokens"))
    expands = given.get("do_query_expansion") is not False
    words = given.get("skiplist_words")  # punctuation where there are none
    config = MultiVectorConfig.parse(
        {
            "query_length": None if expands else length,  # that of the expansion
            "document_length": given.get("document_length") or 180,
            "query_expansion": {"length": length, "attend": attend} if expands else None,
            **({} if words is None else {"skiplist_words": words}),
        },
        f"loading {opened.folder}",
    )
    kept = [layer for layer in layers if layer is not None]
    return make_head(opened.hidden_size, [*kept, Normalize()], config, opened.tokenizer)
