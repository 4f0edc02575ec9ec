"""How a FAISS structure is trained, extended, stored and read; faiss.py searches it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from irkit.core.representation import Representation
from irkit.errors import ConfigError, CorruptError
from irkit.index.array_files import Array, corrupt
from irkit.index.coded_scan import append_codes, has_codes
from irkit.index.faiss_package import import_faiss, need_gpu
from irkit.index.faiss_structure import (
    check_structure,
    core_of,
    emptied,
    read_structure,
    reason_of,
    write_structure,
)
from irkit.index.index_base import Index, StageProgress
from irkit.index.index_settings import FaissConfig
from irkit.index.state import snapshot
from irkit.index.stored_rows import StoredRows

faiss: Any = import_faiss()

_FILE = "faiss.index"
_GROWTH = 4  # train again at this many times the rows of the last training


class StructureCodec(NamedTuple):
    """What shards of an index share.

    Attributes:
        structure: A structure of FAISS that is trained, without rows.
        trained: Number of rows of the index when it was trained; 0 if it needs no training.
    """

    structure: Any
    trained: int


class FaissBuilding(StoredRows):
    """The structure over the first rows; its search is `irkit.index.faiss.Faiss`."""

    config: FaissConfig

    def finish(self, progress: StageProgress | None = None) -> None:
        """Train the structure or add to it, if it leaves out many rows.

        Args:
            progress: Called with the stages "training" and "adding".

        Raises:
            ConfigError: FAISS cannot build what the configuration says.
        """
        report = progress or (lambda stage, count, total: None)
        with self.store.update():
            n, covered = len(self), self.covered
            if n - covered <= max(self.store.limits.faiss_scan, covered // 20):
                return
            if self.outgrown(n):
                codec = self.train(n, self._reader(), report)
                if codec is None:
                    return
                self.take_codec(codec, report)
            self.code(report)

    # ---- the steps of `finish`, which shards take together ----

    def outgrown(self, n: int) -> bool:
        """Return whether ``n`` rows need a new structure: it is for a quarter, or takes no more rows."""
        trained = self._count("trained")
        grows = "NSG" not in self.config.factory  # which takes all rows in one addition
        return not self.codec_version or not grows or 0 < _GROWTH * trained <= n

    def train(self, n: int, values: Callable[[Array], Array], report: StageProgress) -> StructureCodec | None:
        """Train a structure on a sample; return None if there are too few rows.

        Args:
            n: Number of rows of the index; if it is a shard, of the index in shards.
            values: Returns the vectors ``(m, dim)`` float32 of ascending ones of these rows.
            report: Called with the stage "training".

        Raises:
            ConfigError: FAISS cannot build what the configuration says.
        """
        structure, trained = self._move(self._new(n)), 0
        if not structure.is_trained:
            report("training", 0, None)
            trained = n
            with self._threads():
                if not self._train(structure, n, values):
                    return None
        return StructureCodec(structure, trained)

    @property
    def codec_version(self) -> int:
        """Number of rows that the structure was trained for, or 1; 0 without a structure."""
        return self._count("trained") or int(self.store.rows(_FILE) > 0)

    def codec(self) -> StructureCodec:
        """Return the structure without rows."""
        return StructureCodec(emptied(self._read(copied=True)), self._count("trained"))

    def take_codec(self, codec: StructureCodec, report: StageProgress) -> None:
        """Replace the structure by one without rows; add the rows that it had."""
        with self.store.update():
            has_rows = self.covered > 0
            self.store.replace(_FILE, lambda path: write_structure(codec.structure, path))
            self.store.meta["index"] |= {"covered": 0, "trained": codec.trained}
            if has_rows:
                self.code(report)

    def code(self, report: StageProgress) -> None:
        """Add the rows that the structure lacks, if there is a structure.

        Args:
            report: Called with the stage "adding".
        """
        covered, n = self.covered, len(self)
        if covered == n or not self.codec_version:
            return
        report("adding", 0, n - covered)
        grows = "NSG" not in self.config.factory
        size, most = (self._block, self.store.limits.faiss_add) if grows else (n, n)
        with self.store.update(), self._threads():
            structure = self._move(self._read(copied=True))
            for first in range(covered, n, size):
                block = self._vectors(np.arange(first, min(first + size, n)))
                for start in range(0, len(block), most):
                    part = block[start : start + most]
                    structure.add(part)
                    report("adding", len(part), n - covered)
            self.store.replace(_FILE, lambda path: write_structure(structure, path))
            self.store.meta["index"]["covered"] = n

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `Index.stats` returns, the factory, and the number of rows in the structure."""
        return super().stats() | {"factory": self.config.factory, "covered": self.covered}

    # ---- what the structure is built over ----

    def copy(self, source: Index, rows: Array) -> None:
        """See `StoredRows.copy`; codes are made again, as the source may have none."""
        with self.store.update(), self._coding():
            super().copy(source, rows)

    def _append(self, representation: Representation) -> None:
        with self._coding():
            super()._append(representation)

    @contextlib.contextmanager
    def _coding(self) -> Iterator[None]:
        """Append codes of the rows that are added inside, for searches of a graph for many hits.

        All rows have codes, or none, as in indexes that were built before there were codes.
        """
        before = self.store.rows("values.bin")
        coded = has_codes(self.store) if before else self.config.is_graph
        yield
        if coded:
            append_codes(self.store, torch.from_numpy(self.store.read("values.bin")[before:]))

    @property
    def covered(self) -> int:
        """Number of rows in the structure: the first ones."""
        return self._count("covered")

    @property
    def _block(self) -> int:
        """Rows whose vectors are read at once."""
        return max(1, self.store.limits.read_bytes // (4 * max(1, self.dim)))

    def _vectors(self, rows: Array) -> Array:
        """Return the vectors of ``rows``, ascending."""
        return self.store.take("values.bin", rows)

    def _reader(self) -> Callable[[Array], Array]:
        """Return a function of ascending rows that returns their vectors ``(n, dim)`` float32."""
        return self._vectors

    def _check_build(self, representation: Representation) -> None:
        self._move(self._new(1, representation.dim))

    # ---- the structure ----

    @property
    def structure(self) -> Any:
        """The structure of FAISS."""
        return self.store.derived("structure", self._open)[0]

    def _open(self) -> tuple[Any, Array]:
        """Return the stored structure, and the mapped file that it reads its large arrays from."""
        return self._move(self._read()), self.store.read(_FILE)

    def _read(self, copied: bool = False) -> Any:
        """Read the structure of the file, and compare it with what the configuration makes."""
        try:
            structure = read_structure(self.store.read(_FILE), copied)
            check_structure(structure, self._new(len(self)), self.covered)
        except (RuntimeError, ValueError) as error:
            raise self._damaged(error) from None
        return structure

    def _damaged(self, error: Exception) -> CorruptError:
        return corrupt(self.store.path, f"FAISS cannot read its structure ({reason_of(error)})")

    def _new(self, n: int, dim: int = 0) -> Any:
        """Return an empty structure for ``n`` rows."""
        dim = dim or self.dim
        factory = self._factory(n, dim)
        try:
            structure = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ConfigError(
                f"index: FAISS cannot make {factory!r} for {dim} dimensions: {reason_of(error)}"
            ) from None
        core = core_of(structure)
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

    def _train(self, structure: Any, n: int, values: Callable[[Array], Array]) -> bool:
        """Train on a sample of ``n`` rows; return False if there are too few."""
        lists = getattr(core_of(structure), "nlist", 1)
        size = min(n, max(self.config.train_size, lists * self.store.limits.faiss_points))
        rows = np.sort(np.random.default_rng(self.config.seed).choice(n, size, replace=False))
        vectors = values(rows)
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
                f"index: FAISS cannot train {self.config.factory!r} on {size} documents: {reason_of(error)}"
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
