"""Vectors that were computed elsewhere: by a service, by other software, on another machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, Self, cast

import numpy as np
import torch

from irkit.arguments import shown
from irkit.data import Document, Query
from irkit.data.document import as_vector
from irkit.errors import BadTypeError, BadValueError
from irkit.index import Store
from irkit.lexical.config import VectorsConfig
from irkit.lexical.impacts import Impacts
from irkit.lexical.model import LexicalModel, Side, check_side
from irkit.ragged import Ragged
from irkit.representation import Dense, MultiVector, Representation, Sparse

__all__ = ["Vectors"]

_AXES = {"dense": 1, "multi_vector": 2}


class Vectors(LexicalModel):
    """Stands for the model that computed the vectors of documents and queries, which come with them.

    A dense vector is a list, an array or a tensor ``(dim,)``, one of a multi-vector model ``(tokens, dim)``.
    Kind and width are those of the first document unless they are given. If that has weights by term,
    `Impacts` takes the place.

    Args:
        similarity: ``"dot"``, inner products of the vectors as they are (of tokens, their MaxSim); or
            ``"cosine"``, which makes every vector one of length 1.
        representation: ``"dense"`` or ``"multi_vector"``.
        dim: Numbers of a vector.

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
        self.first = ""  # hash of the first vector, so that a killed build goes on with the same ones only

    @property
    def kind(self) -> str:  # type: ignore[override]
        """``"dense"`` or ``"multi_vector"``; the former as long as it is not known."""
        return self.config.representation or "dense"

    @property
    def similarity_name(self) -> str:  # type: ignore[override]
        """``"dot"`` or ``"cosine"``."""
        return self.config.similarity

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self.config.dim or 0

    def fit(self, documents: Iterator[Document]) -> tuple[LexicalModel, Iterator[Document]]:
        """The model whose kind and width are those of the first of ``documents``, and all of them.

        Raises:
            BadValueError: It has no vector, or another one than was said.
        """
        first = next(documents, None)
        if first is None:
            return self, documents
        documents = chain([first], documents)
        if isinstance(first.vector, Mapping) and self.config == VectorsConfig():
            return Impacts(), documents
        if not isinstance(first.vector, np.ndarray):
            self.content(first)  # says so
        shape = np.shape(cast(Any, first.vector))
        found = {
            "representation": next(kind for kind in _AXES if _AXES[kind] == len(shape)),
            "dim": shape[-1],
        }
        given = self.config.model_dump(exclude={"kind"}, exclude_none=True)
        model = type(self)(**{**found, **given})
        model.first = hashlib.blake2b(model.content(first).tobytes(), digest_size=16).hexdigest()
        return model, documents

    def open(self, store: Store) -> Self:
        """The same with kind and width of an index."""
        settings = store.meta["model"]["settings"]
        return type(self)(**{key: value for key, value in settings.items() if key != "kind"})

    def content(self, item: Document | Query) -> np.ndarray[Any, Any]:
        """The vector."""
        kind = type(item).__name__.lower()
        if item.vector is None:
            raise BadValueError(
                f"vectors: {kind} {item.id!r} has no vector; expected vector: [numbers], because there is no "
                "model that would encode its text"
            )
        return self._checked(item.vector, f"{kind} {item.id!r}")

    def given(self, queries: Any) -> tuple[list[Any], bool]:
        """Vectors of queries, and whether it is only one.

        Args:
            queries: One, several, or a `Representation` of several.

        Raises:
            BadTypeError: There are texts, or something else that is no vector.
            BadValueError: They are of another kind or width, or not finite.
        """
        if isinstance(queries, Representation):
            if queries.kind != self.kind or isinstance(queries, Sparse):
                raise BadValueError(
                    f"vectors: got {queries.kind} queries, but the documents are {self.kind}; give what the "
                    "model of the documents makes of queries"
                )
            return list(queries.values if isinstance(queries, Dense) else queries.tokens), False
        if isinstance(queries, str | Mapping) or not isinstance(queries, Iterable):
            return [self._checked(queries, "a query")], True
        if not hasattr(queries, "shape"):
            queries = list(queries)
        single = len(queries) > 0 and _axes(queries) == _AXES[self.kind]
        return ([queries] if single else list(queries)), single

    def represent(self, items: Iterable[Any], side: Side) -> Dense | MultiVector:
        """The vectors, of length 1 if they are compared by cosine."""
        check_side(side)
        if not isinstance(items, Iterable):
            raise BadTypeError(f"vectors: got {shown(items)}, expected several vectors")
        return self._rows([self._checked(item, f"a {side}") for item in items])

    def keep(self, count: int) -> None:
        """There are no terms."""

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
        return MultiVector(Ragged(values, torch.tensor([len(some) for some in tokens], dtype=torch.int64)))

    def _checked(self, vector: Any, owner: str) -> np.ndarray[Any, Any]:
        if isinstance(vector, str):
            raise BadTypeError(
                f"vectors: {owner} is the text {shown(vector)}, but this index has no model for texts; "
                "give its vector, made by the model of the documents"
            )
        try:
            numbers = as_vector(vector)
        except (BadTypeError, BadValueError) as error:
            raise type(error)(f"vectors: {owner}: {error}") from error
        if not isinstance(numbers, np.ndarray):
            raise BadTypeError(
                f"vectors: {owner} has {shown(vector)}, expected numbers; weights by term go into an index "
                "of their own, of the model 'impacts'"
            )
        expected = (self.dim,) if self.kind == "dense" else ("tokens", self.dim)
        if numbers.ndim != len(expected) or numbers.shape[-1] != self.dim:
            raise BadValueError(
                f"vectors: {owner} has a vector of shape {numbers.shape}, expected "
                f"({', '.join(map(str, expected))}{',' * (len(expected) == 1)}), as the first document; give "
                "vectors of one model"
            )
        return numbers


def _axes(given: Any) -> int:
    """Axes of nested lists and arrays, by the first of each; below 0 if they hold no numbers."""
    axes = 0
    while isinstance(given, list | tuple):
        if not given:
            return axes + 1
        axes, given = axes + 1, given[0]
    if hasattr(given, "ndim"):
        return axes + int(given.ndim)
    return axes if isinstance(given, int | float) else -9
