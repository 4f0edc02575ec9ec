"""BM25: how often the terms of a query occur in a document, and how rare they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from irkit.data import Document, Query
from irkit.index import Store, bm25
from irkit.index.files import Array
from irkit.lexical.analyzer import Analyzer
from irkit.lexical.config import BM25Config
from irkit.lexical.model import LexicalModel, Side, check_side, sparse_rows
from irkit.ragged import Ragged
from irkit.representation import Sparse
from irkit.tokenizer import Piece, strings

__all__ = ["BM25"]

_MOST = 65535  # that an index counts; the weight is the same long before


class BM25(LexicalModel):
    """BM25 over the documents of an index, the baseline of every other model; it needs no training.

    The score of a document is the sum, over the terms of the query, of
    ``idf * tf / (tf + k1 * (1 - b + b * length / mean))`` with ``idf = ln(1 + (N - df + 0.5) / (df + 0.5))``,
    where df of the N documents have the term. A term that is twice in the query counts twice. It is the
    formula of Lucene 8 and later, but with exact lengths, which Lucene rounds.

    N and df are exact at any time, whatever was added and removed. The mean length is that of the documents
    of the build; an addition that finds it 1 % off renews it, and so does compaction.

    Examples:
        >>> from irkit import Retriever
        >>> texts = ["Bears sleep in winter.", "Copper conducts.", "A bear and its cubs"]
        >>> retriever = Retriever.build(BM25(k1=1.2, b=0.75), texts, "animals")  # doctest: +SKIP
        >>> [hit.id for hit in retriever.search("sleeping bears", k=2)]  # doctest: +SKIP
        ['0', '2']

    Source: Kamphuis et al., Which BM25 Do You Mean?, ECIR 2020.
    """

    config: BM25Config

    def __init__(
        self,
        k1: float = 0.9,
        b: float = 0.4,
        *,
        language: str = "english",
        stemming: bool = True,
        stop_words: Iterable[str] | None = None,
    ) -> None:
        """Choose the formula, and what a term is.

        Args:
            k1: How much it counts how often a term occurs; 0 asks only whether it does.
            b: How far long documents are held back, from 0 (not at all) to 1.
            language: See `Analyzer`.
            stemming: See `Analyzer`.
            stop_words: See `Analyzer`.

        Raises:
            ConfigError: A value is impossible.
            BadValueError: There is no such language.
        """
        settings = {"k1": k1, "b": b, "language": language, "stemming": stemming, "stop_words": stop_words}
        super().__init__(BM25Config.parse(settings, "BM25"))
        self.analyzer = Analyzer(language, stemming, self.config.stop_words)

    def begin(self, store: Store) -> None:
        """Let a new index keep counts, and weigh them."""
        bm25.begin(store, self.config.k1, self.config.b)

    def content(self, item: Document | Query) -> str:
        """The text; of a document title and text."""
        return item.text if isinstance(item, Query) else item.full_text

    def represent(self, items: Iterable[str], side: Side) -> Sparse:
        """Of queries idf times count of each term, of documents the rest of the formula."""
        check_side(side)
        texts = list(strings(items))
        if not texts:
            return sparse_rows((), None, self.dim)
        with self._terms.store.pinned():
            return self._represent(texts, side)

    def _represent(self, texts: Sequence[str], side: Side) -> Sparse:
        found = self._numbers(texts, self._terms.find)
        if side == "query":
            return self._queries(found)
        rows = sparse_rows(found, None, self.dim)
        lengths = np.repeat([float(len(row)) for row in found], rows.terms.lengths.numpy())
        mean = bm25.mean_length(self._terms.store)
        weights = bm25.saturate(rows.weights.numpy(), lengths, self.config.k1, self.config.b, mean)
        return Sparse(rows.terms, torch.from_numpy(weights), rows.dim)

    def pieces(self, text: str, side: Side) -> list[Piece]:
        """The terms of a text, and the characters they stand for."""
        return [Piece(*span) for span in self.analyzer.spans(text)]

    def _queries(self, found: Sequence[Sequence[int]]) -> Sparse:
        """As `sparse_rows` would make it, in a fraction of the time."""
        counts = [Counter(sorted(row)) for row in found]
        for row in counts:
            row.pop(-1, None)
        terms = np.array([term for row in counts for term in row], np.int32)
        weights = bm25.rarity(self._terms.store, terms) * [count for row in counts for count in row.values()]
        lengths = np.array(list(map(len, counts)))
        return _unchecked(terms, lengths, weights.astype(np.float32), self.dim)

    def _rows(self, items: Sequence[str]) -> Sparse:
        numbers = self._numbers(items, self._terms.learn)
        rows = sparse_rows(numbers, None, max(1, self._terms.known()))
        return Sparse(rows.terms, rows.weights.clamp(max=_MOST), rows.dim)

    def _numbers(self, texts: Sequence[str], number: Callable[[Iterable[str]], list[int]]) -> list[list[int]]:
        return [number(self.analyzer.terms(text)) for text in strings(texts)]


def _unchecked(terms: Array, lengths: Array, weights: Array, dim: int) -> Sparse:
    """A Sparse that is known to be right: what the classes check takes longer than the search of a query."""
    ragged, sparse = object.__new__(Ragged), object.__new__(Sparse)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    ragged.values, ragged.lengths, ragged.offsets = map(torch.from_numpy, (terms, lengths, offsets))
    for name, value in (("terms", ragged), ("weights", torch.from_numpy(weights)), ("dim", dim)):
        object.__setattr__(sparse, name, value)
    return sparse
