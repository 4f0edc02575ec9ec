"""One step of pre-training: texts in, the weighted sum of the objectives out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from irkit.errors import BadValueError
from irkit.heads import PooledHead
from irkit.model import Model
from irkit.representation import Dense
from irkit.training.collapse import ALIKE, likeness
from irkit.training.model_step import ModelStep
from irkit.training.pretraining.base import BaseObjective, Encoded, ObjectiveModule, Value
from irkit.training.pretraining.batches import PretrainBatch

__all__ = ["PretrainStep", "validate"]


class PretrainStep(ModelStep):
    """A model with what it is pre-trained by: each text is encoded once for all objectives.

    What objectives train beside the model, as the decoder of masked auto-encoding, is part of checkpoints and
    not of the model that is saved.

    Attributes:
        model: What is trained.
        objectives: As they were given.
        modules_of: What each of them trains beside the model, by kind.
        parts: Values of the objectives in the last step, and shares of tokens that were told right.

    Examples:
        >>> step = PretrainStep(model, [MaskedAutoEncoding(), BagOfWords()])  # doctest: +SKIP
        >>> step(PretrainCollator(model.tokenizer)([(0, "a text")])).backward()  # doctest: +SKIP
    """

    def __init__(self, model: Model, objectives: Sequence[BaseObjective], *, seed: int = 0) -> None:
        """Join the parts.

        Args:
            model: What is trained.
            objectives: At least one, of different kinds.
            seed: Of the weights of what is trained beside the model, and of its draws.

        Raises:
            BadValueError: There is no objective, one comes twice, or one is not for such a model.
        """
        super().__init__(model)
        kinds = [each.kind for each in objectives]
        if not kinds or len(set(kinds)) < len(kinds):
            raise BadValueError(f"PretrainStep: got objectives {kinds}, expected at least one, none twice")
        self.objectives = tuple(objectives)
        self.modules_of = nn.ModuleDict({each.kind: each.prepare(model, seed) for each in objectives})
        head = model.head
        self._pool = (
            PooledHead(model.encoder.hidden_size, head.pooling) if isinstance(head, PooledHead) else None
        )

    def forward(self, batch: PretrainBatch, progress: float = 0.0) -> Tensor:
        """The loss of a batch: of each objective the mean over what it counts, in all processes.

        Args:
            batch: On the device of the model.
            progress: Of no use.
        """
        total, self.parts, self.signs = torch.zeros((), device=batch.tokens.device), {}, {}
        encoded = self._encoded(batch)
        if encoded.vectors is not None and (alike := likeness(Dense(encoded.vectors))) is not None:
            self.signs[ALIKE] = alike
        for objective, value in self._values(encoded):
            loss = value.total / self.shared(value.count, value.total.device)
            total = total + objective.weight * loss
            self.parts[objective.kind] = loss.detach()
            for name, part in value.parts.items():
                self.parts[f"{objective.kind}_{name}"] = part.detach() / max(1, value.count)
        return total

    def values(self, batch: PretrainBatch) -> list[tuple[BaseObjective, Value]]:
        """What each objective says of a batch."""
        return self._values(self._encoded(batch))

    def _encoded(self, batch: PretrainBatch) -> Encoded:
        hidden = self.model.encoder(batch.tokens)
        vectors = None if self._pool is None else self._pool(hidden, batch.tokens).values
        return Encoded(self.model, batch, hidden, vectors)

    def _values(self, encoded: Encoded) -> list[tuple[BaseObjective, Value]]:
        modules: dict[str, ObjectiveModule] = dict(self.modules_of.items())  # type: ignore[arg-type]
        return [(each, modules[each.kind](encoded)) for each in self.objectives]


@torch.no_grad()
def validate(step: PretrainStep, batches: Iterable[PretrainBatch]) -> dict[str, float]:
    """Losses without dropout, each the mean over what it counts in all batches.

    Args:
        step: Comes back in the mode in which it was.
        batches: With the same numbers of texts, the same is hidden each time.

    Returns:
        ``loss``, the weighted sum, and a value by the name of each objective.
    """
    training, sums, counts = step.training, dict[str, float](), dict[str, int]()
    step.eval()
    try:
        for batch in batches:
            for objective, value in step.values(batch.to(step.model.device)):
                sums[objective.kind] = sums.get(objective.kind, 0.0) + float(value.total)
                counts[objective.kind] = counts.get(objective.kind, 0) + value.count
    finally:
        step.train(training)
    means = {kind: total / max(1, counts[kind]) for kind, total in sums.items()}
    loss = sum(objective.weight * means.get(objective.kind, 0.0) for objective in step.objectives)
    return {"loss": loss, **means}
