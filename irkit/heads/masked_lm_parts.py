"""Encoder and sparse head as a masked language model of transformers: reading and writing its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from irkit.encoder import AnyEncoder, Encoder
from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.families import FAMILIES, masked_lm
from irkit.encoder.family import MaskedLM
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import ConfigError, CorruptError

ACTIVATIONS: dict[str, nn.Module] = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "relu": nn.ReLU(),
    "silu": nn.SiLU(),
}
_RENAMED = ((".gamma", ".weight"), (".beta", ".bias"))  # norms of checkpoints converted from TensorFlow


class HeadParts(NamedTuple):
    """Layers before the matrix, matrix and bias of a sparse head."""

    layers: nn.ModuleList
    weight: nn.Parameter
    bias: nn.Parameter | None


class _Head(Protocol):
    """The attributes of a sparse head that this module uses."""

    layers: nn.ModuleList
    weight: nn.Parameter
    bias: nn.Parameter | None
    vocabulary: tuple[str, ...] | None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def describe(
    encoder: AnyEncoder | InferenceFreeEncoder, head: _Head | None = None
) -> tuple[MaskedLM, dict[str, Any]] | None:
    """Describe the masked language model of transformers that encoder and head make.

    Args:
        encoder: The encoder.
        head: The head; None is the one in the checkpoint of the encoder.

    Returns:
        The model's class and weight names, and its config.json; None if transformers has no such model.
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


def is_whole(encoder: AnyEncoder | InferenceFreeEncoder, head: _Head) -> bool:
    """Return True if encoder and head are a masked language model of transformers."""
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
    """Return the tensors with TensorFlow's names of norm parameters (gamma, beta) changed to torch's."""
    plain = {}
    for name, tensor in tensors.items():
        for old, new in _RENAMED:
            name = name.removesuffix(old) + new if name.endswith(old) else name
        plain[name] = tensor
    return plain


def has_head(encoder: AnyEncoder) -> bool:
    """Return True if the checkpoint of an encoder holds the head of a masked language model."""
    if not isinstance(encoder, Encoder):
        return any(str(name).endswith("ForMaskedLM") for name in encoder.settings.architectures or ())
    known = describe(encoder)
    return known is not None and known[0].names["layers.0.weight"][0] in _plain(encoder.head_weights)


def load_parts(encoder: AnyEncoder, source: str) -> HeadParts:
    """Return the head whose weights stand beside the encoder in its checkpoint, and remove them there."""
    if not isinstance(encoder, Encoder):
        decoder = encoder.load_decoder_()
        return HeadParts(nn.ModuleList(), cast(nn.Parameter, decoder.weight), decoder.bias)
    known = describe(encoder)
    if known is None:
        raise ConfigError(f"loading {source}: irkit knows no masked language model of a {encoder.family}")
    names, tensors = known[0].names, _plain(encoder.head_weights)
    owned = tuple(name.rpartition(".")[0] + "." for theirs in names.values() for name in theirs)
    of_head = {name: value for name, value in tensors.items() if name.startswith(owned)}
    encoder.head_weights = {name: value for name, value in tensors.items() if name not in of_head}
    weights = {}
    for ours, theirs in names.items():
        values = [of_head.pop(name) for name in theirs if name in of_head]
        if values:
            weights[ours] = values[0]
    tie = bool(encoder.settings.get("tie_word_embeddings", True))
    if tie:  # and often left out
        weights.setdefault("weight", encoder.word_embeddings)
    missing = [theirs[0] for ours, theirs in names.items() if ours not in weights]
    if missing or of_head:
        raise CorruptError(
            f"loading {source}: as the head of a {known[0].architecture} its weights lack "
            f"{', '.join(missing) or 'nothing'}, left over are {', '.join(of_head) or 'none'}; Model.sparse "
            "puts a new head on any encoder"
        )
    return fill(layers_of(known[0], encoder), weights, encoder, source, tie=tie)


def layers_of(described: MaskedLM, encoder: Encoder) -> list[nn.Module]:
    """Return the modules before the matrix, with random weights."""
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
    source: str,
    *,
    vocabulary: Sequence[str] | None = None,
    tie: bool = True,
) -> HeadParts:
    """Return the parts of a head with weights from a file.

    Args:
        layers: Modules before the matrix, see `transform_layers`.
        tensors: Weights by their names in the head.
        encoder: Encoder whose hidden states the head gets.
        source: Where the weights come from, for messages.
        vocabulary: Terms of the head; None is the tokens of the tokenizer.
        tie: Whether a matrix equal to the encoder's word embeddings shares their memory.

    Raises:
        CorruptError: Weights are missing, left over, or of other shapes.
    """
    embeddings, weight = encoder.word_embeddings, tensors.get("weight")
    width = layers[0].out_features if layers and isinstance(layers[0], nn.Linear) else encoder.hidden_size
    rows = len(embeddings) if vocabulary is None else len(vocabulary)
    if weight is None or weight.shape != (rows, width):
        shape = "none" if weight is None else str(tuple(weight.shape))
        raise CorruptError(f"loading {source}: expected a matrix of shape {(rows, width)}, found {shape}")
    tied = tie and weight.shape == embeddings.shape and torch.equal(weight.to(embeddings), embeddings)
    matrix = embeddings if tied else nn.Parameter(weight.float())
    bias = tensors.get("bias")
    stack = nn.ModuleList(layers)
    inner = {name.removeprefix("layers."): tensors[name] for name in tensors.keys() - {"weight", "bias"}}
    try:
        stack.load_state_dict({name: value.float() for name, value in inner.items()})
    except RuntimeError as error:  # weights of other shapes or names
        raise CorruptError(f"loading {source}: {' '.join(str(error).split())}") from error
    return HeadParts(stack, matrix, None if bias is None else nn.Parameter(bias.float()))


def write_encoder(encoder: AnyEncoder, head: _Head, folder: Path) -> None:
    """Write the encoder; as the masked language model of transformers if it is one with the head."""
    known = describe(encoder, head) if is_whole(encoder, head) else None
    if known is None or not isinstance(encoder, Encoder):
        encoder.save_pretrained(folder)
        return
    described, settings = known
    tied = head.weight is encoder.word_embeddings
    whole = copy.copy(encoder)  # shares the weights
    whole.prefix = FAMILIES[encoder.family].prefixes[0]
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


def transform_layers(
    hidden_size: int,
    activation: str = "gelu",
    *,
    width: int | None = None,
    norm_eps: float = 1e-12,
    dense_bias: bool = True,
    norm_bias: bool = True,
) -> list[nn.Module]:
    """Return the modules of a masked language model before its matrix: linear layer, activation, norm.

    Args:
        hidden_size: Width of the hidden states.
        activation: One of `ACTIVATIONS`.
        width: Width of the matrix; None is ``hidden_size``.
        norm_eps: Added to the variance.
        dense_bias: Whether the linear layer has a bias.
        norm_bias: Whether the norm has a bias.
    """
    width = hidden_size if width is None else width
    return [
        nn.Linear(hidden_size, width, bias=dense_bias),
        ACTIVATIONS[activation],
        nn.LayerNorm(width, eps=norm_eps, bias=norm_bias),
    ]
