"""Fusion of runs, and hybrid search: by hand, against exact arithmetic, and in one call."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irkit import Hybrid, Model, Retriever, Run, evaluate, fuse
from irkit.data import Query
from irkit.errors import BadTypeError, BadValueError, StorageError

A = {"q1": {"a": 9.0, "b": 7.0, "c": 5.0}, "q2": {"a": 1.0}}
B = {"q1": {"c": 0.9, "d": 0.5, "b": 0.1}, "q3": {"e": 2.0, "f": 2.0}}
ids = st.sampled_from("abcdefgh")
runs = st.lists(
    st.dictionaries(st.sampled_from(["q1", "q2"]), st.dictionaries(ids, st.integers(-50, 50), max_size=6)),
    min_size=2,
    max_size=4,
)
methods = st.sampled_from(["rrf", "minmax", "zscore", "sum"])


def expected(given: list[Any], method: str, weights: list[int], rrf_k: int, depth: int | None) -> Any:
    """Sums of points in exact arithmetic (but for a square root), by query and document."""
    sums: dict[str, dict[str, Any]] = {}
    for query in {query for run in given for query in run}:
        found = [sorted(run.get(query, {}).items(), key=lambda item: -item[1])[:depth] for run in given]
        sums[query] = dict.fromkeys((doc for results in found for doc, _ in results), Fraction(0))
        for results, weight in zip(found, weights, strict=True):
            scores = [Fraction(score) for _, score in results]
            lacking = Fraction(0)
            if not scores:
                continue
            if method == "rrf":
                points = [Fraction(1, rrf_k + rank) for rank in range(1, len(scores) + 1)]
            elif method == "sum":
                points = scores
            elif method == "minmax":
                low, spread = min(scores), max(scores) - min(scores)
                points = [(score - low) / spread if spread else Fraction(1) for score in scores]
            else:
                mean, deviation = statistics.fmean(scores), statistics.pstdev(scores)
                points = [
                    Fraction((float(s) - mean) / deviation) if deviation else Fraction(0) for s in scores
                ]
                lacking = min(points)
            got = dict(zip((doc for doc, _ in results), points, strict=True))
            for doc in sums[query]:
                sums[query][doc] += weight * got.get(doc, lacking)
    return sums


@given(runs, methods, st.data(), st.integers(1, 100), st.sampled_from([None, 1, 3]))
def test_sums_are_those_of_exact_arithmetic(given, method, data, rrf_k, depth):
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(given), max_size=len(given)))
    fused = fuse(given, method, weights=weights, rrf_k=rrf_k, depth=depth)
    exact = expected(given, method, weights, rrf_k, depth)
    assert set(fused.query_ids) == set(exact)
    for query, sums in exact.items():
        assert dict(fused[query]) == pytest.approx(
            {doc: float(value) for doc, value in sums.items()}, abs=1e-9
        )


@given(runs, methods, st.randoms())
def test_ties_keep_their_order_and_the_order_of_runs_does_not_round(given, method, random):
    weights = [1 / (number + 1) for number in range(len(given))]
    fused = fuse(given, method, weights=weights)
    for query in fused.query_ids:
        first = dict.fromkeys(
            doc for run in map(Run.from_dict, given) if query in run for doc, _ in run[query]
        )
        came = {doc: place for place, doc in enumerate(first)}
        assert fused[query] == sorted(fused[query], key=lambda result: (-result[1], came[result[0]]))
        assert fuse(given, method, 2, weights=weights)[query] == fused[query][:2]
    pairs = list(zip(given, weights, strict=True))
    random.shuffle(pairs)
    again = fuse([run for run, _ in pairs], method, weights=[weight for _, weight in pairs])
    assert again.to_dict() == fused.to_dict()  # equal bit by bit; dictionaries compare without order


def test_reciprocal_ranks_as_in_the_paper():
    """RRFscore(d) = sum over the rankings of 1 / (60 + rank): Cormack, Clarke & Büttcher 2009, section 2."""
    fused = fuse([A, B])
    assert fused.query_ids == ["q1", "q2", "q3"]
    assert fused["q1"] == [
        ("c", 1 / 63 + 1 / 61),
        ("b", 1 / 63 + 1 / 62),
        ("a", 1 / 61),
        ("d", 1 / 62),
    ]
    assert fused["q2"] == [("a", 1 / 61)]
    assert fused["q3"] == [("e", 1 / 61), ("f", 1 / 62)]
    assert fuse([A, B], rrf_k=1, weights=[1, 3])["q1"][:2] == [("c", 1 / 4 + 3 / 2), ("b", 1 / 3 + 3 / 4)]


def test_scores_by_hand():
    assert fuse([A, B], "minmax")["q1"] == [("a", 1.0), ("c", 1.0), ("b", 0.5), ("d", 0.5)]
    assert fuse([A, B], "minmax")["q2"] == [("a", 1.0)]  # one result is no worst one
    assert fuse([A, B], "minmax")["q3"] == [("e", 1.0), ("f", 1.0)]
    z = 1.5**0.5  # of three scores at equal distances
    assert dict(fuse([A, B], "zscore")["q1"]) == pytest.approx({"a": 0.0, "b": -z, "c": 0.0, "d": -z})
    assert dict(fuse([A, B], "sum", weights=[0.1, 1])["q1"]) == pytest.approx(
        {"c": 1.4, "a": 0.9, "b": 0.8, "d": 0.5}
    )


def test_runs_of_weight_0_and_results_beyond_the_depth_do_not_count(tmp_path):
    assert fuse([A, B], weights=[0, 2]).to_dict() == {
        "q1": {"c": 2 / 61, "d": 2 / 62, "b": 2 / 63},
        "q3": {"e": 2 / 61, "f": 2 / 62},
    }
    assert [doc for doc, _ in fuse([A, B], "minmax", depth=2)["q1"]] == ["a", "c", "b", "d"]
    assert dict(fuse([A, B], "minmax", depth=2)["q1"])["b"] == 0
    assert [doc for doc, _ in fuse([A, B], k=1)["q1"]] == ["c"]
    Run.from_dict(B).write(tmp_path / "b.trec")
    assert list(fuse([Run.from_dict(A), tmp_path / "b.trec"])) == list(fuse([A, B]))
    assert fuse([{"q": {}}, {"q": {}}])["q"] == []


def test_tiny_and_large_scores_are_normalised():
    for unit in (5e-324, 1e-200, 1e300):
        run = {"q": {"a": 3 * unit, "b": 2 * unit, "c": unit}}
        assert fuse([run, {}], "minmax")["q"] == [("a", 1.0), ("b", 0.5), ("c", 0.0)]
        z = 1.5**0.5
        assert dict(fuse([run, {}], "zscore")["q"]) == pytest.approx({"a": z, "b": 0, "c": -z})
    equal = {"q": dict.fromkeys("abc", 0.1)}  # their computed mean is another number
    assert fuse([equal, {}], "zscore")["q"] == [("a", 0.0), ("b", 0.0), ("c", 0.0)]


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ([A], {}, BadValueError, "two or more runs, got 1"),
        (A, {}, BadTypeError, "in a list"),
        (Run(), {}, BadTypeError, "in a list"),
        ("a.trec", {}, BadTypeError, "in a list"),
        (None, {}, BadTypeError, "in a list"),
        ([A, 7], {}, BadTypeError, "got 7"),
        ([A, "nowhere.trec"], {}, StorageError, "nowhere.trec"),
        ([A, B], {"method": "mean"}, BadValueError, "unknown method 'mean'; expected rrf, minmax"),
        ([A, B], {"k": 0}, BadValueError, "k is 0"),
        ([A, B], {"k": 1.5}, BadValueError, "k is 1.5"),
        ([A, B], {"depth": -1}, BadValueError, "depth is -1"),
        ([A, B], {"rrf_k": 0}, BadValueError, "rrf_k is 0"),
        ([A, B], {"rrf_k": float("nan")}, BadValueError, "rrf_k is nan"),
        ([A, B], {"weights": [1]}, BadValueError, "each of 2 runs, got 1"),
        ([A, B], {"weights": [1, -1]}, BadValueError, "0 or more"),
        ([A, B], {"weights": [0, 0]}, BadValueError, "above 0"),
        ([A, B], {"weights": [1, float("inf")]}, BadValueError, "0 or more"),
        ([A, B], {"weights": [1, "2"]}, BadValueError, "0 or more"),
        ([A, B], {"weights": "12"}, BadTypeError, "a list of numbers"),
        ([A, B], {"weights": 0.5}, BadTypeError, "a list of numbers"),
        ([{"q": {"a": float("nan")}}, B], {}, BadValueError, "finite"),
    ],
)
def test_refusals(given: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fuse(given, **options)


# ---- hybrid search -------------------------------------------------------------------------------

TEXTS = {
    "d0": "neural search",
    "d1": "an index of a vector",
    "d2": "the token model",
    "d3": "text in the index",
    "d4": "vector search in text",
}
QUERIES = {"q1": "vector search", "q2": "the index"}
QRELS = {"q1": {"d4": 2, "d0": 1}, "q2": {"d3": 1}}


@pytest.fixture(scope="module")
def place(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BEIR folder, and indexes of words and of vectors of it."""
    place = tmp_path_factory.mktemp("hybrid")
    (place / "beir" / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", TEXTS), ("queries", QUERIES)):
        lines = [json.dumps({"_id": i, "text": text, "odd": int(i[1]) % 2}) for i, text in texts.items()]
        (place / "beir" / f"{name}.jsonl").write_text("\n".join(lines))
    lines = [f"{query}\t{doc}\t{grade}" for query, row in QRELS.items() for doc, grade in row.items()]
    (place / "beir" / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))
    with pytest.warns(UserWarning, match="mean"):
        Model.from_pretrained(tiny_bert).save_pretrained(place / "model")
    Retriever.build("bm25", place / "beir", place / "words")
    Retriever.build(place / "model", place / "beir", place / "vectors")
    return place


@pytest.fixture
def both(place: Path) -> list[Retriever]:
    return [Retriever.load(place / "words"), Retriever.load(place / "vectors")]


@pytest.mark.parametrize("options", [{}, {"method": "minmax", "weights": [2, 1]}, {"rrf_k": 1}])
def test_hybrid_is_the_fusion_of_what_each_finds(both: list[Retriever], options: dict[str, Any]) -> None:
    hybrid = Hybrid(both, **options)
    fused = fuse([retriever.run(QUERIES, 100) for retriever in both], **options)
    assert list(hybrid.run(QUERIES)) == list(fused)
    found = hybrid.search(list(QUERIES.values()), k=3)
    assert [[(hit.id, hit.score) for hit in hits] for hits in found] == [fused[q][:3] for q in QUERIES]
    assert all(hit.text == TEXTS[hit.id] and hit.metadata["odd"] in (0, 1) for hits in found for hit in hits)
    assert hybrid.search(QUERIES["q1"], k=3) == found[0]


def test_hybrid_asks_for_enough_and_passes_filters_on(both: list[Retriever]) -> None:
    shallow = Hybrid(both, depth=1)
    assert list(shallow.run(QUERIES, 1)) == list(fuse([r.run(QUERIES, 1) for r in both], k=1))
    assert len(shallow.search("search", k=5)) == 5  # at least as many as are wanted
    hybrid = Hybrid(both)
    assert {hit.id for hit in hybrid.search("search", filter={"odd": 1})} == {"d1", "d3"}
    assert {hit.id for hit in hybrid.search("search", filter=iter(["d0", "d2", "no"]))} == {"d0", "d2"}
    assert {hit.id for hit in hybrid.search("the index", filter={"_id": ["d4"]})} == {"d4"}
    assert hybrid.search("search", filter=[]) == []
    assert hybrid.search([]) == []
    assert list(hybrid.run(iter(QUERIES.items()))) == list(hybrid.run(QUERIES))
    assert repr(hybrid).startswith("Hybrid([Retriever(")


def test_hybrid_of_weights_by_term_and_of_text(both: list[Retriever], tmp_path: Path) -> None:
    given = {name: {"vector": {text.split()[-1]: 1.0}} for name, text in TEXTS.items()}
    terms = Retriever.build("impacts", given, tmp_path / "terms")
    run = Hybrid([both[0], terms]).run([Query("q", "neural", {"vector": 1.0})])
    assert [doc for doc, _ in run["q"]] == ["d0", "d1"]


def test_hybrid_reads_texts_where_they_are(both: list[Retriever], tmp_path: Path) -> None:
    other = Retriever.build("bm25", {"d1": "index, changed", "new": "a new index"}, tmp_path / "other")
    texts = {hit.id: hit.text for hit in Hybrid([other, both[0]]).search("index")}
    assert texts == {"d1": "index, changed", "new": "a new index", "d3": TEXTS["d3"]}
    other.update({"new": "another index"})
    assert "another index" in [hit.text for hit in Hybrid([other, both[0]]).search("index")]


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda both: Hybrid(both[:1]), BadValueError, "two or more retrievers, got 1"),
        (lambda both: Hybrid(both[0]), BadValueError, "two or more retrievers, got 1"),
        (lambda both: Hybrid([*both, "words"]), BadTypeError, "got 'words'"),
        (lambda both: Hybrid(both, "mean"), BadValueError, "unknown method"),
        (lambda both: Hybrid(both, weights=[1, 2, 3]), BadValueError, "each of 2 runs, got 3"),
        (lambda both: Hybrid(both, depth=0), BadValueError, "depth is 0"),
        (lambda both: Hybrid(both, rrf_k=-1), BadValueError, "rrf_k is -1"),
        (lambda both: Hybrid(both).search("text", k=0), BadValueError, "search: k is 0"),
        (lambda both: Hybrid(both).search({"q": "text"}), BadTypeError, "a string or several"),
        (lambda both: Hybrid(both).search(7), BadTypeError, "a string or several"),
        (lambda both: Hybrid(both).search("text", filter={"odd": {"~": 1}}), BadValueError, "~"),
    ],
)
def test_hybrid_refusals(
    both: list[Retriever], attempt: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attempt(both)


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> Any:
    """Run a command beside two runs."""
    monkeypatch.chdir(tmp_path)
    Run.from_dict(A).write("a.trec")
    Run.from_dict(B).write("b.jsonl.gz")
    Path("qrels").write_text("q1 0 c 1\nq3 0 f 1\n")
    return command


def test_command_writes_what_fuse_gives(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("fuse", "a.trec", "b.jsonl.gz", "--out", "fused.jsonl") == (0, "", "")
    assert list(Run.read("fused.jsonl")) == list(fuse([A, B]))
    words = ["--method", "minmax", "--weights", "1,0.5", "--k", "2", "--depth", "3", "--rrf-k", "7"]
    code, printed, _ = call("fuse", "a.trec", "b.jsonl.gz", *words)
    assert code == 0
    Path("printed.trec").write_text(printed)
    assert list(Run.read("printed.trec")) == list(fuse([A, B], "minmax", 2, weights=[1, 0.5]))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path("a.trec").read_bytes())))
    assert call("fuse", "-", "b.jsonl.gz", "--out", "again.jsonl")[0] == 0
    assert Path("again.jsonl").read_bytes() == Path("fused.jsonl").read_bytes()


def test_command_shows_measures(call: Any) -> None:
    code, printed, _ = call("fuse", "a.trec", "b.jsonl.gz", "--qrels", "qrels", "--measures", "RR@10 P@1")
    mean = evaluate(fuse([A, B]), {"q1": {"c": 1}, "q3": {"f": 1}}, "RR@10 P@1").mean
    assert (code, printed) == (0, f"measure\tvalue\nRR@10\t{mean['RR@10']:.4f}\nP@1\t{mean['P@1']:.4f}\n")
    assert mean == {"RR@10": 0.75, "P@1": 0.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.trec"], "two or more runs, got 1"),
        (["a.trec", "nope.trec"], "nope.trec"),
        (["-", "-"], "standard input"),
        (["a.trec", "b.jsonl.gz", "--weights", "1,x"], "--weights: got 'x'"),
        (["a.trec", "b.jsonl.gz", "--weights", "1"], "each of 2 runs, got 1"),
        (["a.trec", "b.jsonl.gz", "--method", "rff"], "unknown method 'rff'"),
        (["a.trec", "b.jsonl.gz", "--rrf-k", "0"], "rrf_k is 0"),
        (["a.trec", "b.jsonl.gz", "--split", "test"], "no --qrels"),
        (["a.trec", "b.jsonl.gz", "--qrels", "qrels", "--split", "test"], "test"),
        (["a.trec", "b.jsonl.gz", "--out", "no/where.trec"], "no such directory"),
    ],
)
def test_command_refuses(call: Any, words: list[str], message: str) -> None:
    code, printed, told = call("fuse", *words)
    assert (code, printed) == (2, "")
    assert message in told
    assert not Path("no").exists()
