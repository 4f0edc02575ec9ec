"""Distillation on texts alone: a model learns to make what another makes, above all what it made unpooled."""

from __future__ import annotations

import copy
from typing import Literal, Self

import torch
from irkit_kernels.ragged_pool import ragged_pool
from pydantic import NonNegativeFloat, model_validator
from torch import Tensor
from torch.nn import functional as F

from irkit.encoder import Encoder
from irkit.errors import BadValueError
from irkit.heads import MultiVectorHead, PooledHead, Side
from irkit.model import Model
from irkit.model.batching import hidden_states
from irkit.ragged import Ragged
from irkit.representation import MultiVector
from irkit.scoring import score
from irkit.training.pretraining.base import BaseObjective, Encoded, ObjectiveModule, Value

__all__ = ["Distillation"]

_QUERY = 32  # leading tokens of a text that stand for a query, where the model does not cut them earlier


class Distillation(BaseObjective):
    """Make of a text what a teacher makes of it, which has no pooling layers.

    A model of one vector a text is held against the vector of the teacher. The rows of a multi-vector model
    are held against the means of the teacher's token vectors over their windows, queries (the first tokens of
    texts) and documents alike, and so are the largest similarities of each query token to each document of
    the batch, which MaxSim is made of.

    Prompts of the model are not put in front of texts.

    Attributes:
        teacher: Directory or name of a model with the same tokenizer and as wide vectors of the same kind;
            None is the model that training starts with, without its pooling layers.
        cosine: Weight of 1 - cosine.
        mse: Weight of the squared error: of vectors, relative to the teacher's squared length; of
            similarities.
        states: Weight of 1 - cosine of hidden states: each row of the encoder and the mean of the teacher's
            over its window. That is much more to learn from than one vector a text.

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
        """The frozen teacher, which is neither trained nor saved; see `BaseObjective.prepare`.

        Raises:
            BadValueError: The teacher is not for the model, or is the model itself.
        """
        if not isinstance(model.head, PooledHead | MultiVectorHead):
            raise BadValueError(
                f"distillation: the model makes {model.kind} vectors, expected dense or multi_vector"
            )
        if isinstance(model.head, MultiVectorHead) and not model.head.pools("document"):
            raise BadValueError("distillation: pooled_sides of the model lacks 'document'; add it")
        if self.teacher is None and not _pools(model):
            raise BadValueError(
                "distillation: the model has no pooling layers, so that it is its own teacher; give it some "
                "with `pooling`, or name a `teacher`"
            )
        teacher = _Teacher(model if self.teacher is None else _named(self.teacher, model))
        return _OneVector(teacher, self) if model.kind == "dense" else _ManyVectors(teacher, self)


class _Teacher:
    """Encoder and head of a model, frozen and unpooled; no module: it is neither trained nor saved."""

    def __init__(self, model: Model) -> None:
        self.encoder, self.head = copy.deepcopy((model.encoder, model.head))
        if isinstance(self.encoder, Encoder):
            self.encoder.pool_([None] * len(self.encoder.layers))
        if isinstance(self.head, MultiVectorHead):
            self.head.window = (1, 1)
        for part in (self.encoder, self.head):
            part.eval().requires_grad_(False)

    def hidden(self, tokens: Ragged) -> Ragged:
        if next(self.encoder.parameters()).device != tokens.device:
            self.encoder.to(tokens.device)
            self.head.to(tokens.device)
        return self.encoder(tokens)


class _OneVector(ObjectiveModule):
    def __init__(self, teacher: _Teacher, weights: Distillation) -> None:
        super().__init__()
        self._teacher, self._weights = teacher, weights

    def forward(self, encoded: Encoded) -> Value:
        batch, teacher = encoded.batch, self._teacher
        made = encoded.model.head(encoded.hidden, batch.tokens).values  # type: ignore[union-attr]
        with torch.no_grad():
            hidden = teacher.hidden(batch.original)
            wanted = teacher.head(hidden, batch.original).values  # type: ignore[union-attr]
        cosine = (1 - F.cosine_similarity(made, wanted)).mean()
        squares = ((made - wanted).square().sum(1) / wanted.square().sum(1).clamp(min=1e-12)).mean()
        return _weighed(self._weights, encoded, cosine, squares, hidden)


class _ManyVectors(ObjectiveModule):
    def __init__(self, teacher: _Teacher, weights: Distillation) -> None:
        super().__init__()
        self._teacher, self._weights = teacher, weights

    def forward(self, encoded: Encoded) -> Value:
        batch, head, encoder = encoded.batch, encoded.model.head, encoded.model.encoder
        teacher = self._teacher
        assert isinstance(head, MultiVectorHead) and isinstance(teacher.head, MultiVectorHead)  # noqa: PT018
        start = batch.tokens.positions() < min(head.max_length("query") or _QUERY, _QUERY)
        asked, original = batch.tokens.where(start), batch.original.where(start)
        queries = head.token_vectors(hidden_states(encoder, head, asked, None, "query"), original, "query")
        documents = head.token_vectors(encoded.hidden, batch.original, "document")
        with torch.no_grad():
            hidden = teacher.hidden(batch.original)
            tokens = teacher.head.token_vectors(hidden, batch.original, "document")
            known = teacher.head.token_vectors(teacher.hidden(original), original, "query")
            wanted_queries = self._means(head, original, "query", known)
            wanted_documents = self._means(head, batch.original, "document", tokens)
            wanted = _similarities(wanted_queries, tokens)
        cosine = (
            _distance(queries.values, wanted_queries.values)
            + _distance(documents.values, wanted_documents.values)
        ) / 2
        squares = (_similarities(queries, documents) - wanted).square().mean()
        return _weighed(self._weights, encoded, cosine, squares, hidden)

    def _means(self, head: MultiVectorHead, tokens: Ragged, side: Side, vectors: Ragged) -> Ragged:
        """The teacher's vectors, averaged over the windows that the rows of ``head`` stand for."""
        if head.window == (1, 1) or not head.pools(side):
            return vectors
        teacher = self._teacher.head
        assert isinstance(teacher, MultiVectorHead)
        whole = vectors.values.new_zeros(len(tokens.values), teacher.dim)
        whole[teacher.kept(tokens, side)] = vectors.values
        means = F.normalize(ragged_pool(whole, tokens.offsets, *head.window), dim=-1)
        return head.spans(tokens, side).with_values(means).where(head.kept(tokens, side))


def _distance(made: Tensor, wanted: Tensor) -> Tensor:
    """Mean of 1 - cosine of ``(rows, dim)``; 0 without rows."""
    return (1 - F.cosine_similarity(made, wanted)).sum() / max(1, len(made))


def _similarities(queries: Ragged, documents: Ragged) -> Tensor:
    """``(query tokens, documents)``: of each token the largest product with one of each document."""
    single = Ragged(queries.values, torch.ones(len(queries.values), dtype=torch.int64))
    return score(MultiVector(single), MultiVector(documents))


def _weighed(
    weights: Distillation, encoded: Encoded, cosine: Tensor, squares: Tensor, hidden: Ragged
) -> Value:
    """The sum, and its parts; ``hidden`` is what the encoder of the teacher makes."""
    count = len(encoded.batch)
    total = weights.cosine * cosine + weights.mse * squares
    parts = {"cosine": cosine, "mse": squares}
    if weights.states:
        window = encoded.encoder.config.window
        means = hidden.values if window == (1, 1) else ragged_pool(hidden.values, hidden.offsets, *window)
        parts["states"] = _distance(encoded.hidden.values, means)
        total = total + weights.states * parts["states"]
    return Value(count * total, count, {name: count * part.detach() for name, part in parts.items()})


def _named(name: str, model: Model) -> Model:
    teacher = Model.from_pretrained(name, device="cpu")
    found, wanted = ((each.kind, each.head.dim, each.tokenizer.signature) for each in (teacher, model))
    if found != wanted:
        same = "another tokenizer" if found[:2] == wanted[:2] else f"{found[0]} vectors of width {found[1]}"
        raise BadValueError(
            f"distillation: the teacher {name} has {same}; the model makes {wanted[0]} vectors of width "
            f"{wanted[1]}, expected the same of the same tokens"
        )
    if _pools(teacher):
        raise BadValueError(f"distillation: the teacher {name} pools; expected one without pooling layers")
    return teacher


def _pools(model: Model) -> bool:
    return isinstance(model.encoder, Encoder) and any(model.encoder.config.schedule)
