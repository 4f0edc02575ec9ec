"""The parts of a sparse head: in a masked language model of transformers, or in a folder of their own."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from irkit.config import Config
from irkit.encoder import AnyEncoder, Encoder, StaticEncoder
from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.encoder_config import Activation
from irkit.encoder.families import FAMILIES, masked_lm
from irkit.encoder.family import MaskedLM
from irkit.errors import ConfigError, CorruptError
from irkit.utils.weights import read_weights

ACTIVATIONS: dict[str, nn.Module] = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "relu": nn.ReLU(),
    "silu": nn.SiLU(),
    "tanh": nn.Tanh(),
}
_BIASES = ("layers.0.bias", "layers.2.bias")


class HeadParts(NamedTuple):
    """The parts of a sparse head: layers before the matrix, matrix ``(terms, width)``, bias ``(terms,)``."""

    layers: nn.ModuleList
    weight: nn.Parameter
    bias: nn.Parameter | None


class SavedHead(Config):
    """The content of config.json in the folder of a SparseHead.

    Attributes:
        pooling: As in `SparseConfig`.
        activation: As in `SparseConfig`.
        own_weights: Whether the folder holds weights. Otherwise the head is stored with the encoder, as in
            any masked language model.
        hidden_activation: Activation between the linear layer and the norm; None for a head without layers.
        norm_eps: Added to the variance by the norm.
        vocabulary: The terms; None is the tokens of the tokenizer.
    """

    pooling: str
    activation: str
    own_weights: bool = True
    hidden_activation: Activation | None = None
    norm_eps: float = 1e-12
    vocabulary: tuple[str, ...] | None = None


def describe(
    encoder: AnyEncoder, parameters: Collection[str] | None = None
) -> tuple[MaskedLM, dict[str, Any]] | None:
    """Describe the masked language model of transformers that an encoder and a head make.

    Args:
        encoder: The encoder.
        parameters: Names of the parameters of the head; None is the head in the checkpoint of the encoder.

    Returns:
        A `MaskedLM`, with the model's class and its names of the head's weights; and the content of its
        config.json. None, without a tuple, if transformers has no such model.
    """
    if not isinstance(encoder, Encoder):
        return None
    settings = dict(encoder.settings)
    if parameters is not None and encoder.family == "modernbert":
        settings["decoder_bias"] = "bias" in parameters
    described = masked_lm(settings)
    if described is None or (parameters is not None and {*parameters} != described.names.keys()):
        return None
    return described, settings


def join(
    encoder: Encoder,
    described: MaskedLM,
    settings: dict[str, Any],
    parameters: Mapping[str, Tensor],
    tied: bool,
) -> Encoder:
    """Return a copy of an encoder that shares its weights, and that saves the head of its masked LM with it.

    Args:
        encoder: Encoder of one of irkit's families.
        described: The masked language model, as `describe` returns it.
        settings: Content of the model's config.json.
        parameters: Weights of the head, by irkit's names.
        tied: Whether the decoder matrix is the matrix of the word embeddings.
    """
    whole = copy.copy(encoder)
    whole.prefix = FAMILIES[encoder.family].prefixes[0]
    whole.head_weights = {
        theirs: value.detach().clone()  # files hold no tensor twice under two names
        for name, value in parameters.items()
        for theirs in described.names[name][-1 if tied else 0 :]
        if name != "weight" or not tied
    }
    whole.settings = settings | {"architectures": [described.architecture], "tie_word_embeddings": tied}
    return whole


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with TensorFlow's names of norm parameters changed to torch's.

    ``.gamma`` at the end of a name becomes ``.weight``, and ``.beta`` becomes ``.bias``.
    """
    names = {name: re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name)) for name in tensors}
    return {names[name]: tensor for name, tensor in tensors.items()}


def has_head(encoder: AnyEncoder) -> bool:
    """Return True if the checkpoint of an encoder holds the head of a masked language model."""
    if isinstance(encoder, StaticEncoder):
        return False
    if not isinstance(encoder, Encoder):
        return any(str(name).endswith("ForMaskedLM") for name in encoder.settings.architectures or ())
    known = describe(encoder)
    return known is not None and known[0].names["layers.0.weight"][0] in _plain(encoder.head_weights)


def load_parts(encoder: AnyEncoder, source: str) -> HeadParts:
    """Return the head of the masked language model that the encoder was loaded from.

    The weights move: ``encoder.head_weights`` then lacks them. A `TransformersEncoder` loads its decoder.

    Args:
        encoder: Encoder; changed in place.
        source: Where the weights come from, for messages.

    Raises:
        ConfigError: irkit knows no masked language model of this family.
        CorruptError: Weights of the head are missing, left over, or of other shapes.
    """
    if isinstance(encoder, StaticEncoder):
        raise ConfigError("masked language model: static embeddings have none")
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


def layers_of(described: MaskedLM, encoder: AnyEncoder) -> list[nn.Module]:
    """Make the modules before the matrix of the head ``described``, with random weights."""
    width = encoder.word_embeddings.shape[1]  # less than the hidden size where embeddings are projected
    shape = encoder.hidden_size, described.activation, described.norm_eps, width
    return transform_layers(*shape, parameters=described.names)


def describe_layers(layers: nn.ModuleList) -> dict[str, Any]:
    """Return the keys of `SavedHead` that `read_parts` makes the layers of a head from again."""
    inner = [repr(layer) for layer in layers]
    return {
        "hidden_activation": next(
            (name for name, layer in ACTIVATIONS.items() if repr(layer) in inner), None
        ),
        "norm_eps": next((layer.eps for layer in layers if isinstance(layer, nn.LayerNorm)), 0.0),
    }


def read_parts(encoder: AnyEncoder, saved: SavedHead, folder: Path) -> HeadParts:
    """Read the layers, the matrix and the bias of a head from ``folder``, whose config.json is ``saved``."""
    if saved.hidden_activation is None and isinstance(encoder, TransformersEncoder):
        encoder.load_decoder_()  # hidden states are those that its own decoder gets
    tensors = read_weights(folder)
    layers: list[nn.Module] = []
    if saved.hidden_activation is not None:
        width = tensors["weight"].shape[-1] if "weight" in tensors else None
        shape = (encoder.hidden_size, saved.hidden_activation, saved.norm_eps, width)
        layers = transform_layers(*shape, parameters=tensors)
    return fill(layers, tensors, encoder, str(folder), vocabulary=saved.vocabulary)


def fill(
    layers: list[nn.Module],
    tensors: Mapping[str, Tensor],
    encoder: AnyEncoder,
    source: str,
    *,
    vocabulary: Sequence[str] | None = None,
    tie: bool = True,
) -> HeadParts:
    """Load weights into ``layers``, and return them with the matrix and the bias of the head.

    Args:
        layers: Modules before the matrix, see `transform_layers`; changed in place.
        tensors: Weights by their names in the head.
        encoder: Encoder whose hidden states the head gets.
        source: Where the weights come from, for messages.
        vocabulary: Terms of the head; None is the tokens of the tokenizer.
        tie: Whether a matrix equal to the encoder's word embeddings becomes the same parameter.

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


def transform_layers(
    hidden_size: int,
    activation: str = "gelu",
    norm_eps: float = 1e-12,
    width: int | None = None,
    parameters: Container[str] = _BIASES,
) -> list[nn.Module]:
    """Make the modules of a masked language model before its matrix: linear layer, activation, norm.

    Args:
        hidden_size: Width of the hidden states.
        activation: One of `ACTIVATIONS`.
        norm_eps: Number that the norm adds to the variance.
        width: Width of the matrix; None is ``hidden_size``.
        parameters: Names of the parameters. The linear layer has a bias if ``layers.0.bias`` is among them,
            and the norm if ``layers.2.bias`` is.
    """
    width = hidden_size if width is None else width
    return [
        nn.Linear(hidden_size, width, bias=_BIASES[0] in parameters),
        ACTIVATIONS[activation],
        nn.LayerNorm(width, eps=norm_eps, bias=_BIASES[1] in parameters),
    ]
