"""Collections of sparse vectors: generated ones with topics, and real text weighted by BM25."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import data_dir
from benchmarks.worker import K

__all__ = ["BM25", "SparseVectors", "generate", "lexical", "read", "recall", "texts", "transposed"]

Array = np.ndarray[Any, Any]

BM25 = 0.9, 0.4  # k1 and b


@dataclass
class SparseVectors:
    """Documents and queries, compressed by rows.

    Attributes:
        offsets: ``(n + 1,)`` int64, where each document begins.
        terms: ``(nonzeros,)`` integers, rising within a document.
        weights: ``(nonzeros,)`` float32.
        query_offsets: ``(n_q + 1,)`` int64.
        query_terms: As ``terms``.
        query_weights: As ``weights``.
        dim: ``()`` int64, size of the vocabulary.
        best: ``(n_q, 10)`` float64, the highest scores, falling; 0 where fewer documents share a term.
        counts: ``(nonzeros,)`` uint16 of text: how often each term occurs, beside ``terms``.
        query_counts: The same, beside ``query_terms``.
    """

    offsets: Array
    terms: Array
    weights: Array
    query_offsets: Array
    query_terms: Array
    query_weights: Array
    dim: Array
    best: Array = field(default_factory=lambda: np.empty((0, K)))
    counts: Array = field(default_factory=lambda: np.empty(0, np.uint16))
    query_counts: Array = field(default_factory=lambda: np.empty(0, np.uint16))

    def query(self, number: int) -> tuple[Array, Array]:
        """Return terms and weights of a query."""
        part = slice(self.query_offsets[number], self.query_offsets[number + 1])
        return self.query_terms[part], self.query_weights[part]

    def write(self, folder: Path) -> None:
        """Write one .npy file per attribute."""
        folder.mkdir(parents=True)
        for name, array in asdict(self).items():
            np.save(folder / f"{name}.npy", array)


def read(folder: Path) -> SparseVectors:
    """Map what `SparseVectors.write` wrote from the files."""
    names = SparseVectors.__annotations__
    return SparseVectors(**{name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names})


def generate(documents: int, queries: int = 1000) -> SparseVectors:
    """Generate documents of some 110 terms and queries of some 40, distributed like those of SPLADE.

    A topic (500 documents each) has 500 terms drawn from a Zipf-Mandelbrot law, and 20 facets of 40 of them.
    A document takes 70 % of its terms from its topic and facet, 15 % from another topic and 15 % from
    everywhere. A query has twelve of the heaviest terms of one document and many light ones of its topic.
    """
    from benchmarks.sparse_generator import DIM, make

    return _complete(SparseVectors(*make(documents, queries, max(200, documents // 500), 123), np.array(DIM)))


def texts(collections: Sequence[str]) -> SparseVectors:
    """Read documents and queries of collections of `data_dir`, and weigh them by `lexical`."""
    from irkit.data import read_documents, read_queries
    from irkit.encoder_free.analyzer import Analyzer

    folders = [data_dir() / name for name in collections]
    analyzer, numbers = Analyzer(), dict[str, int]()
    documents = {each.id: each.full_text for folder in folders for each in read_documents(folder)}
    found = [
        [numbers.setdefault(term, len(numbers)) for term in analyzer.terms(text)]
        for text in documents.values()
    ]
    asked = [
        [numbers[term] for term in analyzer.terms(query.text) if term in numbers]
        for folder in folders
        for query in read_queries(folder)
    ]
    return lexical(found, asked, len(numbers))


def lexical(found: Sequence[list[int]], asked: Sequence[list[int]], dim: int) -> SparseVectors:
    """Count the terms of documents and queries, and weigh them by BM25 (queries by its idf)."""
    from irkit.index.bm25_index import saturate

    offsets, terms, counts = _counted(found)
    lengths = np.array([len(each) for each in found])
    weights = saturate(counts, np.repeat(lengths, np.diff(offsets)), *BM25, lengths.mean())
    frequencies = np.bincount(terms, minlength=dim)
    rarity = np.log1p((len(found) - frequencies + 0.5) / (frequencies + 0.5))
    query_offsets, query_terms, query_counts = _counted(asked)
    return _complete(
        SparseVectors(
            offsets,
            terms,
            weights,
            query_offsets,
            query_terms,
            (query_counts * rarity[query_terms]).astype(np.float32),
            np.array(dim),
            counts=counts,
            query_counts=query_counts,
        )
    )


def _counted(rows: Sequence[list[int]]) -> tuple[Array, Array, Array]:
    """Return offsets, terms and how often each occurs."""
    pairs = [np.unique(np.array(row, np.int32), return_counts=True) for row in rows]
    offsets = np.cumsum([0, *(len(terms) for terms, _ in pairs)])
    terms = np.concatenate([terms for terms, _ in pairs])
    return offsets, terms, np.concatenate([counts for _, counts in pairs]).astype(np.uint16)


def _complete(vectors: SparseVectors) -> SparseVectors:
    """Add the highest scores."""
    starts, rows, impacts = transposed(vectors)
    vectors.best = np.zeros((len(vectors.query_offsets) - 1, K))
    for number, best in enumerate(vectors.best):
        scores = np.zeros(len(vectors.offsets) - 1)
        for term, weight in zip(*vectors.query(number), strict=True):
            part = slice(starts[term], starts[term + 1])
            scores[rows[part]] += float(weight) * impacts[part].astype(np.float64)
        top = np.partition(scores, max(0, len(scores) - K))[-K:]
        best[: len(top)] = np.sort(top)[::-1]
    return vectors


def transposed(vectors: SparseVectors) -> tuple[Array, Array, Array]:
    """Sort by terms, see `benchmarks.sparse_scan.transpose`."""
    from benchmarks.sparse_scan import transpose

    arrays = vectors.offsets, vectors.terms, vectors.weights
    result: tuple[Array, Array, Array] = transpose(*arrays, int(vectors.dim))
    return result


def recall(hits: Sequence[Sequence[int]], vectors: SparseVectors) -> float:
    """Return the share of the ten best exact scores that the hits of each query reach; ties count."""
    shares, query = [], np.zeros(int(vectors.dim))
    for number, (found, best) in enumerate(zip(hits, vectors.best, strict=True)):
        wanted = int((best > 0).sum())
        if wanted:
            terms, weights = vectors.query(number)
            query[terms] = weights
            parts = [slice(vectors.offsets[row], vectors.offsets[row + 1]) for row in set(found)]
            scores = [query[vectors.terms[part]] @ vectors.weights[part] for part in parts]
            good = sum(score >= best[wanted - 1] * (1 - 1e-6) for score in scores)
            shares.append(min(wanted, good) / wanted)
            query[terms] = 0
    return float(np.mean(shares))
