"""Search of an index in several shards: each shard is searched, and the best of their hits are merged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from irkit.core.representation import Representation, Sparse, concat
from irkit.errors import BadValueError
from irkit.index import (
    Documents,
    Hits,
    Index,
    IndexConfig,
    SeveralConfig,
    SeveralIndex,
    StageProgress,
    Store,
    StoredRows,
    index_config,
    open_index,
)
from irkit.index import bm25_index as bm25
from irkit.index.array_files import Array
from irkit.index.index_base import as_rows, check_k, row_list
from irkit.index.layout import element_positions
from irkit.index.part_store import PartStore
from irkit.index.state import snapshot
from irkit.index.topk import TopK
from irkit.shards.codecs import Work, finish_part, one_codec, share_codec
from irkit.shards.joint_faiss import search_structures
from irkit.shards.joint_lists import search_bytes, search_lists
from irkit.shards.joint_plaid import search_plaid
from irkit.shards.placement import global_rows, in_order, ordered_hits, placement, push_hits
from irkit.shards.sharded_documents import ShardedDocuments
from irkit.shards.sharded_store import VOCABULARY, ShardedStore


class ShardedIndex(StoredRows):
    """Rows of one representation in all shards, with the interface of `Index`; rows are global ones.

    A search asks every shard for its ``k`` best rows and keeps the ``k`` best of these. Scores equal the
    scores of one index, because shards share all that scores depend on: BM25 its statistics, `plaid` and
    `dense` their centroids and codebooks (see `irkit.shards.codecs`). The shards of `plaid`, `dense`,
    `muvera` and `faiss` choose their candidates together (see the modules ``irkit.shards.joint_...``).

    A model with several heads has one for each: `open_parts` makes it the part of a `SeveralIndex`.

    Attributes:
        parts: Indexes of the shards.
        searched_here: True if this process searches all shards.
    """

    searched_here = True

    def __init__(self, store: Store, documents: ShardedDocuments) -> None:
        """Open the shards; ``documents`` knows which of the documents that come belong to each.

        Args:
            store: A `ShardedStore`, or the `PartStore` of a representation in one.
            documents: Documents of the whole.
        """
        self.parts = [open_index(part) for part in store.parts]
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
        return len(self._documents)

    @property
    @snapshot
    def live(self) -> Array:
        """Return ``(len(self),)`` bool, True for the global rows of documents that are not removed."""
        return self._documents._live()

    # ---- changes ----

    def add(self, representation: Representation) -> range:
        """Add rows for the documents that were added last, see `Index.add`."""
        with self.store.update():
            super().add(representation)
            end = self.store.meta["index"]["rows"] = len(self)
            return range(end - len(representation), end)

    def _append(self, representation: Representation) -> None:
        """Add rows to the shards that have just stored their documents."""
        routes = self._documents.routes
        # routes are of these rows if each shard has as many documents without a row
        missing = [len(global_rows(part.store)) - len(part) for part in self.parts]
        ends = [int(positions[-1]) + 1 for positions in routes if len(positions)]
        if [*map(len, routes)] != missing or max(ends, default=0) > len(representation):
            raise BadValueError("adding documents: an index of several shards needs their ids and texts, too")
        terms = self.store.rows(VOCABULARY)
        for part, positions in zip(self.parts, routes, strict=True):
            have = part.store.rows(VOCABULARY)
            new = self.store.read(VOCABULARY)[have:] if have < terms else b""
            add_rows(part, representation[positions], new)

    def remove(self, rows: Sequence[int] | Array) -> int:
        """Exclude global rows from all later searches, see `Index.remove`."""
        with self.store.update():
            chosen = np.unique(as_rows("removing documents", rows, len(self)))
            split = placement(self.store).split(chosen)
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
        split = placement(self.store).split(rows)
        if not split:
            return self.parts[0].representations(rows[:0])
        parts = concat([self.parts[number].representations(own) for number, _, own in split])
        return parts[np.argsort(np.concatenate([positions for _, positions, _ in split]))]

    def stored_arrays(self, rows: Array | slice) -> dict[str, Array]:
        """Return the arrays of global rows as shards store them."""
        chosen = np.arange(len(self))[rows]
        split = placement(self.store).split(chosen)
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
        where = placement(self.store)
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
        masks = [None if allowed is None else allowed[global_rows(part.store)] for part in self.parts]
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
        for part, hits in zip(self.parts, self.ask(search_part, queries, masks, int(k)), strict=True):
            if hits is not None:
                push_hits(best, part.store, hits)
        return best.hits()

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
        rows = sum(len(part) for part in self.parts)
        documents = int(self.live.sum())
        facts = super(StoredRows, self).stats()
        share = (rows - documents) / max(1, rows)
        return facts | {"removed": rows - documents, "removed_share": share, "shards": len(self.parts)}


def add_rows(part: Index, representation: Representation, terms: Array | bytes) -> None:
    """Add rows, and before them the terms that are new to a shard, as bytes, inside ``update``."""
    if len(terms):
        part.store.append(VOCABULARY, np.frombuffer(terms, np.uint8))
    if len(representation) or part.dim != representation.dim:
        part.add(representation)


def _widened(queries: Representation, part: Index) -> Representation:
    """Return queries over all terms of a shard, to which an interrupted change may have added some."""
    if isinstance(queries, Sparse) and queries.dim < part.dim:
        return Sparse(queries.terms, queries.weights, part.dim)
    return queries


def search_part(part: Index, queries: Representation, allowed: Array | None, k: int) -> Hits:
    """Return the best rows of a shard, among which are the best ones by global row of equal scores."""
    queries = _widened(queries, part)
    return ordered_hits(part.store, len(part), k, lambda width: part.search(queries, width, allowed))


def open_parts(store: Store) -> tuple[Index, Documents]:
    """Return the index and the documents of a store, which may be in several shards."""
    if isinstance(store, ShardedStore):
        documents = ShardedDocuments(store)
        return open_sharded(store, documents), documents
    return open_index(store), Documents(store)


def open_sharded(
    store: ShardedStore,
    documents: ShardedDocuments,
    make: Callable[[Store, ShardedDocuments], ShardedIndex] = ShardedIndex,
) -> Index:
    """Return the index of a store: a `ShardedIndex`, or a `SeveralIndex` of one for each representation.

    Args:
        store: The store.
        documents: Its documents.
        make: Makes the `ShardedIndex` of a store, or of the `PartStore` of a representation.
    """
    config = index_config(store.meta["index"]["config"])
    if not isinstance(config, SeveralConfig):
        return make(store, documents)
    parts = {name: make(PartStore(store, name), documents) for name in sorted(config.indexes)}
    return SeveralIndex(store, config, {**parts})
