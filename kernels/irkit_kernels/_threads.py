"""Shares the items of a CPU kernel, whose calls release the GIL, among threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

__all__ = ["share"]

_here = threading.local()


def share(
    work: Callable[[int, int], None], items: int, threads: int, *, parts: int = 8, multiple: int = 1
) -> None:
    """Call ``work(start, stop)`` on ranges that cover ``range(items)``; whoever is free takes the next.

    Inside ``work`` it uses no more threads: those waiting for each other would never end.

    Args:
        work: Called from this thread and from others at the same time.
        items: Their number.
        threads: Threads to use, this one included; with one, all items are one range.
        parts: Ranges a thread, so that none waits long for another.
        multiple: Ranges are this long or a multiple of it, but for the last.
    """
    if min(threads, items) <= 1 or getattr(_here, "sharing", False):
        work(0, items)
        return
    step = max(1, -(-items // (threads * parts * multiple))) * multiple
    left = iter(range(0, items, step))

    def run() -> None:
        _here.sharing = True
        try:
            for start in left:
                work(start, min(start + step, items))
        finally:
            _here.sharing = False

    others = [_pool(os.getpid()).submit(run) for _ in range(1, threads)]
    run()
    for other in others:
        other.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:  # one a process: threads do not survive a fork
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="irkit-kernels")
