"""Checkpoints of Stanford's ColBERT: an encoder with ``linear.weight`` beside it, and artifact.metadata.

Source: ColBERTConfig and HF_ColBERT of colbert-ai 0.2.22.
"""

from __future__ import annotations

import string
import warnings
from pathlib import Path

import torch
from torch import nn

from irkit.config import read_json
from irkit.encoder import Encoder
from irkit.errors import BadValueError, CorruptError
from irkit.formats.parts import Format, LoadEncoder, Parts
from irkit.heads import MultiVectorHead, Normalize, Projection, as_multi_vector_head
from irkit.heads.layer_modules import write_json
from irkit.tokenizer import Tokenizer, read_optional
from irkit.utils.weights import read_weights, write_weights

_PUNCTUATION = tuple(string.punctuation)


def _read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read a checkpoint: config.json, weights, tokenizer and, if the file exists, artifact.metadata.

    Raises:
        CorruptError: The projection is missing or does not fit the encoder.
    """
    encoder, tokenizer = load_encoder(folder), Tokenizer.from_pretrained(folder)
    encoder.head_weights.pop("linear.weight", None)
    if isinstance(encoder.settings, dict):  # what is saved is a plain encoder
        encoder.settings.pop("architectures", None)
    # the projection
    weight = read_weights(folder).get("linear.weight")
    if weight is None or weight.dim() != 2 or weight.shape[1] != encoder.hidden_size:
        shape = "none" if weight is None else str(tuple(weight.shape))
        raise CorruptError(
            f"loading {folder}: expected linear.weight of shape (dim, {encoder.hidden_size}), found {shape}"
        )
    projection = Projection(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        projection.linear.weight.copy_(weight)
    # markers and lengths
    if not (folder / "artifact.metadata").is_file():
        warnings.warn(f"{folder} has no artifact.metadata; taking ColBERT's defaults", stacklevel=4)
    metadata = read_optional(folder / "artifact.metadata")
    tokens = {
        "query": str(metadata.get("query_token_id") or "[unused0]"),
        "document": str(metadata.get("doc_token_id") or "[unused1]"),
    }
    markers = {side: token if token.endswith(" ") else f"{token} " for side, token in tokens.items()}
    for marker in markers.values():
        tokenizer.add_marker(marker, new=False)
    config = {
        "document_length": metadata.get("doc_maxlen") or 220,
        "query_expansion": {
            "length": metadata.get("query_maxlen") or 32,
            "attend": bool(metadata.get("attend_to_mask_tokens")),
        },
        "skiplist_words": _PUNCTUATION if metadata.get("mask_punctuation", True) else (),
    }
    layers = [projection, Normalize()]
    head = MultiVectorHead.from_layers(encoder, tokenizer, layers, config, f"loading {folder}")
    return {"tokenizer": tokenizer, "encoder": encoder, "head": head, "prompts": markers}


def _write(parts: Parts, folder: Path) -> None:
    """Write a checkpoint of Stanford's ColBERT from which `_read` makes a model with the same outputs.

    Raises:
        BadValueError: The model has a setting that these checkpoints cannot express.
    """
    encoder, head, tokenizer = parts["encoder"], parts["head"], parts["tokenizer"]
    markers = [_token(tokenizer, parts.get("prompts", {}).get(side, "")) for side in ("query", "document")]
    if problems := _problems(parts, markers):
        raise BadValueError(f"saving a model: Stanford's ColBERT has no place for {', '.join(problems)}")
    assert isinstance(encoder, Encoder)  # checked above, as is what follows
    head = as_multi_vector_head(head, "saving a model")
    projection, expansion = head.layers[0], head.config.query_expansion
    assert isinstance(projection, Projection)
    assert expansion is not None
    # encoder and projection under the names of ColBERT
    encoder.save_pretrained(folder)
    tokenizer.save(folder)
    weights = {
        name if name.startswith("bert.") else f"bert.{name}": value
        for name, value in read_weights(folder).items()
        if name not in encoder.head_weights
    }
    write_weights(folder, {**weights, "linear.weight": projection.linear.weight})
    # settings
    write_json(folder / "config.json", read_json(folder / "config.json") | {"architectures": ["HF_ColBERT"]})
    write_json(
        folder / "artifact.metadata",
        {
            "query_token_id": markers[0],
            "doc_token_id": markers[1],
            "query_token": "[Q]",
            "doc_token": "[D]",
            "dim": head.dim,
            "query_maxlen": expansion.length,
            "doc_maxlen": head.config.document_length or tokenizer.max_length,
            "mask_punctuation": bool(head.config.skiplist_words),
            "attend_to_mask_tokens": expansion.attend,
            "interaction": "colbert",
            "similarity": "cosine",
        },
    )


def _token(tokenizer: Tokenizer, prompt: str) -> str | None:
    """Return the token that equals ``prompt``, with or without outer spaces; None if no token does."""
    return next((token for token in (prompt, prompt.strip()) if tokenizer.ids([token])), None)


def _problems(parts: Parts, markers: list[str | None]) -> list[str]:
    """Return the features of a model that these checkpoints cannot express, as phrases for a message.

    Args:
        parts: Parts of the model.
        markers: For each side, the token that its prompt consists of; None if the prompt is not one token.
    """
    encoder, head, prompts = parts["encoder"], parts["head"], parts.get("prompts", {})
    if head.kind != "multi_vector":
        return [f"{head.kind} vectors"]
    head = as_multi_vector_head(head, "saving a model")
    config, expansion = head.config, head.config.query_expansion
    first = head.layers[0] if len(head.layers) == 2 and head.unit else None
    plain = (
        isinstance(first, Projection)
        and [name for name, _ in first.named_parameters()] == ["linear.weight"]
        and isinstance(first.activation, nn.Identity)
        and not first.use_residual
    )
    problems = {
        "encoders other than BERT": not isinstance(encoder, Encoder)
        or encoder.settings["model_type"] != "bert",
        "pooling layers": isinstance(encoder, Encoder) and any(encoder.config.schedule),
        "other layers than one linear layer without bias, then length 1 (fold what is linear)": not plain,
        "prompts that are not one token of the vocabulary each, such as [unused0]": None in markers,
        "prompts of other names than query and document": any(
            text for name, text in prompts.items() if name not in ("query", "document")
        ),
        "a prompt that texts get by default": parts.get("default_prompt_name") is not None,
        "queries that are not filled up with the mask token to one length": (
            expansion is None or expansion.strategy != "fixed" or expansion.token is not None
        ),
        "a skip-list other than the punctuation of documents": bool(config.skiplist_words)
        and (config.skiplist_words, config.skiplist_sides) != (_PUNCTUATION, ("document",)),
        "token pooling": config.token_pooling is not None,
        "truncated vectors": bool(parts.get("truncate_dim")),
        "another similarity than MaxSim": parts.get("similarity_name") not in (None, "maxsim"),
    }
    return [problem for problem, is_there in problems.items() if is_there]


def _fits(folder: Path) -> bool:
    architectures = read_optional(folder / "config.json").get("architectures")
    return isinstance(architectures, list) and "HF_ColBERT" in architectures


STANFORD = Format(_fits, _read, _write)
