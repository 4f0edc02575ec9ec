"""Sparse alignment pre-training: a sparse model learns the logits of a teacher that has the same terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from irkit.core.ragged import Ragged
from irkit.errors import ConfigError
from irkit.heads import as_sparse_head
from irkit.model import Model
from irkit.training.example import Movable
from irkit.training.model_step import TextStep


@dataclass(frozen=True)
class AlignmentBatch(Movable):
    """Texts as both models read them.

    Attributes:
        tokens: Ragged ids ``(total,)`` of the student.
        teacher_tokens: Ragged ids of the teacher for the same texts.
    """

    tokens: Ragged
    teacher_tokens: Ragged


class AlignmentCollator:
    """Make an `AlignmentBatch` of numbered texts; ``max_length`` cuts the texts of both models."""

    def __init__(self, student: Model, teacher: Model, max_length: int) -> None:
        self.student, self.teacher = student.tokenizer, teacher.tokenizer
        self.max_length: int | None = max_length

    def __call__(self, texts: Sequence[tuple[int, str]]) -> AlignmentBatch:
        """Tokenize texts, each given with its number."""
        strings = [text for _, text in texts]
        sides = (side(strings, max_length=self.max_length) for side in (self.student, self.teacher))
        return AlignmentBatch(*sides)


class AlignmentStep(TextStep):
    """Mean squared difference of the highest logits of student and teacher.

    The highest logit of a term is taken over the tokens of a text. Terms count where one of the two is
    positive, that is, where a model gives the term a weight.

    Attributes:
        model: The student.
        teacher: A sparse model with the same terms; it is not trained.

    Source: "Bridging Vocabulary Gaps", section 6.3 (SAP); the loss follows the authors' code of Nguyen et al.
        2025, "MILCO: Learned Sparse Retrieval Across Languages via a Multilingual Connector".
    """

    def __init__(self, model: Model, teacher: Model) -> None:
        """Store the models.

        Raises:
            ConfigError: A model is not sparse, or the two have different terms.
        """
        terms = [_terms(side) for side in (model, teacher)]
        if terms[0] != terms[1]:
            raise ConfigError(
                f"adaptation.teacher: it has {len(terms[1])} terms, the model {len(terms[0])}, and they "
                "differ; expected a sparse model on the target vocabulary"
            )
        super().__init__(model)
        self._teacher = (teacher.eval().requires_grad_(False),)  # a tuple hides its weights from the trainer

    def forward(self, batch: AlignmentBatch, progress: float = 0.0) -> Tensor:
        """Return the mean loss over the terms of all texts, 0 without terms; ``progress`` is not used."""
        loss, count = self.loss_sums(batch)["loss"]
        return loss / self.divisor(count)

    def loss_sums(self, batch: AlignmentBatch) -> dict[str, tuple[Tensor, int]]:
        """Return ``loss``: the sum of squared differences, and the number of terms."""
        teacher = self._teacher[0].to(self.model.device)
        with torch.no_grad():
            teacher_logits = torch.stack(list(highest_logits(teacher, batch.teacher_tokens)))
        logits = torch.stack(list(highest_logits(self.model, batch.tokens)))
        counted = (teacher_logits > 0) | (logits > 0)
        return {"loss": ((logits - teacher_logits)[counted].square().sum(), int(counted.sum()))}


def highest_logits(model: Model, tokens: Ragged) -> Iterator[Tensor]:
    """Yield the highest logit of each term over the tokens of a text, ``(terms,)`` float32, text by text.

    A text without tokens gives no term a weight: its logits are 0.

    Args:
        model: A sparse model.
        tokens: Ragged ids on its device.
    """
    head = as_sparse_head(model.head, "highest_logits")
    for states in model.encoder(tokens):
        values = states.to(torch.promote_types(states.dtype, torch.float32))
        for layer in head.layers:
            values = layer(values)
        logits = F.linear(values.to(head.weight.dtype), head.weight, None).float()
        logits = logits if head.bias is None else logits + head.bias.float()
        yield logits.amax(0) if len(logits) else logits.sum(0)


def _terms(model: Model) -> list[str]:
    if model.kind != "sparse":
        raise ConfigError(f"adaptation.teacher: got a {model.kind} model, expected two sparse ones")
    head = as_sparse_head(model.head, "alignment")
    return list(head.vocabulary or model.tokenizer.tokens(head.dim))
