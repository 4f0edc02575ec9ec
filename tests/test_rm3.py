"""RM3 against a plain computation, on judged collections, and where there is nothing to learn from."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit import Retriever, evaluate
from irkit.cli import main
from irkit.data import read_qrels, read_queries
from irkit.encoder_free import RM3, Analyzer
from irkit.errors import BadTypeError, BadValueError

WORDS = [f"word{number}" for number in range(12)] + ["owl", "night"]
TEXTS = [" ".join([WORDS[i % 13], *(WORDS[(i * j) % 14] for j in range(1, 2 + i % 5))]) for i in range(40)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    rare = [f"owl hunts rare{number % 7} rare{number % 11}" for number in range(4)]
    return Retriever.build("bm25", TEXTS + rare + ["rare1 alone"], tmp_path_factory.mktemp("words") / "index")


def expected(retriever: Retriever, query: str, rm3: RM3, among: set[str]) -> dict[str, float]:
    """Weights of the terms of the expanded query, idf aside, term by term in float64."""
    counts = {item.id: Counter(Analyzer().terms(item.full_text)) for item in retriever.documents}
    having = Counter(term for count in counts.values() for term in count)
    known = [term for term in Analyzer().terms(query) if term in having]
    relevance: dict[str, float] = {}
    for hit in retriever.search(query, rm3.documents, sorted(among)) if known else ():
        for term, count in counts[hit.id].items():
            if having[term] <= len(counts) / 10:
                weight = hit.score * count / counts[hit.id].total()
                relevance[term] = relevance.get(term, 0) + weight
    best = sorted(relevance, key=lambda term: -relevance[term])[: rm3.terms]
    total = sum(relevance[term] for term in best)
    mixed = {term: rm3.weight * count / len(known) for term, count in Counter(known).items()}
    for term in best:
        mixed[term] = mixed.get(term, 0) + (1 - rm3.weight) * relevance[term] / total
    return {
        term: weight * math.log(1 + (len(counts) - having[term] + 0.5) / (having[term] + 0.5))
        for term, weight in mixed.items()
    }


@settings(max_examples=40, deadline=None)
@given(
    queries=st.lists(st.lists(st.sampled_from([*WORDS, "unknown"]), max_size=4).map(" ".join), max_size=4),
    documents=st.sampled_from([1, 3, 100]),
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    some=st.booleans(),
)
def test_expanded_queries(
    words: Retriever, queries: list[str], documents: int, weight: float, some: bool
) -> None:
    rm3, among = RM3(documents, 100, weight), {item.id for item in words.documents}
    among = {name for name in among if int(name) % 3} if some else among
    model: Any = words.model
    allowed = None if not some else [str(row) in among for row in range(len(words.index))]
    keep = None if allowed is None else np.array(allowed)
    found = rm3.expand(words.index, model.encode_representation(queries, "query"), keep)
    for query, row in zip(queries, range(len(queries)), strict=True):
        arrays = found[row : row + 1].arrays()
        terms = {
            model.vocabulary[term]: value
            for term, value in zip(arrays["terms"], arrays["weights"], strict=True)
        }
        assert terms == pytest.approx(expected(words, query, rm3, among), rel=1e-5, abs=1e-7)


def test_only_the_best_terms_are_taken(words: Retriever) -> None:
    model: Any = words.model
    asked = model.encode_representation(["hunts"], "query")
    for number in range(1, 5):
        [terms] = RM3(4, number).expand(words.index, asked).terms
        assert len(terms) == number  # that of the query is the best of them
        assert "hunt" in {model.vocabulary[term] for term in terms.tolist()}


def test_search_and_run(words: Retriever) -> None:
    assert {hit.id for hit in words.search("hunts")} == {"40", "41", "42", "43"}
    hits = words.search("hunts", feedback=RM3())
    assert {hit.id for hit in hits} == {"40", "41", "42", "43", "44"}  # the last has a word of another
    assert dict(words.run({"q": "hunts"}, 10, feedback=RM3())["q"]) == {hit.id: hit.score for hit in hits}
    assert words.search("unknown", feedback=RM3()) == []
    only = words.search("hunts", filter=["40", "44"], feedback=RM3())
    assert [hit.id for hit in only] == ["40"]  # its words alone are added


def test_nothing_to_learn_from(tmp_path: Path) -> None:
    with Retriever.build("bm25", {}, tmp_path / "empty") as empty:
        assert empty.search("night", feedback=RM3()) == []
        empty.add({"a": "a night", "b": "an owl"})  # every term is in more than a tenth
        assert [hit.id for hit in empty.search("night", feedback=RM3())] == ["a"]


def test_what_is_refused(words: Retriever, tmp_path: Path) -> None:
    for settings_, error, message in (
        ({"documents": 0}, BadValueError, "RM3: documents is 0"),
        ({"terms": 1.5}, BadValueError, "RM3: terms is 1.5"),
        ({"weight": 1.1}, BadValueError, "expected a number from 0 to 1"),
        ({"weight": "1"}, BadTypeError, "expected a number from 0 to 1"),
    ):
        with pytest.raises(error, match=message):
            RM3(**settings_)  # type: ignore[arg-type]
    with (
        Retriever.build("impacts", {"a": {"vector": {"x": 1.0}}}, tmp_path / "i") as impacts,
        pytest.raises(BadValueError, match="of another model, expected one of BM25"),
    ):
        impacts.search({"x": 1.0}, feedback=RM3())


def test_command_line(words: Retriever, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "queries.tsv").write_text("q\thunts\n")
    for asked, found in ((["--text", "hunts"], "alone"), ([str(tmp_path / "queries.tsv")], "q Q0 44 5 ")):
        with pytest.raises(SystemExit, match="0"):
            main(["search", str(words.store.path), *asked, "--rm3"])
        assert found in capsys.readouterr().out


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "split", "measure", "alone", "expanded"),
    [
        pytest.param("msmarco-dl21-pool", "train", "AP", 0.448, 0.496, marks=pytest.mark.slow),
        ("vaswani", "test", "AP", 0.286, 0.302),
        pytest.param("scifact", "test", "nDCG@10", 0.678, 0.639, marks=pytest.mark.slow),
    ],
)
def test_judged_collections(
    data_dir: Path, tmp_path: Path, name: str, split: str, measure: str, alone: float, expanded: float
) -> None:
    """Up where queries have many answers, down where they have one: the numbers of docs/sparse.md."""
    path = data_dir / name
    with Retriever.build("bm25", path, tmp_path / "index") as retriever:
        queries, qrels = list(read_queries(path, split)), read_qrels(path, split)
        plain, more = (
            evaluate(retriever.run(queries, 1000, feedback=each), qrels, measure).mean[measure]
            for each in (None, RM3())
        )
    assert (plain, more) == pytest.approx((alone, expanded), abs=0.0006)
