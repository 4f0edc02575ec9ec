"""Approximate search of dense vectors with FAISS, over vectors that the store keeps.

FAISS has two families of structures. HNSW is a graph: a search walks from vector to vector, always on to the
neighbours nearest to the query, and keeps a queue of ``ef_search`` of them (Malkov and Yashunin, arXiv
1603.09320). IVF cuts the space into the cells of a k-means, and a search scores the vectors in the ``nprobe``
cells nearest to the query. Both can store codes in place of vectors: ``SQ`` rounds each dimension, ``PQ``
cuts a vector into parts and stores the nearest centroid of each (Jegou et al., PAMI 2011; ``fs``: with tables
that fit registers).

The short names stand for the factory strings in `_factory`. A graph needs no training and finds most for
single queries; ``ivf`` builds fastest, ``pq`` is a scan of codes of 4 bits per 4 dimensions, and ``ivfpqfs``
is both. The store keeps the vectors themselves, so documents found by coarse codes are ranked by their exact
inner products, and the vectors of a graph need only 16 bits in it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from irkit_kernels.dense_scan import best_of, ranking

from irkit.core.representation import Representation
from irkit.errors import ConfigError, CorruptError
from irkit.index.array_files import Array, corrupt
from irkit.index.faiss_package import import_faiss, need_gpu
from irkit.index.faiss_structure import check_structure, read_structure
from irkit.index.index_base import StageProgress
from irkit.index.index_settings import FaissConfig
from irkit.index.lone_query import Single, search_alone
from irkit.index.state import snapshot
from irkit.index.stored_rows import StoredRows
from irkit.index.topk import Hits

faiss: Any = import_faiss()

_FILE = "faiss.index"
_HIDDEN = 400  # rows fetched for a few hits under a filter
_SPARE = 1.2  # times as many hits as a filter should leave are fetched where they are filtered afterwards


class Faiss(StoredRows):
    """A FAISS structure over the first rows; the rows added since are scanned until ``finish``.

    Every score is an exact inner product, and every search returns ``min(k, documents)`` hits: a scan adds
    the hits that the structure misses. If a filter leaves few documents, the scan finds all hits.
    """

    config: FaissConfig

    def finish(self, progress: StageProgress | None = None) -> None:
        """Train the structure or add to it, if it leaves out many rows.

        Args:
            progress: Called with the stages "training" and "adding".

        Raises:
            ConfigError: FAISS cannot build what the configuration says.
        """
        report, limits = progress or (lambda stage, count, total: None), self.store.limits
        with self.store.update(), self._threads():
            n, covered, trained = len(self), self._count("covered"), self._count("trained")
            if n - covered <= max(limits.faiss_scan, covered // 20):
                return
            grows = "NSG" not in self.config.factory  # which takes all rows in one addition
            # extend the structure, unless rows are four times as many as those it was trained on
            if covered and grows and n < 4 * (trained or n):
                structure = self._move(self._read(copied=True))
            else:
                structure, covered = self._move(self._new(n)), 0
                trained = 0 if structure.is_trained else n
                if trained:
                    report("training", 0, None)
                    if not self._train(structure):
                        return
            report("adding", 0, n - covered)
            size, most = (self._block, limits.faiss_add) if grows else (n, n)
            for first in range(covered, n, size):
                block = self._vectors(np.arange(first, min(first + size, n)))
                for start in range(0, len(block), most):
                    part = block[start : start + most]
                    structure.add(part)
                    report("adding", len(part), n - covered)
            self.store.replace(_FILE, lambda path: _write(structure, path))
            self.store.meta["index"] |= {"covered": n, "trained": trained}

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `Index.stats` returns, the factory, and the number of rows in the structure."""
        return super().stats() | {"factory": self.config.factory, "covered": self._count("covered")}

    # ---- what the structure is built over ----

    @property
    def _block(self) -> int:
        """Rows whose vectors are read at once."""
        return max(1, self.store.limits.read_bytes // (4 * max(1, self.dim)))

    def _vectors(self, rows: Array) -> Array:
        """Return the vectors of ``rows``, ascending."""
        return self.store.take("values.bin", rows)

    def _check_build(self, representation: Representation) -> None:
        self._move(self._new(1, representation.dim))

    # ---- searching ----

    @snapshot
    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """Return the k best documents of every query; see `Index.search`."""
        alone = search_alone(self, queries, k, self._single) if allowed is None else None
        return super().search(queries, k, allowed) if alone is None else alone

    def _single(self, k: int) -> Single | None:
        """Return a function that finds ``k`` hits of one query in this thread, if the structure suffices."""
        self._check_same()
        covered = self._count("covered")
        if k < 1 or covered < len(self) or self.store.rows("removed.bin") or self._few(covered, covered, k):
            return None
        structure, _ = self.store.derived("structure", self._open)
        if _on_gpu(structure):
            return None
        width = self._fetched(structure, k)
        # FAISS takes a fifth longer if each load of the query crosses a border of cache lines
        memory = np.zeros(self.dim + 16, np.float32)
        start = -memory.__array_interface__["data"][0] % 64 // 4
        query = memory[start : start + self.dim][None]
        chosen = np.full((1, width), -1, np.int64)
        found = np.empty((1, width), np.float32)
        rows, scores = np.empty((1, k), np.int64), np.empty((1, k), np.float32)
        rank = ranking(self.store.read("values.bin")[:covered], query, chosen, rows, scores)
        pointers = 1, faiss.swig_ptr(query), width, faiss.swig_ptr(found), faiss.swig_ptr(chosen)
        arguments, target = (*pointers, self._parameters(structure, width, None)), query[0]
        exact = isinstance(structure, faiss.IndexFlat | faiss.IndexIVFFlat | faiss.IndexHNSWFlat)
        search, held = structure.search_c, (structure, query, found, chosen)

        def find(query: Array, _held: Any = held) -> tuple[Array, Array]:
            target[:] = query
            search(*arguments)
            if (
                exact
                and (found[0, 1:] < found[0, :-1]).all()
                and chosen.min() >= 0
                and chosen.max() < covered
            ):
                return chosen.copy(), found.copy()
            rank()
            return rows.copy(), scores.copy()

        return find

    def _few(self, live: int, covered: int, k: int) -> bool:
        """Return whether a scan takes less time, or finds more, than the structure over ``covered`` rows."""
        limits = self.store.limits
        return live <= max(limits.faiss_scan, covered // 20, limits.faiss_scan_per_hit * k)

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        return self._search_structure(
            queries, k, keep, self._count("covered"), self.store.limits.faiss_queries
        )

    def _look_up(self, queries: Representation, k: int, keep: Array | None, live: int) -> Hits:
        """Return the best of what the structure finds, by exact scores."""
        structure, _ = self.store.derived("structure", self._open)
        width = self._fetched(structure, k)
        if keep is not None and width > k:  # so many of coarse codes keep a recall of 0.95, also where a
            width = max(2 * width, min(4 * width, _HIDDEN))  # filter hides the documents nearest to a query
        width = min(width, self.store.limits.faiss_gpu_hits) if _on_gpu(structure) else width
        values = np.ascontiguousarray(queries.arrays()["values"])
        rows = self._candidates(values, width, keep)
        found = best_of(self.store.read("values.bin"), values, rows, min(k, width))
        short = ((0, 0), (0, k - min(k, width)))
        return Hits(
            np.pad(found[0], short, constant_values=-1), np.pad(found[1], short, constant_values=-np.inf)
        )

    def _fetched(self, structure: Any, k: int) -> int:
        """Return how many rows to fetch for ``k`` hits: more, which are ranked, if codes are coarse."""
        coarse = _code_bytes(structure) < 2 * self.dim
        return k + min(max(k, 10) * (self.config.refine - 1), 1000) if coarse else k

    def _candidates(self, values: Array, width: int, keep: Array | None) -> Array:
        """Search for ``values (n_q, dim)``; return rows ``(n_q, width)``, or more of them, -1 for none."""
        structure, _ = self.store.derived("structure", self._open)

        def search(keep: Array | None) -> Array:
            rows: Array = structure.search(values, width, params=self._parameters(structure, width, keep))[1]
            return rows

        try:
            rows = search(keep)
        except RuntimeError:  # this structure takes no filter: more hits are fetched, and filtered below
            if keep is not None:
                share = float(keep[: structure.ntotal].mean())
                width = min(structure.ntotal, math.ceil(_SPARE * width / share))
            try:
                rows = search(None)
            except RuntimeError as error:
                raise self._damaged(error) from None
        rows[(rows < 0) | (rows >= self._count("covered"))] = -1  # a damaged list may have any number
        if hasattr(_core(structure), "nsg"):  # FAISS 1.15 returns a few rows of NSG twice
            _drop_repeats(rows)
        if keep is not None:
            rows[(rows >= 0) & ~keep[rows]] = -1
        return rows

    def _parameters(self, structure: Any, width: int, keep: Array | None) -> Any:
        """Return FAISS's parameters of a search: wider under a filter that hides much, and for many hits."""
        core, share, options = _core(structure), 1.0, {}
        if keep is not None:
            share = float(keep[: structure.ntotal].mean())  # of the covered rows
            options["sel"] = faiss.IDSelectorBitmap(np.packbits(keep, bitorder="little"))
        if hasattr(core, "hnsw"):
            ef = min(math.ceil(max(self.config.ef_search, 2 * width) / share), structure.ntotal)
            return faiss.SearchParametersHNSW(efSearch=ef, **options)
        if hasattr(core, "nprobe"):
            # a filter may hide the rows of the nearest lists, and the others lie farther apart
            usual = math.ceil((self.config.nprobe or 3 * math.sqrt(core.nlist)) * share**-1.5)
            needed = math.ceil(4 * width / share / structure.ntotal * core.nlist)
            nprobe = min(core.nlist, max(usual, needed))
            nprobe = min(nprobe, self.store.limits.faiss_gpu_hits) if _on_gpu(core) else nprobe
            if hasattr(faiss.downcast_index(core.quantizer), "hnsw"):
                options["quantizer_params"] = faiss.SearchParametersHNSW(efSearch=2 * nprobe)
            return faiss.SearchParametersIVF(nprobe=nprobe, **options)
        return faiss.SearchParameters(**options) if options else None

    # ---- the structure ----

    def _open(self) -> tuple[Any, Array]:
        """Return the stored structure, and the mapped file that it reads its large arrays from."""
        return self._move(self._read()), self.store.read(_FILE)

    def _read(self, copied: bool = False) -> Any:
        """Read the structure of the file, and compare it with what the configuration makes."""
        try:
            structure = read_structure(self.store.read(_FILE), copied)
            check_structure(structure, self._new(len(self)), self._count("covered"))
        except (RuntimeError, ValueError) as error:
            raise self._damaged(error) from None
        return structure

    def _damaged(self, error: Exception) -> CorruptError:
        return corrupt(self.store.path, f"FAISS cannot read its structure ({_reason(error)})")

    def _new(self, n: int, dim: int = 0) -> Any:
        """Return an empty structure for ``n`` rows."""
        dim = dim or self.dim
        factory = self._factory(n, dim)
        try:
            structure = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ConfigError(
                f"index: FAISS cannot make {factory!r} for {dim} dimensions: {_reason(error)}"
            ) from None
        core = _core(structure)
        if isinstance(core, faiss.IndexRefine | faiss.IndexIDMap):
            raise ConfigError(
                f"index: factory {factory!r} refines or renumbers; leave that part out, as candidates are "
                "ranked by exact score (see the key refine) and rows numbered here"
            )
        if hasattr(core, "hnsw"):
            core.hnsw.efConstruction = self.config.ef_construction
        return structure

    def _factory(self, n: int, dim: int) -> str:
        """Return the factory string of the configuration for ``n`` rows."""
        config, points = self.config, self.store.limits.faiss_points
        lists = max(1, min(round(4 * math.sqrt(n)), config.train_size // points, n // points))
        # about 4 dimensions each
        codes = max(size for size in range(1, max(1, dim // 4) + 1) if dim % size == 0)
        short = {
            "hnsw": "HNSW32_SQfp16",
            "ivf": f"IVF{lists},Flat",
            "pq": f"PQ{codes}x4fs",
            "ivfpqfs": f"IVF{lists},PQ{codes}x4fs",
        }
        return short.get(config.factory, config.factory)

    def _train(self, structure: Any) -> bool:
        """Train on a sample; return False if there are too few rows."""
        n, lists = len(self), getattr(_core(structure), "nlist", 1)
        size = min(n, max(self.config.train_size, lists * self.store.limits.faiss_points))
        rows = np.sort(np.random.default_rng(self.config.seed).choice(n, size, replace=False))
        vectors = self._vectors(rows)
        largest = float(np.abs(vectors).max(initial=0))
        most = max(largest * size, 4 * largest**2 * vectors.shape[1])  # of a sum, and of a squared distance
        if not most < float(np.finfo(np.float32).max):  # NaN is below nothing; FAISS would end the process
            raise ConfigError(
                f"index: FAISS cannot train {self.config.factory!r} on vectors with numbers up to "
                f"{largest:g}, whose squares float32 does not hold; normalise them, or choose 'flat'"
            )
        try:
            structure.train(vectors)
        except RuntimeError as error:
            if "training points" in str(error):  # fewer than centroids
                return False
            raise ConfigError(
                f"index: FAISS cannot train {self.config.factory!r} on {size} documents: {_reason(error)}"
            ) from None
        return True

    def _move(self, structure: Any) -> Any:
        """Move the structure to the configured device; one without a GPU version stays on the CPU."""
        if self.config.device == "gpu":
            need_gpu(faiss)
        if self.config.device != "cpu" and faiss.get_num_gpus():
            with contextlib.suppress(RuntimeError):
                return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, structure)
        return structure

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """Use one thread where several would make a graph depend on their timing."""
        threads = faiss.omp_get_max_threads()
        graph = any(name in self._factory(1, self.dim) for name in ("HNSW", "NSG"))
        try:
            if graph and self.config.seed is not None:
                faiss.omp_set_num_threads(1)
            yield
        finally:
            faiss.omp_set_num_threads(threads)


def _core(structure: Any) -> Any:
    """Return the part that searches, without transformations of the vectors before it."""
    structure = faiss.downcast_index(structure)
    return _core(structure.index) if isinstance(structure, faiss.IndexPreTransform) else structure


def _on_gpu(structure: Any) -> bool:
    return isinstance(structure, getattr(faiss, "GpuIndex", ()))


def _code_bytes(structure: Any) -> int:
    """Return the bytes per vector that the structure stores."""
    core = _core(structure)
    if _on_gpu(core):  # which does not say
        return 4 * int(core.d) if "Flat" in type(core).__name__ else 0
    return int((faiss.downcast_index(core.storage) if hasattr(core, "storage") else core).sa_code_size())


def _write(structure: Any, path: Path) -> None:
    if _on_gpu(structure):
        structure = faiss.index_gpu_to_cpu(structure)
    try:  # through a file of Python: FAISS closes its own without noticing that the disk is full
        with path.open("wb") as stream:
            faiss.write_index(structure, faiss.PyCallbackIOWriter(stream.write))
    except RuntimeError as error:
        raise OSError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return FAISS's message without the location in its source."""
    return re.sub(r"^Error in .*? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL).strip()


def _drop_repeats(rows: Array) -> None:
    """Set each row that a line of ``rows`` has already to -1, in place."""
    order = rows.argsort(1, kind="stable")
    ascending = np.take_along_axis(rows, order, axis=1)
    line, position = np.nonzero(ascending[:, 1:] == ascending[:, :-1])
    rows[line, order[line, position + 1]] = -1
