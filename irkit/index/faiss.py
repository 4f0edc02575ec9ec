"""Approximate search of dense vectors with FAISS, over vectors that the store keeps.

FAISS has two families of structures. HNSW is a graph: a search walks from vector to vector, always on to the
neighbours nearest to the query, and keeps a queue of ``ef_search`` of them (Malkov and Yashunin, arXiv
1603.09320). IVF cuts the space into the cells of a k-means, and a search scores the vectors in the ``nprobe``
cells nearest to the query. Both can store codes in place of vectors: ``SQ`` rounds each dimension, ``PQ``
cuts a vector into parts and stores the nearest centroid of each (Jegou et al., PAMI 2011; ``fs``: with tables
that fit registers).

The short names stand for the factory strings in faiss_building.py, which trains and extends the structure. A
graph needs no training and finds most for single queries; ``ivf`` builds fastest, ``pq`` is a scan of codes
of 4 bits per 4 dimensions, and ``ivfpqfs`` is both. The store keeps the vectors themselves, so documents
found by coarse codes are ranked by their exact inner products, and the vectors of a graph need only 16 bits
in it. faiss_candidates.py says which of them are ranked where codes tie.

A walk visits twice as many vectors as it finds, one by one. So beside a graph the store keeps the codes of
`flat`, 8 bits per dimension, and a search for many hits of not too many documents scans these.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from irkit_kernels.dense_scan import best_of, products, ranking

from irkit.core.representation import Dense, Representation
from irkit.index.array_files import Array
from irkit.index.coded_scan import has_codes, scan_pays, search_codes
from irkit.index.faiss_building import FaissBuilding
from irkit.index.faiss_candidates import Reach, drop_repeats, drop_ties, find_untied
from irkit.index.faiss_package import import_faiss
from irkit.index.faiss_structure import code_bytes, core_of, is_on_gpu
from irkit.index.lone_query import Single, search_alone
from irkit.index.state import snapshot
from irkit.index.topk import Hits

faiss: Any = import_faiss()

_HIDDEN = 400  # rows fetched for a few hits under a filter
_HIDDEN_SPARE = 1.2  # times as many hits as a filter should leave are fetched where they are filtered later
_NOTHING = np.full((1, 1), -1)  # no hits of one query


class Faiss(FaissBuilding):
    """A FAISS structure over the first rows; the rows added since are scanned until ``finish``.

    Every score is an exact inner product, and every search returns ``min(k, documents)`` hits: a scan adds
    the hits that the structure misses. If a filter leaves few documents, the scan finds all hits.
    """

    @snapshot
    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """Return the k best documents of every query; see `Index.search`."""
        alone = search_alone(self, queries, k, self._single) if allowed is None else None
        return super().search(queries, k, allowed) if alone is None else alone

    def _single(self, k: int) -> Single | None:
        """Return a function that finds ``k`` hits of one query in this thread, if the structure suffices."""
        self._check_same()
        covered = self.covered
        if k < 1 or covered < len(self) or self.store.rows("removed.bin"):
            return None
        if self._few(covered, covered, k) or self._scans_codes(k, None):
            return None
        structure = self.structure
        if is_on_gpu(structure) or hasattr(core_of(structure), "nsg"):  # whose repeats `_find` drops
            return None
        reach = self.reach(k, covered, covered, False)
        width = reach.width + self._spare(structure)
        # FAISS takes a fifth longer if each load of the query crosses a border of cache lines
        memory = np.zeros(self.dim + 16, np.float32)
        start = -memory.__array_interface__["data"][0] % 64 // 4
        query = memory[start : start + self.dim][None]
        chosen = np.full((1, width), -1, np.int64)
        found = np.empty((1, width), np.float32)
        rows, scores = np.empty((1, k), np.int64), np.empty((1, k), np.float32)
        rank = ranking(self.store.read("values.bin")[:covered], query, chosen, rows, scores)
        pointers = 1, faiss.swig_ptr(query), width, faiss.swig_ptr(found), faiss.swig_ptr(chosen)
        arguments, target = (*pointers, self._parameters(structure, reach, None)), query[0]
        search, held = structure.search_c, (structure, query, found, chosen)

        def find(query: Array, _held: Any = held) -> tuple[Array, Array]:
            target[:] = query
            search(*arguments)
            if width > reach.width and chosen[0, -1] >= 0:
                if found[0, -1] != found[0, -2]:
                    chosen[0, -1] = -1
                elif drop_ties(chosen, found, reach.width, k)[0]:
                    return _NOTHING, found  # `_look_up` asks for more
            rank()
            return rows.copy(), scores.copy()

        return find

    def _few(self, live: int, covered: int, k: int) -> bool:
        """Return whether a scan takes less time, or finds more, than the structure over ``covered`` rows."""
        limits = self.store.limits
        return live <= max(limits.faiss_scan, covered // 20, limits.faiss_scan_per_hit * k)

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        def walk(queries: Representation) -> Hits:
            return self._search_structure(queries, k, keep, self.covered, self.store.limits.faiss_queries)

        if not self._scans_codes(k, keep):
            return walk(queries)
        values, most = self.store.read("values.bin"), len(self) // self.store.limits.flat_share

        def score(queries: Dense, rows: Array) -> Array:
            return products(values, np.ascontiguousarray(queries.arrays()["values"]), rows)

        return search_codes(self.store, queries, k, keep, most, score, walk)

    def _scans_codes(self, k: int, keep: Array | None) -> bool:
        """Return whether a scan of all codes takes less time than a walk through the graph."""
        limits = self.store.limits
        few_rows = len(self) <= limits.faiss_codes_per_hit * k and has_codes(self.store)
        return few_rows and scan_pays(self.store, len(self), k, keep, limits.flat_share)

    def _look_up(self, queries: Representation, k: int, keep: Array | None, live: int) -> Hits:
        """Return the best of what the structure finds, by exact scores."""
        stored = self.store.read("values.bin")

        def find(values: Array, reach: Reach) -> tuple[Hits, Array]:
            rows, found, width = self.nearest(values, reach, keep)
            tied = drop_ties(rows, found, width, k)
            hits, missing = best_of(stored, values, rows, min(k, rows.shape[1])), k - rows.shape[1]
            if missing > 0:
                short = ((0, 0), (0, missing))
                hits = (
                    np.pad(hits[0], short, constant_values=-1),
                    np.pad(hits[1], short, constant_values=-np.inf),
                )
            return Hits(*hits), tied

        values = np.ascontiguousarray(queries.arrays()["values"])
        return find_untied(find, values, self.reach(k, live, self.covered, keep is not None))

    def reach(self, k: int, live: int, covered: int, filtered: bool) -> Reach:
        """Return how far a search for ``k`` hits looks.

        Args:
            k: Number of hits.
            live: Number of rows of structures that may be hits.
            covered: Number of rows of structures, of all shards if it is a shard.
            filtered: Whether some rows may be no hits.
        """
        structure = self.structure
        # more, which are ranked, if codes are coarse
        coarse = code_bytes(structure) < 2 * self.dim
        width = k + min(max(k, 10) * (self.config.refine - 1), 1000) if coarse else k
        if filtered and width > k:  # so many of coarse codes keep a recall of 0.95, also where a
            width = max(2 * width, min(4 * width, _HIDDEN))  # filter hides the documents nearest to a query
        width = min(width, self.store.limits.faiss_gpu_hits) if is_on_gpu(structure) else width
        return Reach(width, live / covered, covered, filtered)

    @property
    def on_gpu(self) -> bool:
        """Whether the structure is on a GPU."""
        return is_on_gpu(self.structure)

    def nearest(self, values: Array, reach: Reach, keep: Array | None) -> tuple[Array, Array, int]:
        """Search the structure, where ``keep (n,)`` is true (None: everywhere).

        Args:
            values: ``(n_q, dim)`` float32 queries.
            reach: How far to look. The structure may be that of one shard among several.
            keep: Rows that may be found.

        Returns:
            Rows ``(n_q, m)`` int64, -1 for none and for one that ``keep`` hides; their scores by codes
            ``(n_q, m)`` float32, best first, -inf for none; and how many of the best rows of all shards are
            candidates. One more is there, so that `drop_ties` knows what ties with the last one.
        """
        structure, width = self.structure, reach.width
        spare = self._spare(structure)

        def search(keep: Array | None) -> tuple[Array, Array]:
            parameters = self._parameters(structure, reach, keep)
            found: tuple[Array, Array] = structure.search(
                values, min(width + spare, structure.ntotal), params=parameters
            )
            return found

        try:
            scores, rows = search(keep)
        except RuntimeError:  # this structure takes no filter: more hits are fetched, and filtered below
            if keep is not None:
                width = min(reach.covered, math.ceil(_HIDDEN_SPARE * width / reach.share))
            try:
                scores, rows = search(None)
            except RuntimeError as error:
                raise self._damaged(error) from None
        scores = scores if faiss.is_similarity_metric(structure.metric_type) else -scores
        scores[rows < 0] = -np.inf
        rows[(rows < 0) | (rows >= self.covered)] = -1  # a damaged list may have any number
        if hasattr(core_of(structure), "nsg"):  # FAISS 1.15 returns a few rows of NSG twice
            drop_repeats(rows)
        if keep is not None:
            rows[(rows >= 0) & ~keep[rows]] = -1
        return rows, scores, width

    def _spare(self, structure: Any) -> int:
        """Return 1 if a search asks for one candidate more, so that ties do not depend on FAISS."""
        return int(not self.config.is_graph and not is_on_gpu(structure))

    def _parameters(self, structure: Any, reach: Reach, keep: Array | None) -> Any:
        """Return FAISS's parameters of a search: wider under a filter that hides much, and for many hits."""
        core, share, options = core_of(structure), 1.0, {}
        if keep is not None:
            share = reach.share
            options["sel"] = faiss.IDSelectorBitmap(np.packbits(keep, bitorder="little"))
        if hasattr(core, "hnsw"):
            ef = min(math.ceil(max(self.config.ef_search, 2 * reach.width) / share), reach.covered)
            return faiss.SearchParametersHNSW(efSearch=ef, **options)
        if hasattr(core, "nprobe"):
            # a filter may hide the rows of the nearest lists, and the others lie farther apart
            usual = math.ceil((self.config.nprobe or 3 * math.sqrt(core.nlist)) * share**-1.5)
            needed = math.ceil(4 * reach.width / share / reach.covered * core.nlist)
            nprobe = min(core.nlist, max(usual, needed))
            nprobe = min(nprobe, self.store.limits.faiss_gpu_hits) if is_on_gpu(core) else nprobe
            if hasattr(faiss.downcast_index(core.quantizer), "hnsw"):
                options["quantizer_params"] = faiss.SearchParametersHNSW(efSearch=2 * nprobe)
            return faiss.SearchParametersIVF(nprobe=nprobe, **options)
        return faiss.SearchParameters(**options) if options else None
