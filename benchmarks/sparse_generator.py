"""Made-up sparse vectors of the shape of SPLADE's; compiled, and the same everywhere for a seed."""
# ruff: noqa: NPY002 (of numba's generators, this one takes a seed and repeats its numbers from run to run)

from __future__ import annotations

from typing import Any

import numba
import numpy as np

__all__ = ["DIM", "make"]

Array = np.ndarray[Any, Any]

DIM = 30522  # terms, as many as of BERT's vocabulary
_OF_TOPIC, _FACETS, _OF_FACET = 500, 20, 40  # terms of a topic, facets of a topic, terms of a facet
_MOST = 210  # terms of a document


@numba.njit(cache=True)
def make(documents: int, queries: int, topics: int, seed: int) -> tuple[Array, ...]:
    """Return offsets, terms and weights of documents and of queries, see `sparse_vectors.generate`."""
    # terms with popularities by Zipf, in random order, and topics of them
    np.random.seed(seed)
    popularity = np.empty(DIM)
    for rank in range(DIM):
        popularity[rank] = 1.0 / (rank + 20.0) ** 0.9
    names = np.random.permutation(DIM)  # terms by popularity
    model = _topics(topics, np.cumsum(popularity))

    # documents, with their terms in order
    offsets = np.zeros(documents + 1, np.int64)
    terms, weights = np.empty(documents * 130, np.uint16), np.empty(documents * 130, np.float32)
    subjects = np.empty((documents, 2), np.int64)  # topic and facet of each document
    weight, found = np.zeros(DIM, np.float32), np.empty(_MOST, np.int32)
    for row in range(documents):
        count = _document(model, subjects[row], weight, found)
        start, stop = offsets[row], offsets[row] + count
        terms[start:stop] = names[found[:count]]
        order = np.argsort(terms[start:stop])
        terms[start:stop] = terms[start:stop][order]
        weights[start:stop] = weight[found[:count][order]]
        weight[found[:count]] = 0.0
        offsets[row + 1] = stop

    # queries, each of a random document
    query_offsets = np.zeros(queries + 1, np.int64)
    query_terms, query_weights = np.empty(queries * 64, np.uint16), np.empty(queries * 64, np.float32)
    for query in range(queries):
        row = np.random.randint(0, documents)
        part = slice(offsets[row], offsets[row + 1])
        count = _query(model, subjects[row], terms[part], weights[part], names, weight, found)
        start, stop = query_offsets[query], query_offsets[query] + count
        query_terms[start:stop] = np.sort(found[:count])
        query_weights[start:stop] = weight[query_terms[start:stop]]
        weight[found[:count]] = 0.0
        query_offsets[query + 1] = stop
    end, query_end = offsets[-1], query_offsets[-1]
    return (
        offsets,
        terms[:end].copy(),
        weights[:end].copy(),
        query_offsets,
        query_terms[:query_end].copy(),
        query_weights[:query_end].copy(),
    )


@numba.njit(cache=True)
def _draw(sums: Array) -> int:
    """Draw a position; its probability is its share of the cumulated weights."""
    return np.searchsorted(sums, np.random.random() * sums[-1])  # type: ignore[return-value]


@numba.njit(cache=True)
def _topics(topics: int, everywhere: Array) -> tuple[Array, ...]:
    """Draw terms and cumulated weights ``(topics, 500)`` of the topics, terms of facets, and popularity."""
    terms = np.empty((topics, _OF_TOPIC), np.int32)
    weights = np.empty((topics, _OF_TOPIC), np.float32)
    for topic in range(topics):
        for place in range(_OF_TOPIC):
            terms[topic, place] = _draw(everywhere)
            weights[topic, place] = np.random.exponential(1.0) + 0.05
    facets = np.random.randint(0, _OF_TOPIC, (topics, _FACETS, _OF_FACET))
    sums = np.empty((topics, _OF_TOPIC))
    for topic in range(topics):
        sums[topic] = np.cumsum(weights[topic].astype(np.float64))
    return terms, weights, sums, facets, everywhere


@numba.njit(cache=True)
def _document(model: tuple[Array, ...], subject: Array, weight: Array, found: Array) -> int:
    """Draw topic and facet into ``subject``, terms (by popularity) into ``found``, ``weight`` of each."""
    terms, weights, sums, facets, everywhere = model
    topic, facet = np.random.randint(0, len(terms)), np.random.randint(0, _FACETS)
    other = np.random.randint(0, len(terms))
    subject[0], subject[1] = topic, facet
    wanted, count = min(max(int(np.random.normal(120, 25)), 30), 200), 0
    while count < wanted:
        source = np.random.random()
        if source < 0.30:
            place = facets[topic, facet, np.random.randint(0, _OF_FACET)]
            term, boost = terms[topic, place], 2.2 * (0.5 + weights[topic, place])
        elif source < 0.70:
            place = _draw(sums[topic])
            term, boost = terms[topic, place], 0.7 * (0.3 + weights[topic, place])
        elif source < 0.85:
            place = _draw(sums[other])
            term, boost = terms[other, place], 0.5 * (0.3 + weights[other, place])
        else:
            term, boost = _draw(everywhere), 0.35
        drawn = np.log1p(boost * np.exp(np.random.normal(0.0, 0.6)))
        if weight[term] == 0.0:
            found[count], weight[term] = term, drawn
            count += 1
        elif source < 0.30 and np.random.random() < 0.5:
            wanted -= 1
    return count


@numba.njit(cache=True)
def _query(
    model: tuple[Array, ...],
    subject: Array,
    heavy: Array,
    heaviness: Array,
    names: Array,
    weight: Array,
    found: Array,
) -> int:
    """Draw twelve ``heavy`` terms of a document, then terms of its facet and topic, see `_document`."""
    terms, _, sums, facets, _ = model
    topic, facet = subject
    chances = np.cumsum(heaviness.astype(np.float64) ** 2)
    wanted, count = min(max(int(np.random.normal(40, 8)), 12), 60), 0
    for _ in range(2000):
        if count == wanted:
            break
        if count < 12:
            term = np.int64(heavy[_draw(chances)])
            boost = 2.4 * np.exp(np.random.normal(0, 0.35)) * 0.88**count
        elif np.random.random() < 0.55:
            term = names[terms[topic, facets[topic, facet, np.random.randint(0, _OF_FACET)]]]
            boost = 0.13 * np.exp(np.random.normal(0, 0.5))
        else:
            term = names[terms[topic, _draw(sums[topic])]]
            boost = 0.07 * np.exp(np.random.normal(0, 0.5))
        if weight[term] == 0.0:
            found[count], weight[term] = term, np.log1p(boost)
            count += 1
    return count
