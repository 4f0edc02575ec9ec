"""What objectives have in common: how the trainer saves their model, compiles it and keeps memory low."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from irkit.encoder import Encoder
from irkit.model import Model
from irkit.training.lora import merged

__all__ = ["ModelStep"]


class ModelStep(nn.Module):
    """A module that is called with a batch and the share of steps that are done, and returns a loss.

    Attributes:
        model: What is trained.
        parts: Values of the last step that are logged, by name.
        signs: Values of the last step that show whether it collapses, see `irkit.training.collapse`.
    """

    model: Model

    def __init__(self, model: Model) -> None:
        """Take the model."""
        super().__init__()
        self.model = model
        self.parts: dict[str, Any] = {}
        self.signs: dict[str, Any] = {}

    def shared(self, count: int, device: torch.device) -> float:
        """By what to divide the sum of a loss, that the mean over processes is that over all they count.

        Args:
            count: Of this process: texts, or tokens that are asked for.
            device: Of the model.
        """
        if not (self.training and dist.is_initialized()):  # only one process evaluates
            return max(1, count)
        total = torch.tensor(count, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return max(1.0, float(total)) / dist.get_world_size()

    def activation_checkpointing_enable(self, **_: Any) -> None:
        """Keep of each layer of the encoders its input only; backward computes the rest again."""
        for layer in _layers(self.model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    gradient_checkpointing_enable = activation_checkpointing_enable  # its name before transformers 5.23

    def compile_layers(self, **options: Any) -> None:
        """Compile what layers do with each token by itself; lengths of rows would be compiled anew each time.

        Args:
            options: Of `torch.compile`.
        """
        for layer in _layers(self.model):
            layer.after_attention = torch.compile(layer.after_attention, dynamic=True, **options)

    def finished_model(self) -> Model:
        """The model in evaluation mode, without anything that is there for training only."""
        model = merged(self.model)
        for layer in _layers(model):
            for name in ("forward", "after_attention"):
                vars(layer).pop(name, None)
        return model.eval()

    def save_pretrained(self, path: str | Path) -> None:
        """Write the model to a directory, adapters merged into its weights; it keeps its name."""
        model, name = merged(self.model), self.model.name
        model.save_pretrained(path)
        model.name = name


def _layers(model: Model) -> list[Any]:
    """Of the encoders; none of those that transformers runs."""
    encoders = [part.encoder for part in (model, model.query_model) if part is not None]
    return [layer for encoder in encoders if isinstance(encoder, Encoder) for layer in encoder.layers]
