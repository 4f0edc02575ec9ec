"""What every index does: numbered rows, removal, checks of what it is given, exact scores on request."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from irkit.arguments import brief, check_counts
from irkit.core.representation import Dense, MultiVector, Representation, Sparse
from irkit.core.scoring import score, score_pairs
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.index.array_files import Array
from irkit.index.dense_scores import pair_scores
from irkit.index.index_kinds import INDEX_KINDS, suitable_names
from irkit.index.index_settings import IndexConfig, WindowsConfig
from irkit.index.layout import removed_rows
from irkit.index.metrics import LARGEST_SQUARE, Metric, unit
from irkit.index.state import snapshot
from irkit.index.store import Store
from irkit.index.term_ids import Vocabulary
from irkit.index.topk import Hits
from irkit.utils.forking import one_thread_after_fork

StageProgress: TypeAlias = Callable[[str, int, int | None], object]
"""``progress(stage, count, total)``: ``count`` more of the ``total`` steps of ``stage`` are done.

The name of a stage ends in -ing (``"encoding"``, ``"training"``, ``"adding"``). A stage begins with its first
call, whose count may be 0, and ends with the first call of another stage. ``total`` is None if it is unknown.
"""

_TOKENS = 128  # tokens per document, as an estimate
_TERMS = 512  # terms per document, as an estimate
_PAIRS = 16  # queries and documents that are scored at once, at least


class Index(ABC):
    """Rows of one kind of representation in a `Store`, and their search.

    Rows are numbered 0, 1, ... in order of addition. A number is never used again: a removed row leaves a
    gap. Changes outside ``store.update()`` are committed one by one.

    A kind of index implements `representations`, ``_append`` and ``_search``; most derive from `StoredRows`,
    which leaves only ``_search``.

    Attributes:
        store: Where everything is stored.
        config: The configuration. Settings of the search may be replaced at any time, as in
            ``index.config = index.config.model_copy(update={"ef_search": 128})``.
        windows: How documents are cut into rows; None if each is one row.
    """

    windows: WindowsConfig | None = None

    def __init__(self, store: Store, config: IndexConfig) -> None:
        """Use `create_index` or `open_index`."""
        self.store = store
        self.config = config
        self._built = store.meta["index"]["config"]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of representation that it can hold."""
        return INDEX_KINDS[self.config.kind].holds

    @property
    def representation(self) -> str | None:
        """Kind of the representations; None before the first ``add``."""
        return cast("str | None", self.store.meta["index"]["representation"])

    @property
    def dim(self) -> int:
        """Dimensions of a vector, or size of the vocabulary; 0 before the first ``add``."""
        return int(self.store.meta["index"]["dim"])

    def __len__(self) -> int:
        """Rows ever added, removed ones included."""
        return int(self.store.meta["index"]["rows"])

    @property
    @snapshot
    def live(self) -> Array:
        """``(len(self),)`` bool: rows that are not removed."""
        return live_rows(self.store, len(self))

    def add(self, representation: Representation) -> range:
        """Add documents.

        Args:
            representation: Documents of the same kind and dimensions as those in the index.

        Returns:
            The rows of the documents.

        Raises:
            BadValueError: Kind or dimensions differ, or a value is NaN or infinite; nothing is added.
            StorageError: They could not be stored; nothing is added.
        """
        with self.store.update():
            self._check("adding documents", representation)
            start = len(self)
            about = self.store.meta["index"]
            if isinstance(representation, Sparse):
                lowest = representation.weights.min() if len(representation.weights) else 0
                about["negative"] = bool(about.get("negative") or lowest < 0)
            self._append(self._compared(representation))
            about |= {
                "representation": representation.kind,
                "dim": representation.dim,
                "rows": start + len(representation),
            }
            return range(start, len(self))

    @property
    def may_be_negative(self) -> bool:
        """Whether a stored sparse weight may be below 0."""
        return bool(self.store.meta["index"].get("negative", len(self) > 0))

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents ``rows (n,)``, ascending, of an index of the same kind, exactly as stored."""
        self.add(source.representations(rows))

    def remove(self, rows: Sequence[int] | Array) -> int:
        """Exclude rows from all later searches; their bytes stay until the index is compacted.

        Returns:
            The number of these rows that were not removed before.

        Raises:
            BadValueError: A row does not exist.
        """
        with self.store.update():
            chosen = np.unique(as_rows("removing documents", rows, len(self)))
            chosen = chosen[self.live[chosen]]
            if len(chosen):
                self.store.append("removed.bin", chosen)
            return len(chosen)

    def finish(  # noqa: B027 (an index without such a structure leaves it so)
        self, progress: StageProgress | None = None
    ) -> None:
        """Build or extend the structure that makes searches fast. Searches find everything without it, too.

        Args:
            progress: Called with the stages of the work, see `StageProgress`.
        """

    @snapshot
    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """Return the k best documents of every query.

        Args:
            queries: ``n_q`` representations of the same kind and dimensions as the documents.
            k: At least 1; may exceed the number of documents.
            allowed: ``(len(self),)`` bool: only rows where it is true are returned.

        Returns:
            Rows and scores, ``(n_q, k)`` each. A document without tokens scores -inf and is never a hit.

        Raises:
            BadTypeError: ``allowed`` is no array of bool.
            BadValueError: k is not a whole number of 1 or more, queries are of another kind or dimensions or
                hold NaN, or ``allowed`` is of another length.
        """
        self._check("searching", queries)
        check_k(k)
        k, keep, n_q = int(k), self._keep(allowed), len(queries)
        width = min(k, len(self) if keep is None else int(np.count_nonzero(keep)))
        if width and n_q:
            with torch.no_grad():
                rows, scores = self._search(self._compared(queries.to("cpu", torch.float32)), width, keep)
        else:
            rows, scores = np.empty((n_q, 0), np.int64), np.empty((n_q, 0), np.float32)
        if rows.shape[1] < k:
            rows = np.pad(rows, ((0, 0), (0, k - rows.shape[1])), constant_values=-1)
            scores = np.pad(scores, ((0, 0), (0, k - scores.shape[1])), constant_values=-np.inf)
        return Hits(rows, scores)

    @snapshot
    @torch.no_grad()
    def rescore(self, queries: Representation, rows: Array) -> Array:
        """Return exact scores of chosen documents, removed ones included.

        Args:
            queries: ``n_q`` representations.
            rows: ``(n_q, k)`` integers; -1 stands for no document.

        Returns:
            ``(n_q, k)`` float32; -inf where the row is -1.
        """
        self._check("rescoring", queries)
        queries = self._compared(queries.to("cpu", torch.float32))
        rows = as_rows("rescoring", rows, len(self), least=-1)
        if rows.ndim != 2 or len(rows) != len(queries):
            raise BadValueError(
                f"rescore: rows of shape {rows.shape} for {len(queries)} queries; expected (n_q, k)"
            )
        return self._score_rows(queries, rows)

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return kind, representation, dim, documents, removed (and its share) and bytes."""
        documents = int(self.live.sum())
        return {
            "kind": self.config.kind,
            "representation": self.representation,
            "dim": self.dim,
            "documents": documents,
            "removed": len(self) - documents,
            "removed_share": (len(self) - documents) / max(1, len(self)),
            "bytes": sum(self.store.sizes().values()),
        }

    @abstractmethod
    def representations(self, rows: Array) -> Representation:
        """Return the stored documents of ``rows (n,)``, in this order, removed ones included.

        Raises:
            BadTypeError: ``rows`` are not integers.
            BadValueError: A row does not exist.
        """

    @abstractmethod
    def _append(self, representation: Representation) -> None:
        """Store rows that have been checked."""

    @abstractmethod
    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        """Search with ``k`` at most the number of rows where ``keep`` is true (None: everywhere)."""

    @property
    def _metric(self) -> Metric:
        """Return what a score of dense vectors is."""
        return cast(Metric, self.config.__dict__.get("metric", "inner_product"))  # getattr takes 2 us

    def _compared(self, representation: Representation) -> Representation:
        """Return documents, or queries, as they are stored and compared."""
        return unit(representation) if self._metric == "cosine" else representation

    def _count(self, name: str) -> int:
        """Return a number of the index by its name in the manifest; 0 if the manifest lacks it."""
        return int(self.store.meta["index"].get(name, 0))

    def _score_rows(self, queries: Representation, rows: Array) -> Array:
        """Return the exact scores of rows, as `rescore` does, without checks."""
        scores = np.full(rows.shape, -np.inf, np.float32)
        filled, numbers = rows >= 0, self.store.limits.scan_numbers
        if isinstance(queries, Dense) and filled.any():
            width = min(rows.shape[1], max(1, numbers // max(1, self.dim)))  # rows of one query
            size = max(1, numbers // (width * max(1, self.dim)))
            for start, first in product(range(0, len(rows), size), range(0, rows.shape[1], width)):
                own, columns = slice(start, start + size), slice(first, first + width)
                real = filled[own, columns]
                if real.any():  # padding is not read
                    values = self.representations(rows[own, columns][real]).arrays()["values"]
                    chosen = np.where(real, real.cumsum().reshape(real.shape) - 1, -1)
                    asked = queries.arrays()["values"][own]
                    scores[own, columns] = pair_scores(self._metric, asked, values, chosen)
        elif isinstance(queries, MultiVector) and filled.any():
            scores[filled] = self._score_pairs(queries, np.nonzero(filled)[0], rows[filled])
        else:
            size = max(1, numbers // _TERMS)
            for query in np.flatnonzero(filled.any(1)):
                given = np.flatnonzero(filled[query])
                for some in np.split(given, range(size, len(given), size)):
                    documents = self.representations(rows[query, some])
                    scores[query, some] = score(queries[query : query + 1], documents)[0]
        return scores

    def _score_pairs(self, queries: MultiVector, query: Array, rows: Array) -> Array:
        """Return the MaxSim ``(n,)`` of pairs of queries, ascending, and rows."""
        scores = np.empty(len(rows), np.float32)
        # as many at once as stay in the cache
        size = max(_PAIRS, self.store.limits.scan_numbers // (4 * _TOKENS * max(1, self.dim)))
        for start in range(0, len(rows), size):
            own, documents = query[start : start + size], self.representations(rows[start : start + size])
            pairs = torch.from_numpy(np.stack([own - own[0], np.arange(len(own))], axis=1))
            scores[start : start + size] = score_pairs(queries[own[0] : own[-1] + 1], documents, pairs)
        return scores

    def _check_same(self) -> None:
        """Raise StorageError if a refresh has opened an index of another kind."""
        if self.store.meta.get("index", {}).get("config") != self._built:
            raise StorageError(
                f"index {self.store.path}: it was replaced by one of another kind; open it again"
            )

    def _check(self, operation: str, representation: Representation) -> None:
        """Raise an error if the index cannot hold or compare the representations."""
        one_thread_after_fork()
        self._check_same()
        if not isinstance(representation, Dense | MultiVector | Sparse):
            raise BadTypeError(
                f"{operation}: got {type(representation).__name__}, expected Dense, MultiVector or Sparse"
            )
        if representation.kind not in self.kinds:
            raise BadValueError(
                f"{operation}: an index of kind {self.config.kind!r} holds {', '.join(self.kinds)}, "
                f"got {representation.kind}; choose {suitable_names(representation.kind)}"
            )
        grows = Vocabulary.grows(self.store) and operation.startswith("adding")
        dim = max(self.dim, representation.dim) if grows else self.dim
        if self.representation and (representation.kind, representation.dim) != (self.representation, dim):
            raise BadValueError(
                f"{operation}: the index holds {self.representation} of dimension {self.dim}, got "
                f"{representation.kind} of dimension {representation.dim}; use the model it was built with"
            )
        # float32 is what is stored and searched: 1e200 is infinite in it; a finite sum rules out NaN, too
        values = _numbers(representation).detach().float()
        if not math.isfinite(values.sum().item()) and not values.isfinite().all():
            raise BadValueError(f"{operation}: NaN or infinite values in it; check the model that made them")
        if self._metric == "euclidean" and (values.square().sum(-1) > LARGEST_SQUARE).any():
            raise BadValueError(
                f"{operation}: a vector is longer than {LARGEST_SQUARE**0.5:.1g}, and float32 does not hold "
                "the squares of such distances; divide all vectors by one number, or choose the metric cosine"
            )

    def _keep(self, allowed: Array | None) -> Array | None:
        """Return which rows may be hits: live ones that a filter allows; None if all may."""
        keep = self.live if self.store.rows("removed.bin") else None
        if allowed is None:
            return keep
        try:
            allowed = np.asarray(allowed)
        except ValueError:  # lists of different lengths
            raise BadTypeError(f"search: allowed is {brief(allowed)}; expected bool ({len(self)},)") from None
        if allowed.dtype != np.bool_ or allowed.shape != (len(self),):
            raise BadValueError(
                f"search: allowed is {allowed.dtype} of shape {allowed.shape}; expected bool ({len(self)},), "
                "one per row"
            )
        return np.ascontiguousarray(allowed) if keep is None else allowed & keep


def _numbers(representation: Representation) -> torch.Tensor:
    if isinstance(representation, MultiVector):
        return representation.tokens.values
    return representation.values if isinstance(representation, Dense) else representation.weights


def check_k(k: object) -> None:
    """Raise BadValueError unless ``k`` is a whole number of 1 or more."""
    check_counts("search", k=k)


def as_rows(operation: str, rows: Any, count: int, least: int = 0) -> Array:
    """Return row numbers from ``least`` to ``count - 1`` as an array of int64, of whatever shape.

    Raises:
        BadTypeError: ``rows`` are not integers.
        BadValueError: A row does not exist.
    """
    try:
        chosen = np.asarray(rows)
    except (ValueError, TypeError, RuntimeError):  # lists of different lengths, a tensor with gradients
        raise BadTypeError(f"{operation}: rows are {brief(rows)}; expected integers") from None
    if (chosen.size and chosen.dtype.kind not in "iu") or chosen.dtype == np.uint64:
        raise BadTypeError(f"{operation}: rows are {chosen.dtype}, expected integers")
    outside = chosen[(chosen < least) | (chosen >= count)]
    if outside.size:
        raise BadValueError(f"{operation}: no row {outside[0]}; expected {least} to {count - 1}")
    return chosen.astype(np.int64)


def row_list(operation: str, rows: Any, count: int) -> Array:
    """Return ``rows (n,)`` as `as_rows` does, and refuse another shape by a BadValueError."""
    chosen = as_rows(operation, rows, count)
    if chosen.ndim != 1:
        raise BadValueError(f"{operation}: rows of shape {chosen.shape}; expected (n,)")
    return chosen


def coded_rows(index: Index) -> int:
    """Return the number of rows, the first ones, that an index stores as codes."""
    return int(getattr(index, "coded", 0))


def copy_rows(index: Index, source: Index, rows: Array) -> None:
    """Copy rows as `Index.copy` does; decode rows with codes that would come after rows without."""
    if coded_rows(index) < len(index) and (rows < coded_rows(source)).any():  # codes are of the first rows
        index.add(source.representations(rows))
    else:
        index.copy(source, rows)


def live_rows(store: Store, count: int, name: str = "removed.bin") -> Array:
    """Return ``(count,)`` bool: rows that are not in a list of removed ones; treat it as read-only."""

    def make() -> Array:
        live = np.ones(count, np.bool_)
        if store.rows(name):
            live[removed_rows(store.path, store.read(name), count)] = False
        return live

    return store.derived(("live", count, name), make)
