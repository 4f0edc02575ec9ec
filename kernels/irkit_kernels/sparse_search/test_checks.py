"""Lists that `build` did not make: refused if a search would leave its arrays, searched otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irkit_kernels._testing import guarded, guarded_memory, in_child
from irkit_kernels.sparse_search import Effort, Searcher, Thresholds, build, check_lists

DIM, N = 40, 16384 + 70  # two ranges
QUERIES = np.array([0, 12]), np.arange(12, dtype=np.int32), np.ones(12, np.float32)


def made(terms: Any = np.uint16, weights: Any = np.float16) -> tuple[Any, dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows = [np.sort(rng.choice(DIM, 1 + number % 3, replace=False)) for number in range(N)]
    amounts = rng.random(sum(map(len, rows))) + 0.1
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    forward = offsets, np.concatenate(rows).astype(terms), amounts.astype(weights), None
    return forward, build(forward, DIM)


def test_what_was_built_is_accepted() -> None:
    _, arrays = made()
    check_lists(arrays, N, DIM)
    del arrays["best"]
    check_lists(arrays, N, DIM)


def changed(arrays: dict[str, Any], name: str, place: Any, value: int) -> dict[str, Any]:
    array = arrays[name].copy()
    array[place] = value
    return arrays | {name: array}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "place", "value", "reason"),
    [
        ("list_offsets", 3, 1 << 40, "rise"),
        ("list_offsets", 0, -1, "rise"),
        ("best_offsets", -1, 1 << 40, "rise"),
        ("lists", (5, 1), 1, "beyond"),  # the higher half of a place
        ("lists", (5, 1), -1, "beyond"),
        ("lists", (5, 2), 2, "ranges"),
        ("lists", (5, 2), -1, "ranges"),
        ("lists", (1, 2), 0, "two lists"),
        ("lists", (5, 3), 1 << 30, "beyond"),
        ("lists", (-1, 3), -2, "ranges"),
    ],
)
def test_what_leaves_its_array_is_refused(name: str, place: Any, value: int, reason: str) -> None:
    arrays = changed(made()[1], name, place, value)
    with pytest.raises(ValueError, match=reason):
        check_lists(arrays, N, DIM)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["list_offsets", "lists", "postings", "gains", "best_offsets", "best_scales"]
)
def test_arrays_of_another_kind_are_refused(name: str) -> None:
    arrays = made()[1]
    for wrong in (None, arrays[name].astype(np.float64), arrays[name][:-1].reshape(-1, 1), arrays[name][::2]):
        without = {key: array for key, array in arrays.items() if key != name}
        with pytest.raises(ValueError, match="sparse_search"):
            check_lists(without if wrong is None else without | {name: wrong}, N, DIM)


def test_filters_of_another_kind_are_refused() -> None:
    forward, arrays = made()
    searcher = Searcher(arrays, forward)
    for wrong in (np.ones(N - 1, bool), np.ones((N, 1), bool), np.ones(N, np.uint8), np.arange(3)):
        with pytest.raises(ValueError, match=rf"the filter is .*, expected bool \({N},\)"):
            searcher.find(QUERIES, 3, wrong)
    apart = np.repeat(np.arange(N) % 2 == 0, 2)[::2]  # not contiguous
    for effort in (None, Effort(9, 0.5, 50)):
        found, expected = (searcher.find(QUERIES, 9, keep, effort) for keep in (apart, apart.copy()))
        np.testing.assert_array_equal(found[0], expected[0])
        assert (found[0] % 2 == 0).all()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_no_hits_are_wanted(number: int) -> None:
    forward, arrays = made()
    queries = np.arange(number + 1), np.arange(number, dtype=np.int32), np.ones(number, np.float32)
    for effort in (None, Effort(9, 0.5, 50)):
        rows, scores = Searcher(arrays, forward).find(queries, 0, None, effort)
        assert rows.shape == scores.shape == (number, 0)


def check_rows(rows: Any) -> None:
    assert rows.min() >= -1
    assert rows.max() < N


@pytest.mark.parametrize("terms", [np.uint16, np.uint32])
def test_any_posting_can_be_searched(terms: Any) -> None:
    always_surveyed = Thresholds(survey=1 << 40)
    (offsets, numbers, weights, _), arrays = made(terms)
    wild = {
        "postings": np.full_like(arrays["postings"], 255),
        "best": np.full_like(arrays["best"], 0xFFFFFFFF),
        "gains": np.full_like(arrays["gains"], np.nan),
        "lists": arrays["lists"].copy(),
        "best_scales": np.full_like(arrays["best_scales"], np.inf),
        "numbers": np.full_like(numbers, np.iinfo(terms).max),
        "weights": np.full_like(weights, -np.inf),
    }

    wild["lists"][:, 4] = -1  # the scale of every list is NaN

    def run() -> None:
        with guarded_memory():
            for name, array in wild.items():
                given = {"numbers": numbers, "weights": weights, **arrays, name: array}
                given = {key: guarded(value) for key, value in given.items()}
                check_lists(given, N, DIM)
                forward = guarded(offsets), given["numbers"], given["weights"], None
                searcher = Searcher(given, forward)
                for keep in (None, guarded(np.arange(N) % 2 == 0)):
                    for effort in (None, Effort(9, 0.5, 50)):
                        check_rows(searcher.find(QUERIES, 20, keep, effort)[0])
                for k in (20, N):
                    check_rows(Searcher(given, forward, always_surveyed).find(QUERIES, k)[0])

    in_child(run)


def test_few_documents_with_negative_weights_are_left_to_others() -> None:
    forward = np.array([0, 2, 4]), np.array([0, 1, 0, 1], np.uint16), np.array([1, 1, 1, 1], np.float32), None
    arrays = build(forward, 2)
    forward[2][2:] = [-5, np.nan]
    rows, scores = Searcher(arrays, forward).find(
        (np.array([0, 1]), np.zeros(1, np.int32), np.ones(1, np.float32)), 2
    )
    assert rows.tolist() == [[0, -1]]
    assert scores[0, 0] == 1


def test_terms_beyond_the_vocabulary_are_not_built() -> None:
    forward = np.array([0, 1]), np.array([7], np.uint16), np.ones(1, np.float32), None
    with pytest.raises(ValueError, match="term 7 of a vocabulary of 7"):
        build(forward, 7)
