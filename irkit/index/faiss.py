"""Approximate search of dense vectors with FAISS, over vectors that the store keeps."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from irkit.errors import ConfigError, CorruptError
from irkit.index.base import StageProgress
from irkit.index.config import FaissConfig, MuveraConfig
from irkit.index.faiss_package import import_faiss, need_gpu
from irkit.index.faiss_structure import check_structure, read_structure
from irkit.index.files import REMEDY, Array
from irkit.index.flat import Flat, query_blocks
from irkit.index.state import pinned
from irkit.index.topk import Hits, TopK
from irkit.representation import Representation

__all__ = ["Faiss"]

faiss: Any = import_faiss()

_FILE = "faiss.index"
_FEW = 2048  # rows that are scanned sooner than looked up
_PER_HIT = 64  # as many rows for each hit wanted are scanned, too
_POINTS_PER_CENTROID = 39  # FAISS asks for as many
_MOST_ON_GPU = 2048  # hits of a query, and lists that it visits
_QUERIES = 2048  # searched together: more would only take more memory
_ADDED = 2048  # rows added at a time: a second's work for a graph


class Faiss(Flat):
    """A FAISS structure over the first rows; the rows added since are scanned until ``finish``.

    Every score is an exact inner product, and every search gives ``min(k, documents)`` hits: what the
    structure leaves open is found by scanning, and so is everything under a filter that leaves little.
    """

    kinds: ClassVar[tuple[str, ...]] = ("dense",)
    config: FaissConfig | MuveraConfig

    def finish(self, progress: StageProgress | None = None) -> None:
        """Train the structure or add to it, if the rows that it does not cover are many enough.

        Args:
            progress: Told of the stages "training" and "adding".

        Raises:
            ConfigError: FAISS cannot build what the configuration asks for.
        """
        report = progress or (lambda stage, count, total: None)
        with self.store.update(), self._threads():
            n, covered, trained = len(self), self._state("covered"), self._state("trained")
            if n - covered <= max(_FEW, covered // 20):
                return
            grows = "NSG" not in self._options.factory  # which takes all rows in one addition
            if covered and grows and n < 4 * (trained or n):
                structure = self._place(self._read(copied=True))
            else:
                structure, covered = self._place(self._new(n)), 0
                trained = 0 if structure.is_trained else n
                if trained:
                    report("training", 0, None)
                    if not self._train(structure):
                        return
            report("adding", 0, n - covered)
            if not grows:
                structure.add(self._vectors_of(np.arange(n)))
            for block in self._vectors(covered) if grows else ():
                for start in range(0, len(block), _ADDED):
                    part = block[start : start + _ADDED]
                    structure.add(part)
                    report("adding", len(part), n - covered)
            self.store.replace(_FILE, lambda path: _write(structure, path))
            self.store.meta["index"] |= {"covered": n, "trained": trained}

    @pinned
    def stats(self) -> dict[str, Any]:
        """As of every index, and how many rows the structure covers."""
        return super().stats() | {"factory": self._options.factory, "covered": self._state("covered")}

    @property
    def _options(self) -> FaissConfig:
        assert isinstance(self.config, FaissConfig)
        return self.config

    def _width(self, dim: int) -> int:
        """Of a vector in the structure, where those of documents have ``dim``."""
        return dim

    def _vectors(self, start: int) -> Iterator[Array]:
        """Those of the rows from ``start`` on, in blocks."""
        return self.store.blocks("values.bin", start)

    def _vectors_of(self, rows: Array) -> Array:
        """Those of ``rows``, ascending."""
        return self.store.take("values.bin", rows)

    def _append(self, representation: Representation) -> None:
        if not len(self):
            self._place(self._new(1, representation.dim))  # what is wrong shows before the work is done
        super()._append(representation)

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        covered = self._state("covered")
        kept = covered if keep is None else int(np.count_nonzero(keep[:covered]))
        if kept <= max(_FEW, covered // 20, _PER_HIT * k):
            return super()._search(queries, k, keep)
        parts = [self._search_part(some, k, keep, kept / covered) for some in query_blocks(queries, _QUERIES)]
        return Hits(*map(np.concatenate, zip(*parts, strict=True)))

    def _search_part(self, queries: Representation, k: int, keep: Array | None, share: float) -> Hits:
        covered, best = self._state("covered"), TopK(len(queries), k)
        best.push_pairs(*self._candidates(queries, k, keep, share))
        self._scan(queries, best, covered, keep)
        hits = best.hits()
        short = np.flatnonzero(hits.rows[:, -1] < 0)
        if len(short):
            hits.rows[short], hits.scores[short] = super()._search(queries[short], k, keep)
        return hits

    def _candidates(
        self, queries: Representation, k: int, keep: Array | None, share: float
    ) -> tuple[Array, Array]:
        """Exact scores and rows ``(n_q, k or more)`` of what the structure finds; row -1 is none."""
        structure, _ = self.store.derived("structure", self._open)
        exact = isinstance(structure, faiss.IndexFlat | faiss.IndexIVFFlat | faiss.IndexHNSWFlat)
        coarse = _code_bytes(structure) < 2 * self.dim
        wanted = k + min(max(k, 10) * (self._options.refine - 1), 1000) if coarse else k
        wanted = min(wanted, _MOST_ON_GPU) if _on_gpu(structure) else wanted
        scores, rows = self._look_up(queries.arrays()["values"], wanted, keep, share)
        return (scores if exact else self._score_rows(queries, rows)), rows

    def _look_up(self, values: Array, wanted: int, keep: Array | None, share: float) -> tuple[Array, Array]:
        """What the structure finds for ``values (n_q, width)``: its scores, and rows ``(n_q, wanted)``."""
        structure, _ = self.store.derived("structure", self._open)
        try:
            scores, rows = structure.search(
                values, wanted, params=self._parameters(structure, wanted, keep, share)
            )
        except RuntimeError:  # this structure takes no filter: what it finds is filtered below
            try:
                scores, rows = structure.search(
                    values, wanted, params=self._parameters(structure, wanted, None, 1)
                )
            except RuntimeError as error:
                raise self._damaged(error) from None
        rows[(rows < 0) | (rows >= self._state("covered"))] = -1  # a damaged list may have any
        if keep is not None:
            rows[(rows >= 0) & ~keep[rows]] = -1
        return scores, rows

    def _parameters(self, structure: Any, wanted: int, keep: Array | None, share: float) -> Any:
        """FAISS's parameters of a search, which goes wider for a filter that hides much and for many hits."""
        core = _core(structure)
        options = {}
        if keep is not None:
            options["sel"] = faiss.IDSelectorBitmap(np.packbits(keep, bitorder="little"))
        if hasattr(core, "hnsw"):
            width = min(math.ceil(max(self._options.ef_search, 2 * wanted) / share), structure.ntotal)
            return faiss.SearchParametersHNSW(efSearch=width, **options)
        if hasattr(core, "nprobe"):
            usual = self._options.nprobe or math.ceil(3 * math.sqrt(core.nlist))
            needed = math.ceil(4 * wanted / share / structure.ntotal * core.nlist)
            nprobe = min(core.nlist, max(usual, needed))
            nprobe = min(nprobe, _MOST_ON_GPU) if _on_gpu(core) else nprobe
            if hasattr(faiss.downcast_index(core.quantizer), "hnsw"):
                options["quantizer_params"] = faiss.SearchParametersHNSW(efSearch=2 * nprobe)
            return faiss.SearchParametersIVF(nprobe=nprobe, **options)
        return faiss.SearchParameters(**options) if options else None

    def _state(self, name: str) -> int:
        return int(self.store.meta["index"].get(name, 0))

    def _open(self) -> tuple[Any, Array]:
        """The stored structure and the mapped file that it reads its large arrays from."""
        return self._place(self._read()), self.store.read(_FILE)

    def _read(self, copied: bool = False) -> Any:
        """What the file has, if it is what the configuration makes."""
        try:
            structure = read_structure(self.store.read(_FILE), copied)
            check_structure(structure, self._new(len(self)), self._state("covered"))
        except (RuntimeError, ValueError) as error:
            raise self._damaged(error) from None
        return structure

    def _damaged(self, error: Exception) -> CorruptError:
        return CorruptError(
            f"index {self.store.path}: FAISS cannot read its structure ({_reason(error)}); {REMEDY}"
        )

    def _new(self, n: int, dim: int = 0) -> Any:
        """An empty structure for ``n`` rows."""
        dim = self._width(dim or self.dim)
        factory = _factory(self._options, n, dim)
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
            core.hnsw.efConstruction = self._options.ef_construction
        return structure

    def _train(self, structure: Any) -> bool:
        """Train on a sample; False if there are too few rows."""
        n, lists = len(self), getattr(_core(structure), "nlist", 1)
        size = min(n, max(self._options.train_size, lists * _POINTS_PER_CENTROID))
        rows = np.sort(np.random.default_rng(self._options.seed).choice(n, size, replace=False))
        vectors = self._vectors_of(rows)
        largest = float(np.abs(vectors).max(initial=0))
        most = max(largest * size, 4 * largest**2 * vectors.shape[1])  # of a sum, and of a squared distance
        if not most < float(np.finfo(np.float32).max):  # NaN is below nothing; FAISS would end the process
            raise ConfigError(
                f"index: FAISS cannot train {self._options.factory!r} on vectors with numbers up to "
                f"{largest:g}, whose squares float32 does not hold; normalise them, or choose 'flat'"
            )
        try:
            structure.train(vectors)
        except RuntimeError as error:
            if "training points" in str(error):  # fewer than centroids
                return False
            raise ConfigError(
                f"index: FAISS cannot train {self._options.factory!r} on {size} documents: {_reason(error)}"
            ) from None
        return True

    def _place(self, structure: Any) -> Any:
        """The structure on the configured device; those that have no GPU version stay on the CPU."""
        if self._options.device == "gpu":
            need_gpu(faiss)
        if self._options.device != "cpu" and faiss.get_num_gpus():
            with contextlib.suppress(RuntimeError):
                return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, structure)
        return structure

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """One thread where several would make a graph depend on their timing."""
        threads = faiss.omp_get_max_threads()
        graph = any(name in _factory(self._options, 1, self._width(self.dim)) for name in ("HNSW", "NSG"))
        try:
            if graph and self._options.seed is not None:
                faiss.omp_set_num_threads(1)
            yield
        finally:
            faiss.omp_set_num_threads(threads)


def _factory(config: FaissConfig, n: int, dim: int) -> str:
    """The factory string that a configuration stands for, with ``n`` rows."""
    lists = max(
        1, min(round(4 * math.sqrt(n)), config.train_size // _POINTS_PER_CENTROID, n // _POINTS_PER_CENTROID)
    )
    codes = max(size for size in range(1, max(1, dim // 4) + 1) if dim % size == 0)  # some 4 dimensions each
    short = {
        "hnsw": "HNSW32_SQfp16",
        "ivf": f"IVF{lists},Flat",
        "pq": f"PQ{codes}x4fs",
        "ivfpqfs": f"IVF{lists},PQ{codes}x4fs",
    }
    return short.get(config.factory, config.factory)


def _core(structure: Any) -> Any:
    """The part that searches, behind transformations of the vectors."""
    structure = faiss.downcast_index(structure)
    return _core(structure.index) if isinstance(structure, faiss.IndexPreTransform) else structure


def _on_gpu(structure: Any) -> bool:
    return isinstance(structure, getattr(faiss, "GpuIndex", ()))


def _code_bytes(structure: Any) -> int:
    """Bytes that the structure keeps of a vector."""
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
    """FAISS's message without the place in its source."""
    return re.sub(r"^Error in .*? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL).strip()
