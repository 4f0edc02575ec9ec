"""One step of pre-training: a batch of texts in, the weighted sum of the objectives out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from irkit.core.representation import Dense
from irkit.errors import BadValueError
from irkit.heads import PooledHead
from irkit.model import Model
from irkit.training.collapse import ALIKE, likeness
from irkit.training.masking import PretrainBatch
from irkit.training.model_step import TextStep
from irkit.training.pretraining.objective import BaseObjective, Encoded, ObjectiveModule, Value


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

    def __init__(self, model: Model, objectives: Sequence[BaseObjective], *, seed: int = 0) -> None:
        """Join the parts.

        Args:
            model: Model to train.
            objectives: At least one, of different kinds.
            seed: Seed of the weights beside the model, and of the draws of the objectives.

        Raises:
            BadValueError: There is no objective, one comes twice, or one does not fit the model.
        """
        super().__init__(model)
        kinds = [objective.kind for objective in objectives]
        if not kinds or len(set(kinds)) < len(kinds):
            raise BadValueError(f"PretrainStep: got objectives {kinds}, expected at least one, none twice")
        self.objectives = tuple(objectives)
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
        """Sum the loss of each objective over its texts or tokens."""
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
        return Encoded(self.model, batch, hidden, vectors)

    def values(self, encoded: Encoded) -> list[tuple[BaseObjective, Value]]:
        """Return the value of each objective for a batch."""
        modules: dict[str, ObjectiveModule] = dict(self.modules_of.items())  # type: ignore[arg-type]
        return [(objective, modules[objective.kind](encoded)) for objective in self.objectives]
