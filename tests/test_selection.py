"""Offset, threshold, groups and fields: every kind of index against a ranking of everything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from irkit import Hybrid, Retriever, Run, fuse
from irkit.data import Document
from irkit.errors import BadTypeError, BadValueError, IrkitError
from irkit.index import Documents, Limits, use_limits
from irkit.retrieval.searching import Hit
from irkit.retrieval.selection import group_of

N, DIM = 90, 8
SOURCES: list[Any] = ["a", "b", 1, True, 1.5, ["a", "b"], {"x": 1}, None]
SMALL = Limits(
    faiss_scan=20, faiss_scan_per_hit=1, faiss_points=1, inverted_unlisted=4, plaid_uncompressed=20
)
KINDS = [
    ("dense", "flat", True),
    ("dense", {"kind": "faiss", "factory": "hnsw"}, False),
    ("dense", {"kind": "faiss", "factory": "ivf"}, False),
    ("dense", {"kind": "faiss", "factory": "pq"}, False),
    ("multi_vector", "flat", True),
    ("multi_vector", {"kind": "flat", "dtype": "int8"}, False),
    ("multi_vector", {"kind": "plaid", "nbits": 2}, False),
    ("multi_vector", {"kind": "muvera", "repetitions": 4, "bits": 2, "candidates": 20}, False),
    ("impacts", "inverted", True),
    ("impacts", {"kind": "inverted", "mode": "approximate", "dtype": "uint8"}, False),
    ("bm25", "inverted", True),
    ("bm25", "flat", True),
]


def make(kind: str, rng: np.random.Generator) -> tuple[str, list[dict[str, Any]], list[Any]]:
    """Model, records and queries of a kind; two thirds of the documents have the source "a"."""
    words = [f"w{number}" for number in range(12)]
    records: list[dict[str, Any]] = []
    for number in range(N):
        record: dict[str, Any] = {"_id": f"d{number}", "title": f"title {number}"}
        record["text"] = " ".join(rng.choice(words, 6))
        if kind == "impacts":
            record["vector"] = {word: float(rng.integers(1, 5)) for word in rng.choice(words, 4)}
        elif kind != "bm25":
            shape = (DIM,) if kind == "dense" else (int(rng.integers(1, 4)), DIM)
            record["vector"] = rng.integers(-2, 3, shape).astype(np.float32)  # many equal scores
        metadata = {"n": number}
        if rng.random() < 0.67:
            metadata["source"] = "a"
        elif rng.random() < 0.8:
            metadata["source"] = SOURCES[rng.integers(len(SOURCES))]
        records.append({**record, "metadata": metadata})
    if kind == "bm25":
        return "bm25", records, [" ".join(words[:9]), "w3", "nothing"]
    if kind == "impacts":
        return "impacts", records, [dict.fromkeys(words, 1.0), {"w1": 2.0, "w2": 1.0}, {}]
    queries = [record["vector"] + np.float32(0.5) for record in records[:3]]
    return "vectors", records, queries


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Retriever, list[Any], bool]]:
    """An index that no test changes."""
    kind, index, exact = request.param
    model, records, queries = make(kind, np.random.default_rng(0))
    with use_limits(SMALL):
        retriever = Retriever.build(model, records, tmp_path_factory.mktemp("case") / "index", index=index)
    with retriever:
        retriever.remove(["d3", "d50"])
        yield retriever, queries, exact


def pairs(hits: list[Hit]) -> list[tuple[str, float]]:
    return [(hit.id, hit.score) for hit in hits]


def assert_same(left: list[Hit], right: list[Hit]) -> None:
    """The same documents; a score depends on the queries that are scored together, by a rounding."""
    assert [hit.id for hit in left] == [hit.id for hit in right]
    assert [hit.score for hit in left] == pytest.approx([hit.score for hit in right], rel=1e-6)


def cap(hits: list[Hit], per_group: int) -> list[Hit]:
    """The definition of groups, in words of its own: each hit that has fewer than ``per_group`` before it."""
    kept: list[Hit] = []
    for hit in hits:
        same = [other for other in kept if same_source(hit, other)]
        if len(same) < per_group:
            kept.append(hit)
    return kept


def same_source(left: Hit, right: Hit) -> bool:
    values = left.metadata.get("source"), right.metadata.get("source")
    return values[0] is not None and values[0] == values[1] and type(values[0]) is type(values[1])


def test_an_offset_slices_a_larger_search(case: tuple[Retriever, list[Any], bool]) -> None:
    retriever, queries, _ = case
    for k, offset in ((1, 0), (5, 5), (10, 3), (7, N - 4), (7, N), (3, 10**12)):
        whole = retriever.search(queries, min(k + offset, 2 * N))
        found = retriever.search(queries, k, offset=offset)
        assert [pairs(hits) for hits in found] == [pairs(hits)[offset:] for hits in whole]
        run = retriever.run([(str(i), query) for i, query in enumerate(queries)], k, offset=offset)
        assert [run[str(i)] for i in range(3)] == [pairs(hits) for hits in found]


def test_a_threshold_is_the_lowest_score(case: tuple[Retriever, list[Any], bool]) -> None:
    retriever, queries, _ = case
    whole = retriever.search(queries, 30)
    for threshold in (whole[0][4].score, math.nextafter(whole[0][4].score, math.inf), -1e300, 1e300):
        expected = [[pair for pair in pairs(hits) if pair[1] >= threshold] for hits in whole]
        found = retriever.search(queries, 30, threshold=threshold)
        assert [pairs(hits) for hits in found] == expected
        found = retriever.search(queries, 27, threshold=threshold, offset=3)
        assert [pairs(hits) for hits in found] == [hits[3:] for hits in expected]


@pytest.mark.sampled
@pytest.mark.parametrize("per_group", [1, 2, 40])
def test_groups_are_those_of_a_ranking_of_everything(
    case: tuple[Retriever, list[Any], bool], per_group: int
) -> None:
    retriever, queries, exact = case
    for k, offset in ((1, 0), (4, 0), (9, 2), (N, 0), (3, N)):
        options = {"group_by": "source", "per_group": per_group}
        found = retriever.search(queries, k, offset=offset, **options)
        run = retriever.run({str(i): q for i, q in enumerate(queries)}, k, offset=offset, **options)
        for number, (query, hits) in enumerate(zip(queries, found, strict=True)):
            assert run[str(number)] == pairs(hits)
            everything = cap(retriever.search([query], N)[0], per_group)
            assert len(hits) == len(everything[offset : offset + k])  # if so many exist
            if exact:
                assert_same(hits, everything[offset : offset + k])
                continue
            depth, capped = k + offset, list[Hit]()
            while depth < 4 * N and len(capped) < k + offset:  # the depth that gives enough
                capped = cap(retriever.search([query], min(depth, N))[0], per_group)
                depth *= 4
            assert_same(hits, capped[offset : offset + k])


def test_groups_thresholds_and_filters_meet(case: tuple[Retriever, list[Any], bool]) -> None:
    retriever, queries, exact = case
    condition = {"n": {">=": 20}}
    for query in queries:
        everything = retriever.search([query], N, filter=condition)[0]
        threshold = everything[len(everything) // 2].score if everything else 0.0
        expected = [hit for hit in cap(everything, 1) if hit.score >= threshold]
        found = retriever.search([query], N, condition, group_by="source", threshold=threshold)[0]
        if exact:
            assert_same(found, expected)
        assert all(hit.score >= threshold for hit in found)


def test_what_hits_hold(case: tuple[Retriever, list[Any], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    retriever, queries, _ = case
    whole = retriever.search(queries[0:1], 5)[0]
    for fields in (["title"], ("text", "id"), ["metadata"], ["metadata.n"], "metadata.none", ["id"], []):
        found = retriever.search(queries[0:1], 5, fields=fields)[0]
        assert pairs(found) == pairs(whole)
        names = [fields] if isinstance(fields, str) else fields
        for hit, full in zip(found, whole, strict=True):
            assert hit.text == (full.text if "text" in names else "")
            assert hit.title == (full.title if "title" in names else "")
            metadata = {"metadata.n": {"n": full.metadata["n"]}, "metadata": full.metadata}
            assert hit.metadata == next((metadata[name] for name in names if name in metadata), {})
    monkeypatch.delattr(Documents, "fetch")  # nothing but ids is read
    assert pairs(retriever.search(queries[0:1], 5, fields=[])[0]) == pairs(whole)


def test_a_threshold_is_not_rounded_to_the_precision_of_scores(tmp_path: Path) -> None:
    vectors = {"a": {"vector": [0.9]}, "b": {"vector": [0.5]}}
    retriever = Retriever.build("vectors", vectors, tmp_path / "index")
    score = retriever.search([1.0], 1)[0].score
    assert score != 0.9  # it is the nearest float32
    found = retriever.search([1.0], threshold=0.9)
    assert [hit.id for hit in found] == (["a"] if score >= 0.9 else [])
    assert [hit.id for hit in retriever.search([1.0], threshold=score)] == ["a"]
    assert [hit.id for hit in retriever.search([1.0], threshold=0.9, group_by=None)] == [h.id for h in found]


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (1, 1.0, True),
        (1, True, False),
        ("1", 1, False),
        (["a"], ["a"], True),
        (["a"], "a", False),
        (["a"], '["a"]', False),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, True),
        (None, None, False),
    ],
)
def test_values_that_are_one_group(left: Any, right: Any, same: bool) -> None:
    groups: list[Hashable] = [
        group_of(Document(name, "", metadata={"key": value}), "key")
        for name, value in (("a", left), ("b", right))
    ]
    assert (groups[0] == groups[1]) is same


@pytest.fixture
def notes(tmp_path: Path) -> Retriever:
    texts = {
        f"d{i}": {"text": "common " * (i % 7 + 1) + f"word{i}", "source": f"s{i % 3}"} for i in range(40)
    }
    return Retriever.build("bm25", texts, tmp_path / "notes")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"offset": -1}, BadValueError, r"search: offset is -1; expected a whole number of 0 or more"),
        ({"offset": 1.0}, BadValueError, r"offset is 1.0"),
        ({"offset": True}, BadValueError, r"offset is True"),
        ({"threshold": math.nan}, BadValueError, r"threshold is nan; expected a finite number"),
        ({"threshold": "0.5"}, BadValueError, r"threshold is '0.5'"),
        ({"threshold": True}, BadValueError, r"threshold is True"),
        ({"threshold": 10**400}, BadValueError, r"threshold is 1000"),
        ({"group_by": 5}, BadTypeError, r"group_by is 5; expected a key of metadata"),
        ({"group_by": "source", "per_group": 0}, BadValueError, r"per_group is 0"),
        ({"per_group": 2}, BadValueError, r"per_group without group_by; give a key"),
        ({"fields": ["titel"]}, BadValueError, r"fields has 'titel'; did you mean 'title'\?"),
        ({"fields": "metadata."}, BadValueError, r"fields has 'metadata.'"),
        ({"fields": [5]}, BadTypeError, r"fields has 5; expected names"),
        ({"fields": 5}, BadTypeError, r"fields has 5; expected names"),
        ({"ofset": 1}, BadTypeError, r"search: no option is named 'ofset'; did you mean 'offset'\?"),
    ],
)
def test_bad_options_come_before_any_work(
    notes: Retriever, monkeypatch: pytest.MonkeyPatch, options: Any, error: type[IrkitError], message: str
) -> None:
    hybrid = Hybrid([notes, notes])
    monkeypatch.delattr(type(notes.index), "search")
    for retriever in (notes, hybrid):
        with pytest.raises(error, match=message):
            retriever.search("common", **options)
        with pytest.raises(IrkitError, match="no option" if "fields" in options else message):
            retriever.run({"q": "common"}, **options)


def test_a_key_that_no_document_has(notes: Retriever) -> None:
    for retriever in (notes, Hybrid([notes, notes])):
        with pytest.raises(BadValueError, match=r"search: group_by 'sorce': .* did you mean 'source'\?"):
            retriever.search("common", group_by="sorce")
        with pytest.raises(BadValueError, match=r"did you mean 'source'\?"):
            retriever.run({"q": "common"}, group_by="sorce")
        assert retriever.search("unheard", group_by="sorce") == []
    with pytest.raises(BadValueError, match="no document has the key 'source'"):
        Retriever.build("bm25", {"a": "common"}, notes.store.path.parent / "other").search(
            "common", group_by="source"
        )


@pytest.mark.parametrize("method", ["rrf", "minmax", "zscore", "sum"])
def test_hybrid_chooses_of_the_fused_ranking(notes: Retriever, tmp_path: Path, method: Any) -> None:
    texts = {
        f"d{i}": {"text": f"common word{i} " * (i % 5 + 1), "source": f"s{i % 3}"} for i in range(10, 60)
    }
    other = Retriever.build("bm25", texts, tmp_path / "other")
    both, queries = [notes, other], {"q": "common word12", "r": "word30", "s": "unheard"}
    for depth in (1, 5, 100):
        hybrid = Hybrid(both, method, depth=depth)

        def fused(depth: int) -> Run:
            return fuse([retriever.run(queries, depth) for retriever in both], method, 2 * depth)

        sliced = hybrid.run(queries, 8)
        for query in queries:
            assert hybrid.run(queries, 5, offset=3)[query] == sliced[query][3:]
        threshold = sliced["q"][4][1]
        cut = hybrid.run(queries, 8, threshold=threshold)
        assert cut["q"] == [pair for pair in sliced["q"] if pair[1] >= threshold]
        for per_group in (1, 2, 4):
            for query, text in queries.items():
                hits = hybrid.search(text, 6, group_by="source", per_group=per_group)
                deep = max(6, depth)
                while True:  # the depth that gives enough
                    ranking = fused(min(deep, 50))[query]
                    sources = Counter[str]()
                    expected = []
                    for name, score in ranking:
                        source = f"s{int(name[1:]) % 3}"
                        sources[source] += 1
                        if sources[source] <= per_group:
                            expected.append((name, score))
                    if len(expected) >= 6 or deep >= 50:
                        break
                    deep *= 4
                assert pairs(hits) == expected[:6]
                run = hybrid.run({query: text}, 6, group_by="source", per_group=per_group)
                assert run[query] == pairs(hits)
        first, only = hybrid.search("common", 1)[0], hybrid.search("common", 1, fields=["title"])[0]
        assert first.text
        assert (only.id, only.text, dict(only.metadata)) == (first.id, "", {})
        assert hybrid.search("common", 1, fields=[])[0].id == first.id


def test_groups_of_many_queries_are_searched_in_parts(notes: Retriever) -> None:
    class Counted(Retriever):
        asked: ClassVar[list[int]] = []

        def run(self, queries: Any, k: int = 1000, *arguments: Any, **options: Any) -> Run:
            self.asked.append(len(queries) * k)
            return super().run(queries, k, *arguments, **options)

    queries = {str(n): "common" for n in range(14_000)}
    with Counted.load(notes.store.path) as counted:
        run = Hybrid([counted, counted], depth=60).run(queries, 2, group_by="source")
    assert (len(Counted.asked) // 2, max(Counted.asked) <= 1 << 19) == (2, True)
    assert len({tuple(run[query]) for query in queries}) == 1
    assert list(run.query_ids) == list(queries)


def test_groups_of_a_hybrid_in_which_only_an_index_without_weight_finds_something(tmp_path: Path) -> None:
    texts = {f"d{n}": {"text": "common", "source": n % 3} for n in range(120)}
    silent = Retriever.build("bm25", {name: {"text": "other"} for name in texts}, tmp_path / "silent")
    common = Retriever.build("bm25", texts, tmp_path / "common")
    assert Hybrid([silent, common], weights=[1, 0], depth=5).search("common", 3, group_by="source") == []


def test_a_key_may_begin_as_an_operator_does(tmp_path: Path) -> None:
    texts = {f"d{n}": {"text": "word " * (9 - n)} | ({"$type": "x"} if n > 6 else {}) for n in range(9)}
    retriever = Retriever.build("bm25", texts, tmp_path / "index")
    assert len(retriever.search("word", 3, group_by="$type")) == 3
