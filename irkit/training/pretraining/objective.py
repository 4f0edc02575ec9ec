"""What objectives of pre-training share: their input and their result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import PositiveFloat
from torch import Tensor, nn

from irkit.config import Config
from irkit.core.ragged import Ragged
from irkit.encoder import Encoder
from irkit.encoder.layers import make_norm
from irkit.errors import BadValueError
from irkit.heads.masked_lm_parts import ACTIVATIONS
from irkit.model import Model
from irkit.training.masking import PretrainBatch


@dataclass(frozen=True)
class Encoded:
    """A batch and the output of the model for it.

    Attributes:
        model: Trained model.
        batch: Batch on the device of the model.
        hidden: Ragged ``(total', hidden_size)``, output of the encoder for ``batch.tokens``.
        vectors: ``(n, hidden_size)`` float32, ``hidden`` pooled like in the head of the model, before the
            layers of the head; None for models that make more than one vector per text.
    """

    model: Model
    batch: PretrainBatch
    hidden: Ragged
    vectors: Tensor | None

    @property
    def encoder(self) -> Encoder:
        """Encoder of the model."""
        return own_encoder(self.model, "pre-training")


@dataclass(frozen=True)
class Value:
    """The loss of a batch as a sum and a count, from which means over batches and processes follow.

    Attributes:
        total: Scalar, the sum of the loss over texts or tokens.
        count: Number of these texts or tokens.
        parts: Other sums over them by name, for the log.
    """

    total: Tensor
    count: int
    parts: dict[str, Tensor] = field(default_factory=dict)


class ObjectiveModule(nn.Module):
    """Module that an objective trains beside the model; it is called with the output of the model."""

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, encoded: Encoded) -> Value: ...  # noqa: D102

    def forward(self, encoded: Encoded) -> Value:
        """Compute the loss of a batch."""
        raise NotImplementedError


class BaseObjective(Config):
    """An objective that needs only texts.

    Attributes:
        kind: Name in recipes.
        weight: Factor in the sum of all objectives.
    """

    kind: str
    weight: PositiveFloat = 1.0

    def prepare(self, model: Model, seed: int = 0) -> ObjectiveModule:
        """Make the module that is trained beside the model, in the same dtype and on the same device.

        Args:
            model: Model to train; the module must not hold it.
            seed: Seed of random weights and draws.

        Raises:
            BadValueError: The objective does not fit the model.
        """
        raise NotImplementedError


class PredictionHead(nn.Module):
    """Layers between hidden states and the matrix of word embeddings, with which tokens are predicted.

    Attributes:
        layers: A linear layer, an activation and a norm, like in masked language models.
        bias: ``(vocabulary,)``, bias of the logits.
    """

    def __init__(self, encoder: Encoder) -> None:
        """Make a head of random weights for an encoder."""
        super().__init__()
        config, width = encoder.config, encoder.word_embeddings.shape[1]
        dense, act = nn.Linear(config.hidden_size, width), ACTIVATIONS[config.activation]
        self.layers = nn.Sequential(dense, act, make_norm(config, width))
        self.bias = nn.Parameter(encoder.word_embeddings.new_zeros(config.vocab_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``(m, hidden_size)`` to ``(m, width)``, the width of word embeddings."""
        result: Tensor = self.layers(hidden.to(self.bias.dtype))
        return result


def own_encoder(model: Model, objective: str) -> Encoder:
    """Return the encoder of a model.

    Raises:
        BadValueError: transformers runs the encoder; the message names the objective.
    """
    if not isinstance(model.encoder, Encoder):
        raise BadValueError(
            f"{objective}: transformers runs the encoder of {model.name!r}; expected a family of irkit's own"
        )
    return model.encoder
