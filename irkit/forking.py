"""A process that computes and then forks: its child does not wait for threads that only the parent has."""

from __future__ import annotations

import os
import sys
from functools import cache

__all__ = ["one_thread_after_fork"]


@cache
def one_thread_after_fork() -> None:
    """Have children that are forked from now on compute with one thread; called before a computation.

    The thread that forks brings its team of OpenMP's threads into the child by name only, and the next
    operation of several threads waits for them forever. One thread alone does not wait. A thread that
    the child starts may call ``torch.set_num_threads`` for a team of its own.
    """
    os.register_at_fork(after_in_child=_one_thread)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
    if "faiss" in sys.modules:  # its wheels bring an OpenMP of their own
        sys.modules["faiss"].omp_set_num_threads(1)
