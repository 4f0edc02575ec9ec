"""Several searchers with the same lists, and what each keeps joined, find what one searcher finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from irkit_kernels._jit import Target, compiling_for, cpu_features
from irkit_kernels._threads import forced_threads
from irkit_kernels.dense_search import (
    NO_PLACE,
    Candidates,
    Effort,
    Encoder,
    Searcher,
    arrange,
    assign,
    make_rotation,
    rotate_rows,
    rotate_rows_back,
)
from irkit_kernels.dense_search.build import _nearest_floats
from irkit_kernels.dense_search.op import METRICS
from irkit_kernels.dense_search.rotation import rotate, rotate_back
from irkit_kernels.dense_search.test_dense_search import KEEPS, Case


def parts_of(case: Case, owners: np.ndarray) -> list[tuple[Searcher, np.ndarray]]:
    """Divide the rows; a part has two segments. Return each searcher and the numbers of its rows."""
    parts = []
    euclidean = case.metric == "euclidean"
    encoder = Encoder(case.centroids, case.rotation, case.nbits, euclidean=euclidean)
    for owner in range(int(owners.max()) + 1):
        rows = np.flatnonzero(owners == owner)
        half, segments = len(rows) // 2, []
        for start, own in ((0, rows[:half]), (half, rows[half:])):
            segments.append(arrange(encoder.encode(case.vectors[own]), len(case.centroids), start))
        kept = {name: array if name == "margins" else array[rows] for name, array in case.kept.items()}
        searcher = Searcher(case.centroids, case.rotation, segments, len(rows), metric=case.metric, **kept)
        parts.append((searcher, rows))
    return parts


def cut(found: list[tuple[Candidates, np.ndarray]], query: int, effort: Effort) -> list[tuple[int, int]]:
    """Return the part and the column of the candidates of one searcher, in the order of the definition."""
    items = [
        (part, column, own)
        for part, (own, _) in enumerate(found)
        for column in np.flatnonzero(own.rows[query] >= 0).tolist()
    ]

    def order(item, name):
        part, column, own = item
        score = getattr(own, name)[query, column]
        return -score, own.ranks[query, column], found[part][1][own.rows[query, column]]

    for name, count in (("rough", effort.candidates), ("fine", effort.refined)):
        items = sorted(items, key=lambda item: order(item, name))[:count]
    return [(part, column) for part, column, _ in items]


@pytest.mark.sampled
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("nbits", [1, *(pytest.param(nbits, marks=pytest.mark.slow) for nbits in (2, 4))])
def test_parts_find_what_one_searcher_finds(nbits, keep, metric):
    for seed, dim in ((0, 70), (1, 5)):
        case = Case(seed, dim, [150, 90, 60], 12, nbits, keep, metric)
        if seed:  # many equal rows
            case.vectors = case.vectors.round()
            encoder = Encoder(case.centroids, case.rotation, nbits, euclidean=metric == "euclidean")
            starts = (0, 150, 240)
            case.segments = [
                arrange(encoder.encode(case.vectors[start:stop]), 12, start)
                for start, stop in zip(starts, (150, 240, 300), strict=True)
            ]
            if keep in ("float16", "float32"):
                case.kept["kept"] = case.vectors.astype(keep)
        rng = np.random.default_rng(seed)
        parts = parts_of(case, rng.integers(0, 3, case.n))
        whole = case.searcher()
        for filtered in (False, True):
            allowed = rng.random(case.n) < 0.5 if filtered else None
            for k, asked in ((5, Effort(4, 20, 9)), (30, Effort(12, 40, 40)), (1, Effort(1, 300, 5))):
                effort = whole.effort(asked, k)
                rows, scores = whole.find(case.queries, k, effort, allowed)
                found = [
                    (
                        part.candidates(case.queries, effort, None if allowed is None else allowed[numbers]),
                        numbers,
                    )
                    for part, numbers in parts
                ]
                for query in range(len(case.queries)):
                    hits = []
                    chosen = cut(found, query, effort._replace(refined=effort.refined if nbits > 1 else 300))
                    for part, (own, numbers) in enumerate(found):
                        columns = [column for owner, column in chosen if owner == part]
                        places = np.full((3, len(columns) + 1), NO_PLACE, np.uint32)
                        places[query, : len(columns)] = own.places[query, columns]
                        if nbits == 1 and keep == "none":
                            exact = own.rough[query, columns]  # nothing ranks them again
                            hits += zip(-exact, numbers[own.rows[query, columns]], strict=True)
                            continue
                        exact = parts[part][0].rank(case.queries, places)[query]
                        assert exact[-1] == -np.inf
                        hits += zip(-exact[:-1], numbers[own.rows[query, columns]], strict=True)
                    best = sorted(hits)[:k]
                    assert [row for _, row in best] == rows[query][: len(best)].tolist()
                    assert (rows[query][len(best) :] == -1).all()
                    if nbits > 1 or keep != "none":
                        assert [-score for score, _ in best] == scores[query][: len(best)].tolist()


def test_a_part_without_rows_and_places_that_do_not_exist():
    case = Case(0, 7, [0], 3, 2, "float32", "inner_product")
    searcher = case.searcher()
    found = searcher.candidates(case.queries, Effort(3, 5, 5))
    assert (found.rows == -1).all()
    assert (found.rough == -np.inf).all()
    assert searcher.rank(case.queries, np.full((3, 2), NO_PLACE, np.uint32)).tolist() == [[-np.inf] * 2] * 3
    with pytest.raises(ValueError, match="a place is above the 0 of the segments"):
        searcher.rank(case.queries, np.zeros((3, 1), np.uint32))


@pytest.mark.parametrize("dim", [1, 64, 100, 384])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_rotated_as_by_definition_and_back(dim, threads):
    rotation = make_rotation(dim, 3)
    rows = torch.from_numpy(np.random.default_rng(dim).standard_normal((70, dim)).astype(np.float32))
    with forced_threads(threads):
        there = rotate_rows(rows, rotation)
        back = rotate_rows_back(there, rotation, dim)
    assert torch.equal(there, rotate(rows, rotation))
    assert torch.equal(there[3:4], rotate_rows(rows[3:4], rotation))
    assert torch.equal(back, rotate_back(there, rotation, dim))
    assert torch.equal(back[5:6], rotate_rows_back(there[5:6], rotation, dim))
    torch.testing.assert_close(back, rows)
    assert rotate_rows(rows[:0], rotation).shape == (0, rotation.signs.shape[1])


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_lists_and_codes_of_a_vector_do_not_depend_on_the_others(vnni, whole):
    rng = np.random.default_rng(4)
    vectors, centroids = (rng.standard_normal((n, 90)).astype(np.float32) for n in (700, 60))
    if whole:  # many are as near to one centroid as to another
        vectors, centroids = vectors.round(), np.repeat(centroids.round(), 2, 0)
    features = cpu_features()
    with compiling_for(None if vnni else Target(features - {"avx512vnni"})):
        lists = assign(vectors, centroids)
        distances = np.square(vectors[:, None].astype(float) - centroids).sum(2)
        chosen = np.take_along_axis(distances, lists[:, None], 1)[:, 0]
        assert (chosen <= distances.min(1) * 1.01).all()
        encoder = Encoder(centroids, make_rotation(90), 4, keep_int8=True)
        codes = encoder.encode(vectors)
        for start, stop in ((0, 1), (3, 5), (100, 190), (333, 700)):
            assert np.array_equal(assign(vectors[start:stop], centroids), lists[start:stop])
            for name, part in encoder.encode(vectors[start:stop]).items():
                assert np.array_equal(part, codes[name][start:stop]), name


def test_products_of_fewer_bits_assign_the_same(monkeypatch):
    """A process may let torch round the factors of products; this CPU may lack the instructions for it."""
    rng = np.random.default_rng(0)
    centroids = (1 + 0.01 * rng.standard_normal((50, 64))).astype(np.float32)  # many alike
    vectors, halves = rng.standard_normal((200, 64)).astype(np.float32), -0.5 * np.square(centroids).sum(1)
    expected = _nearest_floats(vectors, centroids, halves)
    addmm = torch.addmm

    def rounded(added, *factors):
        return addmm(added, *(factor.bfloat16().float() for factor in factors))

    monkeypatch.setattr(torch, "addmm", rounded)
    monkeypatch.setenv("DNNL_DEFAULT_FPMATH_MODE", "BF16")
    np.testing.assert_array_equal(_nearest_floats(vectors, centroids, halves), expected)
