"""Learned sparse models: masked language models as they are, and SparseEncoder of sentence-transformers.

Source: SparseEncoder, SpladePooling and MLMTransformer of sentence-transformers 6.2.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from irkit.config import Config, read_json
from irkit.encoder import Encoder
from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.config import Activation
from irkit.encoder.weights import read_weights
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.formats import masked_lm
from irkit.formats.layers import Module, Modules
from irkit.formats.parts import AnyEncoder, LoadEncoder, Opened, Parts, SideParts
from irkit.formats.static import read_idf, static_parts
from irkit.heads import Head, SparseConfig, SparseHead
from irkit.heads.sparse import ACTIVATIONS, transform_layers
from irkit.heads.static import StaticHead
from irkit.tokenizer import Tokenizer

__all__ = ["limits", "make_head", "model_type", "modules", "read", "read_head", "settings"]

_ACTIVATIONS = {"relu": "log1p_relu", "log1p_relu": "log1p_log1p_relu"}  # of SpladePooling: theirs, ours
_MODULES = ("SpladePooling", "SparseHead")
_LIMITS = ("query_max_active_dims", "document_max_active_dims")


class _Saved(Config):
    """What config.json of a SparseHead folder says.

    Attributes:
        pooling: As `SparseConfig` has it.
        activation: As `SparseConfig` has it.
        own_weights: Whether weights are beside it. Otherwise the head is that of the masked language model.
        hidden_activation: Between the linear layer and the norm; None where there are no layers.
        norm_eps: Of the norm.
        vocabulary: The terms; None is the tokens of the tokenizer.
    """

    pooling: str
    activation: str
    own_weights: bool = True
    hidden_activation: Activation | None = None
    norm_eps: float = 1e-12
    vocabulary: tuple[str, ...] | None = None


def read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read the directory of a masked language model: SPLADE with max pooling and log(1 + relu).

    Queries go through the model in ``query/`` if there is one (naver's directories with two encoders), or
    weigh their tokens by ``idf.json`` (OpenSearch).

    Raises:
        CorruptError: Weights of its head are missing, or of other shapes than config.json says.
    """
    encoder, tokenizer = load_encoder(folder), Tokenizer.from_pretrained(folder)
    head = masked_lm.load_head(encoder, SparseConfig(), str(folder))
    parts: Parts = {"tokenizer": tokenizer, "encoder": encoder, "head": head}
    own, table = folder / "query", folder / "idf.json"
    if (own / "config.json").is_file():
        encoder = load_encoder(own)
        has_tokenizer = any((own / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json"))
        parts["query"] = {
            "tokenizer": Tokenizer.from_pretrained(own if has_tokenizer else folder),
            "encoder": encoder,
            "head": masked_lm.load_head(encoder, SparseConfig(), str(own)),
        }
    elif table.is_file():
        parts["query"] = static_parts(tokenizer, StaticHead(read_idf(table, tokenizer)))
    return parts


def model_type(modules: Modules) -> str | None:
    """SparseEncoder for a directory that does not name its type but has its modules."""
    return "SparseEncoder" if any(name in _MODULES for name, _ in modules) else None


def read_head(opened: Opened) -> SparseHead:
    """SpladePooling or irkit's own SparseHead; limits come from config_sentence_transformers.json."""
    listed = ", ".join(name for name, _ in opened.modules) or "nothing"
    if listed not in _MODULES:
        raise ConfigError(
            f"loading {opened.folder}: a SparseEncoder with {listed} after its Transformer, expected "
            "SpladePooling"
        )
    place = opened.modules[0][1]
    given, source = read_json(place / "config.json"), f"loading {opened.folder}"
    most = limits(opened.settings)
    if listed == "SparseHead":
        saved = _Saved.parse(given, f"loading {place}")
        config = SparseConfig.parse({"pooling": saved.pooling, "activation": saved.activation} | most, source)
        if saved.own_weights:
            return _saved_head(opened.encoder, saved, config, place)
        return masked_lm.load_head(opened.encoder, config, str(opened.folder))
    name = given.get("activation_function", "relu")
    shape = {"pooling": given.get("pooling_strategy", "max"), "activation": _ACTIVATIONS.get(name, name)}
    head = masked_lm.load_head(opened.encoder, SparseConfig.parse(shape | most, source), str(opened.folder))
    width = given.get("embedding_dimension") or given.get("word_embedding_dimension") or head.dim
    if width != head.dim:
        raise CorruptError(f"loading {place}: expects {width} dimensions, the vocabulary has {head.dim}")
    return head


def make_head(
    encoder: AnyEncoder, tokenizer: Tokenizer, config: SparseConfig, vocabulary: Sequence[str] | None = None
) -> SparseHead:
    """A head for an encoder: that of its checkpoint if it is a masked language model, else a new one.

    A new one has the word embeddings of the encoder as its matrix. Its layer starts as the identity, because
    hidden states still lie near the embeddings of their tokens: a text then weighs its own words and words
    like them before any training. Special tokens get no weights.

    Args:
        encoder: Whose hidden states it gets.
        tokenizer: Of the same model.
        config: See there.
        vocabulary: Terms other than the tokens; the row of one starts as the mean of those of its tokens.

    Raises:
        BadTypeError: ``vocabulary`` is no list of strings.
        BadValueError: A term is no token at all, or stands there twice.
    """
    if masked_lm.has_head(encoder):
        head = masked_lm.load_head(encoder, config, "the masked language model")
    else:
        matrix, known = encoder.word_embeddings, masked_lm.describe(encoder)
        layers = transform_layers(encoder.hidden_size, width=matrix.shape[1])
        if known is not None and isinstance(encoder, Encoder):
            layers = masked_lm.layers_of(known[0], encoder)
        linear = cast(nn.Linear, layers[0])
        nn.init.eye_(linear.weight)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
        head = SparseHead(layers, matrix, nn.Parameter(torch.zeros(len(matrix))), config)
    if vocabulary is None:
        head.exclude_(number for number in tokenizer.special_tokens() if number < head.dim)
        return head
    return _with_vocabulary(head, tokenizer, vocabulary)


def modules(parts: SideParts) -> list[Module]:
    """What follows the Transformer."""
    head, config = _head(parts), _head(parts).config
    whole = masked_lm.is_whole(parts["encoder"], head)
    if whole and config.activation in _ACTIVATIONS.values():
        names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
        pooling = {
            "pooling_strategy": config.pooling,
            "activation_function": names[config.activation],
            "word_embedding_dimension": head.dim,
        }
        return [("SpladePooling", pooling, {})]
    saved = _Saved(pooling=config.pooling, activation=config.activation, own_weights=not whole)
    if whole:
        return [("SparseHead", saved.model_dump(), {})]
    norm = head.layers[2] if len(head.layers) else None
    inner = [repr(layer) for layer in head.layers]
    layers = {
        "hidden_activation": next((name for name, made in ACTIVATIONS.items() if repr(made) in inner), None),
        "norm_eps": norm.eps if isinstance(norm, nn.LayerNorm) else 0.0,
    }
    listed = {"vocabulary": head.vocabulary}
    return [("SparseHead", saved.model_dump() | layers | listed, head.state_dict())]


def limits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Most weights of a text of either side, by their names in `SparseConfig`, from `settings`."""
    both = settings.get("max_active_dims")
    return {name: settings.get(name, both) for name in _LIMITS}


def settings(documents: Head, queries: Head) -> dict[str, Any]:
    """What config_sentence_transformers.json says of the limits; nothing of heads that are not sparse."""
    configs = [getattr(head, "config", None) for head in (queries, documents)]
    if not all(isinstance(config, SparseConfig) for config in configs):
        return {}
    most = [getattr(config, name) for config, name in zip(configs, _LIMITS, strict=True)]
    if most[0] == most[1]:
        return {} if most[0] is None else {"max_active_dims": most[0]}
    warnings.warn(
        f"saving a model: queries keep {most[0] or 'all'} weights and documents {most[1] or 'all'}; "
        "sentence-transformers has one limit for both and keeps all of this model",
        stacklevel=5,  # whoever called save_pretrained
    )
    return dict(zip(_LIMITS, most, strict=True))


def _head(parts: SideParts) -> SparseHead:
    head = parts["head"]
    assert isinstance(head, SparseHead)  # by its kind
    return head


def _saved_head(encoder: AnyEncoder, saved: _Saved, config: SparseConfig, place: Path) -> SparseHead:
    """The head in a folder of its own."""
    if saved.hidden_activation is None and isinstance(encoder, TransformersEncoder):
        encoder.load_decoder_()  # hidden states are those that its own decoder gets
    tensors = read_weights(place)
    layers: list[nn.Module] = []
    if saved.hidden_activation is not None:
        biases = {f"{key}_bias": f"layers.{i}.bias" in tensors for i, key in ((0, "dense"), (2, "norm"))}
        width = tensors["weight"].shape[-1] if "weight" in tensors else None
        layers = transform_layers(
            encoder.hidden_size, saved.hidden_activation, width=width, norm_eps=saved.norm_eps, **biases
        )
    return masked_lm.fill(layers, tensors, encoder, config, str(place), vocabulary=saved.vocabulary)


def _with_vocabulary(head: SparseHead, tokenizer: Tokenizer, vocabulary: Sequence[str]) -> SparseHead:
    """A head whose rows are means of the rows of the tokens of each term."""
    tokens = tokenizer.without_special_tokens()(vocabulary)
    if len(tokens) == 0 or int(tokens.lengths.min()) == 0:
        empty = next((term for term, row in zip(vocabulary, tokens, strict=True) if not len(row)), None)
        raise BadValueError(
            f"sparse model: the vocabulary has {'no terms' if empty is None else repr(empty)}"
        )

    def means(rows: Tensor) -> nn.Parameter:
        mean = nn.functional.embedding_bag(
            tokens.values.int(), rows.detach(), tokens.offsets, mode="mean", include_last_offset=True
        )
        return nn.Parameter(mean)

    bias = None if head.bias is None else nn.Parameter(means(head.bias[:, None])[:, 0].detach())
    return SparseHead(head.layers, means(head.weight), bias, head.config, vocabulary=vocabulary)
