"""Static embeddings: directories of model2vec, and the StaticEmbedding module of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from irkit.config import read_json
from irkit.encoder.static_encoder import MODEL2VEC as MODEL_TYPE
from irkit.encoder.static_encoder import StaticEncoder
from irkit.errors import ConfigError
from irkit.formats.parts import Format, LoadEncoder, Parts, SideParts
from irkit.heads import Normalize, PooledHead
from irkit.heads.layer_modules import Modules, read_layers
from irkit.tokenizer import Tokenizer, read_optional

MODULE = "StaticEmbedding"
TYPE = f"sentence_transformers.models.{MODULE}"
_LENGTH = 512  # tokens that model2vec reads if config.json does not say


def read_static_side(modules: Modules) -> SideParts:
    """Read a StaticEmbedding module and the layers after it.

    Raises:
        ConfigError: A module other than Dense and Normalize follows.
        CorruptError: The weights are damaged.
    """
    (_, home), *rest = modules
    encoder = StaticEncoder.from_pretrained(home)
    encoder.settings = {}  # sentence-transformers averages unknown tokens, too
    layers = read_layers(rest, "sentence_embedding")
    tokenizer = Tokenizer.from_pretrained(home).without_special_tokens()
    truncation = read_json(home / "tokenizer.json").get("truncation") or {}
    tokenizer.max_length = truncation.get("max_length")
    head = PooledHead(encoder.hidden_size, "mean", layers)
    return {"tokenizer": tokenizer, "encoder": encoder, "head": head}


def write_static_side(parts: SideParts, folder: Path) -> None:
    """Write encoder and tokenizer to a folder.

    Raises:
        ConfigError: model2vec and sentence-transformers cannot express the head.
    """
    tokenizer, encoder, head = parts["tokenizer"], parts["encoder"], parts["head"]
    assert isinstance(encoder, StaticEncoder)
    fits = head.include_prompt and getattr(head, "pooling", None) == ("mean",)
    if not fits or (encoder.settings and not all(isinstance(layer, Normalize) for layer in head.layers)):
        raise ConfigError(
            f"saving a model: static embeddings with the head {head!r:.200}; expected a dense head that "
            "takes the mean of all tokens, and no projection after the embeddings of model2vec, because "
            "other libraries compute nothing else"
        )
    if encoder.settings:  # model2vec knows no layers, but a norm
        encoder.settings["normalize"] = head.unit
        encoder.settings["max_length"] = tokenizer.max_length
    encoder.save_pretrained(folder)
    tokenizer.save(folder)
    state = json.loads(tokenizer.backend.to_str())  # with the length at which texts are cut
    (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")


def _read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read a directory of model2vec: unknown tokens are left out, and texts are cut at ``max_length``."""
    encoder = StaticEncoder.from_pretrained(folder)
    tokenizer = Tokenizer.from_pretrained(folder).without_special_tokens()
    settings = encoder.settings
    length = settings.get("max_length", _LENGTH)
    tokenizer.check_length(length)
    tokenizer.max_length = length
    encoder.unknown = _unknown_id(tokenizer)
    layers = [Normalize()] if settings.get("normalize") else []
    head = PooledHead(encoder.hidden_size, "mean", layers)
    return {"tokenizer": tokenizer, "encoder": encoder, "head": head}


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that stands for unknown words; None if every word has tokens."""
    model: dict[str, Any] = json.loads(tokenizer.backend.to_str())["model"]
    word = model.get("unk_token")
    if word is None:
        return model.get("unk_id")
    return next(iter(tokenizer.ids([word])), None)


def _is_model2vec(folder: Path) -> bool:
    """Return whether model2vec has written a directory: by its name, or by a key that it always writes."""
    settings = read_optional(folder / "config.json") if (folder / "config.json").is_file() else {}
    return settings.get("model_type", MODEL_TYPE if "embedding_dtype" in settings else None) == MODEL_TYPE


MODEL2VEC = Format(_is_model2vec, _read)
