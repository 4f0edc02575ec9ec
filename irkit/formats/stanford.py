"""Checkpoints of Stanford's ColBERT: an encoder with ``linear.weight`` beside it, and artifact.metadata.

Source: ColBERTConfig and HF_ColBERT of colbert-ai 0.2.22.
"""

from __future__ import annotations

import string
import warnings
from pathlib import Path

import torch

from irkit.encoder.weights import read_weights
from irkit.errors import CorruptError
from irkit.formats.layers import optional
from irkit.formats.multi_vector import make_head
from irkit.formats.parts import LoadEncoder, Parts
from irkit.heads import MultiVectorConfig, Normalize, Projection
from irkit.tokenizer import Tokenizer

__all__ = ["read"]


def read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read config.json, weights, tokenizer and, if it is there, artifact.metadata.

    Raises:
        CorruptError: The projection is missing or does not fit the encoder.
    """
    encoder, tokenizer = load_encoder(folder), Tokenizer.from_pretrained(folder)
    encoder.head_weights.pop("linear.weight", None)
    if isinstance(encoder.settings, dict):  # what is saved is a plain encoder
        encoder.settings.pop("architectures", None)
    weight = read_weights(folder).get("linear.weight")
    if weight is None or weight.dim() != 2 or weight.shape[1] != encoder.hidden_size:
        found = "none" if weight is None else str(tuple(weight.shape))
        raise CorruptError(
            f"loading {folder}: expected linear.weight of shape (dim, {encoder.hidden_size}), found {found}"
        )
    projection = Projection(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        projection.linear.weight.copy_(weight)
    if not (folder / "artifact.metadata").is_file():
        warnings.warn(f"{folder} has no artifact.metadata; taking ColBERT's defaults", stacklevel=5)
    given = optional(folder / "artifact.metadata")
    markers = {
        "query": (given.get("query_token_id") or "[unused0]") + " ",
        "document": (given.get("doc_token_id") or "[unused1]") + " ",
    }
    for marker in markers.values():
        tokenizer.add_marker(marker)
    config = MultiVectorConfig.parse(
        {
            "document_length": given.get("doc_maxlen") or 220,
            "query_expansion": {
                "length": given.get("query_maxlen") or 32,
                "attend": bool(given.get("attend_to_mask_tokens")),
            },
            "skiplist_words": tuple(string.punctuation) if given.get("mask_punctuation", True) else (),
        },
        f"loading {folder}",
    )
    return {
        "tokenizer": tokenizer,
        "encoder": encoder,
        "head": make_head(encoder.hidden_size, [projection, Normalize()], config, tokenizer),
        "prompts": markers,
    }
