"""BM25: a score from the frequency of query terms in a document and in the collection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from irkit.core.ragged import Ragged
from irkit.core.representation import Sparse
from irkit.data import Document, Query
from irkit.encoder_free.analyzer import Analyzer
from irkit.encoder_free.base_model import EncoderFreeModel, Side, check_side, sparse_rows
from irkit.encoder_free.settings import BM25Config
from irkit.index import Store
from irkit.index import bm25_index as bm25
from irkit.index.array_files import Array
from irkit.tokenizer import TokenSpan, strings

_MAX_COUNT = 65535  # of a term in a document; the weight saturates long before


class BM25(EncoderFreeModel):
    """BM25 over the documents of an index, the common baseline; it needs no training.

    The score of a document is the sum, over the terms of the query, of
    ``idf * tf / (tf + k1 * (1 - b + b * length / mean))`` with ``idf = ln(1 + (N - df + 0.5) / (df + 0.5))``,
    where df of the N documents have the term, tf is how often the document has it, length is the number of
    terms of the document, repeated ones included, and mean is the mean length of documents. A term that
    occurs twice in the query counts twice. This is the formula of Lucene 8 and later, with exact document
    lengths instead of Lucene's rounded ones.

    N and df are always exact, after additions and removals too. The mean length is computed by the build. It
    is computed again by compaction, and by an addition that changes it by more than 1 %.

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
        """Configure the formula and the analyzer.

        Args:
            k1: Saturation of the term frequency; 0 counts only whether a term occurs.
            b: Normalization by the document length, from 0 (none) to 1 (full).
            language: See `Analyzer`.
            stemming: See `Analyzer`.
            stop_words: See `Analyzer`.

        Raises:
            ConfigError: A value is impossible.
            BadValueError: The language is unknown.
        """
        settings = {"k1": k1, "b": b, "language": language, "stemming": stemming, "stop_words": stop_words}
        super().__init__(BM25Config.parse(settings, "BM25"))
        self.analyzer = Analyzer(language, stemming, self.config.stop_words)

    def begin(self, store: Store) -> None:
        """Prepare a new index to store counts of terms, and to weigh them."""
        bm25.begin(store, self.config.k1, self.config.b)

    def content(self, item: Document | Query) -> str:
        """Return the text of a query, or title and text of a document."""
        return item.text if isinstance(item, Query) else item.full_text

    def encode_representation(self, items: Iterable[str], side: Side) -> Sparse:
        """Return weights of terms whose inner product is the score of BM25.

        The weight of a query term is idf times the count of the term in the query. The weight of a document
        term is the rest of the formula.
        """
        check_side(side)
        texts = list(strings(items))
        if not texts:
            return sparse_rows((), None, self.dim)
        with self._terms.store.snapshot():
            numbers = self._numbers(texts, self._terms.find)
            if side == "query":
                return self._queries(numbers)
            rows, mean = sparse_rows(numbers, None, self.dim), bm25.mean_length(self._terms.store)
            lengths = np.repeat([float(len(row)) for row in numbers], rows.terms.lengths.numpy())
            weights = bm25.saturate(rows.weights.numpy(), lengths, self.config.k1, self.config.b, mean)
            return Sparse(rows.terms, torch.from_numpy(weights), rows.dim)

    def token_spans(self, text: str, side: Side) -> list[TokenSpan]:
        """Return the terms of a text and their characters."""
        return [TokenSpan(*span) for span in self.analyzer.spans(text)]

    def _queries(self, numbers: Sequence[Sequence[int]]) -> Sparse:
        """Weigh the terms of queries, given as numbers (-1 for no term), faster than `sparse_rows` would."""
        counts = [Counter(sorted(row)) for row in numbers]
        for row in counts:
            row.pop(-1, None)
        terms = np.array([term for row in counts for term in row], np.int32)
        weights = bm25.rarity(self._terms.store, terms) * [count for row in counts for count in row.values()]
        lengths = np.array(list(map(len, counts)))
        return _unchecked(terms, lengths, weights.astype(np.float32), self.dim)

    def _rows(self, items: Sequence[str]) -> Sparse:
        numbers = self._numbers(items, self._terms.learn)
        rows = sparse_rows(numbers, None, max(1, self._terms.known()))
        return Sparse(rows.terms, rows.weights.clamp(max=_MAX_COUNT), rows.dim)

    def _numbers(self, texts: Sequence[str], number: Callable[[Iterable[str]], list[int]]) -> list[list[int]]:
        return [number(self.analyzer.terms(text)) for text in strings(texts)]


def _unchecked(terms: Array, lengths: Array, weights: Array, dim: int) -> Sparse:
    """Make a Sparse without its checks, because they take longer than the search for a query."""
    ragged, sparse = object.__new__(Ragged), object.__new__(Sparse)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    ragged.values, ragged.lengths, ragged.offsets = map(torch.from_numpy, (terms, lengths, offsets))
    ragged._host = ragged._longest = None
    for name, value in (("terms", ragged), ("weights", torch.from_numpy(weights)), ("dim", dim)):
        object.__setattr__(sparse, name, value)
    return sparse
