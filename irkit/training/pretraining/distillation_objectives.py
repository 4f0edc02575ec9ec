"""Distillation on texts alone: a student learns from a teacher.

The teacher is usually the same model with its pooling layers switched off.
"""

from __future__ import annotations

import copy
from typing import Literal, Self

import torch
from irkit_kernels.ragged_pool import ragged_pool
from pydantic import NonNegativeFloat, model_validator
from torch import Tensor
from torch.nn import functional as F

from irkit.core.ragged import Ragged
from irkit.core.representation import MultiVector
from irkit.core.scoring import score
from irkit.encoder import Encoder
from irkit.errors import BadValueError
from irkit.heads import Head, Side, as_multi_vector_head
from irkit.model import Model
from irkit.model.pipeline import hidden_states
from irkit.training.pretraining.pretrain_step import BaseObjective, Encoded, ObjectiveModule, Value

_QUERY = 32  # leading tokens of a text that serve as a query, unless the model cuts queries earlier


class Distillation(BaseObjective):
    """Learn the vectors of a teacher without pooling layers.

    For a model with one vector per text, the target is the vector of the teacher. For a multi-vector model,
    the target of each row is the mean of the teacher's token vectors over the window of the row, for
    documents and for queries (the first tokens of texts). A second target are the terms of MaxSim: the
    largest similarity of each query token to each document of the batch.

    Texts get no prompts.

    Attributes:
        teacher: Directory or name of a model with the same tokenizer and vectors of the same kind and width;
            None is the model before training, without its pooling layers.
        cosine: Weight of 1 - cosine of each vector and its target.
        mse: Weight of the squared error. For one vector per text: the error of the vector, relative to the
            squared length of the teacher's. For multi-vector models: the error of the similarities.
        states: Weight of 1 - cosine of hidden states: of each row of the encoder, and the mean of the
            teacher's hidden states over the window of the row. A text has many hidden states, so they teach
            more than one vector per text.

    Source: Sanh et al. 2019, "DistilBERT", section 2, for the cosine; Reimers and Gurevych 2020, "Making
    Monolingual Sentence Embeddings Multilingual using Knowledge Distillation", for the squared error.
    """

    kind: Literal["distillation"] = "distillation"
    teacher: str | None = None
    cosine: NonNegativeFloat = 1.0
    mse: NonNegativeFloat = 1.0
    states: NonNegativeFloat = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.cosine or self.mse or self.states):
            raise ValueError("'cosine', 'mse' and 'states' are all 0, which teaches nothing; leave one at 1")
        return self

    def prepare(self, model: Model, seed: int = 0) -> ObjectiveModule:
        """Make the frozen teacher, which is neither trained nor saved; see `BaseObjective.prepare`.

        Raises:
            BadValueError: The teacher does not fit the model, or is the model itself.
        """
        if model.kind not in ("dense", "multi_vector"):
            raise BadValueError(
                f"distillation: the model makes {model.kind} vectors, expected dense or multi_vector"
            )
        if not model.head.pools("document"):
            raise BadValueError("distillation: pooled_sides of the model lacks 'document'; add it")
        if self.teacher is None and not _pools(model):
            raise BadValueError(
                "distillation: the model has no pooling layers, so that it is its own teacher; give it some "
                "with `pooling`, or name a `teacher`"
            )
        teacher = _Teacher(model if self.teacher is None else _load_teacher(self.teacher, model))
        return _OneVector(teacher, self) if model.kind == "dense" else _ManyVectors(teacher, self)


class _Teacher:
    """Encoder and head of a model, frozen and unpooled; not a module, so neither trained nor saved."""

    def __init__(self, model: Model) -> None:
        self.encoder, self.head = copy.deepcopy((model.encoder, model.head))
        if isinstance(self.encoder, Encoder):
            self.encoder.set_pooling_([None] * len(self.encoder.layers))
        self.head.window = (1, 1)
        for part in (self.encoder, self.head):
            part.eval().requires_grad_(False)

    def hidden(self, tokens: Ragged) -> Ragged:
        if next(self.encoder.parameters()).device != tokens.device:
            self.encoder.to(tokens.device)
            self.head.to(tokens.device)
        return self.encoder(tokens)


class _Distilling(ObjectiveModule):
    def __init__(self, teacher: _Teacher, weights: Distillation) -> None:
        super().__init__()
        self._teacher, self._weights = teacher, weights

    def value(self, encoded: Encoded, cosine: Tensor, squares: Tensor, hidden: Ragged) -> Value:
        """Weigh and add the parts of the loss.

        Args:
            encoded: Batch and output of the trained model.
            cosine: Scalar, the mean of 1 - cosine.
            squares: Scalar, the mean squared error.
            hidden: Output of the teacher's encoder for the batch.

        Returns:
            The weighted sum and each part, multiplied by the number of texts of the batch.
        """
        count = len(encoded.batch)
        total = self._weights.cosine * cosine + self._weights.mse * squares
        parts = {"cosine": cosine, "mse": squares}
        if self._weights.states:
            window = encoded.encoder.config.window
            means = hidden.values if window == (1, 1) else ragged_pool(hidden.values, hidden.offsets, *window)
            parts["states"] = _distance(encoded.hidden.values, means)
            total = total + self._weights.states * parts["states"]
        return Value(count * total, count, {name: count * part.detach() for name, part in parts.items()})


class _OneVector(_Distilling):
    def forward(self, encoded: Encoded) -> Value:
        batch, teacher = encoded.batch, self._teacher
        vectors = encoded.model.head(encoded.hidden, batch.tokens).values  # type: ignore[union-attr]
        with torch.no_grad():
            hidden = teacher.hidden(batch.original)
            targets = teacher.head(hidden, batch.original).values  # type: ignore[union-attr]
        cosine = (1 - F.cosine_similarity(vectors, targets)).mean()
        squares = ((vectors - targets).square().sum(1) / targets.square().sum(1).clamp(min=1e-12)).mean()
        return self.value(encoded, cosine, squares, hidden)


class _ManyVectors(_Distilling):
    def forward(self, encoded: Encoded) -> Value:
        batch, encoder, teacher = encoded.batch, encoded.model.encoder, self._teacher
        head = as_multi_vector_head(encoded.model.head, "distillation")
        target = as_multi_vector_head(teacher.head, "distillation")
        # queries are the first tokens of the texts
        start = batch.tokens.positions() < min(head.max_length("query") or _QUERY, _QUERY)
        query_tokens, original = batch.tokens.where(start), batch.original.where(start)
        query_states = hidden_states(encoder, head, query_tokens, None, "query")
        queries = head.token_vectors(query_states, original, "query")
        documents = head.token_vectors(encoded.hidden, batch.original, "document")
        # targets, from which nothing was hidden
        with torch.no_grad():
            hidden = teacher.hidden(batch.original)
            document_tokens = target.token_vectors(hidden, batch.original, "document")
            tokens = target.token_vectors(teacher.hidden(original), original, "query")
            target_queries = self._means(head, original, "query", tokens)
            target_documents = self._means(head, batch.original, "document", document_tokens)
            target_similarities = _similarities(target_queries, document_tokens)
        of_queries = _distance(queries.values, target_queries.values)
        of_documents = _distance(documents.values, target_documents.values)
        squares = (_similarities(queries, documents) - target_similarities).square().mean()
        return self.value(encoded, (of_queries + of_documents) / 2, squares, hidden)

    def _means(self, student: Head, tokens: Ragged, side: Side, vectors: Ragged) -> Ragged:
        """Average the teacher's token vectors over the windows of the trained model, and normalise the means.

        Args:
            student: Head of the trained model, whose windows decide.
            tokens: Token ids of the texts.
            side: ``"query"`` or ``"document"``.
            vectors: Vectors of the teacher, one per token that has a vector.

        Returns:
            One vector per vector of ``student``; ``vectors`` itself if this side is not pooled.
        """
        if student.window == (1, 1) or not student.pools(side):
            return vectors
        head = as_multi_vector_head(student, "distillation")
        teacher = as_multi_vector_head(self._teacher.head, "distillation")
        whole = vectors.values.new_zeros(len(tokens.values), teacher.dim)
        whole[teacher.has_vector(tokens, side)] = vectors.values
        means = F.normalize(ragged_pool(whole, tokens.offsets, *head.window), dim=-1)
        return head.spans(tokens, side).with_values(means).where(head.has_vector(tokens, side))


def _distance(vectors: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of 1 - cosine over the rows of ``(rows, dim)``; 0 without rows."""
    return (1 - F.cosine_similarity(vectors, targets)).sum() / max(1, len(vectors))


def _similarities(queries: Ragged, documents: Ragged) -> Tensor:
    """Return ``(query tokens, documents)``: the largest product of a query token and a document."""
    single = Ragged(queries.values, torch.ones(len(queries.values), dtype=torch.int64))
    return score(MultiVector(single), MultiVector(documents))


def _load_teacher(name: str, model: Model) -> Model:
    teacher = Model.from_pretrained(name, device="cpu")
    theirs, ours = ((part.kind, part.head.dim, part.tokenizer.signature) for part in (teacher, model))
    if theirs != ours:
        other = "another tokenizer" if theirs[:2] == ours[:2] else f"{theirs[0]} vectors of width {theirs[1]}"
        raise BadValueError(
            f"distillation: the teacher {name} has {other}; the model makes {ours[0]} vectors of width "
            f"{ours[1]}, expected the same of the same tokens"
        )
    if _pools(teacher):
        raise BadValueError(f"distillation: the teacher {name} pools; expected one without pooling layers")
    return teacher


def _pools(model: Model) -> bool:
    return isinstance(model.encoder, Encoder) and any(model.encoder.config.schedule)
