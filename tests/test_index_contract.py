"""What every index promises, for every kind of representation it holds: the oracle is `irkit.score`."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit import Dense, MultiVector, Ragged, Sparse, score
from irkit.core.representation import Representation, concat
from irkit.errors import BadTypeError, BadValueError
from irkit.index import INDEX_KINDS, Hits, Index, Limits, Store, compact, create_index, open_index, use_limits
from irkit.index.topk import TopK

DIM = 8


@dataclass(frozen=True)
class Backend:
    """An index under test: a kind of the table of index kinds, with some of SETTINGS."""

    config: str | dict[str, Any]
    kind: str
    exact: bool = True  # finds exactly the best; the others find most of them, with exact scores
    lossy: bool = False  # exact for what it keeps, which is not quite what it was given
    positive: bool = False  # given no values below 0


SMALL = Limits(  # little data is cut into many blocks, and looked up rather than scanned
    scan_scores=32,
    scan_numbers=64,
    flat_scan=17,
    flat_share=1,
    dense_scan=20,
    dense_scan_per_hit=1,
    dense_points=8,
    faiss_scan=20,
    faiss_scan_per_hit=1,
    faiss_points=1,
    inverted_unlisted=4,
    plaid_uncompressed=20,
    plaid_scan=4,
    plaid_margin=2,
)
# settings that are tested, and what they promise; other kinds are tested as approximate, with their defaults
SETTINGS: dict[str, list[Backend]] = {
    "flat": [
        *(Backend("flat", kind) for kind in ("dense", "multi_vector", "sparse")),
        Backend({"kind": "flat", "codes": False}, "dense"),
        *(
            Backend({"kind": "flat", "dtype": dtype}, "dense", True, True)
            for dtype in ("float16", "bfloat16")
        ),
        *(
            Backend({"kind": "flat", "dtype": "int8"}, kind, False, True)
            for kind in ("dense", "multi_vector")
        ),
        Backend({"kind": "flat", "metric": "cosine"}, "dense", False, True),
        Backend({"kind": "flat", "metric": "euclidean"}, "dense"),
        Backend({"kind": "flat", "dtype": "int8", "metric": "euclidean"}, "dense", False, True),
    ],
    "dense": [
        Backend({"kind": "dense", "keep": keep}, "dense", False, keep != "float32")
        for keep in ("none", "int8", "float16", "float32")
    ]
    + [
        Backend({"kind": "dense", "keep": keep, "metric": metric}, "dense", False, lossy)
        for keep, metric, lossy in (
            ("none", "cosine", True),
            ("none", "euclidean", True),
            ("float16", "cosine", True),
            ("int8", "euclidean", True),
            ("float32", "euclidean", False),
        )
    ],
    "faiss": [
        Backend({"kind": "faiss", "factory": factory, "nprobe": 8}, "dense", False)
        for factory in ("hnsw", "ivf", "pq", "ivfpqfs", "Flat", "HNSW8", "IVF4,SQ8", "RR8,IVF4_HNSW4,PQ4x4fs")
    ],
    "muvera": [
        Backend(
            {"kind": "muvera", "repetitions": 10, "bits": 3, "candidates": 50}, "multi_vector", False, True
        )
    ],
    "plaid": [
        *(Backend({"kind": "plaid", "nbits": nbits}, "multi_vector", False, True) for nbits in (1, 2, 4, 8)),
        Backend({"kind": "plaid", "nbits": 1, "keep_tokens": True}, "multi_vector", False, True),
    ],
    "inverted": [
        Backend(
            {"kind": "inverted", "dtype": dtype, "mode": mode}, "sparse", exact, dtype != "float32", positive
        )
        for dtype, mode, exact, positive in (
            ("float32", "exact", True, True),
            ("float32", "exact", True, False),
            ("float16", "exact", True, True),
            ("float16", "approximate", False, True),
            ("uint16", "exact", False, True),
            ("uint8", "exact", False, True),
            ("uint8", "approximate", False, True),
        )
    ],
}
BACKENDS = [
    backend
    for name, kind in INDEX_KINDS.items()
    for backend in SETTINGS.get(name, [Backend(name, holds, False) for holds in kind.holds])
]


@pytest.fixture(autouse=True)
def _directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture(params=BACKENDS, ids=lambda backend: f"{backend.kind}-{backend.config}")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    chosen: Backend = request.param
    with use_limits(SMALL):
        yield chosen


def whole_numbers(backend: Backend, n: int, rng: np.random.Generator) -> Representation:
    """Small integers: all scores are exact in float32, and many are equal."""
    lowest = 0 if backend.positive else -2
    return make(backend.kind, n, rng, lambda *shape: rng.integers(lowest, 3, shape))


def reals(backend: Backend, n: int, rng: np.random.Generator) -> Representation:
    sign = np.abs if backend.positive else np.positive
    return make(backend.kind, n, rng, lambda *shape: sign(rng.standard_normal(shape)))


def make(kind: str, n: int, rng: np.random.Generator, values: Any) -> Representation:
    if kind == "dense":
        return Dense(torch.tensor(values(n, DIM), dtype=torch.float32))
    if kind == "multi_vector":
        lengths = torch.tensor(rng.integers(0, 4, n))
        return MultiVector(
            Ragged(torch.tensor(values(int(lengths.sum()), DIM), dtype=torch.float32), lengths)
        )
    kept = rng.random((n, DIM)) < 0.4
    return Sparse.from_dense(torch.tensor(np.where(kept, values(n, DIM), 0), dtype=torch.float32))


def expected(scores: np.ndarray, k: int, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition: best first, ties to the lower row, -1 and -inf where nothing is left."""
    scores = np.where(keep, scores, -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, 1)
    missing = max(0, k - scores.shape[1])
    rows = np.pad(np.where(best == -np.inf, -1, order), ((0, 0), (0, missing)), constant_values=-1)
    return rows, np.pad(best, ((0, 0), (0, missing)), constant_values=-np.inf)


def build(backend: Backend, pieces: list[Representation]) -> Path:
    path = Path(tempfile.mkdtemp())
    with Store.build(path) as store:
        index = create_index(store, backend.config)
        for piece in pieces:
            index.add(piece)
        index.finish()
        store.publish()
    return path


def truth_of(backend: Backend, index: Index, queries: Representation, data: Representation) -> np.ndarray:
    """Scores of what the index keeps; only a lossy one may keep something else than ``data``."""
    if backend.lossy and len(index):
        data = index.representations(np.arange(len(index)))
    metric = backend.config.get("metric") if isinstance(backend.config, dict) else None
    if not metric:
        return score(queries, data).numpy()
    assert isinstance(queries, Dense)
    assert isinstance(data, Dense)
    q, d = queries.values.double(), data.values.double()
    if metric == "euclidean":
        return -(q[:, None] - d).square().sum(-1).float().numpy()
    q = q / q.norm(dim=1, keepdim=True).clamp(min=1e-30)  # documents are kept with length 1
    return (q @ d.T).float().numpy()


def margin(backend: Backend, queries: Representation, data: Representation) -> float:
    """What scores may differ by: whole numbers are exact, what a lossy index makes of them is rounded."""
    return 2 * tolerance(queries, data) if backend.lossy else 0


def tolerance(queries: Representation, documents: Representation) -> float:
    """Rounding of an inner product in float32, at most: terms x unit roundoff x sizes (Higham 2002, 3.1)."""
    sizes = [
        np.abs(x.arrays().get("values", x.arrays().get("weights"))).max(initial=0)
        for x in (queries, documents)
    ]
    terms = DIM * (4 if queries.kind == "multi_vector" else 1)
    return float(2 * terms * 2**-24 * DIM * sizes[0] * sizes[1])


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 60), k=st.integers(1, 70))
@settings(max_examples=6, deadline=None)
def check_contract(backend: Backend, seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    data = whole_numbers(backend, n, rng)
    queries = whole_numbers(backend, 3, rng)
    cuts = np.sort(rng.integers(0, n + 1, 2))
    pieces = [data[: cuts[0]], data[cuts[0] : cuts[1]], data[cuts[1] :]]
    store = Store.open(build(backend, pieces[:2]))
    index = open_index(store)
    added = index.add(pieces[2])
    assert added == range(cuts[1], n)
    keep = np.ones(n, bool)
    for step in range(4):
        allowed = [None, np.zeros(n, bool), rng.random(n) < 0.1, rng.random(n) < 0.7][rng.integers(4)]
        check_search(backend, index, queries, data, keep, allowed, k, rng)
        gone = rng.integers(0, n, rng.integers(0, 1 + n // 4))
        assert index.remove(gone) == keep[gone].any() * keep[np.unique(gone)].sum()
        keep[gone] = False
        if step == 1:
            index.finish()
        if step == 2:
            index = open_index(Store.open(store.path))
    stats = index.stats()
    assert (stats["documents"], stats["removed"], len(index)) == (keep.sum(), n - keep.sum(), n)
    compact(store.path)
    index = open_index(Store.open(store.path))
    check_search(backend, index, queries, data[np.flatnonzero(keep)], keep[keep], None, k, rng)


def check_search(
    backend: Backend,
    index: Index,
    queries: Representation,
    data: Representation,
    keep: np.ndarray,
    allowed: np.ndarray | None,
    k: int,
    rng: np.random.Generator,
) -> None:
    """A search and the scores of chosen rows follow the definition; ``keep`` has the rows not removed."""
    truth, atol = truth_of(backend, index, queries, data), margin(backend, queries, data)
    wanted = keep if allowed is None else keep & allowed
    hits = index.search(queries, k, allowed)
    rows, scores = expected(truth, k, wanted)
    if backend.exact:
        np.testing.assert_array_equal(hits.rows, rows)
        np.testing.assert_array_equal(hits.scores, scores)
    else:
        check_hits(hits, truth, wanted, k, atol)
    if not len(data):
        return
    given = np.where(rng.random(rows.shape) < 0.2, -1, rng.integers(0, len(data), rows.shape))
    exact = np.where(given < 0, -np.inf, np.take_along_axis(truth, given.clip(0), 1))
    np.testing.assert_allclose(index.rescore(queries, given), exact, 0, atol)  # removed ones included


def check_hits(hits: Any, truth: np.ndarray, keep: np.ndarray, k: int, atol: float) -> None:
    """As many as there are, each once and allowed, in order, with exact scores."""
    some = keep & (truth > -np.inf)  # (n_q, n): a document without tokens is no hit
    if (some.sum(1) != some[0].sum()).any():
        for query in range(len(truth)):
            check_hits(Hits(*(x[query : query + 1] for x in hits)), truth[query : query + 1], keep, k, atol)
        return
    count = min(k, int(some[0].sum()))
    assert (hits.rows[:, count:] == -1).all()
    assert (hits.scores[:, count:] == -np.inf).all()
    rows = hits.rows[:, :count]
    assert rows.min(initial=0) >= 0
    assert keep[rows].all()
    assert all(len(set(row)) == count for row in rows.tolist())
    np.testing.assert_allclose(hits.scores[:, :count], np.take_along_axis(truth, rows, 1), 0, atol)
    for row, scores in zip(rows, hits.scores, strict=True):
        assert (np.lexsort((row, -scores[:count])) == np.arange(count)).all()


@pytest.mark.sampled
def test_search_follows_the_definition(backend: Backend) -> None:
    check_contract(backend)


@pytest.mark.sampled
def test_scores_of_real_numbers(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    data, queries = reals(backend, 200, rng), reals(backend, 5, rng)
    index = open_index(Store.open(build(backend, [data])))
    hits = index.search(queries, 10)
    truth = truth_of(backend, index, queries, data)
    found = np.take_along_axis(truth, hits.rows, 1)
    np.testing.assert_allclose(hits.scores, found, rtol=0, atol=tolerance(queries, data))
    if backend.exact:
        best = -np.sort(-truth, axis=1)[:, :10]
        np.testing.assert_allclose(hits.scores, best, rtol=0, atol=tolerance(queries, data))


def clustered(data: Representation, rng: np.random.Generator) -> Representation:
    """Its vectors, each moved to that of the cluster that its row belongs to; sparse ones as they are."""
    if isinstance(data, Sparse):
        return data
    values = data.values if isinstance(data, Dense) else data.tokens.values
    cluster = torch.tensor(rng.integers(0, 20, len(data)))
    cluster = cluster if isinstance(data, Dense) else cluster[data.tokens.row_ids()]
    values = torch.nn.functional.normalize(0.3 * values + values[:20][cluster])
    return Dense(values) if isinstance(data, Dense) else MultiVector(data.tokens.with_values(values))


@pytest.mark.sampled
def test_finds_most_of_the_best(backend: Backend) -> None:
    rng = np.random.default_rng(1)
    data = reals(backend, 500, rng)
    if not backend.exact:  # twenty clusters, as texts have them
        data = clustered(data, rng)
    queries = data[:50]
    index = open_index(Store.open(build(backend, [data])))
    for allowed in (np.ones(500, bool), rng.random(500) < 0.5):
        truth, _ = expected(truth_of(backend, index, queries, data), 10, allowed)
        hits = index.search(queries, 10, allowed)
        recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(hits.rows, truth, strict=True)])
        assert recall >= (1 if backend.exact else 0.9)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_finds_the_best_of_what_a_filter_allows(backend: Backend, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = reals(backend, 1500, rng)
    if not backend.exact:
        data = clustered(data, rng)
    queries = data[:40]
    index = open_index(Store.open(build(backend, [data])))
    scores = truth_of(backend, index, queries, data)
    for share in (0.01, 0.1, 0.5, None):
        if share is None:  # half of them, without what is nearest to any query
            allowed = np.argsort(np.argsort(scores.max(0), kind="stable")) < 750
        else:
            allowed = rng.permutation(1500) < share * 1500
        truth, _ = expected(scores, 10, allowed)
        hits = index.search(queries, 10, allowed)
        recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(hits.rows, truth, strict=True)])
        assert recall >= (1 if backend.exact else 0.95), share


@pytest.mark.sampled
def test_queries_and_filters_in_any_layout(backend: Backend) -> None:
    rng = np.random.default_rng(6)
    data = reals(backend, 300, rng)
    queries, index = data[:5], open_index(Store.open(build(backend, [data])))
    allowed = rng.random(300) < 0.5
    expected = index.search(queries, 10, allowed)
    if isinstance(queries, Dense):
        queries = Dense(queries.values.T.contiguous().T)
    table = np.stack([allowed, ~allowed], axis=1)
    for view in (table[:, 0], allowed[::-1].copy()[::-1]):
        hits = index.search(queries, 10, view)
        np.testing.assert_array_equal(hits.rows, expected.rows)
        np.testing.assert_allclose(hits.scores, expected.scores, rtol=1e-5, atol=1e-5)
    everything = index.search(queries, 10, np.broadcast_to(np.True_, 300))
    np.testing.assert_array_equal(everything.rows, index.search(queries, 10, np.ones(300, bool)).rows)


@pytest.mark.sampled
def test_one_build_equals_another(backend: Backend) -> None:
    rng = np.random.default_rng(2)
    data, queries = reals(backend, 100, rng), reals(backend, 5, rng)
    one = build(backend, [data])
    pieces = build(backend, [data[:30], data[30:30], data[30:99], data[99:]])
    for path in (build(backend, [data]), pieces):
        files = sorted(file.name for file in one.iterdir())
        assert files == sorted(file.name for file in path.iterdir())
        assert all((one / file).read_bytes() == (path / file).read_bytes() for file in files)
    hits, again = (open_index(Store.open(path)).search(queries, 7) for path in (one, pieces))
    np.testing.assert_array_equal(hits.rows, again.rows)


@pytest.mark.sampled
def test_a_reader_sees_the_old_index_until_it_refreshes(backend: Backend) -> None:
    rng = np.random.default_rng(3)
    data, queries = whole_numbers(backend, 60, rng), whole_numbers(backend, 4, rng)
    path = build(backend, [data[:30]])
    reader = Store.open(path)
    index = open_index(reader)
    before = index.search(queries, 40)
    writer = open_index(Store.open(path))
    with writer.store.update():
        writer.add(data[30:])
        writer.remove([0, 5])
        writer.finish()
    np.testing.assert_array_equal(index.search(queries, 40).rows, before.rows)
    assert reader.refresh()
    assert not reader.refresh()
    after = index.search(queries, 60)
    keep = ~np.isin(np.arange(60), [0, 5])
    check_hits(after, truth_of(backend, index, queries, data), keep, 60, margin(backend, queries, data))


def test_nothing_in_it(backend: Backend) -> None:
    queries = reals(backend, 2, np.random.default_rng(4))
    index = open_index(Store.open(build(backend, [])))
    hits = index.search(queries, 3)
    assert hits.rows.tolist() == [[-1] * 3] * 2
    assert (hits.scores == -np.inf).all()
    assert index.rescore(queries, hits.rows).shape == (2, 3)
    assert index.search(queries[:0], 3).rows.shape == (0, 3)
    assert index.stats()["documents"] == 0
    index = open_index(Store.open(build(backend, [queries[:0]])))
    assert (len(index), index.dim, index.search(queries, 1).rows.tolist()) == (0, DIM, [[-1], [-1]])


@pytest.mark.sampled
def test_an_index_compacted_to_nothing_is_as_it_was_begun(backend: Backend) -> None:
    data = whole_numbers(backend, 20, np.random.default_rng(5))
    path = build(backend, [data])
    open_index(Store.open(path)).remove(range(20))
    for _ in range(2):
        compact(path)
        index = open_index(Store.open(path))
        assert (len(index), index.representation, index.dim) == (0, backend.kind, DIM)
        none = index.representations(np.arange(0))
        assert (type(none), len(none), none.dim) == (type(data), 0, DIM)
        assert index.search(data[:2], 1).rows.tolist() == [[-1], [-1]]
    index.add(data)
    index.finish()
    fresh = open_index(Store.open(build(backend, [data])))
    for one, other in zip(index.search(data, 5), fresh.search(data, 5), strict=True):
        np.testing.assert_array_equal(one, other)


def with_value(data: Representation, value: float) -> Representation:
    """The same with one number replaced."""
    if isinstance(data, Dense):
        numbers = data.values.clone()
    else:
        numbers = (data.tokens.values if isinstance(data, MultiVector) else data.weights).clone()
    numbers.view(-1)[-1] = value
    if isinstance(data, Dense):
        return Dense(numbers)
    if isinstance(data, MultiVector):
        return MultiVector(data.tokens.with_values(numbers))
    return Sparse(data.terms, numbers, data.dim)


def wider(kind: str) -> Representation:
    ones = torch.ones(1, DIM + 1)
    made = {
        "dense": Dense,
        "multi_vector": lambda x: MultiVector(Ragged.from_rows([x])),
        "sparse": Sparse.from_dense,
    }
    return made[kind](ones)


@pytest.mark.sampled
def test_bad_representations_change_nothing(backend: Backend) -> None:
    rng = np.random.default_rng(5)
    data = reals(backend, 40, rng)
    index = open_index(Store.open(build(backend, [data])))
    hits = index.search(data, 5)
    other = {"dense": "sparse", "multi_vector": "dense", "sparse": "multi_vector"}[backend.kind]
    for bad in (
        with_value(data, np.nan),
        with_value(data, np.inf),
        with_value(data.to("cpu", torch.float64), 1e200),
        wider(backend.kind),
        reals(Backend("flat", other), 3, rng),
    ):
        with pytest.raises(BadValueError):
            index.add(bad)
        with pytest.raises(BadValueError):
            index.search(bad, 1)
        with pytest.raises(BadValueError):
            index.rescore(bad, np.zeros((len(bad), 1), int))
    with pytest.raises(BadTypeError):
        index.add(torch.ones(2, DIM))
    assert len(index) == index.stats()["documents"] == 40
    np.testing.assert_array_equal(open_index(Store.open(index.store.path)).search(data, 5).rows, hits.rows)


@pytest.mark.sampled
def test_bad_arguments_are_refused(backend: Backend) -> None:
    data = reals(backend, 40, np.random.default_rng(5))
    index = open_index(Store.open(build(backend, [data])))
    for k in (0, -1, 1.5, "3", None, True):
        with pytest.raises(BadValueError, match=f"search: k is {k!r}; expected a whole number of 1 or more"):
            index.search(data, k)
    for allowed in (np.ones(39, bool), np.ones(40), np.ones((1, 40), bool)):
        with pytest.raises(BadValueError, match="allowed"):
            index.search(data, 1, allowed)
    for rows in ([40], [-1], [3, 400]):
        with pytest.raises(BadValueError, match="no row"):
            index.remove(rows)
    with pytest.raises(BadTypeError):
        index.remove([0.5])
    for rows in (np.zeros(40, int), np.zeros((39, 1), int), np.full((40, 1), 40), np.full((40, 1), -2)):
        with pytest.raises(BadValueError):
            index.rescore(data, rows)
    assert index.stats()["documents"] == 40


BAD_ROWS: list[tuple[Any, type[Exception], str]] = [
    ([40], BadValueError, "no row 40; expected 0 to 39"),
    ([3, -1], BadValueError, "no row -1; expected 0 to 39"),
    (np.array([1, 1 << 40]), BadValueError, "no row 1099511627776; expected"),
    (np.zeros((2, 2), int), BadValueError, r"rows of shape \(2, 2\); expected \(n,\)"),
    (3, BadValueError, r"rows of shape \(\); expected \(n,\)"),
    ([0.0, 1.0], BadTypeError, "rows are float64, expected integers"),
    (np.array([1], np.uint64), BadTypeError, "rows are uint64, expected integers"),
    (np.ones(40, bool), BadTypeError, "rows are bool, expected integers"),
    (np.ones(39, bool), BadTypeError, "rows are bool, expected integers"),
    (["0"], BadTypeError, "rows are <U1, expected integers"),
    ("0", BadTypeError, "rows are <U1, expected integers"),
    ([[0], [1, 2]], BadTypeError, r"rows are \[\[0\], \[1, 2\]\]; expected integers"),
    (None, BadTypeError, "rows are object, expected integers"),
    ([1 << 70], BadTypeError, "rows are object, expected integers"),
    (slice(2), BadTypeError, "rows are object, expected integers"),
    (torch.ones(2, requires_grad=True), BadTypeError, "rows are tensor.*; expected integers"),
]


@pytest.mark.sampled
def test_bad_rows_are_refused_before_anything_is_read(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = open_index(Store.open(build(backend, [reals(backend, 40, np.random.default_rng(5))])))
    assert len(index.representations(np.array([0, 39]))) == 2
    assert len(index.representations(np.array([]))) == 0
    monkeypatch.setattr(Store, "read", lambda self, name: pytest.fail(f"{name} is read"))
    for rows, error, message in BAD_ROWS:
        with pytest.raises(error, match=f"^representations: {message}"):
            index.representations(rows)


@pytest.mark.sampled
def test_queries_in_other_dtypes_and_with_gradients(backend: Backend) -> None:
    rng = np.random.default_rng(6)
    data = whole_numbers(backend, 30, rng)
    index = open_index(Store.open(build(backend, [data])))
    queries = data[:4]
    hits = index.search(queries, 5)
    assert (index.search(queries.to(dtype=torch.bfloat16), 5).rows == hits.rows).all()
    if backend.kind == "dense":
        assert (index.search(Dense(queries.values.clone().requires_grad_()), 5).rows == hits.rows).all()


def test_documents_without_tokens_are_no_hits() -> None:
    data = MultiVector(Ragged.from_rows([torch.ones(2, DIM), torch.ones(0, DIM), -torch.ones(1, DIM)]))
    index = open_index(Store.open(build(Backend("flat", "multi_vector"), [data])))
    assert index.search(data[:1], 3).rows.tolist() == [[0, 2, -1]]
    assert concat([data, data]).tokens.lengths.tolist() == [2, 0, 1] * 2


@given(
    st.lists(st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 1e-40, 2.0, 3e38]), min_size=1, max_size=200),
    st.integers(1, 90),
    st.lists(st.integers(0, 200), max_size=5),
)
def test_top_k_is_a_stable_sort(values: list[float], k: int, cuts: list[int]) -> None:
    scores = np.float32([values, values[::-1]])
    best = TopK(2, k)
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    for start, stop in itertools.pairwise(bounds):
        best.push(scores[:, start:stop], np.arange(start, stop))
    rows, kept = expected(scores, k, np.ones(len(values), bool))
    hits = best.hits()
    np.testing.assert_array_equal(hits.rows, rows)
    np.testing.assert_array_equal(hits.scores, kept)
