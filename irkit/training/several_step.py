"""One step of training of a model with several heads: losses of each head, and heads that learn from all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from irkit.config import Config, as_list
from irkit.core.ragged import Ragged
from irkit.core.representation import Representation, Several
from irkit.errors import BadValueError
from irkit.heads import Side
from irkit.model import Model
from irkit.model.pipeline import hidden_states
from irkit.training.example import Batch
from irkit.training.losses import Loss
from irkit.training.model_step import ModelStep
from irkit.training.regularizers import Regularizer
from irkit.training.scores import Scores
from irkit.training.train_step import TrainStep


class HeadTraining(Config):
    """How one head of several is trained.

    Attributes:
        losses: Losses of the scores of this head; None is the losses of the recipe.
        regularizers: Penalties on the weights of a sparse head.
        weight: Factor of the losses of this head in the sum, self-distillation included.
    """

    losses: Annotated[list[Loss] | None, BeforeValidator(lambda item: item and as_list(item))] = None
    regularizers: Annotated[list[Regularizer], BeforeValidator(as_list)] = Field(default_factory=list)
    weight: float = Field(1.0, gt=0)


class SelfDistillation(Config):
    """Heads learn from the sum of the scores of all heads.

    The sum of the scores, ``s = sum(weights[h] * s_h)``, gets the losses of the recipe, too. Its softmax over
    the documents of the batch (or, if no loss compares these, of the query) is the target of every head:
    ``-sum(softmax(s / t) log softmax(s_h / t))``, without gradients through the target.

    Attributes:
        weights: Weight of each head in the sum; a head that is not named weighs 1.
        temperature: ``t``.
        weight: Factor of this loss.

    Source: Chen et al. 2024, "BGE M3-Embedding" (arXiv 2402.03216), section 3.3.
    """

    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    temperature: float = Field(0.02, gt=0)
    weight: float = Field(1.0, gt=0)


class SeveralStep(TrainStep):
    """A model with several heads and their losses: called with a batch, it returns the sum of all losses.

    One pass of the encoder gives the representations of all heads.

    Attributes:
        heads: Step of each head by name.
        distillation: How heads learn from all heads; None if they do not.
    """

    def __init__(
        self,
        model: Model,
        losses: Sequence[Loss],
        heads: Mapping[str, HeadTraining] | None = None,
        *,
        distillation: SelfDistillation | None = None,
        gradient_cache_size: int | None = None,
    ) -> None:
        """Make a step of each head, and check that the losses fit.

        Args:
            model: Model with several heads.
            losses: Losses of heads that have none of their own, and of the sum of the scores.
            heads: Settings of heads by name; a missing one has the defaults.
            distillation: See the class.
            gradient_cache_size: See `TrainStep`.

        Raises:
            BadValueError: The model has one head, a head is unknown, or a loss does not fit a head.
        """
        ModelStep.__init__(self, model)
        settings = dict(heads or {})
        known = model.heads if model.head.parts else {}
        named = {*settings, *(distillation.weights if distillation else ())}
        if not known or (unknown := sorted(named - known.keys())):
            problem = f"no head {', '.join(unknown)}" if known else f"a model of {model.kind} vectors alone"
            raise BadValueError(
                f"training several heads: {problem}; expected "
                + (", ".join(known) or "a model of kind several")
            )
        self.factors = {name: settings.get(name, HeadTraining()).weight for name in known}
        self.heads: dict[str, TrainStep] = {}  # no submodules: they share the weights of the model
        for name, view in known.items():
            own = settings.get(name, HeadTraining())
            chosen = losses if own.losses is None else own.losses
            self.heads[name] = TrainStep(view, chosen, regularizers=own.regularizers)
        self.losses, self.regularizers = tuple(losses), ()
        self.matryoshka, self.interaction = None, None
        self.gradient_cache_size, self.distillation = gradient_cache_size, distillation
        of_sum = [loss.needs for loss in losses] if distillation else []
        self.needs = frozenset[str]().union(*(step.needs for step in self.heads.values()), *of_sum)
        if distillation and (wrong := [loss.kind for loss in losses if loss.needs & {"vectors", "guide"}]):
            raise BadValueError(
                f"training several heads: the loss {wrong[0]} compares vectors, and the sum of the scores of "
                "all heads has none; give it to one head by heads"
            )

    def forward(self, batch: Batch, progress: float = 0.0) -> Tensor:
        """Return the loss of a batch, see `TrainStep.forward`."""
        self.parts, self.signs = {}, {}
        queries: Any = self.encode(batch.queries, "query")
        documents: Any = self.encode(batch.documents, "document")
        total = torch.zeros((), device=batch.own.device)
        for name, step in self.heads.items():
            step.parts, step.signs = {}, {}
            step.needs = self.needs  # so that all heads compare the same documents
            value = step.compare(batch, queries.parts[name], documents.parts[name], progress)
            total = total + self.factors[name] * value
            for own, all_ in ((step.parts, self.parts), (step.signs, self.signs)):
                all_.update({f"{name}_{key}": part for key, part in own.items()})
        if self.distillation is not None:
            with torch.autocast(batch.own.device.type, enabled=False):
                total = total + self._distil(batch, self.distillation)
        return total

    def _encode(self, tokens: Ragged, side: Side) -> Representation:
        model, head = self.model, self.model.head
        hidden = hidden_states(model.encoder, head, tokens, None, side)
        length = model.pipeline(side).prompt_length
        rows = {name: one.for_training(hidden, tokens, length, side) for name, one in head.parts.items()}
        representation: Any = Several(rows)
        return cast(Representation, representation)

    def _distil(self, batch: Batch, distillation: SelfDistillation) -> Tensor:
        """Return the losses of the sum of all scores, and of each head that learns from the sum."""
        scores = {name: step.seen for name, step in self.heads.items()}
        first, share = next(iter(scores.values()))
        weights = {name: distillation.weights.get(name, 1.0) for name in scores}
        own = sum(weights[name] * head_scores.own for name, (head_scores, _) in scores.items())
        matrix = None
        if first.all is not None:
            matrix = sum(
                weights[name] * cast(Tensor, head_scores.all) for name, (head_scores, _) in scores.items()
            )
        summed = replace(
            first, own=cast(Tensor, own), all=cast("Tensor | None", matrix), queries=None, documents=None
        )
        total = torch.zeros((), device=batch.own.device)
        for loss in self.losses:
            if batch.targets is None and loss.scored_only:
                continue
            value = share * loss(summed)
            self._note(f"sum_{loss.kind}", value)
            total = total + loss.weight * value
        target = _logits(summed, distillation.temperature).softmax(1).detach()
        for name, (head_scores, _) in scores.items():
            logs = _logits(head_scores, distillation.temperature).log_softmax(1)
            value = share * -(target * logs).sum(1).mean()
            self._note(f"{name}_self_distillation", value)
            total = total + distillation.weight * self.factors[name] * value
        return total


def _logits(scores: Scores, temperature: float) -> Tensor:
    """Return scores for a softmax: over all documents of the batch, or over the documents of each query."""
    lowest = torch.finfo(scores.own.dtype).min
    if scores.all is not None:  # a document without tokens scores -inf, and 0 times -inf is no number
        return (scores.all / temperature).clamp(min=lowest)
    return (scores.own / temperature).masked_fill(~scores.mask, lowest)
