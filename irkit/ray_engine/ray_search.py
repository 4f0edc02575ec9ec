"""Search of an index in several shards by actors of Ray.

Every shard has an actor, or several replicas, that maps its files. A search sends the encoded queries to one
actor of each shard at once, and merges what they find. Queries are encoded, and texts are read, by the
process that searches. So it and the actors need the same directory under the same path.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, Unpack, cast

from irkit.arguments import check_counts, check_flags, is_finite
from irkit.core.representation import Representation
from irkit.errors import BadValueError, StorageError
from irkit.index import Hits, IndexConfig, Store, open_index
from irkit.index.array_files import Array
from irkit.ray_engine.ray_start import start_ray
from irkit.retrieval.collection import AnyModel, LoadOptions, open_collection
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.searching import PartialResultWarning
from irkit.shards import ShardedDocuments, ShardedIndex, ShardedStore
from irkit.shards.sharded_index import search_part

_STATES = 8  # of a shard that an actor can show
_PAUSE = 0.05  # seconds before a shard whose actors have died is asked again


@dataclass
class Answers:
    """What shards answered to the searches of a thread, see `ShardedRetriever.watch`.

    Attributes:
        asked: Number of questions to shards.
        repeated: Number of questions that went to another actor, or to the same one once more.
        missing: Names of the shards that gave no answer.
    """

    asked: int = 0
    repeated: int = 0
    missing: set[str] = field(default_factory=set)


class ShardedRetriever(Retriever):
    """A `irkit.Retriever` of an index in shards that actors of Ray search; it has all methods of one.

    Results are those of `irkit.Retriever`. Other methods than searches work in this process. A killed actor
    is started again by Ray; a query that it had not answered goes to another replica, or to the new actor.

    Examples:
        >>> retriever = ShardedRetriever.load("words", replicas=2)  # doctest: +SKIP
        >>> retriever.search("hibernation", k=1)[0].id  # doctest: +SKIP
        'b'
    """

    index: RayIndex

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
            replicas: Number of actors of each shard.
            timeout: Seconds that a search waits for a shard.
            partial_results: Return the hits of other shards if one does not answer in time, with a
                `PartialResultWarning`; `missing` names the shard. By default that is an error.
            options: See `irkit.Retriever.load`.

        Raises:
            StorageError: There is no finished index, or it is not in shards.
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
        index = RayIndex(start_ray(address), store, replicas, timeout, partial_results)
        collection.index, collection.documents = index, index.documents
        if model is not None:
            collection.model  # noqa: B018 (loads and checks it)
        return cls(collection)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the shards that gave no answer to the last search of this thread."""
        return self.index.missing

    def watch(self, partial_results: bool) -> contextlib.AbstractContextManager[Answers]:
        """Return a context that counts what shards answer to the searches of this thread.

        Args:
            partial_results: Whether searches inside may miss shards, without a warning; or else a shard that
                does not answer is an error.
        """
        return self.index.watch(partial_results)

    def close(self) -> None:
        """End the actors, and close the files."""
        self.index.close()
        super().close()


class RayIndex(ShardedIndex):
    """A `ShardedIndex` whose shards actors search."""

    def __init__(
        self, ray: Any, store: ShardedStore, replicas: int, timeout: float, partial_results: bool
    ) -> None:
        """Start the actors of all shards."""
        self.documents = ShardedDocuments(store)
        super().__init__(store, self.documents)
        self._ray, self._timeout = ray, timeout
        self._turns, self._thread = itertools.count(), _ThreadView(partial_results)
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": "SPREAD"}
        start = ray.remote(ShardSearcher).options(**options).remote
        self.actors = [[start(str(part.path.absolute())) for _ in range(replicas)] for part in store.parts]
        ray.get([actor.__ray_ready__.remote() for actors in self.actors for actor in actors])

    @property
    def missing(self) -> tuple[str, ...]:
        """See `ShardedRetriever.missing`."""
        return self._thread.missing

    @contextlib.contextmanager
    def watch(self, partial_results: bool) -> Iterator[Answers]:
        """See `ShardedRetriever.watch`."""
        own, answers = self._thread, Answers()
        before = own.answers, own.partial
        own.answers, own.partial = answers, partial_results
        try:
            yield answers
        finally:
            own.answers, own.partial = before

    def close(self) -> None:
        """End the actors."""
        for actor in itertools.chain.from_iterable(self.actors):
            self._ray.kill(actor)
        self.actors = []

    def _search_parts(
        self, queries: Representation, k: int, allowed: list[Array | None]
    ) -> list[Hits | None]:
        if self.store.updating or not self.actors:  # this thread alone sees its change
            return super()._search_parts(queries, k, allowed)
        # ask all shards at once, then wait for each
        end, turn = time.monotonic() + self._timeout, next(self._turns)
        shared = self._ray.put(queries) if len(queries) > 1 else queries
        questions = [
            (zlib.crc32(part.state.saved), self.config, self.formula, shared, k, mask)
            for part, mask in zip(self.store.parts, allowed, strict=True)
        ]
        first = [
            actors[turn % len(actors)].search.remote(*question)
            for actors, question in zip(self.actors, questions, strict=True)
        ]
        found = [
            self._wait(shard, reference, questions[shard], turn, end) for shard, reference in enumerate(first)
        ]
        names = tuple(
            part.path.name for part, hits in zip(self.store.parts, found, strict=True) if hits is None
        )
        own = self._thread
        own.missing = names
        if own.answers is not None:
            own.answers.asked += len(found)
            own.answers.missing |= set(names)
        if names:
            problem = f"searching {self.store.path}: no answer of {', '.join(names)} in {self._timeout:g} s"
            if not own.partial:
                raise StorageError(f"{problem}; search again, or ask for partial results")
            if own.answers is None:
                warnings.warn(f"{problem}; hits are missing", PartialResultWarning, stacklevel=6)
        return found

    def _wait(self, shard: int, reference: Any, question: Any, turn: int, end: float) -> Hits | None:
        """Return the answer of a shard; ask its other actors if one has died or is late."""
        errors, actors = self._ray.exceptions, self.actors[shard]
        share = self._timeout / len(actors)
        for attempt in itertools.count(1):
            try:
                left = max(0.0, min(share, end - time.monotonic()))
                rows, scores = self._ray.get(reference, timeout=left)
                return Hits(rows, scores)
            except errors.RayTaskError as error:
                raise error.cause from None
            except errors.GetTimeoutError:
                pass
            except errors.RayActorError:
                time.sleep(_PAUSE)
            if time.monotonic() >= end:
                return None
            if self._thread.answers is not None:
                self._thread.answers.repeated += 1
            reference = actors[(turn + attempt) % len(actors)].search.remote(*question)
        raise AssertionError("unreachable")


class _ThreadView(threading.local):
    """What the last search of a thread missed, and how it searches."""

    def __init__(self, partial: bool) -> None:
        self.missing: tuple[str, ...] = ()
        self.partial, self.answers = partial, cast(Answers | None, None)


class ShardSearcher:
    """Searches a shard; an actor of Ray has one."""

    def __init__(self, path: str) -> None:
        self.store = Store.open(path, verify=False)
        self.index: Any = open_index(self.store)
        self._states: dict[int, Any] = {}

    def search(
        self,
        state: int,
        config: IndexConfig,
        formula: tuple[float, float] | None,
        queries: Representation,
        k: int,
        allowed: Array | None,
    ) -> tuple[Array, Array]:
        """Return rows of the shard and scores of a search of one of its last states.

        Args:
            state: Checksum of its manifest.
            config: Settings of the search.
            formula: See `irkit.index.StoredRows.formula`.
            queries: The queries.
            k: Maximum number of results.
            allowed: Rows that may be results.

        Raises:
            StorageError: The shard is in another state.
        """
        if state not in self._states:
            self.store.refresh()
            newest = self.store.committed
            self._states[zlib.crc32(newest.saved)] = newest
            while len(self._states) > _STATES:
                del self._states[next(iter(self._states))]
        if state not in self._states:
            raise StorageError(
                f"searching {self.store.path}: it was changed by another process; refresh the retriever"
            )
        if self.index.formula != formula:
            self.index.formula = formula
        if self.index.config != config:
            self.index.config = config
        with self.store.snapshot(self._states[state]):
            hits = search_part(self.index, queries, k, allowed)
        return hits.rows, hits.scores
