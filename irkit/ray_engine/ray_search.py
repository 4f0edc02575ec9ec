"""Search of an index in several shards by actors of Ray.

An actor maps the files of one shard, or of several if there are more shards than CPUs; replicas of it map the
same files. A search asks one replica of every actor at once, and merges what they find: hits, or for `plaid`,
`dense` and `muvera` candidates and their scores, among which the candidates of one index are chosen (see
`irkit.shards.joint_plaid` and `irkit.shards.joint_lists`). Queries are encoded, and texts are read, by the
process that searches. So it and the actors need the same directory under the same path.

Questions and answers are pickled here and sent as bytes: Ray would pickle each argument by itself, and a
tensor as a file of torch, which takes milliseconds. Every process of the cluster must be trusted, as Ray
itself requires.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, Unpack, cast

import numpy as np

from irkit.arguments import check_counts, check_flags, is_finite
from irkit.core.representation import Representation, representation_from_arrays
from irkit.errors import BadValueError, StorageError
from irkit.index import Hits, SeveralIndex, Store, open_index
from irkit.index.array_files import Array
from irkit.ray_engine.ray_start import start_ray
from irkit.retrieval.collection import AnyModel, LoadOptions, open_collection
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.searching import PartialResultWarning
from irkit.shards import ShardedDocuments, ShardedIndex, ShardedStore

_STATES = 8  # of a shard that an actor can show
_PAUSE = 0.05  # seconds before a shard whose actors have died is asked again
_COPIED = 100_000  # bytes of a question that Ray sends with every call; it stores longer ones once


@dataclass
class Answers:
    """What shards answered to the searches of a thread, see `ShardedRetriever.watch`.

    Attributes:
        asked: Number of requests to shards.
        repeated: Number of requests that went to another actor, or to the same one again.
        missing: Names of the shards that gave no answer.
    """

    asked: int = 0
    repeated: int = 0
    missing: set[str] = field(default_factory=set)


class ShardedRetriever(Retriever):
    """A `irkit.Retriever` of an index in shards that actors of Ray search; it has all methods of one.

    Results equal the results of `irkit.Retriever`. Other methods than searches work in this process. A killed
    actor is started again by Ray; a query that it had not answered goes to another replica, or to the new
    actor.

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
            replicas: Number of actors that search each shard.
            timeout: Seconds that a search waits for a shard.
            partial_results: Return the hits of other shards if one does not answer in time, with a
                `PartialResultWarning`; `missing` names the shard. By default that is an error.
            options: See `irkit.Retriever.load`.

        Raises:
            StorageError: The path has no finished index, or it is not in shards.
            BadValueError: The index is of a model with several heads.
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
        if isinstance(collection.index, SeveralIndex):
            raise BadValueError(
                f"opening {path} on Ray: it has the representations {', '.join(collection.index.parts)}, and "
                "actors search one; Retriever.load searches all shards in this process"
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
        """Return a context that counts the answers of shards to the searches of this thread.

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
        paths = [str(part.path.absolute()) for part in store.parts]
        processes = min(len(paths), max(1, int(ray.cluster_resources().get("CPU", 1))))
        self._groups = [range(len(paths))[number::processes] for number in range(processes)]
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": "SPREAD"}
        start = ray.remote(ShardSearcher).options(**options).remote
        # actors[number] search the shards of _groups[number]
        self.actors = [[start([paths[n] for n in group]) for _ in range(replicas)] for group in self._groups]
        ray.get([actor.__ray_ready__.remote() for actors in self.actors for actor in actors])

    @property
    def missing(self) -> tuple[str, ...]:
        """See `ShardedRetriever.missing`."""
        return self._thread.missing

    @property
    def searched_here(self) -> bool:  # type: ignore[override]
        """True inside a change, which this thread alone sees, and after `close`."""
        return self.store.updating or not self.actors

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

    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """See `ShardedIndex.search`."""
        own = self._thread
        own.missing = ()
        hits = super().search(queries, k, allowed)
        if own.missing and own.answers is None:
            problem = self._problem(own.missing)
            warnings.warn(f"{problem}; hits are missing", PartialResultWarning, stacklevel=4)
        return hits

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
        answers = self._ask(work, queries, masks, settings)
        pairs = zip(self.store.parts, answers, strict=True)
        names = [part.path.name for part, answer in pairs if answer is None]
        own = self._thread
        own.missing = tuple(sorted({*own.missing, *names}))
        if own.answers is not None:
            own.answers.asked += len(answers)
            own.answers.missing |= set(names)
        if names and not own.partial:
            raise StorageError(f"{self._problem(names)}; search again, or ask for partial results")
        return answers

    def _problem(self, names: Sequence[str]) -> str:
        return f"searching {self.store.path}: no answer of {', '.join(names)} in {self._timeout:g} s"

    def _ask(
        self,
        work: Callable[..., Any],
        queries: Representation,
        masks: Sequence[Array | None],
        settings: Sequence[Any],
    ) -> list[Any]:
        """Ask one replica of every actor at once, and wait for all; None for shards without an answer."""
        question = _Question(self._ray, self, work, queries, masks, settings)
        turn = next(self._turns)
        errors, start, share = self._ray.exceptions, time.monotonic(), self._timeout / len(self.actors[0])
        end, late = start + self._timeout, start + share
        groups = zip(self.actors, self._groups, strict=True)
        calls = [question.put(actors[turn % len(actors)], group) for actors, group in groups]
        found: list[Any] = [None] * len(self.store.parts)
        try:
            answers = self._ray.get(calls, timeout=share)
        except (errors.RayTaskError, errors.GetTimeoutError, errors.RayActorError):
            numbers = range(len(calls))
            answers = [self._wait(number, calls[number], question, turn, late, end) for number in numbers]
        for group, answer in zip(self._groups, answers, strict=True):
            if answer is not None:
                for shard, own in zip(group, pickle.loads(answer), strict=True):
                    # an actor that was first asked after a later change cannot show this state
                    is_known = own is not None
                    found[shard] = (
                        own if is_known else work(self.parts[shard], queries, masks[shard], *settings)
                    )
        return found

    def _wait(
        self, number: int, call: Any, question: _Question, turn: int, late: float, end: float
    ) -> bytes | None:
        """Return the answer of an actor, or of its replicas if it has died or is late; None after ``end``."""
        errors, actors, group = self._ray.exceptions, self.actors[number], self._groups[number]
        for attempt in itertools.count(1):
            try:
                answer: bytes = self._ray.get(call, timeout=max(0.0, min(late, end) - time.monotonic()))
                return answer
            except errors.RayTaskError as error:
                raise error.cause from None
            except errors.GetTimeoutError:
                pass
            except errors.RayActorError:
                time.sleep(_PAUSE)
            if time.monotonic() >= end:
                return None
            if self._thread.answers is not None:
                self._thread.answers.repeated += len(group)
            call = question.put(actors[(turn + attempt) % len(actors)], group)
            late = time.monotonic() + self._timeout / len(actors)
        raise AssertionError("unreachable")


class _Question:
    """A search as the bytes that actors get; the part that is equal for all actors is pickled once."""

    def __init__(
        self,
        ray: Any,
        index: RayIndex,
        work: Callable[..., Any],
        queries: Representation,
        masks: Sequence[Array | None],
        settings: Sequence[Any],
    ) -> None:
        self._settings = pickle.dumps((index.config, index.formula), pickle.HIGHEST_PROTOCOL)
        content = work, (queries.kind, queries.dim, queries.arrays()), settings
        self._queries = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        if len(self._queries) > _COPIED:
            self._queries = ray.put(self._queries)
        self._states = [zlib.crc32(part.state.saved) for part in index.store.parts]
        self._masks = [None if mask is None else np.packbits(mask).tobytes() for mask in masks]

    def put(self, actor: Any, group: Sequence[int]) -> Any:
        """Ask an actor about all its shards; return the reference of its answer."""
        parts = pickle.dumps([(self._states[shard], self._masks[shard]) for shard in group])
        return actor.search.remote(self._settings, self._queries, parts)


class _ThreadView(threading.local):
    """State of a thread: which shards its last search missed, whether it accepts that, and its `watch`."""

    def __init__(self, partial: bool) -> None:
        self.missing: tuple[str, ...] = ()
        self.partial, self.answers = partial, cast(Answers | None, None)


class ShardSearcher:
    """Searches one or several shards; an actor of Ray has one."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._parts = [_Part(path) for path in paths]
        self._settings = b""

    def search(self, settings: bytes, queries: bytes, parts: bytes) -> bytes:
        """Search all shards.

        Args:
            settings: Pickled ``(config, formula)`` of the search, see `irkit.index.StoredRows`.
            queries: Pickled function of a shard, queries as ``(kind, dim, arrays)``, and further arguments of
                the function, see `ShardedIndex.ask`.
            parts: Pickled list: for each shard the checksum of the manifest of one of its last states, and
                packed bits of the rows that may be results, or None for all.

        Returns:
            Pickled list: for each shard what the function returns, or None for a state that this actor cannot
            show.
        """
        if settings != self._settings:
            config, formula = pickle.loads(settings)
            for index in [part.index for part in self._parts]:
                if index.formula != formula:
                    index.formula = formula
                if index.config != config:
                    index.config = config
            self._settings = settings
        work, content, arguments = pickle.loads(queries)
        rows = representation_from_arrays(*content)
        asked = zip(self._parts, pickle.loads(parts), strict=True)
        found = [part.search(state, work, rows, mask, arguments) for part, (state, mask) in asked]
        return pickle.dumps(found, pickle.HIGHEST_PROTOCOL)


class _Part:
    """A shard that an actor searches, in its latest states."""

    def __init__(self, path: str) -> None:
        self.store = Store.open(path, verify=False)
        self.index: Any = open_index(self.store)
        self._states: dict[int, Any] = {}

    def search(
        self,
        state: int,
        work: Callable[..., Any],
        queries: Representation,
        mask: bytes | None,
        arguments: Sequence[Any],
    ) -> Any:
        if state not in self._states:
            self.store.refresh()
            newest = self.store.committed
            self._states[zlib.crc32(newest.saved)] = newest
            while len(self._states) > _STATES:
                del self._states[next(iter(self._states))]
        if state not in self._states:
            return None
        with self.store.snapshot(self._states[state]):
            bits = None if mask is None else np.frombuffer(mask, np.uint8)
            allowed = None if bits is None else np.unpackbits(bits, count=len(self.index)).view(bool)
            return work(self.index, queries, allowed, *arguments)
