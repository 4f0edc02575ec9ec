"""Where checkpoints keep the head of masked language modelling: a layer, a norm and a row for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from irkit.encoder.config import Activation
from irkit.encoder.families import FAMILIES, NameMap, activation
from irkit.errors import ConfigError

__all__ = ["MaskedLM", "masked_lm"]

_ARCHITECTURES = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
    "camembert": "CamembertForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
}


class MaskedLM(NamedTuple):
    """The head of one checkpoint.

    Attributes:
        architecture: Class of transformers.
        prefix: What stands before the names of the encoder.
        names: Parameters of `irkit.heads.SparseHead` to names in the checkpoint. Where there are two, the
            first counts; files whose matrix is that of the word embeddings hold only the second.
        activation: After the linear layer.
        norm_eps: Added to the variance by the norm.
    """

    architecture: str
    prefix: str
    names: NameMap
    activation: Activation
    norm_eps: float


def masked_lm(settings: Mapping[str, Any]) -> MaskedLM | None:
    """Describe the head that belongs to a ``config.json``; None for families without one (TITE).

    Raises:
        ConfigError: Its activation is none of the known.
    """
    family = str(settings.get("model_type"))
    if family not in _ARCHITECTURES:
        return None
    act, eps = settings.get("hidden_act", "gelu"), settings.get("layer_norm_eps", 1e-12)
    if family == "bert":
        dense, norm = "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"
        decoder, biases = "cls.predictions.decoder", ["cls.predictions.decoder", "cls.predictions"]
    elif family == "distilbert":
        dense, norm = "vocab_transform", "vocab_layer_norm"
        decoder, biases = "vocab_projector", ["vocab_projector"]
        act, eps = settings.get("activation", "gelu"), 1e-12
    elif family == "modernbert":
        dense, norm, decoder, biases = "head.dense", "head.norm", "decoder", ["decoder"]
        act, eps = settings.get("classifier_activation", "gelu"), settings.get("norm_eps", 1e-5)
    else:
        dense, norm, act = "lm_head.dense", "lm_head.layer_norm", "gelu"
        decoder, biases = "lm_head.decoder", ["lm_head.decoder", "lm_head"]
    names: NameMap = {
        "layers.0.weight": (f"{dense}.weight",),
        "layers.0.bias": (f"{dense}.bias",),
        "layers.2.weight": (f"{norm}.weight",),
        "layers.2.bias": (f"{norm}.bias",),
        "weight": (f"{decoder}.weight",),
        "bias": tuple(f"{name}.bias" for name in biases),
    }
    if family == "modernbert":
        there = {
            "layers.0.bias": settings.get("classifier_bias", False),
            "layers.2.bias": settings.get("norm_bias", False),
            "bias": settings.get("decoder_bias", True),
        }
        names = {ours: theirs for ours, theirs in names.items() if there.get(ours, True)}
    try:
        known = activation(act)
    except ConfigError as error:
        raise ConfigError(f"masked language model: a {family} with {error} is not supported") from error
    return MaskedLM(_ARCHITECTURES[family], FAMILIES[family].prefixes[0], names, known, float(eps))
