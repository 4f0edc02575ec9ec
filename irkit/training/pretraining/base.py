"""What objectives of pre-training have in common: what they see, and what they give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import PositiveFloat
from torch import Tensor, nn

from irkit.config import Config
from irkit.encoder import Encoder
from irkit.encoder.layers import make_norm
from irkit.errors import BadValueError
from irkit.heads.sparse import ACTIVATIONS
from irkit.model import Model
from irkit.ragged import Ragged
from irkit.training.pretraining.batches import PretrainBatch

__all__ = ["BaseObjective", "Encoded", "ObjectiveModule", "PredictionHead", "Value", "own_encoder"]


@dataclass(frozen=True)
class Encoded:
    """A batch and what the model made of it.

    Attributes:
        model: What is trained.
        batch: On the device of the model.
        hidden: Ragged ``(total', hidden_size)``, what its encoder makes of ``batch.tokens``.
        vectors: ``(n, hidden_size)`` float32, ``hidden`` pooled as the head of the model does, before its
            layers; None of models that make no single vector.
    """

    model: Model
    batch: PretrainBatch
    hidden: Ragged
    vectors: Tensor | None

    @property
    def encoder(self) -> Encoder:
        """Of the model."""
        return own_encoder(self.model, "pre-training")


@dataclass(frozen=True)
class Value:
    """The loss of a batch, from which means over several batches and processes can be had.

    Attributes:
        total: Scalar, the sum of the loss over what is counted.
        count: How many texts or tokens that are.
        parts: More sums over the same by name, to be logged.
    """

    total: Tensor
    count: int
    parts: dict[str, Tensor] = field(default_factory=dict)


class ObjectiveModule(nn.Module):
    """What an objective trains beside the model; called with what the model made of a batch."""

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, encoded: Encoded) -> Value: ...  # noqa: D102

    def forward(self, encoded: Encoded) -> Value:
        """The loss of a batch."""
        raise NotImplementedError


class BaseObjective(Config):
    """What an encoder is trained by; subclasses have a ``kind``.

    Attributes:
        kind: Name in recipes.
        weight: Of this objective among several, whose weighted sum counts.
    """

    kind: str
    weight: PositiveFloat = 1.0

    def prepare(self, model: Model, seed: int = 0) -> ObjectiveModule:
        """Make what is trained beside the model, in the same dtype and on the same device.

        Args:
            model: What is trained; the module must not hold it.
            seed: Of random weights and draws.

        Raises:
            BadValueError: The objective is not for such a model.
        """
        raise NotImplementedError


class PredictionHead(nn.Module):
    """What comes before the matrix of word embeddings where hidden states say which token it was.

    Attributes:
        layers: A linear layer, an activation and a norm, as in masked language models.
        bias: ``(vocabulary,)`` of logits.
    """

    def __init__(self, encoder: Encoder) -> None:
        """Make one of random weights for an encoder, whose word embeddings are the matrix."""
        super().__init__()
        config, width = encoder.config, encoder.word_embeddings.shape[1]
        dense, act = nn.Linear(config.hidden_size, width), ACTIVATIONS[config.activation]
        self.layers = nn.Sequential(dense, act, make_norm(config, width))
        self.bias = nn.Parameter(encoder.word_embeddings.new_zeros(config.vocab_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """``(m, hidden_size)`` to ``(m, width)`` of word embeddings."""
        result: Tensor = self.layers(hidden.to(self.bias.dtype))
        return result


def own_encoder(model: Model, objective: str) -> Encoder:
    """The encoder of a model.

    Raises:
        BadValueError: Another library runs it; the message names the objective.
    """
    if not isinstance(model.encoder, Encoder):
        raise BadValueError(
            f"{objective}: transformers runs the encoder of {model.name!r}; expected a family of irkit's own"
        )
    return model.encoder
