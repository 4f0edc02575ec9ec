"""Work on the requests of many clients together.

No request waits for others: requests that arrive while a batch is computed form the next batch. So a lone
client is answered at once, and many clients get large batches.

Each item has a size, such as its tokens. A large request comes as several items, and items of all requests
take turns by start-time fair queueing (Goyal et al. 1996): a clock counts the size of all work so far, and an
item starts at the time of its arrival plus the size of the earlier items of its request. So a small request
does not wait for all of a large one, and the large one is not put off for ever.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from irkit.serve.meters import BATCHES, WAITING
from irkit.serve.problems import Problem

Run = Callable[[Hashable, list[Any]], Sequence[Any]]
"""Work on items of one key, and return a result for each."""


class _Item(NamedTuple):
    start: float
    number: int
    key: Hashable
    value: Any
    size: int
    result: asyncio.Future[Any]


class Batcher:
    """Collects items, and works on the items of one key together in a thread.

    Args:
        name: Name for metrics and threads.
        run: Works on items of one key; if it fails for several, it is called for each alone.
        batch_size: Largest size of the items of a batch; a larger item is a batch alone.
        most_waiting: Size of waiting items at which further requests are turned away.

    Attributes:
        waiting: Total size of the waiting items; items of a running batch do not count.
    """

    def __init__(self, name: str, run: Run, batch_size: int, most_waiting: int) -> None:
        self.name, self._run = name, run
        self._batch_size, self._most_waiting = batch_size, most_waiting
        self._items: list[_Item] = []  # a heap
        self._numbers, self._clock, self.waiting = itertools.count(), 0.0, 0
        self._thread = ThreadPoolExecutor(1, f"irkit-{name}")
        self._worker: asyncio.Task[None] | None = None

    @property
    def wanted(self) -> int:
        """Number of the waiting items that a request still waits for."""
        return sum(not item.result.done() for item in self._items)

    async def submit(self, key: Hashable, values: Sequence[tuple[Any, int]]) -> list[Any]:
        """Wait for the results of the values of a request.

        Args:
            key: Values of one key are worked on together.
            values: Each with its size.

        Raises:
            Problem: Too much is waiting already (429).
        """
        size = sum(size for _, size in values)
        if self.waiting and self.waiting + size > self._most_waiting:
            raise Problem(429, f"{self.name}: too much is waiting already; try again in a second")
        loop, start, futures = asyncio.get_running_loop(), self._clock, []
        for value, part in values:
            future = loop.create_future()
            heapq.heappush(self._items, _Item(start, next(self._numbers), key, value, part, future))
            futures.append(future)
            start += part
        self._count(size)
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:  # of a request that failed or was given up
                future.cancel()

    async def _work(self) -> None:
        """Work on batches until nothing waits."""
        loop = asyncio.get_running_loop()
        try:
            while batch := self._take():
                BATCHES.labels(self.name).observe(sum(item.size for item in batch))
                values = [item.value for item in batch]
                for item, outcome in zip(
                    batch,
                    await loop.run_in_executor(self._thread, self._outcomes, batch[0].key, values),
                    strict=True,
                ):
                    if item.result.done():
                        continue
                    if isinstance(outcome, Exception):
                        item.result.set_exception(outcome)
                    else:
                        item.result.set_result(outcome)
        finally:
            self._worker = None

    def _take(self) -> list[_Item]:
        """Remove and return the next batch: items of the first key, up to the batch size."""
        batch: list[_Item] = []
        others: list[_Item] = []
        size = 0
        while self._items and len(others) < 1000:
            item = heapq.heappop(self._items)
            if item.result.done():  # given up
                self._count(-item.size)
            elif batch and (item.key != batch[0].key or size + item.size > self._batch_size):
                others.append(item)
                if item.key == batch[0].key:
                    break
            else:
                batch.append(item)
                size += item.size
        for item in others:
            heapq.heappush(self._items, item)
        self._clock += size
        self._count(-size)
        return batch

    def _outcomes(self, key: Hashable, values: list[Any]) -> list[Any]:
        """Return the result of each item, or its error; if a batch fails, each item runs alone."""
        try:
            return list(self._run(key, values))
        except Exception as error:
            if len(values) == 1:
                return [error]
        return [self._outcomes(key, [value])[0] for value in values]

    def _count(self, size: int) -> None:
        self.waiting += size
        WAITING.labels(self.name).set(self.waiting)

    async def close(self) -> None:
        """Work on the waiting items, and end the thread."""
        if self._worker is not None:
            with suppress(asyncio.CancelledError):
                await self._worker
        self._thread.shutdown(wait=False)
