"""Threads share items: each item is processed once, and errors reach the caller."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irkit_kernels._threads import share


@given(st.integers(0, 300), st.integers(0, 5), st.integers(1, 8), st.integers(1, 20))
def test_every_item_comes_once(items, threads, parts, multiple):
    ranges: list[range] = []
    share(
        lambda start, stop: ranges.append(range(start, stop)), items, threads, parts=parts, multiple=multiple
    )
    assert sorted(item for part in ranges for item in part) == list(range(items))
    if threads > 1:
        assert all(len(part) % multiple == 0 or part.stop == items for part in ranges)


@pytest.mark.parametrize("bad", range(8))
def test_errors_reach_the_caller(bad):
    def work(start: int, stop: int) -> None:
        if bad in range(start, stop):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        share(work, 8, 3)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_waits_for_the_other_threads(error):
    """They use memory that the caller frees; the rest of the items is left."""
    caller, begun, ended = threading.get_ident(), threading.Event(), list[int]()

    def work(start: int, stop: int) -> None:
        if threading.get_ident() == caller:
            begun.wait()
            raise error
        begun.set()
        time.sleep(0.1)
        ended.append(start)

    with pytest.raises(error):
        share(work, 100, 2)
    assert len(ended) == 1
    time.sleep(0.3)
    assert len(ended) == 1
