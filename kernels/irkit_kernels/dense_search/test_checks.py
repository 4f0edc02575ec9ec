"""Arrays that `arrange` did not make: refused if a search would leave them, searched otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irkit_kernels._testing import guarded, guarded_memory, in_child
from irkit_kernels.dense_search import (
    Effort,
    Encoder,
    Rotation,
    Searcher,
    arrange,
    check_segment,
    make_rotation,
)

N, DIM, LISTS = 300, 70, 5


def made(nbits: int = 4, metric: str = "euclidean") -> tuple[dict[str, Any], dict[str, Any], Any]:
    rng = np.random.default_rng(0)
    vectors, centroids = (rng.standard_normal((n, DIM)).astype(np.float32) for n in (N, LISTS))
    rotation = make_rotation(DIM)
    encoder = Encoder(centroids, rotation, nbits, euclidean=metric == "euclidean", keep_int8=True)
    codes = encoder.encode(vectors)
    others = {"centroids": centroids, "rotation": rotation, "n_rows": N, "metric": metric}
    others |= {"kept": codes["kept"], "kept_scales": codes["kept_scales"]}
    return arrange(codes, LISTS), others, vectors[:3]


def opened(segment: dict[str, Any], others: dict[str, Any]) -> Searcher:
    given = dict(others)
    return Searcher(given.pop("centroids"), given.pop("rotation"), [segment], given.pop("n_rows"), **given)


def test_what_was_arranged_is_accepted() -> None:
    for nbits in (1, 2, 4):
        segment, others, _ = made(nbits)
        assert check_segment(segment, LISTS, 128, True) == nbits
        opened(segment, others)


@pytest.mark.parametrize(
    ("place", "value"), [(0, 1), (-1, N + 1), (-1, N - 1), (2, 1 << 40), (2, -(1 << 40)), (1, N)]
)
def test_offsets_that_leave_their_array_are_refused(place: int, value: int) -> None:
    segment, others, _ = made()
    segment["offsets"][place] = value
    with pytest.raises(ValueError, match="offsets do not rise"):
        opened(segment, others)


@pytest.mark.parametrize("name", ["offsets", "rows", "signs", "planes", "factors", "level_factors", "biases"])
def test_arrays_of_another_kind_are_refused(name: str) -> None:
    segment, others, _ = made()
    array = segment[name]
    for wrong in (None, array.astype(np.float64), array[:-1], array[::2], array[..., None]):
        changed = {key: value for key, value in segment.items() if key != name or wrong is not None}
        if wrong is not None:
            changed[name] = wrong
        if name == "planes" and wrong is None:
            opened(changed, others)  # codes of one bit
            continue
        with pytest.raises(ValueError, match="dense_search"):
            opened(changed, others)


def test_settings_that_do_not_fit_are_refused() -> None:
    segment, others, queries = made()
    rotation = others["rotation"]
    wrong_rotations = [
        Rotation(rotation.signs[:, :-1], rotation.order),
        Rotation(rotation.signs, rotation.order.astype(np.float32)),
        Rotation(rotation.signs, np.zeros_like(rotation.order)),
        Rotation(rotation.signs, rotation.order + 1),
    ]
    changes: list[dict[str, Any]] = [{"rotation": wrong} for wrong in wrong_rotations]
    changes += [{"metric": "manhattan"}, {"kept": others["kept"][1:]}, {"kept_scales": None}]
    changes += [{"kept": others["kept"].astype(np.float64)}, {"kept": others["kept"].astype(np.float32)}]
    changes += [{"margins": np.zeros(LISTS + 1, np.float32), "metric": "inner_product"}]
    for change in changes:
        with pytest.raises(ValueError, match="dense_search"):
            opened(segment, others | change)
    plain = made(1)[0]
    with pytest.raises(ValueError, match=r"codes of \[1, 4\] bits"):
        Searcher(others["centroids"], rotation, [plain, segment], 2 * N, metric="euclidean")
    searcher = opened(segment, others)
    for wrong in (np.zeros(N + 1, bool), np.zeros((N, 1), bool), np.zeros(N), np.array([N]), np.array([-1])):
        with pytest.raises(ValueError, match="filter"):
            searcher.find(queries, 3, keep=wrong)
    with pytest.raises(ValueError, match="expected"):
        searcher.find(queries[:, 1:], 3)
    with pytest.raises(ValueError, match="3 bits"):
        Encoder(others["centroids"], rotation, 3)


@pytest.mark.parametrize("nbits", [1, 4])
def test_any_code_can_be_searched(nbits: int) -> None:
    segment, others, queries = made(nbits)
    wild = {
        "rows": np.full(N, 0xFFFFFFFF, np.uint32),
        "signs": np.full_like(segment["signs"], 255),
        "factors": np.full(N, 0x7FC07FC0, np.uint32),
        "biases": np.full(N, np.inf, np.float32),
        "kept_scales": np.full(N, -np.inf, np.float32),
    }

    def run() -> None:
        with guarded_memory():
            for name, array in wild.items():
                given = {key: guarded(value) for key, value in (segment | {name: array}).items()}
                kept = {key: guarded(others[key]) for key in ("kept", "kept_scales")}
                kept = {key: guarded(array) if key == name else value for key, value in kept.items()}
                given.pop("kept_scales", None)
                searcher = opened(given, others | kept)
                for keep in (None, guarded(np.arange(N) % 2 == 0)):
                    for asked in (queries, np.full((1, DIM), np.nan), np.full((1, DIM), 3e38)):
                        rows, _ = searcher.find(asked, 20, Effort(5, 50, 30), keep)
                        assert rows.min() >= -1
                        assert rows.max() < N

    in_child(run)
