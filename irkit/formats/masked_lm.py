"""Encoder and head as the masked language model of transformers that they are: in and out of its weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from irkit.encoder import Encoder
from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.lookup import NoEncoder
from irkit.encoder.masked_lm import MaskedLM, masked_lm
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.formats.parts import AnyEncoder
from irkit.heads import SparseConfig, SparseHead
from irkit.heads.sparse import transform_layers

__all__ = ["describe", "fill", "has_head", "is_whole", "layers_of", "load_head", "write_encoder"]

_RENAMED = ((".gamma", ".weight"), (".beta", ".bias"))  # norms of checkpoints converted from TensorFlow


def describe(
    encoder: AnyEncoder | NoEncoder, head: SparseHead | None = None
) -> tuple[MaskedLM, dict[str, Any]] | None:
    """What transformers calls the parts of this head, or of one from the checkpoint, and its config.json.

    None where transformers has no such head for the encoder.
    """
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


def is_whole(encoder: AnyEncoder | NoEncoder, head: SparseHead) -> bool:
    """Whether encoder and head are a masked language model of transformers."""
    if head.vocabulary is not None:
        return False
    if isinstance(encoder, TransformersEncoder):
        decoder = encoder.decoder
        return decoder is not None and decoder.weight is head.weight and decoder.bias is head.bias
    known = describe(encoder, head)
    if known is None or not isinstance(encoder, Encoder):
        return False
    same_layers = repr(head.layers) == repr(nn.ModuleList(layers_of(known[0], encoder)))
    return same_layers and head.weight.shape == encoder.word_embeddings.shape


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With the names that norms have today."""
    plain = {}
    for name, tensor in tensors.items():
        for old, new in _RENAMED:
            name = name.removesuffix(old) + new if name.endswith(old) else name
        plain[name] = tensor
    return plain


def has_head(encoder: AnyEncoder) -> bool:
    """Whether the checkpoint of an encoder holds the head of a masked language model."""
    if not isinstance(encoder, Encoder):
        return any(str(name).endswith("ForMaskedLM") for name in encoder.settings.architectures or ())
    found = describe(encoder)
    return found is not None and found[0].names["layers.0.weight"][0] in _plain(encoder.head_weights)


def load_head(encoder: AnyEncoder, config: SparseConfig, source: str) -> SparseHead:
    """The head whose weights stand beside the encoder in its checkpoint; they move from there into it."""
    if not isinstance(encoder, Encoder):
        decoder = encoder.load_decoder_()
        return SparseHead([], cast(nn.Parameter, decoder.weight), decoder.bias, config)
    known = describe(encoder)
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
    tie = bool(encoder.settings.get("tie_word_embeddings", True))
    if tie:  # and often left out
        found.setdefault("weight", encoder.word_embeddings)
    missing = [theirs[0] for ours, theirs in names.items() if ours not in found]
    if missing or of_head:
        raise CorruptError(
            f"loading {source}: as the head of a {known[0].architecture} its weights lack "
            f"{', '.join(missing) or 'nothing'}, left over are {', '.join(of_head) or 'none'}; Model.sparse "
            "puts a new head on any encoder"
        )
    return fill(layers_of(known[0], encoder), found, encoder, config, source, tie=tie)


def layers_of(described: MaskedLM, encoder: Encoder) -> list[nn.Module]:
    """What stands before the matrix, of random weights."""
    return transform_layers(
        encoder.hidden_size,
        described.activation,
        norm_eps=described.norm_eps,
        dense_bias="layers.0.bias" in described.names,
        norm_bias="layers.2.bias" in described.names,
    )


def fill(
    layers: list[nn.Module],
    tensors: Mapping[str, Tensor],
    encoder: AnyEncoder,
    config: SparseConfig,
    source: str,
    *,
    vocabulary: Sequence[str] | None = None,
    tie: bool = True,
) -> SparseHead:
    """A head with weights from a file.

    Args:
        layers: Before the matrix.
        tensors: By their names in the head.
        encoder: Whose hidden states it gets.
        config: Of the head.
        source: Where the weights come from, for messages.
        vocabulary: Of the head.
        tie: Whether a matrix equal to the word embeddings of the encoder is them.

    Raises:
        CorruptError: Weights are missing, left over, or of other shapes.
    """
    embeddings, weight = encoder.word_embeddings, tensors.get("weight")
    width = layers[0].out_features if layers and isinstance(layers[0], nn.Linear) else encoder.hidden_size
    rows = len(embeddings) if vocabulary is None else len(vocabulary)
    if weight is None or weight.shape != (rows, width):
        found = "none" if weight is None else str(tuple(weight.shape))
        raise CorruptError(f"loading {source}: expected a matrix of shape {(rows, width)}, found {found}")
    tied = tie and weight.shape == embeddings.shape and torch.equal(weight.to(embeddings), embeddings)
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


def write_encoder(encoder: AnyEncoder, head: SparseHead, folder: Path) -> None:
    """Write the encoder; as the masked language model of transformers if it is one with the head."""
    known = describe(encoder, head) if is_whole(encoder, head) else None
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
