"""Threads share items: each item is processed once, and errors reach the caller."""

from __future__ import annotations

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
