"""Search of an index in several shards: each shard is searched, and the best of their hits are merged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from irkit.core.representation import Representation, Sparse, concat
from irkit.errors import BadValueError
from irkit.index import (
    Hits,
    Index,
    IndexConfig,
    SeveralIndex,
    StageProgress,
    Store,
    StoredRows,
    WindowedIndex,
    open_index,
)
from irkit.index import bm25_index as bm25
from irkit.index.array_files import Array, corrupt
from irkit.index.index_base import as_rows, check_k, row_list
from irkit.index.layout import element_positions
from irkit.index.part_store import index_records
from irkit.index.state import snapshot
from irkit.index.topk import TopK
from irkit.index.windowed import index_of_rows
from irkit.shards.codecs import Work, finish_part, one_codec, share_codec
from irkit.shards.joint_faiss import search_structures
from irkit.shards.joint_lists import search_bytes, search_lists
from irkit.shards.joint_plaid import search_plaid
from irkit.shards.placement import (
    Placement,
    WindowNumbers,
    global_rows,
    in_order,
    number_windows,
    ordered_hits,
    placement,
    push_hits,
)
from irkit.shards.sharded_documents import ShardedDocuments
from irkit.shards.sharded_store import VOCABULARY


class ShardedIndex(StoredRows):
    """Rows of one representation in all shards, with the interface of `Index`; rows are global ones.

    If documents are in windows, the rows are the windows of all shards, document by document, and this is the
    ``inner`` of a `irkit.shards.ShardedWindows`.

    A search asks every shard for its ``k`` best rows and keeps the ``k`` best of these. Scores equal the
    scores of one index, because shards share all that scores depend on: BM25 its statistics, `plaid` and
    `dense` their centroids and codebooks (see `irkit.shards.codecs`). The shards of `plaid`, `dense`,
    `muvera` and `faiss` choose their candidates together (see the modules ``irkit.shards.joint_...``).

    A model with several heads has one for each: `open_parts` makes it the part of a `SeveralIndex`.

    Attributes:
        parts: Indexes of the rows of the shards.
        cut: If documents are in windows, the indexes of the shards, whose rows are documents; else None.
        searched_here: True if this process searches all shards.
    """

    searched_here = True

    def __init__(self, store: Store, documents: ShardedDocuments) -> None:
        """Open the shards; ``documents`` knows which of the documents that come belong to each.

        Args:
            store: A `ShardedStore`, or the `PartStore` of a representation in one.
            documents: Documents of the whole.

        Raises:
            CorruptError: Shards have different windows.
        """
        opened = [open_index(part) for part in store.parts]
        if any(part.windows != opened[0].windows for part in opened):
            raise corrupt(store.path, "its shards cut documents into different windows")
        self.parts = [index_of_rows(part) for part in opened]
        cut = [part for part in opened if isinstance(part, WindowedIndex)]
        self.cut = cut or None
        self._documents = documents
        super().__init__(store, self.parts[0].config)

    @property
    def config(self) -> IndexConfig:
        """The configuration; settings of the search may be replaced, see `Index`."""
        return self._config

    @config.setter
    def config(self, config: IndexConfig) -> None:
        self._config = config
        for part in self.parts:
            part.config = config

    @property
    def formula(self) -> tuple[float, float] | None:
        """See `StoredRows.formula`."""
        return self._stored[0].formula

    @formula.setter
    def formula(self, formula: tuple[float, float] | None) -> None:
        for part in self._stored:
            part.formula = formula

    @property
    def _stored(self) -> list[StoredRows]:
        return [part for part in self.parts if isinstance(part, StoredRows)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of representation that the index can hold."""
        return self.parts[0].kinds

    def __len__(self) -> int:
        """Return the number of global rows, including rows of removed documents."""
        return len(self._documents) if self.cut is None else sum(map(len, self.parts))

    @property
    @snapshot
    def live(self) -> Array:
        """Return ``(len(self),)`` bool, True for the global rows of documents that are not removed."""
        if self.cut is None:
            return self._documents._live()
        live = np.empty(len(self), np.bool_)
        for part, numbers in zip(self.parts, self.numbers, strict=True):
            live[numbers] = part.live
        return live

    @property
    def windows_of_all(self) -> WindowNumbers:
        """The windows of all shards, if documents are in windows."""
        assert self.cut is not None
        return number_windows(self.store, len(self._documents), self.cut)

    @property
    def numbers(self) -> list[Array]:
        """For each shard the global row ``(n,)`` of each of its rows."""
        if self.cut is None:
            return [global_rows(part) for part in self.store.parts]
        return self.windows_of_all.numbers

    @property
    def placement(self) -> Placement:
        """Where the global rows are."""
        return placement(self.store) if self.cut is None else self.windows_of_all.placement

    # ---- changes ----

    def add(self, representation: Representation) -> range:
        """Add rows for the documents that were added last, see `Index.add`."""
        with self.store.update():
            super().add(representation)
            end = self.store.meta["index"]["rows"] = len(self)
            return range(end - len(representation), end)

    def _append(self, representation: Representation) -> None:
        """Add rows to the shards that have just stored their documents."""
        routes = new_routes(self._documents, self.parts, len(representation))
        terms = self.store.rows(VOCABULARY)
        for part, positions in zip(self.parts, routes, strict=True):
            have = part.store.rows(VOCABULARY)
            new = self.store.read(VOCABULARY)[have:] if have < terms else b""
            add_rows(part, representation[positions], new)

    def remove(self, rows: Sequence[int] | Array) -> int:
        """Exclude global rows from all later searches, see `Index.remove`."""
        with self.store.update():
            chosen = np.unique(as_rows("removing documents", rows, len(self)))
            split = self.placement.split(chosen)
            return sum(self.parts[number].remove(own) for number, _, own in split)

    def finish(self, progress: StageProgress | None = None) -> None:
        """Share statistics and codecs, and build or extend the structures of all shards."""
        with contextlib.nullcontext() if self.store.building else self.store.update():
            work = self.share(progress)
            for part in self.parts:
                finish_part(part, work, progress)

    def share(self, progress: StageProgress | None = None) -> Work:
        """Share statistics and codecs; return what shards have to do, see `share_codec`."""
        if "bm25" in self.store.meta["index"]:
            mean = bm25.renewed_mean(self.store)
            for store in self.store.parts:
                with store.update():
                    store.meta["index"]["bm25"]["shared"] = mean
            with self.store.update():
                self.store.meta["index"]["bm25"]["mean"] = mean
        return share_codec(self, progress)

    # ---- rows as they are stored ----

    @snapshot
    def representations(self, rows: Array) -> Representation:
        """Return the stored documents of global ``rows (n,)``, in this order."""
        return self._represent(row_list("representations", rows, len(self)))

    def _represent(self, rows: Array) -> Representation:
        split = self.placement.split(rows)
        if not split:
            return self.parts[0].representations(rows[:0])
        parts = concat([self.parts[number].representations(own) for number, _, own in split])
        return parts[np.argsort(np.concatenate([positions for _, positions, _ in split]))]

    def stored_arrays(self, rows: Array | slice) -> dict[str, Array]:
        """Return the arrays of global rows as shards store them."""
        chosen = np.arange(len(self))[rows]
        split = self.placement.split(chosen)
        if not split:
            return self._stored[0].stored_arrays(chosen[:0])
        parts = [self._stored[number].stored_arrays(own) for number, _, own in split]
        order = np.argsort(np.concatenate([positions for _, positions, _ in split]))
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if "lengths" not in joined:
            return {name: array[order] for name, array in joined.items()}
        lengths = joined["lengths"]
        elements = element_positions(np.cumsum(lengths)[order], lengths[order])
        single = self._stored[0]._row_arrays()
        return {name: array[order if name in single else elements] for name, array in joined.items()}

    def _score_rows(self, queries: Representation, rows: Array) -> Array:
        scores = np.full(rows.shape, -np.inf, np.float32)
        where = self.placement
        owners = np.full(rows.shape, -1)
        owners[rows >= 0] = where.shards[rows[rows >= 0]]
        for number in np.unique(owners[owners >= 0]).tolist():
            in_part = owners == number
            own = np.full(rows.shape, -1)
            own[in_part] = where.rows[rows[in_part]]
            part = self.parts[number]
            scores[in_part] = part._score_rows(part._compared(_widened(queries, part)), own)[in_part]
        return scores

    def _compared(self, representation: Representation) -> Representation:
        """Return documents, or queries, as they are: shards normalise them for cosines."""
        return representation

    # ---- searching ----

    @snapshot
    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """Return the k best documents of every query; see `Index.search`."""
        check_k(k)
        self._check("searching", queries)
        allowed, best = self._keep(allowed), TopK(len(queries), int(k))
        if not len(queries):
            return best.hits()
        divided = self.divide(queries, int(k), allowed)
        if divided is not None:
            return divided
        masks = [None if allowed is None else allowed[numbers] for numbers in self.numbers]
        alone = len(self.parts) == 1 and in_order(self.parts[0].store)  # it chooses as one index does
        joint_searches = (
            (search_plaid, search_lists, search_bytes, search_structures) if one_codec(self) else ()
        )
        for search in () if alone else joint_searches:
            joint = search(self, queries, int(k), masks)
            if joint is not None:
                if joint.rows.shape[1] < k:
                    best.push_pairs(joint.scores, joint.rows)
                    joint = best.hits()
                return joint
        for numbers, hits in zip(self.numbers, self.ask(search_part, queries, masks, int(k)), strict=True):
            if hits is not None:
                push_hits(best, numbers, hits)
        return best.hits()

    def divide(self, queries: Representation, k: int, allowed: Array | None) -> Hits | None:
        """Return the hits if other processes share the queries, each of which searches all shards, or None.

        Args:
            queries: Queries.
            k: Hits.
            allowed: Which global rows may be results, bool ``(n,)``; None for all.
        """
        return None

    def ask(
        self,
        work: Callable[..., Any],
        queries: Representation,
        masks: Sequence[Array | None],
        *settings: Any,
    ) -> list[Any]:
        """Return ``work(part, queries, mask, *settings)`` of each shard; None for one that cannot be asked.

        Args:
            work: A function of a module.
            queries: Queries.
            masks: For each shard which of its rows may be results, bool ``(n,)``; None for all.
            settings: Further arguments.
        """
        pairs = zip(self.parts, masks, strict=True)
        return [work(part, queries, mask, *settings) for part, mask in pairs]

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        return self.search(queries, k, keep)

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `Index.stats` returns, and the number of shards."""
        return super(StoredRows, self).stats() | shard_facts(self.parts, int(self.live.sum()))


def shard_facts(parts: Sequence[Index], documents: int) -> dict[str, Any]:
    """Return the numbers of removed rows and of shards; ``documents`` are the rows that are not removed."""
    rows = sum(map(len, parts))
    share = (rows - documents) / max(1, rows)
    return {"removed": rows - documents, "removed_share": share, "shards": len(parts)}


def new_routes(documents: ShardedDocuments, parts: Sequence[Index], count: int) -> list[Array]:
    """Return which of the ``count`` documents that were added last each shard has stored: their positions.

    Raises:
        BadValueError: They have their rows already, or have not been added.
    """
    # they have no rows yet if each shard has as many documents without a row
    missing = [len(global_rows(part.store)) - len(part) for part in parts]
    ends = [int(positions[-1]) + 1 for positions in documents.routes if len(positions)]
    if [*map(len, documents.routes)] != missing or max(ends, default=0) > count:
        raise BadValueError("adding documents: an index of several shards needs their ids and texts, too")
    return documents.routes


def add_rows(
    part: Index,
    representation: Representation,
    terms: Array | bytes = b"",
    spans: Sequence[Array] | None = None,
) -> None:
    """Add rows to a shard, inside ``update``.

    Args:
        part: Index of the shard.
        representation: The rows.
        terms: Terms that are new to the shard, as bytes.
        spans: For documents in windows, see `WindowedIndex.add_windows`.
    """
    if len(terms):
        part.store.append(VOCABULARY, np.frombuffer(terms, np.uint8))
    if not len(representation) and part.dim == representation.dim:
        return
    if spans is None:
        part.add(representation)
    else:
        cast(WindowedIndex | SeveralIndex, part).add_windows(representation, spans)


def _widened(queries: Representation, part: Index) -> Representation:
    """Return queries over all terms of a shard, to which an interrupted change may have added some."""
    if isinstance(queries, Sparse) and queries.dim < part.dim:
        return Sparse(queries.terms, queries.weights, part.dim)
    return queries


def search_part(part: Index, queries: Representation, allowed: Array | None, k: int) -> Hits:
    """Return the best rows of a shard, among which are the best ones by global row of equal scores."""
    queries = _widened(queries, part)
    return ordered_hits(part.store, len(part), k, lambda width: part.search(queries, width, allowed))


def note_rows(store: Store, rows: int) -> None:
    """Write what the indexes of all shards have in common into the manifest of the whole, inside ``update``.

    Args:
        store: The whole, or the `PartStore` of a representation in it.
        rows: Number of global rows.
    """
    for name, about in index_records(store).items():
        parts = [index_records(part)[name] for part in store.parts]
        about["dim"] = max(part["dim"] for part in parts)
        about["representation"], about["rows"] = parts[0]["representation"], rows
        if any("negative" in part for part in parts):
            about["negative"] = any(part.get("negative") for part in parts)
