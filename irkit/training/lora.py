"""Adapters of low rank (LoRA) in the encoders of a model: what is trained instead of their weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from irkit.errors import ConfigError, require
from irkit.model import Model

__all__ = ["add_lora", "merged"]


def add_lora(model: Model, settings: Mapping[str, Any]) -> None:
    """Put adapters beside the linear layers of the encoders, in place: these and the heads are trained then.

    Args:
        model: Encoder and, if it has one, the encoder of queries get adapters.
        settings: Keys of ``peft.LoraConfig``; ``target_modules`` are by default all linear layers.

    Raises:
        ConfigError: There is no such key, or a value is impossible.
        MissingDependencyError: peft is not installed.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
    """
    peft = require("peft", "train", "LoRA")
    for part in (model, model.query_model):
        if part is None or not any(True for _ in part.encoder.parameters()):
            continue
        linear = {name for name, module in part.encoder.named_modules() if isinstance(module, nn.Linear)}
        targets = sorted({name.rpartition(".")[2] for name in linear})
        try:
            config = peft.LoraConfig(**{"target_modules": targets, **settings})
            peft.inject_adapter_in_model(config, part.encoder)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"lora: {error}") from error


def merged(model: Model) -> Model:
    """The model with its adapters added to its weights: itself if it has none, else a copy."""
    if not any(hasattr(module, "get_base_layer") for module in model.modules()):
        return model
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        children: list[tuple[str, Any]] = list(module.named_children())
        for name, layer in children:
            if hasattr(layer, "get_base_layer"):  # of peft, which need not be imported to ask
                layer.merge()
                setattr(module, name, layer.get_base_layer())
    return model
