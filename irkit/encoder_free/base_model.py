"""Base class of models without an encoder. The index stores the terms of such a model, if it has any."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
import torch

from irkit.arguments import brief, check_counts
from irkit.core.ragged import Ragged
from irkit.core.representation import Representation, Sparse
from irkit.data import Document, Query
from irkit.encoder_free.settings import EncoderFreeConfig
from irkit.errors import BadValueError
from irkit.index import Store
from irkit.index.array_files import Array
from irkit.index.term_ids import LooseTerms, Vocabulary
from irkit.tokenizer import TokenSpan

Side: TypeAlias = Literal["query", "document"]


class EncoderFreeModel(ABC):
    """Replaces a `irkit.Model` in a `irkit.Retriever`; `open` attaches it to an index.

    Attributes:
        config: The settings that decide representations.
    """

    kind: str = "sparse"
    similarity_name: str = "dot"

    def __init__(self, config: EncoderFreeConfig) -> None:
        """Store the configuration; callers create `BM25`, `Impacts` or `Vectors`."""
        self.config = config
        self._vocabulary: Vocabulary | LooseTerms | None = None

    def __repr__(self) -> str:
        settings = (f"{key}={value!r}" for key, value in self.config if key != "kind")
        return f"{type(self).__name__}({', '.join(settings)})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_vocabulary": None}  # a copy is not attached to an index

    @property
    def name(self) -> str:
        """``"bm25"``, ``"impacts"`` or ``"vectors"``."""
        return self.config.kind

    @property
    def dim(self) -> int:
        """Number of terms, at least 1."""
        return max(1, len(self._terms)) if self._vocabulary else 1

    @property
    def vocabulary(self) -> Sequence[str]:
        """The strings of the terms, by number."""
        return self._terms.strings or [""]

    @property
    def fingerprint(self) -> str:
        """Hash of the configuration: 32 hexadecimal digits."""
        return hashlib.blake2b(self.config.model_dump_json().encode(), digest_size=16).hexdigest()

    def open(self, store: Store) -> Self:
        """Return a copy that is attached to an index and has its terms."""
        opened = copy.copy(self)
        opened._vocabulary = Vocabulary(store)
        return opened

    def begin(self, store: Store) -> None:  # noqa: B027 (there may be nothing to do)
        """Write what the model needs into a new index; call it inside ``store.update()``."""

    @abstractmethod
    def content(self, item: Document | Query) -> Any:
        """Return the part of a document or a query that the model represents: a text, weights, or a vector.

        Raises:
            BadValueError: The document or query lacks this part.
        """

    @abstractmethod
    def encode_representation(self, items: Iterable[Any], side: Side) -> Representation:
        """Return term weights or vectors, which the index compares.

        Terms that the index lacks are dropped. If ``items`` is empty, the model need not be attached to an
        index.

        Args:
            items: Values from `content`.
            side: ``"query"`` or ``"document"``.

        Raises:
            BadTypeError: An item has another type.
            BadValueError: The model is not attached to an index, or the side is unknown.
        """

    def stored(
        self, items: Iterable[Any], *, chunk_size: int, progress: Callable[[int], object] | None = None
    ) -> Iterator[Representation]:
        """Yield the rows that an index stores for documents, in parts.

        Args:
            items: Values from `content`.
            chunk_size: Number of documents per part.
            progress: Called with the number of documents of each part.

        Raises:
            BadValueError: ``chunk_size`` is below 1.
        """
        check_counts(self.name, chunk_size=chunk_size)
        source = iter(items)
        while chunk := list(islice(source, chunk_size)):
            yield self._rows(chunk)
            if progress is not None:
                progress(len(chunk))

    def stored_apart(self, items: Sequence[Any]) -> tuple[Representation, list[str]]:
        """Analyze documents without an index; return their rows, and the terms in order of appearance.

        The rows number terms by the order of appearance in ``items``. After an index has learned these terms,
        `renumbered` turns the rows into those that `stored` would return. For vectors, the list of terms is
        empty.
        """
        apart = copy.copy(self)
        apart._vocabulary = terms = LooseTerms()
        return apart._rows(items), terms.strings

    def learn(self, terms: Iterable[str]) -> list[int]:
        """Return the numbers of terms in the index; new terms get one, which `keep` stores."""
        numbers: list[int] = self._terms.learn(terms)
        return numbers

    def keep(self, count: int) -> None:
        """Store the first ``count`` terms in the index; call it inside ``store.update()``.

        Args:
            count: Number of terms; the ``dim`` of the next representation that the caller adds to the index.
        """
        self._terms.keep(count)

    def token_spans(self, text: str, side: Side) -> list[TokenSpan]:
        """Return the terms of a text and their characters; nothing for models that do not read texts."""
        return []

    @property
    def _terms(self) -> Any:
        if self._vocabulary is None:
            raise BadValueError(
                f"{self.name}: it knows no terms before it belongs to an index; use Retriever.build or load"
            )
        return self._vocabulary

    @abstractmethod
    def _rows(self, items: Sequence[Any]) -> Representation:
        """Return the rows that an index stores for documents: counts or weights of terms, or vectors.

        Terms that are new to the index get the next numbers.
        """


def check_side(side: str) -> None:
    """Raise BadValueError unless ``side`` is ``"query"`` or ``"document"``."""
    if not isinstance(side, str) or side not in get_args(Side):
        raise BadValueError(
            f"encode_representation: side {brief(side)}, expected {' or '.join(map(repr, get_args(Side)))}"
        )


def sparse_rows(rows: Sequence[Sequence[int]], weights: Iterable[float] | None, dim: int) -> Sparse:
    """Make sparse rows; terms are sorted, and the weights of equal terms are added up.

    Args:
        rows: Numbers of terms, per row; the number -1 stands for no term and is dropped.
        weights: Weights of all terms, row after row; None stands for 1 each.
        dim: Number of terms.
    """
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    terms = np.fromiter((term for row in rows for term in row), np.int64, int(lengths.sum()))
    keys = np.repeat(np.arange(len(rows)) * dim, lengths) + terms
    values = np.ones(len(keys)) if weights is None else np.fromiter(weights, np.float64, len(keys))
    known = terms >= 0
    keys, positions = np.unique(keys[known], return_inverse=True)
    return sparse_from_keys(keys, np.bincount(positions, values[known], len(keys)), len(rows), dim)


def renumbered(rows: Sparse, numbers: Array, dim: int) -> Sparse:
    """Replace term ``t`` of sparse rows by ``numbers[t]``, of ``dim`` terms, and sort each row again."""
    owners = np.repeat(np.arange(len(rows)) * dim, rows.terms.lengths.numpy())
    keys = owners + numbers[rows.terms.values.numpy()]
    order = np.argsort(keys, kind="stable")
    return sparse_from_keys(keys[order], rows.weights.numpy()[order], len(rows), dim)


def sparse_from_keys(keys: Array, weights: Array, n: int, dim: int) -> Sparse:
    """Make ``n`` sparse rows from one key per weight.

    Args:
        keys: ``(nonzeros,)`` int64 in rising order, each ``row * dim + term``.
        weights: ``(nonzeros,)``, the weight of each key.
        n: Number of rows.
        dim: Number of terms.
    """
    lengths = torch.from_numpy(np.bincount(keys // dim, minlength=n))
    terms = Ragged(torch.from_numpy((keys % dim).astype(np.int32)), lengths)
    return Sparse(terms, torch.from_numpy(weights.astype(np.float32)), dim)
