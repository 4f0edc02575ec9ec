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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from irkit.core.representation import Representation
from irkit.errors import StorageError
from irkit.index import Hits
from irkit.index.array_files import Array
from irkit.index.part_store import PartStore
from irkit.ray_engine.shard_searcher import ShardSearcher, states_of
from irkit.retrieval.searching import PartialResultWarning
from irkit.shards import ShardedIndex, ShardedStore

_PAUSE = 0.05  # seconds before a shard whose actors have died is asked again
_COPIED = 100_000  # bytes of a question that Ray sends with every call; it stores longer ones once


@dataclass
class Answers:
    """What shards answered to the searches of a thread, see `ShardedRetriever.watch`.

    Attributes:
        asked: Number of requests to shards: in a search one for each representation, for each block of
            queries, and for each number of windows. If actors share queries, one for each actor.
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
        timeout: Seconds that a search waits for a shard.
    """

    def __init__(
        self, ray: Any, store: ShardedStore, replicas: int, timeout: float, partial_results: bool
    ) -> None:
        """Start the actors, see `ShardedRetriever.load`."""
        self._ray, self._store, self.timeout = ray, store, timeout
        self._turns, self._thread = itertools.count(), _ThreadView(partial_results)
        paths = [str(part.path.absolute()) for part in store.parts]
        processes = min(len(paths), max(1, int(ray.cluster_resources().get("CPU", 1))))
        self.groups = [range(len(paths))[number::processes] for number in range(processes)]
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": "SPREAD"}
        start = ray.remote(ShardSearcher).options(**options).remote
        whole = str(store.path.absolute())
        self.replicas = [
            [start([paths[n] for n in group], whole) for _ in range(replicas)] for group in self.groups
        ]
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
            own.searching, own.begun = False, None
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
        self._count(asked=asked)
        if own.answers is not None:
            own.answers.missing |= {*self.missing}
        if own.missing and not own.partial:
            raise StorageError(f"{self._problem(own.missing)}; search again, or ask for partial results")
        return found

    def divide(
        self, index: ShardedIndex, queries: Representation, k: int, allowed: Array | None
    ) -> Hits | None:
        """Divide queries among the actors, each of which searches all shards for its share.

        Args:
            index: The index, which has the rows of one representation.
            queries: Queries.
            k: Hits.
            allowed: Which global rows may be results, bool ``(n,)``; None for all.

        Returns:
            The hits; None for a large index, and if actors do not answer or cannot show this state. Then the
            shards have to be asked.
        """
        own, groups = self._thread, len(self.replicas)
        if own.missing or _size(index) > index.store.limits.shared_bytes:
            return None
        mask = None if allowed is None else np.packbits(allowed).tobytes()
        view = _sent(self._ray, (states_of([self._store, *self._store.parts]), mask))
        settings, name = _settings(index), _name(index)
        turn, count = next(self._turns), min(len(queries), groups)
        cuts = [len(queries) * number // count for number in range(count + 1)]
        shares = [
            _sent(self._ray, (name, _content(queries[first:last]), k))
            for first, last in itertools.pairwise(cuts)
        ]
        turns = range(turn, turn + groups * len(self.replicas[0]))
        actors = [self._replica(n % groups, n // groups) for n in turns]

        def ask(number: int, attempt: int) -> Any:
            actor = actors[(number + attempt) % len(actors)]
            return actor.search_all.remote(settings, view, shares[number])

        own.begun = time.monotonic()
        answers = self._answers(ask, count, len(actors), own.begun)
        self._count(asked=count)
        found = [pickle.loads(answer) for answer in answers if answer is not None]
        if len(found) < count:
            self._count(repeated=count)
            return None
        own.begun = None
        return Hits(*map(np.concatenate, zip(*found, strict=True)))

    def _answers(
        self, ask: Callable[[int, int], Any], count: int, actors: int, begun: float
    ) -> list[bytes | None]:
        """Ask for all shares at once, and ask the next actor if one dies or takes half of the time.

        Args:
            ask: ``ask(number, attempt)`` asks for a share, of another actor in each attempt.
            count: Number of shares.
            actors: Number of actors.
            begun: When the search began.

        Returns:
            The answers; None for those that have not come.
        """
        errors, late, end = self._ray.exceptions, begun + self.timeout / 2, begun + self.timeout
        waiting = {ask(number, 0): (number, 0) for number in range(count)}
        try:
            answers: list[bytes | None] = self._ray.get([*waiting], timeout=self.timeout / 2)
            return answers
        except (errors.RayTaskError, errors.GetTimeoutError, errors.RayActorError):
            answers = [None] * count
        while waiting:
            ready, _ = self._ray.wait([*waiting], timeout=max(0.0, late - time.monotonic()))
            if not ready:  # all that are open are late
                if late == end:
                    break
                late = end
            for call in ready or [*waiting]:
                number, attempt = waiting.pop(call)
                try:
                    answers[number] = self._ray.get(call, timeout=1 if ready else 0)
                    continue
                except errors.RayTaskError:
                    return answers
                except (errors.RayActorError, errors.GetTimeoutError):
                    pass
                if attempt + 1 < actors:
                    waiting[ask(number, attempt + 1)] = number, attempt + 1
                    self._count(repeated=1)
        return answers

    def _count(self, asked: int = 0, repeated: int = 0) -> None:
        """Add to the counts of `watch`, if this thread is inside one."""
        if self._thread.answers is not None:
            self._thread.answers.asked += asked
            self._thread.answers.repeated += repeated

    def _names(self, shards: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._store.parts[shard].path.name for shard in sorted(shards))

    def _problem(self, shards: Iterable[int]) -> str:
        names = ", ".join(self._names(shards))
        return f"searching {self._store.path}: no answer of {names} in {self.timeout:g} s"

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
        errors, now = self._ray.exceptions, time.monotonic()
        end, self._thread.begun = (self._thread.begun or now) + self.timeout, None
        share = max(0.0, end - now) / len(self.replicas[0])
        late = now + share
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
            self._count(repeated=len(group))
            call = question.put(self._replica(number, turn + attempt), group)
            late = time.monotonic() + self.timeout / count
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
        self._settings, self._states = _settings(index), states_of(index.store.parts)
        self._queries = _sent(ray, (_name(index), work, _content(queries), settings))
        self._masks = [None if mask is None else np.packbits(mask).tobytes() for mask in masks]

    def put(self, actor: Any, group: Sequence[int]) -> Any:
        """Ask an actor about all its shards; return the reference of its answer."""
        parts = pickle.dumps([(self._states[shard], self._masks[shard]) for shard in group])
        return actor.search.remote(self._settings, self._queries, parts)


def _sent(ray: Any, content: Any) -> Any:
    """Return the pickled content, or where Ray has stored it if it is long, for all actors."""
    pickled = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return pickled if len(pickled) <= _COPIED else ray.put(pickled)


def _settings(index: ShardedIndex) -> bytes:
    return pickle.dumps((index.config, index.formula), pickle.HIGHEST_PROTOCOL)


def _size(index: ShardedIndex) -> int:
    """Return the bytes of all shards."""
    size: int = index.store.derived("bytes", lambda: sum(index.store.sizes().values()))
    return size


def _name(index: ShardedIndex) -> str:
    return index.store.name if isinstance(index.store, PartStore) else ""


def _content(queries: Representation) -> tuple[Any, ...]:
    return queries.kind, queries.dim, queries.arrays()


class _ThreadView(threading.local):
    """State of a thread: its search, the shards that the search missed, and whether it accepts that.

    ``begun`` is the time at which the present question was first asked, by `ShardActors.divide`.
    """

    answers: Answers | None = None
    begun: float | None = None
    searching = False

    def __init__(self, partial: bool) -> None:
        self.missing: set[int] = set()
        self.partial = partial
