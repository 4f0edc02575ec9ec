"""What a model family is: how to read its ``config.json``, and where its checkpoints keep the weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from irkit.encoder.encoder_config import MOST_LAYERS, Activation, EncoderConfig, Pooling
from irkit.errors import ConfigError

NameMap = dict[str, tuple[str, ...]]
Settings = Mapping[str, Any]

_LAYER = re.compile(r"layers\.(\d+)\.(.*)")
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


class MaskedLM(NamedTuple):
    """The head of masked language modelling in one checkpoint: a layer, a norm and a row for each token.

    Attributes:
        architecture: Class of transformers.
        names: Parameters of the sparse head to names in the checkpoint. Where there are two, the
            first counts; files whose matrix is the word embeddings hold only the second.
        activation: Activation function after the linear layer.
        norm_eps: Added to the variance by the norm.
    """

    architecture: str
    names: NameMap
    activation: Activation
    norm_eps: float


class Family(NamedTuple):
    """One family of checkpoints.

    Attributes:
        config: Reads ``config.json``; raises ConfigError for what the encoder cannot do.
        weights: Names in the checkpoint by module of `irkit.encoder.Encoder`, without ``.weight`` and
            ``.bias``; ``layers.`` stands for every layer, whose number replaces ``{}``. Weights of several
            names are stacked on top of each other: query, key and value are one matrix here.
        prefixes: What may stand before every name of the encoder.
        heads: Prefixes of weights that belong to task heads; kept and saved again, never an error.
        masked_lm: Describes the head of masked language modelling that belongs to a ``config.json``.
        schedule: Keys of ``config.json`` that hold a pooling schedule; None is irkit's own key ``pooling``.
    """

    config: Callable[[Settings], EncoderConfig]
    weights: Mapping[str, str | tuple[str, ...]]
    prefixes: tuple[str, ...]
    heads: tuple[str, ...]
    masked_lm: Callable[[Settings], MaskedLM] | None = None
    schedule: Callable[[Sequence[Pooling | None]], dict[str, Any]] | None = None

    def checkpoint_names(self, parameter: str) -> tuple[str, ...]:
        """Return the names in the checkpoint of one of our parameters, such as ``layers.0.qkv.bias``."""
        module, _, suffix = parameter.rpartition(".")
        layer = _LAYER.fullmatch(module)
        theirs = self.weights[f"layers.{layer[2]}" if layer else module]
        names = (theirs,) if isinstance(theirs, str) else theirs
        return tuple(f"{name.format(layer[1] if layer else '')}.{suffix}" for name in names)


def masked_lm_names(dense: str, norm: str, decoder: str, *biased: str) -> NameMap:
    """Map the parameters of the masked language modelling head to names in a checkpoint.

    Args:
        dense: Name of the linear layer.
        norm: Name of the norm.
        decoder: Name of the output matrix.
        biased: Names of further modules that hold a copy of the output bias.
    """
    return {
        "layers.0.weight": (f"{dense}.weight",),
        "layers.0.bias": (f"{dense}.bias",),
        "layers.2.weight": (f"{norm}.weight",),
        "layers.2.bias": (f"{norm}.bias",),
        "weight": (f"{decoder}.weight",),
        "bias": tuple(f"{name}.bias" for name in (decoder, *biased)),
    }


def count_layers(settings: Settings, key: str = "num_hidden_layers") -> int:
    """Return the number of layers that ``config.json`` says.

    Raises:
        ConfigError: Nothing can be built with that number.
    """
    count = settings[key]
    if type(count) is not int or not 0 < count <= MOST_LAYERS:
        raise ConfigError(f"{key} {count!r:.60}, expected 1 to {MOST_LAYERS},")
    return count


def activation(name: str) -> Activation:
    """Return the activation that Hugging Face calls ``name``.

    Raises:
        ConfigError: irkit has no such activation.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r:.60}")
    return _ACTIVATIONS[name]
