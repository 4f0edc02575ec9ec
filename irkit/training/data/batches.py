"""Which examples make a batch: a function of seed, epoch and step alone, so that no data is read for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, count
from typing import Any

import numpy as np

from irkit.errors import BadValueError
from irkit.training.data.dataset import Key, Mixture
from irkit.training.data.records import Stream

__all__ = ["Batches", "make_batches"]

Array = np.ndarray[Any, Any]

_AHEAD = 10_000  # how many examples are passed over, until a later step, for queries that come twice
_PIECE = 1 << 16  # places made Python numbers at once


def make_batches(
    data: Mixture,
    *,
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = False,
) -> Batches:
    """Batches of one process, each from one dataset and, where the data allows, without a query twice.

    Step ``k`` of all processes together has the examples of step ``k`` of one process with ``world_size``
    times the batch.

    Args:
        data: What they are of.
        batch_size: Examples in a batch of one process.
        tokens_per_batch: Instead: about how many tokens; `Mixture.measure` comes first.
        seed: Of the order.
        rank: Number of this process.
        world_size: How many processes there are.
        drop_last: Whether an incomplete batch at the end of a dataset is left out. One that cannot give each
            process an example always is.

    Returns:
        An iterable for ``DataLoader(batch_sampler=...)``.

    Raises:
        BadValueError: Both sizes are given or none, or a number is impossible.
    """
    size = batch_size if tokens_per_batch is None else tokens_per_batch
    if (batch_size is None) == (tokens_per_batch is None) or type(size) is not int or size < 1:
        raise BadValueError(
            f"batches: got batch_size={batch_size!r} and tokens_per_batch={tokens_per_batch!r}; expected one "
            "of them, a whole number of at least 1"
        )
    if not 0 <= rank < world_size:
        raise BadValueError(f"batches: rank {rank} of {world_size} processes; expected 0 to {world_size - 1}")
    if tokens_per_batch is not None and any(dataset.sizes is None for dataset in data.datasets):
        hint = "data that is not streamed" if data.streaming else "the lengths of texts; call measure first"
        raise BadValueError(f"batches: tokens_per_batch needs {hint}")
    return Batches(data, size, tokens_per_batch is not None, (seed, rank, world_size), drop_last)


class Batches:
    """Iterates over lists of keys of a `Mixture`; see `make_batches`.

    Raises:
        BadValueError: A dataset is too small for one batch.
    """

    def __init__(
        self, data: Mixture, size: int, tokens: bool, place: tuple[int, int, int], drop_last: bool
    ) -> None:
        self._data, self._size, self._tokens, self._drop_last = data, size, tokens, drop_last
        self._seed, self._rank, self._world = place
        self._epoch, self._start, self._length = 0, 0, 0
        self._keys = [
            _repeated(dataset.query_keys()) if dataset.config.shuffle else None for dataset in data.datasets
        ]
        for number, dataset in enumerate(data.datasets):
            if next(self._pass(number, 0), None) is None:
                raise BadValueError(
                    f"batches: {dataset.config.source} has {len(dataset)} examples, too few for one batch of "
                    f"{size} in each of {self._world} processes; take smaller ones"
                )

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next; each has an order and draws of its own."""
        self._epoch = epoch

    def skip(self, steps: int) -> None:
        """Let the next iteration, and only that, start after ``steps`` batches, whose data is not read."""
        self._start = steps

    def __len__(self) -> int:
        if self._data.streaming:
            raise TypeError("a stream has no number of batches; give max_steps")
        if not self._length:
            numbers = range(len(self._data.datasets))
            if self._weights is None:
                self._length = sum(1 for number in numbers for _ in self._pass(number, 0))
            else:
                total = sum(int(self._sizes(number).sum()) for number in numbers)
                self._length = -(-total // (self._size * self._world))
        return self._length

    def __iter__(self) -> Iterator[list[Key]]:
        start, self._start = self._start, 0
        steps = self._steps(self._epoch)
        for number in count() if self._data.streaming else range(len(self)):
            dataset, groups, cycle = next(steps)
            if number >= start:
                yield [(dataset, index, cycle) for index in groups[self._rank]]

    @property
    def _weights(self) -> Array | None:
        weights = [dataset.config.weight for dataset in self._data.datasets]
        if weights[0] is None:
            return np.ones(1) if self._data.streaming else None
        return np.asarray(weights) / sum(filter(None, weights))

    def _steps(self, epoch: int) -> Iterator[tuple[int, list[list[int]], int]]:
        """Number of a dataset, the examples of each process, and the cycle, without an end.

        Every epoch is cut where the first one ends, however well examples fit into batches: resuming
        counts steps.
        """
        numbers, first = range(len(self._data.datasets)), epoch << 20
        rng, weights = np.random.default_rng([self._seed, epoch]), self._weights
        if weights is None:
            for cycle in count(first):
                yield from ((number, groups, cycle) for number, groups in self._all_once(cycle, rng))
        passes = [self._cycles(number, first) for number in numbers]
        while True:
            number = int(rng.choice(len(numbers), p=weights))
            yield number, *next(passes[number])

    def _all_once(self, cycle: int, rng: np.random.Generator) -> Iterator[tuple[int, list[list[int]]]]:
        """Every example once, the datasets drawn by what is left of them."""
        passes = [self._pass(number, cycle) for number in range(len(self._data.datasets))]
        left = np.asarray([len(dataset) for dataset in self._data.datasets])
        while left.any():
            number = int(rng.choice(len(left), p=left / left.sum())) if len(left) > 1 else 0
            groups = next(passes[number], None)
            left[number] = 0 if groups is None else left[number] - sum(map(len, groups))
            if groups is not None:
                yield number, groups

    def _cycles(self, number: int, first: int) -> Iterator[tuple[list[list[int]], int]]:
        for cycle in count(first):
            yield from ((groups, cycle) for groups in self._pass(number, cycle))

    def _pass(self, number: int, cycle: int) -> Iterator[list[list[int]]]:
        """All examples of a dataset, in steps of one group for each process."""
        order, waiting = self._order(number, cycle), deque[int]()
        keys, sizes = self._keys[number], self._sizes(number).data if self._tokens else None
        while True:
            groups = self._fill(waiting, order, keys, sizes)
            if not groups:
                return
            last = len(groups) < self._world or (sizes is None and len(groups[-1]) < self._size)
            if last:
                found = list(chain.from_iterable(groups))
                if self._drop_last or len(found) < self._world:
                    continue
                groups = [part.tolist() for part in np.array_split(np.asarray(found), self._world)]
            yield groups

    def _order(self, number: int, cycle: int) -> Iterator[int]:
        dataset = self._data.datasets[number]
        length = dataset.records.block if isinstance(dataset.records, Stream) else len(dataset)
        for block in count():
            rng = np.random.default_rng([self._seed, number, cycle, block])
            places = rng.permutation(length) if dataset.config.shuffle else np.arange(length)
            for start in range(0, length, _PIECE):
                yield from (places[start : start + _PIECE] + block * length).tolist()
            if not dataset.streaming:
                return

    def _sizes(self, number: int) -> Array:
        """What each example takes of a batch."""
        sizes = self._data.datasets[number].sizes if self._tokens else None
        return np.ones(len(self._data.datasets[number]), np.int64) if sizes is None else sizes

    def _fill(
        self,
        waiting: deque[int],
        order: Iterator[int],
        keys: memoryview | None,
        sizes: memoryview | None,
    ) -> list[list[int]]:
        """The next groups, as full as they get, no query twice in them; what waits comes first next time."""
        groups: list[list[int]] = [[]]
        used, seen, passed = 0, set[int](), list[int]()
        for index in chain(_drained(waiting), order):
            if keys is not None and keys[index] in seen:
                passed.append(index)
                if len(passed) == _AHEAD:
                    break
                continue
            cost = 1 if sizes is None else sizes[index]
            if groups[-1] and used + cost > self._size:
                if len(groups) == self._world:
                    passed.append(index)
                    break
                groups.append([])
                used = 0
            groups[-1].append(index)
            used += cost
            if keys is not None:
                seen.add(keys[index])
        waiting.extendleft(reversed(passed))
        return groups if groups[0] else []


def _drained(items: deque[int]) -> Iterator[int]:
    while items:
        yield items.popleft()


def _repeated(keys: Array | None) -> memoryview | None:
    """The keys, if one comes twice."""
    if keys is None or len(np.unique(keys)) == len(keys):
        return None
    return keys.data
