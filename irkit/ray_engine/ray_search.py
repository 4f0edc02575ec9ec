"""Search of an index in several shards by actors of Ray.

An actor maps the files of one shard, or of several if there are more shards than CPUs; replicas of it map the
same files (shard_searcher.py). A search asks one replica of every actor at once (shard_actors.py), and merges
what they find: hits, or for `plaid`, `dense`, `muvera` and `faiss` candidates and their scores, among which
the candidates of one index are chosen (see the modules ``irkit.shards.joint_...``). With a model of several
heads, the same actors are asked once for each head.

If all shards have no more than `Limits.shared_bytes`, actors share the queries instead: each maps all files,
and searches them for its queries. Two searches of small indexes still go to the shards: fewer queries than
actors in `flat` or `muvera`, and BM25 with another formula than that of the index (`RayIndex.divide`).

Queries are encoded, and texts are read, by the process that searches. So it and the actors need the same
directory under the same path.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar, Unpack, cast

import numpy as np

from irkit.arguments import check_counts, check_flags, is_finite
from irkit.core.representation import Dense, MultiVector, Representation, Sparse
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.index import Hits, Store
from irkit.index.array_files import Array
from irkit.index.flat import Flat
from irkit.index.muvera import Muvera
from irkit.index.state import snapshot
from irkit.ray_engine.ray_start import start_ray
from irkit.ray_engine.shard_actors import Answers, ShardActors
from irkit.retrieval.collection import AnyModel, Collection, LoadOptions, open_collection
from irkit.retrieval.retriever import Retriever
from irkit.shards import ShardedDocuments, ShardedIndex, ShardedStore
from irkit.shards.placement import wants_gpu
from irkit.shards.shard_opening import open_sharded

_SECONDS = 1 / 16  # that a query is thought to take, before one was measured
_TIME = 0.2  # share of the timeout that the queries of a question may take

F = TypeVar("F", bound=Callable[..., Any])


def one_search(method: F) -> F:
    """Decorate a method of `ShardedRetriever` so that all questions of a call belong to one search."""

    @functools.wraps(method)
    def run(self: ShardedRetriever, *arguments: Any, **options: Any) -> Any:
        with self.actors.searching():
            return method(self, *arguments, **options)

    return cast(F, run)


class ShardedRetriever(Retriever):
    """A `irkit.Retriever` of an index in shards that actors of Ray search; it has all methods of one.

    Results equal the results of `irkit.Retriever`. Other methods than searches work in this process. A killed
    actor is started again by Ray; a query that it had not answered goes to another replica, or to the new
    actor.

    Attributes:
        actors: The actors.

    Examples:
        >>> retriever = ShardedRetriever.load("words", replicas=2)  # doctest: +SKIP
        >>> retriever.search("hibernation", k=1)[0].id  # doctest: +SKIP
        'b'
    """

    def __init__(self, collection: Collection, actors: ShardActors) -> None:
        """Use `ShardedRetriever.load`."""
        super().__init__(collection)
        self.actors = actors

    @classmethod
    def build(cls, *arguments: object, **options: object) -> NoReturn:
        """Raise BadTypeError: `irkit.ray_engine.build_shards` builds an index on Ray."""
        raise BadTypeError(
            "ShardedRetriever.build: it opens an index that is there; build one with "
            "irkit.ray_engine.build_shards or Retriever.build(..., shards=N), then ShardedRetriever.load"
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: AnyModel | Mapping[str, Any] | str | Path | None = None,
        *,
        address: str | None = None,
        replicas: int = 1,
        timeout: float = 30,
        partial_results: bool = False,
        **options: Unpack[LoadOptions],
    ) -> Self:
        """Open an index in shards, and start the actors.

        Args:
            path: Directory of the index, which actors find under the same path.
            model: See `irkit.Retriever.load`; actors load none.
            address: Address of a cluster, such as ``"ray://host:10001"``; by default Ray is started here,
                unless this process is connected to one.
            replicas: Number of actors that search each shard.
            timeout: Seconds that a search waits for a shard.
            partial_results: Return the hits of other shards if one does not answer in time, with a
                `PartialResultWarning`; `missing` names the shard. By default that is an error.
            options: See `irkit.Retriever.load`.

        Raises:
            StorageError: The path has no finished index, or it is not in shards.
            MissingDependencyError: Ray is not installed.
        """
        check_counts("ShardedRetriever", replicas=replicas)
        check_flags("ShardedRetriever", partial_results=partial_results)
        if not is_finite(timeout) or timeout <= 0:
            raise BadValueError(f"ShardedRetriever: timeout is {timeout}; expected seconds above 0")
        collection = open_collection(path, model, options)
        store = collection.store
        if not isinstance(store, ShardedStore):
            raise StorageError(
                f"opening {path} on Ray: it is not in shards; irkit reshard {path} --shards N divides it"
            )
        actors = ShardActors(start_ray(address), store, replicas, timeout, partial_results)
        collection.index, collection.documents = open_on_actors(store, actors)
        if model is not None:
            collection.model  # noqa: B018 (loads and checks it)
        return cls(collection, actors)

    search = one_search(Retriever.search)
    run = one_search(Retriever.run)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the shards that gave no answer to the last search of this thread, to any of its heads."""
        return self.actors.missing

    def watch(self, partial_results: bool) -> contextlib.AbstractContextManager[Answers]:
        """Return a context that counts the answers of shards to the searches of this thread.

        Args:
            partial_results: Whether searches inside may miss shards, without a warning; or else a shard that
                does not answer is an error.
        """
        return self.actors.watch(partial_results)

    def close(self) -> None:
        """End the actors, and close the files."""
        self.actors.close()
        super().close()


class RayIndex(ShardedIndex):
    """A `ShardedIndex` whose shards actors search."""

    def __init__(self, store: Store, documents: ShardedDocuments, actors: ShardActors) -> None:
        super().__init__(store, documents)
        self._actors, self._seconds = actors, _SECONDS

    @property
    def searched_here(self) -> bool:  # type: ignore[override]
        """True inside a change, which this thread alone sees, and after the actors have ended."""
        return self.store.updating or not self._actors.replicas

    @snapshot
    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """See `ShardedIndex.search`; actors get as many queries at once as they answer in good time."""
        found, start = list[Hits](), 0
        with self._actors.searching():
            if not isinstance(queries, Dense | MultiVector | Sparse) or len(queries) < 2:
                return super().search(queries, k, allowed)
            while start < len(queries):
                size = max(1, int(self._actors.timeout * _TIME / self._seconds))
                block = queries[start : start + size] if start or size < len(queries) else queries
                begun = time.monotonic()
                found.append(super().search(block, k, allowed))
                self._seconds = (time.monotonic() - begun) / len(block)
                start += size
        return found[0] if len(found) == 1 else Hits(*map(np.concatenate, zip(*found, strict=True)))

    def divide(self, queries: Representation, k: int, allowed: Array | None) -> Hits | None:
        """See `ShardedIndex.divide`."""
        # half of the documents take about half of the time only where most of it goes to scoring them
        is_split = len(queries) < len(self._actors.replicas) and isinstance(self.parts[0], Flat | Muvera)
        # with another formula an index lists all rows in memory, which each actor does for its shards only
        if is_split or self.formula is not None or len(self.parts) == 1:
            return None
        if self.searched_here or wants_gpu(self):
            return None
        return self._actors.divide(self, queries, k, allowed)

    def ask(
        self,
        work: Callable[..., Any],
        queries: Representation,
        masks: Sequence[Array | None],
        *settings: Any,
    ) -> list[Any]:
        """See `ShardedIndex.ask`."""
        if self.searched_here:
            return super().ask(work, queries, masks, *settings)
        return self._actors.ask(self, work, queries, masks, settings)


def open_on_actors(store: ShardedStore, actors: ShardActors) -> tuple[Any, ShardedDocuments]:
    """Return the index, each of whose representations actors search, and the documents of a store."""
    documents = ShardedDocuments(store)
    return open_sharded(store, documents, functools.partial(RayIndex, actors=actors)), documents
