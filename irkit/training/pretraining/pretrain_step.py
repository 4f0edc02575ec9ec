"""One step of pre-training, a batch of texts in, the weighted sum of the objectives out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from irkit.config import Config
from irkit.core.ragged import Ragged
from irkit.core.representation import Dense, MultiVector
from irkit.encoder import Encoder
from irkit.encoder.norms import make_norm
from irkit.errors import BadValueError
from irkit.heads import PooledHead
from irkit.heads.masked_lm_parts import ACTIVATIONS
from irkit.model import Model
from irkit.training.collapse import ALIKE, likeness
from irkit.training.masking import PretrainBatch
from irkit.training.model_step import TextStep


@dataclass(frozen=True)
class Encoded:
    """A batch and the output of the model for it.

    Attributes:
        model: Trained model.
        batch: Batch on the device of the model.
        hidden: Ragged ``(total', hidden_size)``, output of the encoder for ``batch.tokens``.
        vectors: ``(n, hidden_size)`` float32, ``hidden`` pooled like in the head of the model, before the
            layers of the head; None for models that make more than one vector per text.
        interaction: Compares token vectors of the model; None for its score.
    """

    model: Model
    batch: PretrainBatch
    hidden: Ragged
    vectors: Tensor | None
    interaction: Callable[[MultiVector, MultiVector], Tensor] | None = None

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
        parts: Other sums over the same texts or tokens, by name, for the log.
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
            model: Model to train; the module must not store the model as a submodule.
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


class PretrainStep(TextStep):
    """A model with its pre-training objectives; each text is encoded once for all of them.

    Modules that an objective trains beside the model, such as the decoder of masked auto-encoding, are part
    of checkpoints but not of the saved model.

    Attributes:
        model: Trained model.
        objectives: Objectives, in the given order.
        modules_of: Module that each objective trains beside the model, by kind.
        parts: Losses of the objectives in the last step, and the shares of correctly predicted tokens.

    Examples:
        >>> step = PretrainStep(model, [MaskedAutoEncoding(), BagOfWords()])  # doctest: +SKIP
        >>> step(PretrainCollator(model.tokenizer)([(0, "a text")])).backward()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Model,
        objectives: Sequence[BaseObjective],
        *,
        seed: int = 0,
        interaction: nn.Module | None = None,
    ) -> None:
        """Make the module that each objective trains beside the model.

        Args:
            model: Model to train.
            objectives: At least one, of different kinds.
            seed: Seed of the weights beside the model, and of the draws of the objectives.
            interaction: Compares token vectors, is trained and saved with the model; None for the score of
                the model.

        Raises:
            BadValueError: The objectives are empty, one comes twice, or one does not fit the model.
        """
        super().__init__(model)
        kinds = [objective.kind for objective in objectives]
        if not kinds or len(set(kinds)) < len(kinds):
            raise BadValueError(f"PretrainStep: got objectives {kinds}, expected at least one, none twice")
        self.objectives, self.interaction = tuple(objectives), interaction
        self.modules_of = nn.ModuleDict({part.kind: part.prepare(model, seed) for part in objectives})
        pooling = getattr(model.head, "pooling", None)
        self._pool = None if pooling is None else PooledHead(model.encoder.hidden_size, pooling)

    def forward(self, batch: PretrainBatch, progress: float = 0.0) -> Tensor:
        """Return the weighted sum of the objectives, each the mean over its texts or tokens in all processes.

        Args:
            batch: A batch on the device of the model.
            progress: Not used.
        """
        total, self.parts, self.signs = torch.zeros((), device=batch.tokens.device), {}, {}
        encoded = self.encode(batch)
        if encoded.vectors is not None and (alike := likeness(Dense(encoded.vectors))) is not None:
            self.signs[ALIKE] = alike
        for objective, value in self.values(encoded):
            loss = value.total / self.divisor(value.count)
            total = total + objective.weight * loss
            self.parts[objective.kind] = loss.detach()
            for name, part in value.parts.items():
                self.parts[f"{objective.kind}_{name}"] = part.detach() / max(1, value.count)
        return total

    def loss_sums(self, batch: PretrainBatch) -> dict[str, tuple[Tensor, int]]:
        """Return, per objective, the sum of the loss and the number of texts or tokens that it runs over."""
        return {
            objective.kind: (value.total, value.count) for objective, value in self.values(self.encode(batch))
        }

    def validate(self, batches: Iterable[PretrainBatch]) -> dict[str, float]:
        """Return the mean loss of each objective, and as ``loss`` their weighted sum."""
        means = super().validate(batches)
        return {"loss": sum(part.weight * means.get(part.kind, 0.0) for part in self.objectives), **means}

    def encode(self, batch: PretrainBatch) -> Encoded:
        """Return the output of the model for a batch."""
        hidden = self.model.encoder(batch.tokens)
        vectors = None if self._pool is None else self._pool(hidden, batch.tokens).values
        return Encoded(self.model, batch, hidden, vectors, self.interaction)

    def values(self, encoded: Encoded) -> list[tuple[BaseObjective, Value]]:
        """Return the value of each objective for a batch."""
        modules: dict[str, ObjectiveModule] = dict(self.modules_of.items())  # type: ignore[arg-type]
        return [(objective, modules[objective.kind](encoded)) for objective in self.objectives]
