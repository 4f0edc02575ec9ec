"""Engines of the suite ``dense``; each runs in a process of its own, see `benchmarks.worker`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dense_vectors import DenseVectors, read
from benchmarks.worker import Engine, K, Options, Search, work

Array = np.ndarray[Any, Any]

_CHUNK = 8192  # documents given to irkit at a time


def build_irkit(vectors: DenseVectors, folder: Path, options: Options) -> None:
    """Build through the public interface, from chunks of a file; nothing else is held in memory."""
    import torch

    from irkit import Dense
    from irkit.index import Store, create_index

    with Store.build(folder) as store:
        index = create_index(store, {"kind": "dense", **options})
        for start in range(0, len(vectors.values), _CHUNK):
            index.add(Dense(torch.from_numpy(_from_file(vectors.values, start, start + _CHUNK))))
        index.finish()
        store.publish()


def open_irkit(vectors: DenseVectors, folder: Path, options: Options) -> Search:
    """Return a search whose settings are fields of the index's configuration."""
    import torch

    from irkit import Dense
    from irkit.index import Store, open_index

    index = open_index(Store.open(folder))
    built = index.config
    queries = [Dense(torch.from_numpy(query[None])) for query in np.array(vectors.queries)]

    def search(count: int, settings: Options) -> list[list[int]]:
        index.config = built.model_copy(update=settings)
        return [index.search(query, K).rows[0].tolist() for query in queries[:count]]

    return search


def build_faiss(vectors: DenseVectors, folder: Path, options: Options) -> None:
    """Build the index of a factory string, trained on as many vectors as FAISS samples."""
    import faiss

    folder.mkdir(parents=True)
    values = np.array(vectors.values)
    index = faiss.index_factory(values.shape[1], options["factory"], faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        index.train(values[:: max(1, len(values) // 100_000)])
    index.add(values)
    faiss.write_index(index, str(folder / "index"))


def open_faiss(vectors: DenseVectors, folder: Path, options: Options) -> Search:
    """Return a search whose settings are nprobe and k_factor, or efSearch."""
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.read_index(str(folder / "index"))
    names = faiss.ParameterSpace()
    queries = np.array(vectors.queries)

    def search(count: int, settings: Options) -> list[list[int]]:
        for name, value in settings.items():
            if name == "k_factor":
                index.k_factor = value
            else:
                names.set_index_parameter(index, name, value)
        return [index.search(queries[at : at + 1], K)[1][0].tolist() for at in range(count)]

    return search


def build_hnswlib(vectors: DenseVectors, folder: Path, options: Options) -> None:
    """Build a graph with the options ``M`` and ``ef_construction``."""
    import hnswlib

    folder.mkdir(parents=True)
    values = np.array(vectors.values)
    index = hnswlib.Index(space="ip", dim=values.shape[1])
    index.init_index(max_elements=len(values), **options)
    index.add_items(values, num_threads=2)
    index.save_index(str(folder / "index"))


def open_hnswlib(vectors: DenseVectors, folder: Path, options: Options) -> Search:
    """Return a search whose setting is ef."""
    import hnswlib

    index = hnswlib.Index(space="ip", dim=vectors.values.shape[1])
    index.load_index(str(folder / "index"))
    index.set_num_threads(1)

    def find(query: Array, settings: Options) -> Any:
        return index.knn_query(query, k=K, num_threads=1)[0][0]

    return _one_by_one(vectors, find, lambda settings: index.set_ef(settings["ef"]))


def build_usearch(vectors: DenseVectors, folder: Path, options: Options) -> None:
    """Build a graph of numbers of ``options["dtype"]``."""
    from usearch.index import Index

    folder.mkdir(parents=True)
    values = np.array(vectors.values)
    index = Index(ndim=values.shape[1], metric="ip", **options)
    index.add(np.arange(len(values)), values, threads=2)
    index.save(str(folder / "index"))


def open_usearch(vectors: DenseVectors, folder: Path, options: Options) -> Search:
    """Return a search whose setting is expansion_search."""
    from usearch.index import Index

    index = Index(ndim=vectors.values.shape[1], metric="ip", **options)
    index.load(str(folder / "index"))

    def begin(settings: Options) -> None:
        index.expansion_search = settings["expansion_search"]

    return _one_by_one(vectors, lambda query, settings: index.search(query, K, threads=1).keys, begin)


def build_scann(vectors: DenseVectors, folder: Path, options: Options) -> None:
    """Build a tree of twice the square root of the documents as leaves, codes of 4 bits, and vectors."""
    import scann

    folder.mkdir(parents=True)
    values = np.array(vectors.values)
    leaves = 2 * round(math.sqrt(len(values)))
    tree = scann.scann_ops_pybind.builder(values, K, "dot_product").tree(
        num_leaves=leaves, num_leaves_to_search=leaves // 10, training_sample_size=100_000
    )
    codes = tree.score_ah(2, anisotropic_quantization_threshold=0.2)
    codes.set_n_training_threads(2).reorder(100).build().serialize(str(folder))


def open_scann(vectors: DenseVectors, folder: Path, options: Options) -> Search:
    """Return a search whose settings are leaves_to_search and pre_reorder_num_neighbors."""
    import scann

    index = scann.scann_ops_pybind.load_searcher(str(folder))
    return _one_by_one(vectors, lambda query, settings: index.search(query, K, **settings)[0])


ENGINES = {
    "irkit": Engine("irkit", build_irkit, open_irkit),
    "faiss": Engine("faiss-cpu", build_faiss, open_faiss),
    "hnswlib": Engine("hnswlib", build_hnswlib, open_hnswlib),
    "usearch": Engine("usearch", build_usearch, open_usearch),
    "scann": Engine("scann", build_scann, open_scann),
}


def _one_by_one(
    vectors: DenseVectors,
    find: Callable[[Array, Options], Any],
    begin: Callable[[Options], object] = lambda settings: None,
) -> Search:
    queries = np.array(vectors.queries)

    def search(count: int, settings: Options) -> list[list[int]]:
        begin(settings)
        return [find(query, settings).tolist() for query in queries[:count]]

    return search


def _from_file(array: Any, start: int, stop: int) -> Array:
    """Read rows of a mapped array without the mapping, whose pages would count as memory of the process."""
    width = array.shape[1]
    count = (min(stop, len(array)) - start) * width
    offset = array.offset + start * width * array.itemsize
    return np.fromfile(array.filename, array.dtype, count, offset=offset).reshape(-1, width)


if __name__ == "__main__":
    work(ENGINES, read)
