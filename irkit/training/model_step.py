"""What the steps of all objectives share: how their model is adapted, saved, compiled and checkpointed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from irkit.encoder import Encoder
from irkit.errors import ConfigError, require
from irkit.heads.layer_modules import UNKNOWN_TO_OTHERS
from irkit.model import Model


class ModelStep(nn.Module):
    """Module that is called with a batch and the share of completed steps, and returns a loss.

    Attributes:
        model: Trained model.
        interaction: Compares token vectors, and is trained and saved if it is a module; None for the score of
            the model.
        parts: Values of the last step that are logged, by name.
        signs: Values of the last step that show a collapse, see `irkit.training.collapse`.
    """

    model: Model

    def __init__(self, model: Model) -> None:
        """Store the model."""
        super().__init__()
        self.model = model
        self.interaction: Any = None
        self.parts: dict[str, Any] = {}
        self.signs: dict[str, Any] = {}
        self.saved = False  # whether the model was saved before

    def activation_checkpointing_enable(self, **_: Any) -> None:
        """Keep only the input of each encoder layer; the backward pass computes the rest again."""
        for layer in _layers(self.model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    gradient_checkpointing_enable = activation_checkpointing_enable  # its name before transformers 5.23

    def compile_layers(self, **options: Any) -> None:
        """Compile the part of each layer that works per token; the rest depends on the lengths of rows.

        Args:
            options: Options of `torch.compile`.
        """
        for layer in _layers(self.model):
            layer.after_attention = torch.compile(layer.after_attention, dynamic=True, **options)

    def finished_model(self) -> Model:
        """Return the model in evaluation mode, without anything that only training needs."""
        model = merged(self.model)
        for layer in _layers(model):
            for name in ("forward", "after_attention"):
                vars(layer).pop(name, None)
        return model.eval()

    def save_pretrained(self, path: str | Path) -> None:
        """Write the model to a directory, and the interaction beside it; the model keeps its name.

        Adapters are merged into the weights.
        """
        model, name = merged(self.model), self.model.name
        with warnings.catch_warnings():
            if self.saved:  # what other libraries cannot open is said once, not at every checkpoint
                warnings.filterwarnings("ignore", UNKNOWN_TO_OTHERS)
            model.save_pretrained(path)
        model.name, self.saved = name, True
        if hasattr(self.interaction, "fingerprint"):
            self.interaction.fingerprint = model.fingerprint
        if hasattr(self.interaction, "save_pretrained"):
            self.interaction.save_pretrained(path)


class TextStep(ModelStep):
    """Step of an objective on texts without labels."""

    def loss_sums(self, batch: Any) -> dict[str, tuple[Tensor, int]]:
        """Compute the losses of a batch as sums.

        Returns:
            Per name of a loss: the sum, a scalar, and the number of texts or tokens over which it runs.
        """
        raise NotImplementedError

    @torch.no_grad()
    def validate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean of each loss over all batches, computed without dropout.

        Args:
            batches: Batches on any device.
        """
        training, sums, counts = self.training, dict[str, float](), dict[str, int]()
        self.eval()
        try:
            for batch in batches:
                for name, (total, count) in self.loss_sums(batch.to(self.model.device)).items():
                    sums[name] = sums.get(name, 0.0) + float(total)
                    counts[name] = counts.get(name, 0) + count
        finally:
            self.train(training)
        return {name: total / max(1, counts[name]) for name, total in sums.items()}

    def divisor(self, count: int) -> float:
        """Return the number by which this process divides a sum of losses.

        Each process divides its own sum. The mean of these quotients over the processes is then the mean loss
        over the texts or tokens of all processes.

        Args:
            count: Number of texts or tokens in this process.
        """
        if not (self.training and dist.is_initialized()):  # only one process evaluates
            return max(1, count)
        total = torch.tensor(count, dtype=torch.float64, device=self.model.device)
        dist.all_reduce(total)
        return max(1.0, float(total)) / dist.get_world_size()


def add_lora(model: Model, settings: Mapping[str, Any]) -> None:
    """Add adapters to the linear layers of the encoders, in place; then only adapters and heads are trained.

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
    """Return a copy of the model with its adapters merged into the weights, or the model if it has none."""
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


def _layers(model: Model) -> list[Any]:
    """Return the layers of irkit's own encoders; encoders that transformers runs have none."""
    encoders = [side.encoder for side in (model, model.query_model) if side is not None]
    return [layer for encoder in encoders if isinstance(encoder, Encoder) for layer in encoder.layers]
