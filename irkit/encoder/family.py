"""The description of a model family: how to read its ``config.json``, and the names of its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from irkit.encoder.encoder_config import MOST_LAYERS, Activation, EncoderConfig, Pooling
from irkit.encoder.rotary import RotaryScaling
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
    "tanh": "tanh",
}


class MaskedLM(NamedTuple):
    """The masked language modelling head of a checkpoint: a linear layer, a norm and an output matrix.

    Attributes:
        architecture: Name of the class of transformers.
        names: For each parameter of irkit's sparse head, its names in the checkpoint. If the file has both of
            two names, the first counts; files whose matrix is the word embeddings have only the second.
        activation: Activation function after the linear layer.
        norm_eps: Number that the norm adds to the variance.
    """

    architecture: str
    names: NameMap
    activation: Activation
    norm_eps: float


class Family(NamedTuple):
    """One family of checkpoints.

    Attributes:
        config: Function that reads ``config.json``; raises ConfigError for what the encoder cannot do.
        weights: Names in the checkpoint by module of `irkit.encoder.Encoder`, without ``.weight`` and
            ``.bias``. ``layers.`` stands for every layer, whose number replaces ``{}``. The weights of
            several names are concatenated: query, key and value are one matrix in `Encoder`.
        prefixes: Prefixes that the names of the encoder's weights may have, such as ``"bert."``.
        heads: Prefixes of weights of task heads, which are kept and saved again.
        masked_lm: Function that describes the masked language modelling head that belongs to a
            ``config.json``; None if the family has no such head.
        schedule: Function that returns the keys of ``config.json`` for a pooling schedule; None uses irkit's
            own key ``pooling``.
        variant: Function that returns the family with the names of weights that belong to a
            ``config.json``; None if all checkpoints have the same names.
        alternating: Whether the rows of query, key and value alternate head by head in the checkpoint.
    """

    config: Callable[[Settings], EncoderConfig]
    weights: Mapping[str, str | tuple[str, ...]]
    prefixes: tuple[str, ...]
    heads: tuple[str, ...]
    masked_lm: Callable[[Settings], MaskedLM] | None = None
    schedule: Callable[[Sequence[Pooling | None]], dict[str, Any]] | None = None
    variant: Callable[[Settings], Family] | None = None
    alternating: bool = False

    def checkpoint_names(self, parameter: str) -> tuple[str, ...]:
        """Return the names in the checkpoint of the parts of one parameter of `irkit.encoder.Encoder`.

        ``layers.0.qkv.bias``, for example, has three parts: query, key and value.
        """
        module, _, suffix = parameter.rpartition(".")
        layer = _LAYER.fullmatch(module)
        theirs = self.weights[f"layers.{layer[2]}" if layer else module]
        names = (theirs,) if isinstance(theirs, str) else theirs
        return tuple(f"{name.format(layer[1] if layer else '')}.{suffix}" for name in names)


def masked_lm_names(dense: str, norm: str, decoder: str, *biased: str) -> NameMap:
    """Map each parameter of irkit's sparse head to its names in the checkpoint of a masked language model.

    Args:
        dense: Name of the linear layer in the checkpoint, without ``.weight``.
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
    """Return the number of layers, ``key`` of a ``config.json``.

    Raises:
        ConfigError: The number is not from 1 to `MOST_LAYERS`.
    """
    count = settings[key]
    if type(count) is not int or not 0 < count <= MOST_LAYERS:
        raise ConfigError(f"{key} {count!r:.60}, expected 1 to {MOST_LAYERS},")
    return count


def activation(name: str) -> Activation:
    """Return irkit's name of the activation function that Hugging Face calls ``name``.

    Raises:
        ConfigError: irkit has no such activation.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r:.60}")
    return _ACTIVATIONS[name]


def rotary_settings(settings: Settings, kind: str = "", base: float = 10_000.0) -> dict[str, Any]:
    """Return the rotary settings of a `LayerConfig`: ``rotary_base`` and ``rotary_scaling``.

    Args:
        settings: Content of config.json, with today's key ``rope_parameters`` or the older ``rope_theta`` and
            ``rope_scaling``.
        kind: Kind of the layer, for models whose kinds of layers have settings of their own.
        base: Base if config.json has none.

    Raises:
        ConfigError: irkit does not have this kind of rotary positions.
    """
    rope = settings.get("rope_parameters") or {}
    rope = rope.get(kind) or {} if kind in rope else rope
    rope = {"rope_theta": settings.get("rope_theta"), **(settings.get("rope_scaling") or {}), **rope}
    if rope.get("partial_rotary_factor", settings.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor {rope.get('partial_rotary_factor')!r:.60}")
    rotary = {"rotary_base": float(rope.get("rope_theta") or base)}
    name = rope.get("rope_type") or rope.get("type") or "default"
    if name == "default":
        return rotary
    if name not in ("linear", "ntk", "yarn", "llama3") or rope.get("mixed_b") is not None:
        raise ConfigError(f"rope_type {name!r:.60}")
    values = {"kind": name, "factor": float(rope["factor"])}
    if name in ("yarn", "llama3"):
        key = "original_max_position_embeddings"
        values["length"] = rope.get(key) or settings.get(key) or settings["max_position_embeddings"]
    if name == "llama3":
        values |= {"slow": rope["low_freq_factor"], "fast": rope["high_freq_factor"]}
    if name == "yarn":
        values |= {"slow": rope.get("beta_slow") or 1, "fast": rope.get("beta_fast") or 32}
        values |= {"whole": rope.get("truncate", True), "amplitude": _yarn_amplitude(rope)}
    return {**rotary, "rotary_scaling": RotaryScaling.parse(values, f"rope_type {name}")}


def _yarn_amplitude(rope: Settings) -> float:
    """Return the factor of cosines and sines of YaRN, section 3.4, which a config.json may also give."""

    def amplitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return amplitude(rope["mscale"]) / amplitude(rope["mscale_all_dim"])
    return amplitude(1)
