"""Learned sparse models: masked language models as they are, and SparseEncoder of sentence-transformers.

Source: SparseEncoder, SpladePooling and MLMTransformer of sentence-transformers 6.2.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from irkit.config import Config, read_json
from irkit.encoder import Encoder
from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.config import Activation
from irkit.encoder.lookup import NoEncoder
from irkit.encoder.masked_lm import MaskedLM, masked_lm
from irkit.encoder.weights import read_weights
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.formats.layers import Module
from irkit.formats.parts import AnyEncoder, LoadEncoder, Opened, Parts, SideParts
from irkit.formats.static import read_idf, static_parts
from irkit.heads import Head, SparseConfig, SparseHead
from irkit.heads.sparse import ACTIVATIONS, transform_layers
from irkit.heads.static import StaticHead
from irkit.tokenizer import Tokenizer

__all__ = ["limits", "make_head", "modules", "read", "read_head", "settings", "write_encoder"]

_ACTIVATIONS = {"relu": "log1p_relu", "log1p_relu": "log1p_log1p_relu"}  # of SpladePooling: theirs, ours
_RENAMED = ((".gamma", ".weight"), (".beta", ".bias"))  # norms of checkpoints converted from TensorFlow
_LIMITS = ("query_max_active_dims", "document_max_active_dims")


class _Saved(Config):
    """What config.json of a SparseHead folder says; weights are beside it.

    Attributes:
        pooling: As `SparseConfig` has it.
        activation: As `SparseConfig` has it.
        hidden_activation: Between the linear layer and the norm; None where there are no layers.
        norm_eps: Of the norm.
        vocabulary: The terms; None is the tokens of the tokenizer.
    """

    pooling: str
    activation: str
    hidden_activation: Activation | None
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
    head = _masked_lm_head(encoder, SparseConfig(), str(folder))
    parts: Parts = {"tokenizer": tokenizer, "encoder": encoder, "head": head}
    own, table = folder / "query", folder / "idf.json"
    if (own / "config.json").is_file():
        encoder = load_encoder(own)
        has_tokenizer = any((own / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json"))
        parts["query"] = {
            "tokenizer": Tokenizer.from_pretrained(own if has_tokenizer else folder),
            "encoder": encoder,
            "head": _masked_lm_head(encoder, SparseConfig(), str(own)),
        }
    elif table.is_file():
        parts["query"] = static_parts(tokenizer, StaticHead(read_idf(table, tokenizer)))
    return parts


def read_head(opened: Opened) -> SparseHead:
    """SpladePooling or irkit's own SparseHead; limits come from config_sentence_transformers.json."""
    listed = ", ".join(name for name, _ in opened.modules) or "nothing"
    if listed not in ("SpladePooling", "SparseHead"):
        raise ConfigError(
            f"loading {opened.folder}: a SparseEncoder with {listed} after its Transformer, expected "
            "SpladePooling"
        )
    place = opened.modules[0][1]
    given, source = read_json(place / "config.json"), f"loading {opened.folder}"
    most = limits(opened.settings)
    if listed == "SparseHead":
        saved = _Saved.parse(given, f"loading {place}")
        shape = {"pooling": saved.pooling, "activation": saved.activation}
        return _saved_head(opened.encoder, saved, SparseConfig.parse(shape | most, source), place)
    name = given.get("activation_function", "relu")
    shape = {"pooling": given.get("pooling_strategy", "max"), "activation": _ACTIVATIONS.get(name, name)}
    head = _masked_lm_head(opened.encoder, SparseConfig.parse(shape | most, source), str(opened.folder))
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
    if _has_masked_lm(encoder):
        head = _masked_lm_head(encoder, config, "the masked language model")
    else:
        matrix, known = encoder.word_embeddings, _masked_lm(encoder)
        layers = transform_layers(encoder.hidden_size, width=matrix.shape[1])
        if known is not None and isinstance(encoder, Encoder):
            layers = _layers(known[0], encoder)
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
    if _is_whole(parts["encoder"], head):
        names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
        pooling = {
            "pooling_strategy": config.pooling,
            "activation_function": names[config.activation],
            "word_embedding_dimension": head.dim,
        }
        return [("SpladePooling", pooling, {})]
    norm = head.layers[2] if len(head.layers) else None
    inner = [repr(layer) for layer in head.layers]
    saved = _Saved(
        pooling=config.pooling,
        activation=config.activation,
        hidden_activation=next((name for name, made in ACTIVATIONS.items() if repr(made) in inner), None),
        norm_eps=norm.eps if isinstance(norm, nn.LayerNorm) else 0.0,
        vocabulary=head.vocabulary,
    )
    return [("SparseHead", saved.model_dump(), head.state_dict())]


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
    return dict(zip(_LIMITS, most, strict=True))


def write_encoder(parts: SideParts, folder: Path) -> None:
    """Write the encoder; as the masked language model of transformers if it is one with the head."""
    encoder, head = parts["encoder"], _head(parts)
    known = _masked_lm(encoder, head) if _is_whole(encoder, head) else None
    if known is None or not isinstance(encoder, Encoder):
        encoder.save_pretrained(folder)
        return
    described, settings = known
    tied = head.weight is encoder.word_embeddings
    whole = copy.copy(encoder)  # shares the weights
    whole.prefix = described.prefix
    whole.head_weights = {
        theirs: value.detach().clone()  # files hold no tensor twice under two names
        for name, value in head.named_parameters()
        for theirs in described.names[name][-1 if tied else 0 :]
        if name != "weight" or not tied
    }
    whole.settings = settings | {
        "architectures": [described.architecture],
        "tie_word_embeddings": tied,
    }
    whole.save_pretrained(folder)


def _head(parts: SideParts) -> SparseHead:
    head = parts["head"]
    assert isinstance(head, SparseHead)  # by its kind
    return head


def _masked_lm(
    encoder: AnyEncoder | NoEncoder, head: SparseHead | None = None
) -> tuple[MaskedLM, dict[str, Any]] | None:
    """What transformers calls the head of this encoder, and config.json; None where it knows none like it."""
    if not isinstance(encoder, Encoder):
        return None
    settings = dict(encoder.settings)
    if head is not None and encoder.family == "modernbert":
        settings["decoder_bias"] = head.bias is not None
    described = masked_lm(settings)
    if described is None:
        return None
    if head is not None and {name for name, _ in head.named_parameters()} != described.names.keys():
        return None
    return described, settings


def _is_whole(encoder: AnyEncoder | NoEncoder, head: SparseHead) -> bool:
    """Whether SpladePooling after a masked language model of transformers does the same."""
    if head.vocabulary is not None or head.config.activation not in _ACTIVATIONS.values():
        return False
    if isinstance(encoder, TransformersEncoder):
        return encoder.decoder is not None and encoder.decoder.weight is head.weight
    return _masked_lm(encoder, head) is not None


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With the names that norms have today."""
    plain = {}
    for name, tensor in tensors.items():
        for old, new in _RENAMED:
            name = name.removesuffix(old) + new if name.endswith(old) else name
        plain[name] = tensor
    return plain


def _has_masked_lm(encoder: AnyEncoder) -> bool:
    """Whether the checkpoint of an encoder holds such a head."""
    if not isinstance(encoder, Encoder):
        return any(str(name).endswith("ForMaskedLM") for name in encoder.settings.architectures or ())
    found = _masked_lm(encoder)
    return found is not None and found[0].names["layers.0.weight"][0] in _plain(encoder.head_weights)


def _masked_lm_head(encoder: AnyEncoder, config: SparseConfig, source: str) -> SparseHead:
    """The head whose weights stand beside the encoder in its checkpoint; they move from there into it."""
    if not isinstance(encoder, Encoder):
        decoder = encoder.load_decoder_()
        return SparseHead([], cast(nn.Parameter, decoder.weight), decoder.bias, config)
    known = _masked_lm(encoder)
    if known is None:
        raise ConfigError(f"loading {source}: irkit knows no masked language model of a {encoder.family}")
    names, tensors = known[0].names, _plain(encoder.head_weights)
    owned = tuple(name.rpartition(".")[0] + "." for theirs in names.values() for name in theirs)
    of_head = {name: value for name, value in tensors.items() if name.startswith(owned)}
    encoder.head_weights = {name: value for name, value in tensors.items() if name not in of_head}
    found = {}
    for ours, theirs in names.items():
        values = [of_head.pop(name) for name in theirs if name in of_head]
        if values:
            found[ours] = values[0]
    if encoder.settings.get("tie_word_embeddings", True):  # and often left out
        found.setdefault("weight", encoder.word_embeddings)
    missing = [theirs[0] for ours, theirs in names.items() if ours not in found]
    if missing or of_head:
        raise CorruptError(
            f"loading {source}: as the head of a {known[0].architecture} its weights lack "
            f"{', '.join(missing) or 'nothing'}, left over are {', '.join(of_head) or 'none'}; Model.sparse "
            "puts a new head on any encoder"
        )
    return _filled(_layers(known[0], encoder), found, encoder, config, source)


def _saved_head(encoder: AnyEncoder, saved: _Saved, config: SparseConfig, place: Path) -> SparseHead:
    """The head in a folder of its own."""
    tensors = read_weights(place)
    layers: list[nn.Module] = []
    if saved.hidden_activation is not None:
        biases = {f"{key}_bias": f"layers.{i}.bias" in tensors for i, key in ((0, "dense"), (2, "norm"))}
        width = tensors["weight"].shape[-1] if "weight" in tensors else None
        layers = transform_layers(
            encoder.hidden_size, saved.hidden_activation, width=width, norm_eps=saved.norm_eps, **biases
        )
    return _filled(layers, tensors, encoder, config, str(place), saved.vocabulary)


def _layers(described: MaskedLM, encoder: Encoder) -> list[nn.Module]:
    return transform_layers(
        encoder.hidden_size,
        described.activation,
        norm_eps=described.norm_eps,
        dense_bias="layers.0.bias" in described.names,
        norm_bias="layers.2.bias" in described.names,
    )


def _filled(
    layers: list[nn.Module],
    tensors: Mapping[str, Tensor],
    encoder: AnyEncoder,
    config: SparseConfig,
    source: str,
    vocabulary: Sequence[str] | None = None,
) -> SparseHead:
    """A head with weights from a file; a matrix equal to the word embeddings is them."""
    embeddings, weight = encoder.word_embeddings, tensors.get("weight")
    width = layers[0].out_features if layers and isinstance(layers[0], nn.Linear) else encoder.hidden_size
    rows = len(embeddings) if vocabulary is None else len(vocabulary)
    if weight is None or weight.shape != (rows, width):
        found = "none" if weight is None else str(tuple(weight.shape))
        raise CorruptError(f"loading {source}: expected a matrix of shape {(rows, width)}, found {found}")
    tied = weight.shape == embeddings.shape and torch.equal(weight.to(embeddings), embeddings)
    matrix = embeddings if tied else nn.Parameter(weight.float())
    bias = tensors.get("bias")
    stack = nn.ModuleList(layers)
    inner = {name.removeprefix("layers."): tensors[name] for name in tensors.keys() - {"weight", "bias"}}
    try:
        stack.load_state_dict({name: value.float() for name, value in inner.items()})
        bias = None if bias is None else nn.Parameter(bias.float())
        return SparseHead(stack, matrix, bias, config, vocabulary=vocabulary)
    except (RuntimeError, BadValueError) as error:  # weights of other shapes or names
        raise CorruptError(f"loading {source}: {' '.join(str(error).split())}") from error


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
