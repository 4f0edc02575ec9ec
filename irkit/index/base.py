"""What every index does: rows in order of addition, tombstones, checks, exact scores on request."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
import torch

from irkit.arguments import is_count, shown
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.forking import one_thread_after_fork
from irkit.index.config import IndexConfig
from irkit.index.files import Array
from irkit.index.layout import removed_rows
from irkit.index.state import pinned
from irkit.index.store import Store
from irkit.index.topk import Hits
from irkit.index.vocabulary import Vocabulary
from irkit.representation import Dense, MultiVector, Representation, Sparse
from irkit.scoring import score

__all__ = ["Index", "StageProgress", "as_rows", "live_rows"]

StageProgress: TypeAlias = Callable[[str, int, int | None], object]
"""``progress(stage, count, total)``: of ``stage``, ``count`` more of ``total`` are done.

A stage has a name in the -ing form (``"encoding"``, ``"training"``, ``"adding"``) and begins with its first
call, whose count may be 0; a call of another name ends it. ``total`` is None where nobody knows it, as
throughout a stage in which nothing can be counted.
"""

_SUITABLE = {  # names of `index_config`, by what they hold
    "dense": "flat, hnsw, ivf, pq, ivfpqfs, faiss or auto",
    "multi_vector": "flat, plaid, muvera or auto",
    "sparse": "inverted, flat or auto",
}
_NUMBERS = 1 << 23  # of documents fetched at a time: 32 MB
_TOKENS = 128  # of a document, some


class Index(ABC):
    """Rows of one kind of representation in a `Store`, to be searched.

    Rows are numbered 0, 1, ... in order of addition. A number is never used again: a removed row leaves a
    gap. Changes made outside ``store.update()`` are committed one by one.

    Attributes:
        store: Where everything is kept.
        config: Its configuration; what only concerns searching may be replaced at any time, as in
            ``index.config = index.config.model_copy(update={"ef_search": 128})``.
    """

    kinds: ClassVar[tuple[str, ...]] = ("dense", "multi_vector", "sparse")
    """Kinds of representation it can hold."""

    def __init__(self, store: Store, config: IndexConfig) -> None:
        """Use `create_index` or `open_index`."""
        self.store = store
        self.config = config
        self._built = store.meta["index"]["config"]

    @property
    def representation(self) -> str | None:
        """Kind of what it holds; None before the first ``add``."""
        kind: str | None = self.store.meta["index"]["representation"]
        return kind

    @property
    def dim(self) -> int:
        """Width of a vector, or size of the vocabulary; 0 before the first ``add``."""
        return int(self.store.meta["index"]["dim"])

    def __len__(self) -> int:
        """Rows ever added, removed ones included."""
        return int(self.store.meta["index"]["rows"])

    @property
    @pinned
    def live(self) -> Array:
        """``(len(self),)`` bool: rows that are not removed."""
        return live_rows(self.store, len(self))

    def add(self, representation: Representation) -> range:
        """Add documents.

        Args:
            representation: Of the kind and width of what is there already.

        Returns:
            Their rows.

        Raises:
            BadValueError: Another kind or width, or a value is NaN or infinite; nothing is added.
            StorageError: They could not be stored; nothing is added.
        """
        with self.store.update():
            self._check("adding documents", representation)
            start = len(self)
            self._append(representation)
            self.store.meta["index"] |= {
                "representation": representation.kind,
                "dim": representation.dim,
                "rows": start + len(representation),
            }
            return range(start, len(self))

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents ``rows (n,)``, rising, of another index of the same kind, as they are kept there."""
        self.add(source.representations(rows))

    def remove(self, rows: Sequence[int] | Array) -> int:
        """Take rows out of all later searches; their bytes stay until the index is compacted.

        Returns:
            How many were still there.

        Raises:
            BadValueError: There is no such row.
        """
        with self.store.update():
            chosen = np.unique(self._check_rows("removing documents", rows))
            chosen = chosen[self.live[chosen]]
            if len(chosen):
                self.store.append("removed.bin", chosen)
            return len(chosen)

    def finish(  # noqa: B027 (an index that needs nothing of the kind leaves it so)
        self, progress: StageProgress | None = None
    ) -> None:
        """Build or extend what makes search fast; everything is found without it, too.

        Args:
            progress: Told of the stages of the work, see `StageProgress`.
        """

    @pinned
    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """The k best documents of every query.

        Args:
            queries: ``n_q`` representations of the kind and width of the documents.
            k: At least 1; may exceed the number of documents.
            allowed: ``(len(self),)`` bool; only rows where it is true are found.

        Returns:
            Rows and scores, ``(n_q, k)`` each. A document that scores -inf (it has no tokens) is no hit.

        Raises:
            BadValueError: k < 1, queries of another kind or width or with NaN, ``allowed`` of another length.
        """
        self._check("searching", queries)
        if isinstance(k, bool) or not hasattr(k, "__index__"):
            raise BadTypeError(f"search: k is {shown(k)}; expected a whole number")
        if not is_count(k):
            raise BadValueError(f"search: k is {shown(k)}; expected 1 or more")
        k = int(k)
        keep, n_q = self._keep(allowed), len(queries)
        wanted = min(k, len(self) if keep is None else int(np.count_nonzero(keep)))
        if wanted and n_q:
            with torch.no_grad():
                rows, scores = self._search(queries.to("cpu", torch.float32), wanted, keep)
        else:
            rows, scores = np.empty((n_q, 0), np.int64), np.empty((n_q, 0), np.float32)
        if rows.shape[1] < k:
            rows = np.pad(rows, ((0, 0), (0, k - rows.shape[1])), constant_values=-1)
            scores = np.pad(scores, ((0, 0), (0, k - scores.shape[1])), constant_values=-np.inf)
        return Hits(rows, scores)

    @pinned
    @torch.no_grad()
    def rescore(self, queries: Representation, rows: Array) -> Array:
        """Exact scores of given documents, removed ones included.

        Args:
            queries: ``n_q`` representations.
            rows: ``(n_q, k)`` integers; -1 stands for no document.

        Returns:
            ``(n_q, k)`` float32; -inf where the row is -1.
        """
        self._check("rescoring", queries)
        queries = queries.to("cpu", torch.float32)
        rows = as_rows("rescoring", rows)
        if rows.ndim != 2 or len(rows) != len(queries):
            raise BadValueError(
                f"rescore: rows of shape {rows.shape} for {len(queries)} queries; expected (n_q, k)"
            )
        self._check_rows("rescoring", rows[rows != -1])
        return self._score_rows(queries, rows)

    @pinned
    def stats(self) -> dict[str, Any]:
        """Kind, representation, dim, documents, removed (and its share), bytes."""
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
        """The stored documents of ``rows (n,)``, in this order."""

    @abstractmethod
    def _append(self, representation: Representation) -> None:
        """Store checked rows."""

    @abstractmethod
    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        """Search with ``k`` at most the number of rows where ``keep`` is true (None: all)."""

    def _score_rows(self, queries: Representation, rows: Array) -> Array:
        """`rescore` without checks."""
        scores = np.full(rows.shape, -np.inf, np.float32)
        given = rows >= 0
        if isinstance(queries, Dense) and given.any():
            size = max(1, _NUMBERS // (rows.shape[1] * self.dim))
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                documents = self.representations(rows[part].clip(0).reshape(-1))
                values = cast(Dense, documents).values.view(*rows[part].shape, -1)
                scores[part] = (values @ queries.values[part, :, None])[..., 0]
            scores[~given] = -np.inf
            return scores
        if isinstance(queries, MultiVector):
            asked, place = np.nonzero(given)
            size = max(1, _NUMBERS // (_TOKENS * max(1, self.dim)))
            for start in range(0, len(asked), size):
                some, at = asked[start : start + size], place[start : start + size]
                scores[some, at] = self._score_pairs(queries, some, rows[some, at])
            return scores
        for query in np.flatnonzero(given.any(1)):
            documents = self.representations(rows[query, given[query]])
            scores[query, given[query]] = score(queries[query : query + 1], documents)[0]
        return scores

    def _score_pairs(self, queries: MultiVector, query: Array, rows: Array) -> Array:
        """MaxSim of some pairs of queries, rising, and rows: ``(n,)``."""
        from irkit_kernels.maxsim import maxsim

        asked, documents = queries[query[0] : query[-1] + 1], cast(MultiVector, self.representations(rows))
        pairs = np.stack([query - query[0], np.arange(len(rows))], axis=1)
        q, d = asked.tokens, documents.tokens
        return maxsim(q.values, q.offsets, d.values.float(), d.offsets, torch.from_numpy(pairs)).numpy()

    def _check_same(self) -> None:
        """Refuse files of an index of another kind, which a refresh has brought."""
        if self.store.meta.get("index", {}).get("config") != self._built:
            raise StorageError(
                f"index {self.store.path}: it was replaced by one of another kind; open it again"
            )

    def _check(self, operation: str, given: Representation) -> None:
        one_thread_after_fork()
        self._check_same()
        if not isinstance(given, Dense | MultiVector | Sparse):
            raise BadTypeError(
                f"{operation}: got {type(given).__name__}, expected Dense, MultiVector or Sparse"
            )
        if given.kind not in self.kinds:
            raise BadValueError(
                f"{operation}: an index of kind {self.config.kind!r} holds {', '.join(self.kinds)}, "
                f"got {given.kind}; choose {_SUITABLE[given.kind]}"
            )
        grows = Vocabulary.grows(self.store) and operation.startswith("adding")
        dim = max(self.dim, given.dim) if grows else self.dim
        if self.representation and (given.kind, given.dim) != (self.representation, dim):
            raise BadValueError(
                f"{operation}: the index holds {self.representation} of dimension {self.dim}, "
                f"got {given.kind} of dimension {given.dim}; use the model it was built with"
            )
        values = _numbers(given).detach().float()  # what is stored and searched: 1e200 is infinite in it
        if not math.isfinite(values.sum().item()) and not values.isfinite().all():  # a sum may be too large
            raise BadValueError(f"{operation}: NaN or infinite values in it; check the model that made them")

    def _check_rows(self, operation: str, rows: Sequence[int] | Array) -> Array:
        chosen = as_rows(operation, rows)
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if outside.size:
            raise BadValueError(f"{operation}: no row {outside.flat[0]}; there are rows 0 to {len(self) - 1}")
        return chosen

    def _keep(self, allowed: Array | None) -> Array | None:
        keep = self.live if self.store.rows("removed.bin") else None
        if allowed is None:
            return keep
        try:
            allowed = np.asarray(allowed)
        except ValueError:  # lists of different lengths
            raise BadTypeError(f"search: allowed is {shown(allowed)}; expected bool ({len(self)},)") from None
        if allowed.dtype != np.bool_ or allowed.shape != (len(self),):
            raise BadValueError(
                f"search: allowed is {allowed.dtype} of shape {allowed.shape}; expected bool ({len(self)},), "
                "one per row"
            )
        return allowed if keep is None else allowed & keep


def _numbers(given: Representation) -> torch.Tensor:
    if isinstance(given, MultiVector):
        return given.tokens.values
    return given.values if isinstance(given, Dense) else given.weights


def as_rows(operation: str, rows: Any) -> Array:
    """Numbers of rows as an array of int64, of whatever shape.

    Raises:
        BadTypeError: They are no integers.
    """
    try:
        chosen = np.asarray(rows)
    except ValueError:  # lists of different lengths
        raise BadTypeError(f"{operation}: rows are {shown(rows)}; expected integers") from None
    if (chosen.size and chosen.dtype.kind not in "iu") or chosen.dtype == np.uint64:
        raise BadTypeError(f"{operation}: rows are {chosen.dtype}, expected integers")
    return chosen.astype(np.int64)


def live_rows(store: Store, count: int) -> Array:
    """``(count,)`` bool: rows that are not removed; treat it as read-only."""

    def make() -> Array:
        live = np.ones(count, np.bool_)
        if store.rows("removed.bin"):
            live[removed_rows(store.path, store.read("removed.bin"), count)] = False
        return live

    return store.derived(("live", count), make)
