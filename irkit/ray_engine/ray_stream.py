"""Stream a long sequence through actors of Ray: results come in order, even if processes or nodes die.

Ray Data does the work. A task reads items, actors with a state of their own (such as a model) process them,
and the results come back one by one. Ray Data pauses the reader while the actors are busy, and the actors
while their results are not consumed. Items and results are pickled, so every process of the cluster must be
trusted, as Ray itself requires.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from irkit.errors import IrkitError, require

_ATTEMPTS = 5  # without a result in between
_PREFETCHED = 1  # results on their way to this process
_TAKEN = 8  # results that a client takes at once


def stream(
    ray: Any,
    read: Callable[[int], Iterator[Any]],
    begin: Callable[[], Callable[[Any], Any]],
    *,
    gpu: bool = False,
) -> Iterator[Any]:
    """Yield the result for every item, in the order of the items.

    If a process or a node dies, Ray repeats its work. Where Ray cannot do that, this function starts again
    after the last result that it yielded.

    Args:
        ray: The module, connected; see `irkit.ray_engine.ray_start.start_ray`.
        read: Called in a process of its own with a number n; yields the items after the first n.
        begin: Called once in each actor; returns a function from an item to its result. There is at most
            one actor for every CPU, or GPU, of the cluster.
        gpu: Give each actor a GPU instead of a CPU.

    Raises:
        IrkitError: Ray failed several times in a row. Errors of ``read`` and of the actors are raised
            unchanged.
    """
    run = _taken_by_client if ray.util.client.ray.is_connected() else _results
    work = ray.put((str(Path.cwd()), read, begin))  # a model among it would be too large for a client's call
    done, failures = 0, 0
    while True:
        try:
            for result, error in run(ray, work, done, gpu):
                if error is not None:
                    raise error
                yield result
                done, failures = done + 1, 0
            return
        except ray.exceptions.RayError as error:
            failures += 1
            if failures == _ATTEMPTS:
                raise IrkitError(
                    f"work on Ray: it failed {failures} times in a row: {type(error).__name__}: "
                    f"{' '.join(str(error).split()):.300}; see the log of Ray"
                ) from error


def _results(ray: Any, work: Any, done: int, gpu: bool) -> Iterator[tuple[Any, BaseException | None]]:
    """Yield results and errors, after the first ``done`` ones."""
    data: Any = require("ray.data", "ray", "The engine ray")
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # an item is a block, so that actors share few items, too
    context.execution_options.preserve_order = True
    device = "GPU" if gpu else "CPU"
    actors = max(1, int(ray.cluster_resources().get(device, 1)))
    resources = {"num_gpus": 1} if gpu else {"num_cpus": 1}
    with data.DataContext.current(context):
        results = (
            data.from_items([done])
            .map_batches(_Reader(work), batch_size=1, num_cpus=0)
            .map_batches(
                _Actor,
                fn_constructor_args=([work],),
                batch_size=1,
                compute=data.ActorPoolStrategy(min_size=1, max_size=actors),
                **resources,
            )
        )
        batches = iter(results.iter_batches(batch_size=1, prefetch_batches=_PREFETCHED))
    for batch in batches:
        yield pickle.loads(batch["result"][0])


class _Reader:
    """Reads items in a task of Ray Data."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import ray

        home, read, _ = ray.get(self.work)
        _go_to(home)
        try:
            for item in read(int(batch["item"][0])):
                yield {"item": [_pickled(item, None)]}
        except Exception as error:
            yield {"item": [_pickled(None, error)]}


class _Actor:
    """Works on items in an actor of Ray Data."""

    def __init__(self, work: list[Any]) -> None:
        import ray

        home, _, begin = ray.get(work[0])
        _go_to(home)
        self.problem: BaseException | None = None
        try:
            self.call = begin()
        except Exception as error:
            self.problem = error

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        item, problem = pickle.loads(batch["item"][0])
        problem = problem or self.problem
        if problem is not None:
            return {"result": [_pickled(None, problem)]}
        try:
            return {"result": [_pickled(self.call(item), None)]}
        except Exception as error:
            return {"result": [_pickled(None, error)]}


def _pickled(value: Any, error: BaseException | None) -> bytes:
    return pickle.dumps((value, error), pickle.HIGHEST_PROTOCOL)


def _go_to(folder: str) -> None:
    """Change to the working directory of the process that ordered the work, so that relative paths agree."""
    with contextlib.suppress(OSError):  # this node lacks the folder
        os.chdir(folder)


# ---- a client of a cluster, in which Ray Data does not run ----


def _taken_by_client(ray: Any, work: Any, done: int, gpu: bool) -> Iterator[tuple[Any, BaseException | None]]:
    relay = ray.remote(_Relay).options(num_cpus=0).remote(work, done, gpu)
    try:
        while results := ray.get(relay.take.remote()):
            yield from results
    finally:
        ray.kill(relay)


class _Relay:
    """Has the results inside the cluster, in an actor, for a process that is connected as a client."""

    def __init__(self, work: tuple[str, Any, Any], done: int, gpu: bool) -> None:
        import ray

        self.results = _results(ray, ray.put(work), done, gpu)

    def take(self) -> list[tuple[Any, BaseException | None]]:
        """Return the next results, each with None, or an error with the result None; empty at the end."""
        return list(itertools.islice(self.results, _TAKEN))
