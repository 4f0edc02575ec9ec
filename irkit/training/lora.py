"""Adapters of low rank (LoRA), which are trained instead of the weights of the encoders."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from irkit.errors import ConfigError, require
from irkit.model import Model


def add_lora(model: Model, settings: Mapping[str, Any]) -> None:
    """Add adapters to the linear layers of the encoders, in place; only they and the heads are trained then.

    Args:
        model: Model whose encoder, and encoder of queries if it has one, get adapters.
        settings: Keys of ``peft.LoraConfig``; ``target_modules`` are all linear layers by default.

    Raises:
        ConfigError: A key is unknown, or a value is impossible.
        MissingDependencyError: peft is not installed.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
    """
    peft = require("peft", "train", "LoRA")
    for side in (model, model.query_model):
        if side is None or not any(True for _ in side.encoder.parameters()):
            continue
        linear = {name for name, module in side.encoder.named_modules() if isinstance(module, nn.Linear)}
        targets = sorted({name.rpartition(".")[2] for name in linear})
        try:
            config = peft.LoraConfig(**{"target_modules": targets, **settings})
            peft.inject_adapter_in_model(config, side.encoder)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"lora: {error}") from error


def merged(model: Model) -> Model:
    """Return a copy with the adapters merged into the weights; the model itself if it has none."""
    if not any(hasattr(module, "get_base_layer") for module in model.modules()):
        return model
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        children: list[tuple[str, Any]] = list(module.named_children())
        for name, layer in children:
            if hasattr(layer, "get_base_layer"):  # of peft, which need not be imported for it
                layer.merge()
                setattr(module, name, layer.get_base_layer())
    return model
