"""Engines of the suite ``sparse``; each runs in a process of its own, see `benchmarks.worker`.

All search for one query at a time. The setting ``{"how": "together"}`` means all of them in one call,
``{"how": "arrays"}`` one at a time by the compiled function alone, from the arrays or tensors that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.sparse_vectors import SparseVectors, read, transposed
from benchmarks.worker import Engine, K, Options, Search, work

if TYPE_CHECKING:
    from irkit import Sparse

Array = np.ndarray[Any, Any]

_CHUNK = 8192  # documents given to irkit at a time


def build_nothing(vectors: SparseVectors, folder: Path, options: Options) -> None:
    """Do nothing: scans transpose the vectors when they are opened."""


def open_numpy(vectors: SparseVectors, folder: Path, options: Options) -> Search:
    """Open a scan that adds up the documents of each query term by numpy, as bm25s does without numba."""
    starts, rows, impacts = transposed(vectors)
    documents, queries = len(vectors.offsets) - 1, _queries(vectors)

    def search(count: int, settings: Options) -> list[list[int]]:
        hits = []
        for terms, weights in queries[:count]:
            scores = np.zeros(documents, np.float32)
            for term, weight in zip(terms, weights, strict=True):
                part = slice(starts[term], starts[term + 1])
                scores[rows[part]] += weight * impacts[part]
            best = np.argpartition(-scores, K)[:K]  # of many zeros, far faster than from the other end
            hits.append(best[np.argsort(-scores[best])].tolist())
        return hits

    return search


def open_numba(vectors: SparseVectors, folder: Path, options: Options) -> Search:
    """Open the same scan as a compiled loop that takes the ten best; queries and hits are those of irkit."""
    from benchmarks.sparse_scan import scan
    from irkit.index.topk import Hits

    starts, rows, impacts = transposed(vectors)
    rows = rows.astype(np.uint32)
    sums = np.empty(len(vectors.offsets) - 1, np.float32)

    def find(offsets: Array, terms: Array, weights: Array) -> Hits:
        n_q = len(offsets) - 1
        best, scores = np.empty((n_q, K), np.int64), np.empty((n_q, K), np.float32)
        scan(starts, rows, impacts, offsets, terms, weights, sums, best, scores)
        return Hits(best, scores)

    def opened(query: Sparse) -> tuple[Array, Array, Array]:
        return query.terms.offsets.numpy(), query.terms.values.numpy(), query.weights.numpy()

    every, each = _representations(vectors)
    arrays = [opened(query) for query in each]

    def search(count: int, settings: Options) -> list[list[int]]:
        match settings.get("how"):
            case "together":
                return find(*opened(_first(every, count))).rows.tolist()
            case "arrays":
                return [find(*query).rows[0].tolist() for query in arrays[:count]]
        return [find(*opened(query)).rows[0].tolist() for query in each[:count]]

    return search


def build_irkit(vectors: SparseVectors, folder: Path, options: Options) -> None:
    """Build through the public interface in chunks; as counts if ``options["bm25"]`` are k1 and b."""
    from irkit import Ragged, Sparse
    from irkit.index import Store, create_index
    from irkit.index.bm25_index import begin

    weights = vectors.counts if "bm25" in options else vectors.weights
    with Store.build(folder) as store:
        index = create_index(store, {key: value for key, value in options.items() if key != "bm25"})
        if "bm25" in options:
            with store.update():
                begin(store, *options["bm25"])
        for start in range(0, len(vectors.offsets) - 1, _CHUNK):
            offsets = vectors.offsets[start : start + _CHUNK + 1]
            part = slice(offsets[0], offsets[-1])
            terms = Ragged(_from_file(vectors.terms, part).astype(np.int32), np.diff(offsets))
            index.add(Sparse(terms, _from_file(weights, part).astype(np.float32), int(vectors.dim)))
        index.finish()
        store.publish()


def open_irkit(vectors: SparseVectors, folder: Path, options: Options) -> Search:
    """Return a search whose settings are fields of the index's configuration."""
    from irkit.index import Store, open_index

    index = open_index(Store.open(folder))
    built = index.config
    every, each = _representations(vectors)
    tensors = [(query.terms.values, query.weights) for query in each]

    @cache
    def find() -> Callable[..., Any]:
        return _searcher(vectors, built.dtype).single(K)  # type: ignore[no-any-return]

    def search(count: int, settings: Options) -> list[list[int]]:
        chosen = {key: value for key, value in settings.items() if key != "how"}
        index.config = built.model_copy(update=chosen)
        match settings.get("how"):
            case "together":
                return index.search(_first(every, count), K).rows.tolist()  # type: ignore[no-any-return]
            case "arrays":
                one = find()
                return [one(*query)[0][0].tolist() for query in tensors[:count]]
        return [index.search(query, K).rows[0].tolist() for query in each[:count]]

    return search


def _searcher(vectors: SparseVectors, dtype: str) -> Any:
    """Return the kernel that the index is made of, on the vectors."""
    from irkit_kernels.sparse_search import Searcher, build

    weights = np.asarray(vectors.weights).astype(dtype)
    forward = np.array(vectors.offsets), np.asarray(vectors.terms).astype(np.uint16), weights, None
    return Searcher(build(forward, int(vectors.dim), approximate=False), forward)


def build_seismic(vectors: SparseVectors, folder: Path, options: Options) -> None:
    """Build with ``n_postings`` of the options; two others suit collections of this size."""
    from seismic import SeismicIndexRaw

    folder.mkdir(parents=True)
    given = folder / "vectors.bin"
    _write_seismic(vectors, given)
    index = SeismicIndexRaw.build(str(given), max_fraction=6.0, centroid_fraction=0.1, **options)
    index.save(str(folder / "index"))
    given.unlink()


def open_seismic(vectors: SparseVectors, folder: Path, options: Options) -> Search:
    """Return a search whose settings are query_cut and heap_factor."""
    from seismic import SeismicIndexRaw

    index = SeismicIndexRaw.load(str(folder / "index"))
    queries = [(terms.astype(np.int32), weights) for terms, weights in _queries(vectors)]

    def search(count: int, settings: Options) -> list[list[int]]:
        cut, factor = settings["query_cut"], settings["heap_factor"]
        hits = [index.search(terms, weights, K, cut, factor, 0, True) for terms, weights in queries[:count]]
        return [[row for _, row in each] for each in hits]

    return search


def build_bm25s(vectors: SparseVectors, folder: Path, options: Options) -> None:
    """Build from the terms of each document, each as often as it occurs."""
    from bm25s import BM25

    counts = np.asarray(vectors.counts)
    ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])[vectors.offsets]
    terms = np.split(np.repeat(np.asarray(vectors.terms), counts), ends[1:-1])
    k1, b = options["bm25"]
    index = BM25(method="lucene", k1=k1, b=b, backend="numba")
    index.index(
        ([each.tolist() for each in terms], {term: term for term in range(int(vectors.dim))}),
        show_progress=False,
    )
    index.save(folder)


def open_bm25s(vectors: SparseVectors, folder: Path, options: Options) -> Search:
    """Return a search by its numba backend on one thread."""
    from bm25s import BM25

    index = BM25.load(folder)
    index.backend = "numba"
    queries = [
        np.repeat(terms, counts).tolist()
        for terms, counts in zip(
            *(
                np.split(array, vectors.query_offsets[1:-1])
                for array in (vectors.query_terms, vectors.query_counts)
            ),
            strict=True,
        )
    ]

    def retrieve(some: Sequence[list[int]]) -> list[list[int]]:
        found = index.retrieve(list(some), k=K, show_progress=False, n_threads=1)
        return found.documents.tolist()  # type: ignore[no-any-return]

    def search(count: int, settings: Options) -> list[list[int]]:
        if settings.get("how") == "together":
            return retrieve(queries[:count])
        return [retrieve([query])[0] for query in queries[:count]]

    retrieve(queries[:1])  # compiles
    return search


ENGINES = {
    "numpy": Engine("numpy", build_nothing, open_numpy),
    "numba": Engine("numba", build_nothing, open_numba),
    "irkit": Engine("irkit", build_irkit, open_irkit),
    "seismic": Engine("pyseismic-lsr", build_seismic, open_seismic),
    "bm25s": Engine("bm25s", build_bm25s, open_bm25s),
}


def _queries(vectors: SparseVectors) -> list[tuple[Array, Array]]:
    """Return terms (int64) and weights of each query."""
    every = (vectors.query(number) for number in range(len(vectors.best)))
    return [(terms.astype(np.int64), np.array(weights)) for terms, weights in every]


def _representations(vectors: SparseVectors) -> tuple[Sparse, list[Sparse]]:
    """Return the queries as irkit has them: all, and one by one."""
    from irkit import Ragged, Sparse

    terms = Ragged(np.array(vectors.query_terms, np.int32), np.diff(vectors.query_offsets))
    every = Sparse(terms, np.array(vectors.query_weights), int(vectors.dim))
    return every, [every[number : number + 1] for number in range(len(every))]


def _first(queries: Sparse, count: int) -> Sparse:
    return queries if count == len(queries) else queries[:count]  # slicing takes 0.2 ms


def _from_file(array: Any, part: slice) -> Array:
    """Read part of a mapped array without the mapping, whose pages would count as memory of the process."""
    offset = array.offset + int(part.start) * array.itemsize
    return np.fromfile(array.filename, array.dtype, int(part.stop - part.start), offset=offset)


def _write_seismic(vectors: SparseVectors, path: Path) -> None:
    """Write its raw format, numbers of 32 bits: documents; then the length, terms and weights of each."""
    with path.open("wb") as file:
        np.uint32(len(vectors.offsets) - 1).tofile(file)
        for start in range(0, len(vectors.offsets) - 1, _CHUNK):
            offsets = np.asarray(vectors.offsets[start : start + _CHUNK + 1])
            part = slice(offsets[0], offsets[-1])
            lengths = np.diff(offsets)
            place = 2 * (offsets[:-1] - offsets[0]) + np.arange(len(lengths))  # of each length
            out = np.empty(2 * (offsets[-1] - offsets[0]) + len(lengths), np.uint32)
            out[place] = lengths
            at = np.repeat(place + 1 - (offsets[:-1] - offsets[0]), lengths) + np.arange(lengths.sum())
            out[at] = _from_file(vectors.terms, part)
            out[at + np.repeat(lengths, lengths)] = _from_file(vectors.weights, part).view(np.uint32)
            out.tofile(file)


if __name__ == "__main__":
    work(ENGINES, read)
