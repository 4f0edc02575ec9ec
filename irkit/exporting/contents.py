"""The `Contents` of an index, which exports stream: documents with their representations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from irkit.core.representation import Dense, MultiVector, Representation, Several
from irkit.data import Document
from irkit.index.array_files import Array
from irkit.index.several_index import SeveralIndex
from irkit.retrieval.retriever import Retriever

_TOGETHER = 256  # documents in memory


class Exported(NamedTuple):
    """A document that is exported.

    Attributes:
        row: Its row in the index; its id in engines whose ids are numbers.
        document: Id, text and metadata.
        vector: ``(dim,)`` or ``(tokens, dim)`` float32; or, if sparse, terms ``(n,)`` and weights ``(n,)``.
            If the model has several heads, a dictionary of these by head.
    """

    row: int
    document: Document
    vector: Any


class Column(NamedTuple):
    """One of the representations that documents have.

    Attributes:
        kind: ``"dense"``, ``"multi_vector"`` or ``"sparse"``.
        dim: Width of a vector, or number of terms.
    """

    kind: str
    dim: int


class KeyTypes(NamedTuple):
    """The types of the values that documents store under one metadata key.

    Attributes:
        types: Some of ``"number"``, ``"string"``, ``"boolean"``, ``"null"`` and ``"other"``.
        in_lists: Whether some documents store a list of values.
    """

    types: frozenset[str]
    in_lists: bool

    @property
    def single(self) -> str:
        """The type of all values but null; ``"other"`` if there are several."""
        [*types] = self.types - {"null"}
        return types[0] if len(types) == 1 else "other"


@dataclass(frozen=True)
class Contents:
    """The documents of an index, one state of it, in the order of their rows.

    Attributes:
        retriever: The index.
        progress: Called with the number of documents exported since its last call.
    """

    retriever: Retriever
    progress: Callable[[int], object]

    @property
    def kind(self) -> str:
        """``"dense"``, ``"multi_vector"`` or ``"sparse"``; ``"several"`` of a model with several heads."""
        return str(self.retriever.store.meta["model"]["kind"])

    @property
    def is_bm25(self) -> bool:
        """Whether the index is one of BM25: its weights come from the texts."""
        return bool(self.retriever.store.meta["model"]["name"] == "bm25")

    @property
    def dim(self) -> int:
        """Width of a vector, or number of terms."""
        return self.retriever.index.dim or int(self.retriever.store.meta["model"]["dim"] or 1)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The representations of a document: by head if the model has several, or else by kind."""
        index = self.retriever.index
        if not isinstance(index, SeveralIndex):
            return {self.kind: Column(self.kind, self.dim)}
        return {name: Column(str(part.representation), part.dim or 1) for name, part in index.parts.items()}

    @property
    def metrics(self) -> dict[str, str]:
        """What a score is, by the names of `columns`, see `irkit.index.metrics`."""
        index = self.retriever.index
        parts = index.parts if isinstance(index, SeveralIndex) else {self.kind: index}
        return {name: str(getattr(part.config, "metric", "inner_product")) for name, part in parts.items()}

    def vectors(self, item: Exported) -> dict[str, Any]:
        """Return the vectors of a document by the names of `columns`."""
        return item.vector if isinstance(item.vector, dict) else {self.kind: item.vector}

    @cached_property
    def _names(self) -> dict[str, Sequence[str]]:
        model: Any = self.retriever.model
        heads = model.heads if self.kind == "several" else {self.kind: model}
        return {
            name: heads[name].vocabulary for name, column in self.columns.items() if column.kind == "sparse"
        }

    def weights(self, name: str, vector: Any) -> dict[str, float]:
        """Return the weights of a sparse vector of the column ``name`` by the names of their terms."""
        terms, weights = vector
        names = self._names[name]
        return dict(zip([names[term] for term in terms.tolist()], weights.tolist(), strict=True))

    @cached_property
    def terms(self) -> Sequence[str]:
        """Names of terms by number; loads the model."""
        return self.retriever.model.vocabulary

    @property
    def about(self) -> dict[str, Any]:
        """What a search of the exported documents must know: model, metric, and keys of the metadata.

        ``types`` has for each key the type of its values, and whether they are in lists. Reads all documents.
        """
        return {
            "model": self.retriever.store.meta["model"],
            "kind": self.kind,
            "dim": self.dim,
            "documents": len(self.retriever),
            "metric": next(iter(self.metrics.values())),
            "keys": self.retriever.documents.metadata_keys(),
            "types": {key: [types.single, types.in_lists] for key, types in self.keys.items()},
        }

    def ids(self) -> Iterator[str]:
        """Yield the ids of the documents."""
        for rows in self._blocks():
            yield from self.retriever.documents.ids(rows)

    def __iter__(self) -> Iterator[Exported]:
        retriever = self.retriever
        for rows in self._blocks():
            documents = retriever.documents.fetch(rows)
            vectors = split_rows(retriever.index.representations(rows))
            for row, document, vector in zip(rows.tolist(), documents, vectors, strict=True):
                yield Exported(row, document, vector)
            self.progress(len(rows))

    def batches(self) -> Iterator[list[Exported]]:
        """Yield the documents, 256 at a time."""
        batch: list[Exported] = []
        for item in self:
            batch.append(item)
            if len(batch) == _TOGETHER:
                yield batch
                batch = []
        if batch:
            yield batch

    @cached_property
    def keys(self) -> dict[str, KeyTypes]:
        """The types of each key of the metadata; reads all documents."""
        types: dict[str, set[str]] = {}
        lists: set[str] = set()
        for rows in self._blocks():
            for document in self.retriever.documents.fetch(rows):
                for key, value in document.metadata.items():
                    values = value if isinstance(value, list) else [value]
                    types.setdefault(key, set()).update(map(_type_of, values))
                    if isinstance(value, list):
                        lists.add(key)
        return {key: KeyTypes(frozenset(kinds), key in lists) for key, kinds in sorted(types.items())}

    def _blocks(self) -> Iterator[Array]:
        live = np.flatnonzero(self.retriever.index.live)
        yield from (live[start : start + _TOGETHER] for start in range(0, len(live), _TOGETHER))


def split_rows(representation: Representation | Several) -> Iterator[Any]:
    """Yield the vector of each row, see `Exported`."""
    if isinstance(representation, Several):
        parts = [split_rows(part) for part in representation.parts.values()]
        for vectors in zip(*parts, strict=True):
            yield dict(zip(representation.parts, vectors, strict=True))
        return
    arrays = representation.arrays()
    if isinstance(representation, Dense):
        yield from arrays["values"]
        return
    ends = np.cumsum(arrays["lengths"])
    for start, end in zip((ends - arrays["lengths"]).tolist(), ends.tolist(), strict=True):
        if isinstance(representation, MultiVector):
            yield arrays["values"][start:end]
        else:
            yield arrays["terms"][start:end], arrays["weights"][start:end]


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else "string" if isinstance(value, str) else "other"
