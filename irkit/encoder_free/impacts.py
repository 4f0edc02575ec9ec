"""The model `Impacts`: weights by term that were computed elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain

from irkit.arguments import brief
from irkit.core.representation import Sparse
from irkit.data import Document, Query
from irkit.data.document import check_vector
from irkit.encoder_free.base_model import EncoderFreeModel, Side, check_side, sparse_rows
from irkit.encoder_free.settings import ImpactsConfig
from irkit.errors import BadTypeError, BadValueError


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
        vectors = _checked(items)
        with self._terms.store.snapshot() if vectors else nullcontext():
            rows = [self._terms.find(vector) for vector in vectors]
            return sparse_rows(rows, _weights(vectors), self.dim)

    def _rows(self, items: Sequence[Mapping[str, float]]) -> Sparse:
        rows = [self._terms.learn(vector) for vector in _checked(items)]
        return sparse_rows(rows, _weights(items), max(1, self._terms.known()))


def _checked(vectors: Iterable[object]) -> list[Mapping[str, float]]:
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
