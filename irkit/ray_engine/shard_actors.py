"""The actors that search the shards of an index: they are started, asked, asked again if they die, and ended.

Questions and answers are pickled here and sent as bytes: Ray would pickle each argument by itself, and a
tensor as a file of torch, which takes milliseconds. Arrays of numpy, in one argument and one result, still
take longer than bytes. Every process of the cluster must be trusted, as Ray itself requires.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from irkit.core.representation import Representation
from irkit.errors import StorageError
from irkit.index.array_files import Array
from irkit.index.part_store import PartStore
from irkit.ray_engine.shard_searcher import ShardSearcher
from irkit.retrieval.searching import PartialResultWarning
from irkit.shards import ShardedIndex, ShardedStore

_PAUSE = 0.05  # seconds before a shard whose actors have died is asked again
_COPIED = 100_000  # bytes of a question that Ray sends with every call; it stores longer ones once


@dataclass
class Answers:
    """What shards answered to the searches of a thread, see `ShardedRetriever.watch`.

    Attributes:
        asked: Number of requests to shards: in a search one for each representation, for each batch of
            queries, and for each number of windows.
        repeated: Number of requests that went to another actor, or to the same one again.
        missing: Names of the shards that gave no answer.
    """

    asked: int = 0
    repeated: int = 0
    missing: set[str] = field(default_factory=set)


class ShardActors:
    """Actors that search the shards of an index, all its representations.

    Attributes:
        groups: For each actor the numbers of its shards.
        replicas: The replicas of each actor; empty after `close`.
    """

    def __init__(
        self, ray: Any, store: ShardedStore, replicas: int, timeout: float, partial_results: bool
    ) -> None:
        """Start the actors, see `ShardedRetriever.load`."""
        self._ray, self._store, self._timeout = ray, store, timeout
        self._turns, self._thread = itertools.count(), _ThreadView(partial_results)
        paths = [str(part.path.absolute()) for part in store.parts]
        processes = min(len(paths), max(1, int(ray.cluster_resources().get("CPU", 1))))
        self.groups = [range(len(paths))[number::processes] for number in range(processes)]
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": "SPREAD"}
        start = ray.remote(ShardSearcher).options(**options).remote
        self.replicas = [[start([paths[n] for n in group]) for _ in range(replicas)] for group in self.groups]
        try:
            ray.get([actor.__ray_ready__.remote() for actors in self.replicas for actor in actors])
        except ray.exceptions.RayError as error:
            self.close()
            raise StorageError(
                f"opening {store.path} on Ray: a shard cannot be opened there "
                f"({' '.join(str(error).split()):.300}); every node needs the directory under this path"
            ) from error

    @property
    def missing(self) -> tuple[str, ...]:
        """See `ShardedRetriever.missing`."""
        return self._names(self._thread.missing)

    @contextlib.contextmanager
    def searching(self) -> Iterator[None]:
        """Make one search of all that this thread asks inside the block.

        A shard that has not answered once is not asked again in it. At the end, one warning names the shards
        that are missing, outside of `watch`.
        """
        own = self._thread
        if own.searching:
            yield
            return
        own.missing, own.searching = set(), True
        try:
            yield
        finally:
            own.searching = False
        if own.missing and own.answers is None:
            problem = self._problem(own.missing)
            warnings.warn(f"{problem}; hits are missing", PartialResultWarning, stacklevel=4)

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
        for actor in itertools.chain.from_iterable(self.replicas):
            self._ray.kill(actor)
        self.replicas = []

    def ask(
        self,
        index: ShardedIndex,
        work: Callable[..., Any],
        queries: Representation,
        masks: Sequence[Array | None],
        settings: Sequence[Any],
    ) -> list[Any]:
        """See `ShardedIndex.ask`.

        Args:
            index: The index, which has the rows of one representation.
            work: See `ShardedIndex.ask`, like the other arguments.
            queries: Queries.
            masks: Rows that may be results.
            settings: Further arguments.

        Raises:
            StorageError: A shard does not answer, and all have to.
        """
        own = self._thread
        asked = len(self._store.parts) - len(own.missing)
        found = self._ask(index, work, queries, masks, settings)
        own.missing |= {shard for shard, answer in enumerate(found) if answer is None}
        if own.answers is not None:
            own.answers.asked += asked
            own.answers.missing |= {*self.missing}
        if own.missing and not own.partial:
            raise StorageError(f"{self._problem(own.missing)}; search again, or ask for partial results")
        return found

    def _names(self, shards: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._store.parts[shard].path.name for shard in sorted(shards))

    def _problem(self, shards: Iterable[int]) -> str:
        names = ", ".join(self._names(shards))
        return f"searching {self._store.path}: no answer of {names} in {self._timeout:g} s"

    def _ask(
        self,
        index: ShardedIndex,
        work: Callable[..., Any],
        queries: Representation,
        masks: Sequence[Array | None],
        settings: Sequence[Any],
    ) -> list[Any]:
        """Ask one replica of every actor at once, and wait for all; None for shards without an answer."""
        question = _Question(self._ray, index, work, queries, masks, settings)
        turn, missing = next(self._turns), self._thread.missing
        numbers = [number for number, group in enumerate(self.groups) if missing.isdisjoint(group)]
        errors, start, share = self._ray.exceptions, time.monotonic(), self._timeout / len(self.replicas[0])
        end, late = start + self._timeout, start + share
        calls = [question.put(self._replica(number, turn), self.groups[number]) for number in numbers]
        try:
            answers = self._ray.get(calls, timeout=share)
        except (errors.RayTaskError, errors.GetTimeoutError, errors.RayActorError):
            pairs = zip(numbers, calls, strict=True)
            answers = [self._wait(number, call, question, turn, late, end) for number, call in pairs]
        found: list[Any] = [None] * len(self._store.parts)
        for number, answer in zip(numbers, answers, strict=True):
            if answer is not None:
                for shard, own in zip(self.groups[number], pickle.loads(answer), strict=True):
                    # an actor that was first asked after a later change cannot show this state
                    is_known = own is not None
                    found[shard] = (
                        own if is_known else work(index.parts[shard], queries, masks[shard], *settings)
                    )
        return found

    def _wait(
        self, number: int, call: Any, question: _Question, turn: int, late: float, end: float
    ) -> bytes | None:
        """Return the answer of an actor, or of its replicas if it has died or is late; None after ``end``."""
        errors, group, count = self._ray.exceptions, self.groups[number], len(self.replicas[number])
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
            call = question.put(self._replica(number, turn + attempt), group)
            late = time.monotonic() + self._timeout / count
        raise AssertionError("unreachable")

    def _replica(self, number: int, turn: int) -> Any:
        actors = self.replicas[number]
        return actors[turn % len(actors)]


class _Question:
    """A search as the bytes that actors get; the part that is equal for all actors is pickled once."""

    def __init__(
        self,
        ray: Any,
        index: ShardedIndex,
        work: Callable[..., Any],
        queries: Representation,
        masks: Sequence[Array | None],
        settings: Sequence[Any],
    ) -> None:
        self._settings = pickle.dumps((index.config, index.formula), pickle.HIGHEST_PROTOCOL)
        name = index.store.name if isinstance(index.store, PartStore) else ""
        content = name, work, (queries.kind, queries.dim, queries.arrays()), settings
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
    """State of a thread: its search, the shards that the search missed, and whether it accepts that."""

    answers: Answers | None = None
    searching = False

    def __init__(self, partial: bool) -> None:
        self.missing: set[int] = set()
        self.partial = partial
