"""An index whose documents have any number of rows: the windows of long texts, found as one document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from irkit.core.representation import Representation
from irkit.errors import BadValueError
from irkit.index.array_files import Array, corrupt
from irkit.index.documents import REMOVED_DOCUMENTS
from irkit.index.index_base import Index, StageProgress, as_rows, check_k, coded_rows, copy_rows, live_rows
from irkit.index.index_settings import IndexConfig, WindowsConfig
from irkit.index.layout import element_positions
from irkit.index.state import snapshot
from irkit.index.store import Store
from irkit.index.topk import Hits

SPANS, ENDS = "window_spans.bin", "window_ends.bin"
_DEEPER = 4  # times as many windows, if those found belong to too few documents
_DEEP_HITS = 1 << 20  # hits of several queries that are searched together


class WindowedIndex(Index):
    """Documents in windows, with the interface of `Index`; its rows are documents.

    The windows are rows of an index of any kind. A search ranks ``2 k`` windows, and then four times as many
    again and again, until the best ``k`` documents are known, see `_rank_documents`. If the index of the
    windows is exact, the search finds what a scan of all windows finds.

    Attributes:
        inner: The index of the windows.
        windows: How documents were cut, and how the scores of their windows become one.
    """

    windows: WindowsConfig

    def __init__(self, store: Store, inner: Index, windows: WindowsConfig) -> None:
        """Use `create_index` or `open_index`; ``inner`` is the index of the windows in ``store``."""
        self.inner, self.windows = inner, windows
        super().__init__(store, inner.config)

    @property
    def config(self) -> IndexConfig:
        """The configuration; settings of the search may be replaced, see `Index`."""
        return self.inner.config

    @config.setter
    def config(self, config: IndexConfig) -> None:
        self.inner.config = config

    def __len__(self) -> int:
        """Documents ever added, removed ones included."""
        return self.store.rows(ENDS)

    @property
    @snapshot
    def live(self) -> Array:
        """``(len(self),)`` bool: documents that are not removed."""
        return live_rows(self.store, len(self), REMOVED_DOCUMENTS)

    @property
    def coded(self) -> int:
        """Number of documents, the first ones, all of whose windows are stored as codes."""
        return int(np.searchsorted(self._ends(), coded_rows(self.inner), "right"))

    # ---- changes ----

    def add(self, representation: Representation) -> range:
        """Add documents of one window each; `add_windows` adds longer ones."""
        one = np.zeros((1, 2), np.int64)
        return self.add_windows(representation, [one] * len(representation))

    def add_windows(self, representation: Representation, spans: Sequence[Array]) -> range:
        """Add documents.

        Args:
            representation: A row for each window, document by document.
            spans: For each document ``(n, 2)``, where its windows start and end in its text; at least one.

        Returns:
            The rows of the documents.

        Raises:
            BadValueError: A document has no window, numbers of windows and rows differ, or see `Index.add`.
        """
        counts = window_counts(representation, spans)
        with self.store.update():
            start, before = len(self), len(self.inner)
            self.inner.add(representation)
            if len(spans):
                self.store.append(SPANS, np.concatenate(spans).astype(np.int64))
                self.store.append(ENDS, before + np.cumsum(counts))
            return range(start, len(self))

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents ``rows (n,)``, ascending, of an index of windows of the same kind, as stored."""
        assert isinstance(source, WindowedIndex)
        chosen, counts = source._windows_of(rows)
        with self.store.update():
            before = len(self.inner)
            copy_rows(self.inner, source.inner, chosen)
            if len(rows):
                self.store.append(SPANS, source._spans(chosen))
                self.store.append(ENDS, before + np.cumsum(counts))

    def remove(self, rows: Sequence[int] | Array) -> int:
        """Exclude documents from all later searches, see `Index.remove`."""
        with self.store.update():
            chosen = np.unique(as_rows("removing documents", rows, len(self)))
            chosen = chosen[self.live[chosen]]
            if len(chosen):
                self.store.append(REMOVED_DOCUMENTS, chosen)
                self.inner.remove(self._windows_of(chosen)[0])
            return len(chosen)

    def finish(self, progress: StageProgress | None = None) -> None:
        """Build or extend the structure that makes searches fast, see `Index.finish`."""
        self.inner.finish(progress)

    # ---- searching ----

    @snapshot
    @torch.no_grad()
    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """Return the k best documents of every query, see `Index.search`."""
        if allowed is not None and len(self):
            self._keep(allowed)  # checks it
            allowed = np.asarray(allowed)[self._owners()]
        most = max(1, len(self.inner))
        self._check("searching", queries)
        check_k(k)
        result = Hits(np.full((len(queries), k), -1), np.full((len(queries), k), -np.inf, np.float32))
        if not len(self.inner):
            return result
        queries = queries.to("cpu", torch.float32)
        left, depth = np.arange(len(queries)), min(2 * int(k), most)
        while len(left):
            few = []
            size = max(1, _DEEP_HITS // depth)
            for start in range(0, len(left), size):
                part = left[start : start + size]
                hits = self.inner.search(queries[part], depth, allowed)
                for query, windows, scores in zip(part.tolist(), hits.rows, hits.scores, strict=True):
                    ended = depth == most or windows[-1] < 0
                    rows, values, known = self._rank_documents(
                        queries[query : query + 1], windows, scores, ended
                    )
                    if known < k and not ended:
                        few.append(query)
                        continue
                    rows, values = rows[:k], values[:k]
                    result.rows[query, : len(rows)], result.scores[query, : len(rows)] = rows, values
            left, depth = np.array(few, np.int64), min(_DEEPER * depth, most)
        return result

    def _rank_documents(
        self, query: Representation, windows: Array, scores: Array, ended: bool
    ) -> tuple[Array, Array, int]:
        """Return documents of the best windows, best first, their scores, and how many are surely the best.

        A document that is not among them has only windows that score no more than the last one here. So its
        maximum and its mean are at most that, and documents above it are known.
        """
        windows, scores = windows[windows >= 0], scores[windows >= 0]
        rows, firsts = np.unique(self._owners()[windows], return_index=True)
        if self.windows.pool != "mean":
            order = np.argsort(firsts)  # windows are ranked already
            return rows[order], scores[firsts[order]], len(rows)
        values = self._score_rows(query, rows[None])[0]
        order = np.argsort(-values, kind="stable")
        rows, values = rows[order], values[order]
        finite = values > -np.inf
        rows, values = rows[finite], values[finite]
        return rows, values, len(rows) if ended else int((values > scores[-1]).sum())

    def _score_rows(self, queries: Representation, rows: Array) -> Array:
        table = np.full(rows.shape, -np.inf, np.float32)
        where, scores, counts = self.window_scores(queries, rows)
        if len(counts):
            starts = np.cumsum(counts) - counts
            if self.windows.pool == "mean":
                table[where] = np.add.reduceat(scores.astype(np.float64), starts) / counts
            else:
                table[where] = np.maximum.reduceat(scores, starts)
        return table

    def window_scores(self, queries: Representation, rows: Array) -> tuple[Any, Array, Array]:
        """Score the windows of documents ``rows (n_q, k)``; -1 is padding.

        Returns:
            Where there are documents; the scores of their windows, document by document; their numbers.
        """
        where = np.nonzero(rows >= 0)
        queries = self.inner._compared(queries.to("cpu", torch.float32))
        windows, counts = self._windows_of(rows[where])
        n_windows = np.bincount(where[0], counts, len(rows)).astype(np.int64)  # windows of each query
        table = np.full((len(rows), int(n_windows.max(initial=0))), -1, np.int64)
        filled = np.arange(table.shape[1]) < n_windows[:, None]
        table[filled] = windows
        return where, self.inner._score_rows(queries, table)[filled] if len(windows) else table, counts

    @snapshot
    @torch.no_grad()
    def passages(self, queries: Representation, rows: Array) -> Array:
        """Return where the best window of each document starts and ends in its text.

        Args:
            queries: ``n_q`` representations.
            rows: ``(n_q, k)`` documents; -1 stands for none.

        Returns:
            ``(n_q, k, 2)`` integers; 0 where the row is -1.
        """
        self._check("finding passages", queries)
        rows = as_rows("finding passages", rows, len(self), least=-1)
        return self.best_spans(rows, *self.window_scores(queries, rows))

    def best_spans(self, rows: Array, where: Any, scores: Array, counts: Array) -> Array:
        """Return `passages` from the scores of windows, see `window_scores`."""
        result = np.zeros((*rows.shape, 2), np.int64)
        if len(counts):
            starts = np.cumsum(counts) - counts
            scores = np.where(np.isnan(scores), -np.inf, scores)  # altered files hold NaN
            highest = np.repeat(np.maximum.reduceat(scores, starts), counts)
            positions = np.where(scores == highest, np.arange(len(scores)), len(scores))
            best = np.minimum.reduceat(positions, starts) - starts  # the first of equal ones
            ends = self._ends()[rows[where]]
            result[where] = self._spans(ends - counts + best)
        return result

    def representations(self, rows: Array) -> Representation:
        """Refuse: a document of several windows has several rows, which `inner` has.

        Raises:
            BadValueError: Always.
        """
        raise BadValueError(
            f"index {self.store.path}: a document in windows has several representations and not one; "
            "build an index without windows for this, or read the windows from index.inner"
        )

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `Index.stats` returns, with the number of windows."""
        return super().stats() | {"windows": int(self.inner.live.sum())}

    def _compared(self, representation: Representation) -> Representation:
        """Return documents, or queries, as they are: the index of the windows normalises them for cosines."""
        return representation

    def _append(self, representation: Representation) -> None:
        raise NotImplementedError  # add_windows stores rows

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        return self.search(queries, k, keep)

    # ---- which windows belong to which document ----

    def _ends(self) -> Array:
        """Return ``(n,)``: for each document, the number of the window after its last.

        Raises:
            CorruptError: The ends are not ascending, or do not cover all windows.
        """
        if not self.store.rows(ENDS):
            return np.empty(0, np.int64)
        ends = self.store.read(ENDS)

        def check() -> None:
            if ends[-1] != self.store.rows(SPANS) or np.diff(ends, prepend=0).min() < 1:
                raise corrupt(self.store.path, f"its windows are not divided among {len(ends)} documents")

        self.store.once(ENDS, check)
        return ends

    def _spans(self, windows: Array) -> Array:
        """Return ``(n, 2)`` where ``windows (n,)`` start and end in the texts of their documents."""
        spans: Array = self.store.read(SPANS)[windows]
        return spans

    def _owners(self) -> Array:
        """Return ``(n,)`` the document of each window."""
        return self.store.derived(
            "owners", lambda: np.repeat(np.arange(len(self)), np.diff(self._ends(), prepend=0))
        )

    def _windows_of(self, rows: Array) -> tuple[Array, Array]:
        """Return the windows of documents ``rows (n,)``, and how many each has."""
        ends = self._ends()
        counts = ends[rows] - np.where(rows > 0, ends[rows - 1], 0)
        return element_positions(ends[rows], counts), counts


def window_counts(representation: Representation, spans: Sequence[Array]) -> Array:
    """Return ``(n,)`` the number of windows of each document, see `WindowedIndex.add_windows`.

    Raises:
        BadValueError: A document has no window, or numbers of windows and rows differ.
    """
    counts = np.array([len(span) for span in spans], np.int64)
    if counts.sum() != len(representation) or not counts.all():
        raise BadValueError(
            f"adding documents: {len(representation)} rows and {counts.sum()} windows of {len(spans)} "
            "documents; expected a row for each window, and a window or more for each document"
        )
    return counts


def index_of_rows(index: Index) -> Index:
    """Return the index of the windows, if documents are in windows; any other index as it is."""
    return index.inner if isinstance(index, WindowedIndex) else index
