"""Make ``os.fork`` safe after a computation: a child must not wait for threads that only its parent has."""

from __future__ import annotations

import os
import sys
from functools import cache


@cache
def one_thread_after_fork() -> None:
    """Limit torch and FAISS to one thread in all children that are forked from now on.

    Call this function before a computation with several threads. A fork copies OpenMP's list of threads into
    the child, but not the threads. An operation with several threads in the child would wait forever for the
    missing threads; an operation with one thread does not wait. A thread that the child starts may call
    ``torch.set_num_threads`` to get threads of its own.
    """
    os.register_at_fork(after_in_child=_one_thread)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
    if "faiss" in sys.modules:  # its wheels contain another OpenMP
        sys.modules["faiss"].omp_set_num_threads(1)
