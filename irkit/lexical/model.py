"""What models without weights have in common: their terms, if any, are those of the documents of an index."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
import torch

from irkit.arguments import check_counts, shown
from irkit.data import Document, Query
from irkit.errors import BadValueError
from irkit.index import Store
from irkit.index.vocabulary import Vocabulary
from irkit.lexical.config import LexicalConfig
from irkit.ragged import Ragged
from irkit.representation import Representation, Sparse
from irkit.tokenizer import Piece

__all__ = ["LexicalModel", "Side", "check_side", "sparse_rows"]

Side: TypeAlias = Literal["query", "document"]


class LexicalModel(ABC):
    """What a `Retriever` takes in the place of a `Model`; `open` gives it the terms of an index.

    Attributes:
        config: All that decides about representations, beside the documents of the index.
    """

    kind: str = "sparse"
    similarity_name: str = "dot"

    def __init__(self, config: LexicalConfig) -> None:
        """Use `BM25`, `Impacts` or `Vectors`."""
        self.config = config
        self._vocabulary: Vocabulary | None = None

    def __repr__(self) -> str:
        settings = (f"{key}={value!r}" for key, value in self.config if key != "kind")
        return f"{type(self).__name__}({', '.join(settings)})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_vocabulary": None}  # a copy belongs to no index yet

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
        """The terms, by number."""
        return self._terms.strings or [""]

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that stand for the configuration."""
        return hashlib.blake2b(self.config.model_dump_json().encode(), digest_size=16).hexdigest()

    def open(self, store: Store) -> Self:
        """The same with the terms of an index."""
        twin = copy.copy(self)
        twin._vocabulary = Vocabulary(store)
        return twin

    def begin(self, store: Store) -> None:  # noqa: B027 (there may be nothing to do)
        """Make a new index fit to hold what comes from `stored`, inside ``store.update()``."""

    @abstractmethod
    def content(self, item: Document | Query) -> Any:
        """What is represented of a document or a query.

        Raises:
            BadValueError: It has nothing of the kind.
        """

    @abstractmethod
    def represent(self, items: Iterable[Any], side: Side) -> Representation:
        """Weights of terms, or vectors, which the index compares.

        Terms that the index does not have are left out. Without items it needs no index.

        Args:
            items: As `content` gives them.
            side: ``"query"`` or ``"document"``.

        Raises:
            BadTypeError: Items of another type.
            BadValueError: The model does not belong to an index yet, or there is no such side.
        """

    def stored(
        self, items: Iterable[Any], *, chunk_size: int, progress: Callable[[int], object] | None = None
    ) -> Iterator[Representation]:
        """What an index keeps of documents.

        Args:
            items: As `content` gives them.
            chunk_size: Documents of a part.
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

    def keep(self, count: int) -> None:
        """Store the first ``count`` terms, inside ``store.update()``: before a part is added, its ``dim``."""
        self._terms.keep(count)

    def pieces(self, text: str, side: Side) -> list[Piece]:
        """The terms of a text, and the characters they stand for; none where texts have no part in it."""
        return []

    @property
    def _terms(self) -> Vocabulary:
        if self._vocabulary is None:
            raise BadValueError(
                f"{self.name}: it knows no terms before it belongs to an index; use Retriever.build or load"
            )
        return self._vocabulary

    @abstractmethod
    def _rows(self, items: Sequence[Any]) -> Representation:
        """What is kept of documents, with numbers for new terms."""


def check_side(side: str) -> None:
    """Raise BadValueError unless ``side`` is one."""
    if not isinstance(side, str) or side not in get_args(Side):
        raise BadValueError(
            f"represent: side {shown(side)}, expected {' or '.join(map(repr, get_args(Side)))}"
        )


def sparse_rows(rows: Sequence[Sequence[int]], weights: Iterable[float] | None, dim: int) -> Sparse:
    """Rows of terms, in rising order.

    Args:
        rows: Numbers of terms; -1 is left out.
        weights: Of all of them, one row after the other; those of equal terms are added up. None: 1 each.
        dim: Number of terms.
    """
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    terms = np.fromiter((term for row in rows for term in row), np.int64, int(lengths.sum()))
    keys = np.repeat(np.arange(len(rows)) * dim, lengths) + terms
    ones = np.ones(len(keys)) if weights is None else np.fromiter(weights, np.float64, len(keys))
    known = terms >= 0
    keys, place = np.unique(keys[known], return_inverse=True)
    sums = np.bincount(place, ones[known], len(keys)).astype(np.float32)
    found = np.bincount(keys // dim, minlength=len(rows))
    numbers = torch.from_numpy((keys % dim).astype(np.int32))
    return Sparse(Ragged(numbers, torch.from_numpy(found)), torch.from_numpy(sums), dim)
