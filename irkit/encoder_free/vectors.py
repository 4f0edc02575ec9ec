"""Vectors, and weights by term, that were computed elsewhere, such as by a service: `Vectors`, `Impacts`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, Literal, Self, cast

import numpy as np
import torch

from irkit.arguments import brief
from irkit.core.ragged import Ragged
from irkit.core.representation import Dense, MultiVector, Representation, Sparse
from irkit.data import Document, Query
from irkit.data.document import as_vector, check_vector
from irkit.encoder_free.base_model import EncoderFreeModel, Side, check_side, sparse_rows
from irkit.encoder_free.settings import ImpactsConfig, VectorsConfig
from irkit.errors import BadTypeError, BadValueError
from irkit.index import Store

_AXES = {"dense": 1, "multi_vector": 2}


class Impacts(EncoderFreeModel):
    """Represents documents and queries by the term weights that come with them.

    The weights are the ``vector`` of a record, as in impact indexes of Anserini and Pyserini:
    ``{"id": "1", "contents": "...", "vector": {"bear": 2.1, "winter": 0.7}}``. `irkit encode` writes such
    records.

    Examples:
        >>> from irkit import Retriever
        >>> documents = {"1": {"vector": {"bear": 2.0, "winter": 0.5}}, "2": {"vector": {"copper": 1.5}}}
        >>> retriever = Retriever.build(Impacts(), documents, "impacts")  # doctest: +SKIP
        >>> retriever.search({"bear": 1.5, "cub": 1.0}, k=1)[0].score  # doctest: +SKIP
        3.0
    """

    def __init__(self) -> None:
        super().__init__(ImpactsConfig())

    def content(self, item: Document | Query) -> Mapping[str, float]:
        """Return the weights by term."""
        if not isinstance(item.vector, Mapping):
            kind = type(item).__name__.lower()
            raise BadValueError(
                f"impacts: {kind} {item.id!r} has no weights; expected vector: {{term: weight}}"
            )
        return item.vector

    def encode_representation(self, items: Iterable[Mapping[str, float]], side: Side) -> Sparse:
        """Return the weights of the terms that the index has."""
        check_side(side)
        vectors = _checked_weights(items)
        with self._terms.store.snapshot() if vectors else nullcontext():
            rows = [self._terms.find(vector) for vector in vectors]
            return sparse_rows(rows, _weights(vectors), self.dim)

    def _rows(self, items: Sequence[Mapping[str, float]]) -> Sparse:
        rows = [self._terms.learn(vector) for vector in _checked_weights(items)]
        return sparse_rows(rows, _weights(items), max(1, self._terms.known()))


class Vectors(EncoderFreeModel):
    """Represents documents and queries by the vectors that come with them.

    A vector is a list, an array or a tensor: ``(dim,)`` for dense models, ``(tokens, dim)`` for multi-vector
    models. The first document decides kind and width, unless they are given. If the first document has
    weights by term, `fit` returns an `Impacts` model instead.

    Args:
        similarity: ``"dot"`` compares vectors by inner product or MaxSim; ``"cosine"`` normalizes them first.
        representation: ``"dense"`` or ``"multi_vector"``.
        dim: Width of a vector.

    Examples:
        >>> from irkit import Retriever
        >>> vectors = np.eye(3, dtype=np.float32)
        >>> retriever = Retriever.build(Vectors("cosine"), zip("abc", vectors), "vectors")  # doctest: +SKIP
        >>> retriever.search([0.0, 2.0, 0.0], k=1)[0].id  # doctest: +SKIP
        'b'
    """

    config: VectorsConfig

    def __init__(
        self,
        similarity: Literal["dot", "cosine"] = "dot",
        *,
        representation: Literal["dense", "multi_vector"] | None = None,
        dim: int | None = None,
    ) -> None:
        settings = {"similarity": similarity, "representation": representation, "dim": dim}
        super().__init__(VectorsConfig.parse(settings, "vectors"))
        self.first = ""  # hash of the first vector: a killed build resumes only with the same vectors

    @property
    def kind(self) -> str:  # type: ignore[override]
        """``"dense"`` or ``"multi_vector"``; ``"dense"`` if not known yet."""
        return self.config.representation or "dense"

    @property
    def similarity_name(self) -> str:  # type: ignore[override]
        """``"dot"`` or ``"cosine"``."""
        return self.config.similarity

    @property
    def dim(self) -> int:
        """Width of a vector; 0 if not known yet."""
        return self.config.dim or 0

    def fit(self, documents: Iterator[Document]) -> tuple[EncoderFreeModel, Iterator[Document]]:
        """Return the model with kind and width of the first document, and all documents.

        Raises:
            BadValueError: The first document has no vector, or one of another kind or width than configured.
        """
        seen: list[Document] = []
        for first in documents:
            seen.append(first)
            if first.vector is None or len(first.vector):  # one without tokens has no width
                break
        else:
            if seen and self.config.dim is None:
                raise BadValueError(
                    f"vectors: document {seen[0].id!r} has no tokens, and there is no other; give a document "
                    "with some, or Vectors(representation='multi_vector', dim=128)"
                )
            return self, iter(seen)
        documents = chain(seen, documents)
        if isinstance(first.vector, Mapping) and self.config == VectorsConfig():
            return Impacts(), documents
        if not isinstance(first.vector, np.ndarray):
            self.content(first)  # raises
        shape = np.shape(cast(Any, first.vector))
        kind = next(kind for kind in _AXES if _AXES[kind] == len(shape))
        settings = self.config.model_dump(exclude={"kind"}, exclude_none=True)
        model = type(self)(**{"representation": kind, "dim": shape[-1], **settings})
        model.first = hashlib.blake2b(model.content(first).tobytes(), digest_size=16).hexdigest()
        return model, documents

    def open(self, store: Store) -> Self:
        """Return a new model with the settings of an index: similarity, kind and width of vectors."""
        settings = store.meta["model"]["settings"]
        return type(self)(**{key: value for key, value in settings.items() if key != "kind"})

    def content(self, item: Document | Query) -> np.ndarray[Any, Any]:
        """Return the vector."""
        kind = type(item).__name__.lower()
        if item.vector is None:
            raise BadValueError(
                f"vectors: {kind} {item.id!r} has no vector; expected vector: [numbers], because there is no "
                "model that would encode its text"
            )
        return self._checked(item.vector, f"{kind} {item.id!r}")

    def split_queries(self, queries: Any) -> tuple[list[Any], bool]:
        """Return the vectors of queries, and whether there is a single one.

        Args:
            queries: One vector, several vectors, or a `Representation` of several queries.

        Raises:
            BadTypeError: A query is a text, or anything but a vector.
            BadValueError: A vector has another kind or width, or is not finite.
        """
        if isinstance(queries, Representation):
            if queries.kind != self.kind or isinstance(queries, Sparse):
                raise BadValueError(
                    f"vectors: got {queries.kind} queries, but the documents are {self.kind}; give what the "
                    "model of the documents makes of queries"
                )
            return list(queries.values if isinstance(queries, Dense) else queries.tokens), False
        is_number = not isinstance(queries, Iterable) or getattr(queries, "ndim", 1) == 0
        if isinstance(queries, str | Mapping) or is_number:
            return [self._checked(queries, "a query")], True
        if not hasattr(queries, "shape"):
            queries = list(queries)
        single = len(queries) > 0 and _axes(queries) == _AXES[self.kind]
        return ([queries] if single else list(queries)), single

    def encode_representation(self, items: Iterable[Any], side: Side) -> Dense | MultiVector:
        """Stack vectors, one array ``(dim,)`` or ``(tokens, dim)`` per item, as Dense or MultiVector.

        Vectors get length 1 if the similarity is ``"cosine"``.
        """
        check_side(side)
        if not isinstance(items, Iterable):
            raise BadTypeError(f"vectors: got {brief(items)}, expected several vectors")
        return self._rows([self._checked(item, f"a {side}") for item in items])

    def keep(self, count: int) -> None:
        """Do nothing: vectors have no terms."""

    def _rows(self, items: Sequence[Any]) -> Dense | MultiVector:
        if self.config.representation is None or self.config.dim is None:
            raise BadValueError(
                "vectors: no document and no setting says of which kind and width they are; give documents, "
                "or Vectors(representation='dense', dim=384)"
            )
        tokens = [item.reshape(-1, self.dim) for item in items]
        values = torch.from_numpy(np.concatenate([np.empty((0, self.dim), np.float32), *tokens]))
        if self.config.similarity == "cosine":
            values = torch.nn.functional.normalize(values, dim=-1)
        if self.kind == "dense":
            return Dense(values)
        return MultiVector(Ragged(values, torch.tensor([len(rows) for rows in tokens], dtype=torch.int64)))

    def _checked(self, vector: Any, owner: str) -> np.ndarray[Any, Any]:
        if isinstance(vector, str):
            raise BadTypeError(
                f"vectors: {owner} is the text {brief(vector)}, but this index has no model for texts; "
                "give its vector, made by the model of the documents"
            )
        try:
            numbers = as_vector(vector)
        except (BadTypeError, BadValueError) as error:
            raise type(error)(f"vectors: {owner}: {error}") from error
        if not isinstance(numbers, np.ndarray):
            raise BadTypeError(
                f"vectors: {owner} has {brief(vector)}, expected numbers; weights by term go into an index "
                "of their own, of the model 'impacts'"
            )
        if self.kind == "multi_vector" and numbers.shape == (0,):
            numbers = np.empty((0, self.dim), np.float32)
        expected = (self.dim,) if self.kind == "dense" else ("tokens", self.dim)
        if numbers.ndim != len(expected) or numbers.shape[-1] != self.dim:
            raise BadValueError(
                f"vectors: {owner} has a vector of shape {numbers.shape}, expected "
                f"({', '.join(map(str, expected))}{',' * (len(expected) == 1)}), as the first document; give "
                "vectors of one model"
            )
        return numbers


def _axes(values: Any) -> int:
    """Count the axes of nested lists and arrays by their first items; below 0 if no numbers are in them.

    The first item that is not empty counts. An empty item alone is a text without tokens.
    """
    axes = 0
    while isinstance(values, list | tuple) and values:
        axes, values = axes + 1, next((item for item in values if not _is_empty(item)), values[0])
    if _is_empty(values):
        return axes + _AXES["multi_vector"]
    if hasattr(values, "ndim"):
        return axes + int(values.ndim)
    return axes if isinstance(values, int | float) else -9


def _is_empty(item: Any) -> bool:
    return not item if isinstance(item, list | tuple) else 0 in getattr(item, "shape", ())


def _checked_weights(vectors: Iterable[object]) -> list[Mapping[str, float]]:
    if not isinstance(vectors, Iterable):
        raise BadTypeError(f"impacts: got {brief(vectors)}, expected weights by term of several texts")
    items = []
    for item in vectors:
        if not isinstance(item, Mapping):
            raise BadTypeError(f"impacts: got {brief(item)}, expected weights by term: {{term: weight}}")
        check_vector(item)
        items.append(item)
    return items


def _weights(vectors: Sequence[Mapping[str, float]]) -> Iterator[float]:
    return chain.from_iterable(vector.values() for vector in vectors)
