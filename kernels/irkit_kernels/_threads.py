"""Distribute the items of a CPU kernel among threads; the kernel's calls release the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache

import torch

__all__ = ["forced_threads", "share", "threads_for"]

_thread = threading.local()
_forced = 0  # number of threads inside of `forced_threads`


def threads_for(work: int, least: int) -> int:
    """Return the number of threads for some work: torch's, or fewer so that each has ``least`` or more."""
    return _forced or min(torch.get_num_threads(), work // least)


@contextmanager
def forced_threads(count: int) -> Iterator[None]:
    """Use ``count`` threads for every amount of work, so that small tests cover several threads."""
    global _forced
    before, _forced = _forced, count
    try:
        yield
    finally:
        _forced = before


def share(
    work: Callable[[int, int], None], items: int, threads: int, *, parts: int = 8, multiple: int = 1
) -> None:
    """Call ``work(start, stop)`` on ranges that together cover ``range(items)``.

    Each thread takes the next range as soon as it is free. A nested call, inside ``work``, runs in the
    calling thread alone: threads of one pool that wait for each other would deadlock. No thread is at work
    any more when this returns or raises, because then the caller's memory may be freed.

    Args:
        work: Called by several threads at the same time.
        items: Number of items.
        threads: Number of threads, including the calling one. With one thread all items are one range.
        parts: Ranges per thread; more of them balance the load better.
        multiple: The length of every range but the last is a multiple of this.
    """
    if min(threads, items) <= 1 or getattr(_thread, "sharing", False):
        work(0, items)
        return
    step = max(1, -(-items // (threads * parts * multiple))) * multiple
    starts = iter(range(0, items, step))  # one iterator for all threads: next() is atomic under the GIL

    def run() -> None:
        _thread.sharing = True
        try:
            for start in starts:
                work(start, min(start + step, items))
        finally:
            _thread.sharing = False

    others: list[Future[None]] = []
    try:
        for _ in range(1, threads):
            others.append(_pool(os.getpid()).submit(run))
        run()
        for other in others:
            other.result()
    except BaseException:
        for _ in starts:  # use up the ranges, so that no thread takes another one
            pass
        wait(others)
        raise


@cache
def _pool(process: int) -> ThreadPoolExecutor:  # one per process: threads do not survive a fork
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="irkit-kernels")
