"""Learned sparse models: masked language models as they are, and SparseEncoder of sentence-transformers.

Source: SparseEncoder, SpladePooling and MLMTransformer of sentence-transformers 6.2.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from irkit.config import read_json
from irkit.encoder import Encoder
from irkit.encoder.masked_lm import MaskedLM, masked_lm
from irkit.errors import ConfigError, CorruptError
from irkit.formats.layers import Module
from irkit.formats.parts import AnyEncoder, LoadEncoder, Opened, Parts
from irkit.heads import Head, SparseConfig, SparseHead
from irkit.heads.sparse import transform_layers
from irkit.tokenizer import Tokenizer

__all__ = ["make_head", "modules", "read", "read_head", "settings", "write_encoder"]

_ACTIVATIONS = {"relu": "log1p_relu", "log1p_relu": "log1p_log1p_relu"}  # their names, ours
_RENAMED = ((".gamma", ".weight"), (".beta", ".bias"))  # norms of checkpoints converted from TensorFlow


def read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read the directory of a masked language model: SPLADE with max pooling and log(1 + relu)."""
    encoder = load_encoder(folder)
    return {
        "tokenizer": Tokenizer.from_pretrained(folder),
        "encoder": encoder,
        "head": _masked_lm_head(encoder, SparseConfig(), str(folder)),
    }


def read_head(opened: Opened) -> SparseHead:
    """SpladePooling, and limits from config_sentence_transformers.json."""
    if [name for name, _ in opened.modules] != ["SpladePooling"]:
        found = ", ".join(name for name, _ in opened.modules) or "nothing"
        raise ConfigError(
            f"loading {opened.folder}: a SparseEncoder with {found} after its Transformer, expected "
            "SpladePooling"
        )
    place = opened.modules[0][1]
    given = read_json(place / "config.json")
    name = given.get("activation_function", "relu")
    limit = opened.settings.get("max_active_dims")
    config = SparseConfig.parse(
        {
            "pooling": given.get("pooling_strategy", "max"),
            "activation": _ACTIVATIONS.get(name, name),
            "query_max_active_dims": opened.settings.get("query_max_active_dims", limit),
            "document_max_active_dims": opened.settings.get("document_max_active_dims", limit),
        },
        f"loading {opened.folder}",
    )
    head = _masked_lm_head(opened.encoder, config, str(opened.folder))
    width = given.get("embedding_dimension") or given.get("word_embedding_dimension") or head.dim
    if width != head.dim:
        raise CorruptError(f"loading {place}: expects {width} dimensions, the vocabulary has {head.dim}")
    return head


def make_head(
    encoder: AnyEncoder, tokenizer: Tokenizer, config: SparseConfig, vocabulary: Sequence[str] | None = None
) -> SparseHead:
    """A head for an encoder: that of its checkpoint if it is a masked language model, else a new one.

    A new one has a random layer, and the word embeddings of the encoder as its matrix. Special tokens get
    no weights.
    """
    head = (
        _masked_lm_head(encoder, config, "the checkpoint")
        if _has_masked_lm(encoder)
        else _new_head(encoder, config)
    )
    head.exclude_(number for number in tokenizer.special_tokens() if number < head.dim)
    return head


def _has_masked_lm(encoder: AnyEncoder) -> bool:
    described = _described(encoder)
    return described is not None and _plain(encoder.head_weights).keys() >= {
        described.names["layers.0.weight"][0]
    }


def _described(encoder: AnyEncoder) -> MaskedLM | None:
    return masked_lm(encoder.settings) if isinstance(encoder, Encoder) else None


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    plain = {}
    for name, tensor in tensors.items():
        for old, new in _RENAMED:
            name = name.removesuffix(old) + new if name.endswith(old) else name
        plain[name] = tensor
    return plain


def _new_head(encoder: AnyEncoder, config: SparseConfig) -> SparseHead:
    described = _described(encoder)
    weight = encoder.word_embeddings
    bias = nn.Parameter(torch.zeros(len(weight)))
    if described is None:
        return SparseHead(transform_layers(encoder.hidden_size), weight, bias, config)
    return SparseHead(_layers(described, encoder.hidden_size), weight, bias, config)


def _layers(described: MaskedLM, width: int) -> list[nn.Module]:
    return transform_layers(
        width,
        described.activation,
        norm_eps=described.norm_eps,
        dense_bias="layers.0.bias" in described.names,
        norm_bias="layers.2.bias" in described.names,
    )


def _masked_lm_head(encoder: AnyEncoder, config: SparseConfig, source: str) -> SparseHead:
    """The head whose weights stand beside the encoder in its checkpoint; they move from there into it."""
    described = _described(encoder)
    if described is None or not isinstance(encoder, Encoder):
        raise ConfigError(
            f"loading {source}: a {encoder.family} has no masked language model that irkit knows"
        )
    tensors = _plain(encoder.head_weights)
    found: dict[str, Tensor] = {}
    for ours, theirs in described.names.items():
        value = next((tensors[name] for name in theirs if name in tensors), None)
        if value is not None:
            found[ours] = value
    embeddings = encoder.word_embeddings
    tied = encoder.settings.get("tie_word_embeddings", True)
    missing = [described.names[name][0] for name in described.names if name not in found]
    if tied and "weight" not in found:
        missing.remove(described.names["weight"][0])
    if missing:
        raise CorruptError(
            f"loading {source}: a {encoder.family} without the head of a masked language model: missing "
            f"{', '.join(missing)}; Model.sparse makes a new head for any encoder"
        )
    layers = nn.ModuleList(_layers(described, encoder.hidden_size))
    shapes = {f"layers.{name}": tuple(value.shape) for name, value in layers.named_parameters()}
    shapes |= {"weight": tuple(embeddings.shape), "bias": (len(embeddings),)}
    for name, value in found.items():
        if tuple(value.shape) != shapes[name]:
            raise CorruptError(
                f"loading {source}: {described.names[name][0]} has shape {tuple(value.shape)}, "
                f"config.json says {shapes[name]}"
            )
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            parameter.copy_(found[f"layers.{name}"])
    weight = found.get("weight")
    same = weight is None or (tied and torch.equal(weight.to(embeddings.dtype), embeddings))
    matrix = embeddings if same or weight is None else nn.Parameter(weight.float())
    bias = nn.Parameter(found["bias"].float()) if "bias" in found else None
    used = {name for names in described.names.values() for name in names}
    encoder.head_weights = {
        name: value
        for name, value in encoder.head_weights.items()
        if next(iter(_plain({name: value}))) not in used
    }
    return SparseHead(layers, matrix, bias, config)


def modules(head: Head) -> list[Module]:
    """What follows the Transformer."""
    assert isinstance(head, SparseHead)  # by its kind
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    pooling = {
        "pooling_strategy": head.config.pooling,
        "activation_function": names[head.config.activation],
        "word_embedding_dimension": head.dim,
    }
    return [("SpladePooling", pooling, {})]


def settings(head: SparseHead) -> dict[str, Any]:
    """What config_sentence_transformers.json says of the limits."""
    query, document = head.config.query_max_active_dims, head.config.document_max_active_dims
    if query == document:
        return {} if query is None else {"max_active_dims": query}
    return {"query_max_active_dims": query, "document_max_active_dims": document}


def write_encoder(encoder: Encoder, head: SparseHead, folder: Path) -> None:
    """Write encoder and head as the masked language model of transformers that they are."""
    described = masked_lm(encoder.settings)
    assert described is not None
    parameters = dict(head.named_parameters())
    tied = head.weight is encoder.word_embeddings
    if tied:
        del parameters["weight"]
    whole = copy.copy(encoder)  # shares the weights
    whole.prefix = described.prefix
    whole.head_weights = {described.names[name][0]: value for name, value in parameters.items()}
    whole.settings = encoder.settings | {
        "architectures": [described.architecture],
        "tie_word_embeddings": tied,
        **({"decoder_bias": True} if encoder.family == "modernbert" and head.bias is not None else {}),
    }
    whole.save_pretrained(folder)
