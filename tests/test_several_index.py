"""Indexes of models with several heads: one store, one commit, one search; and wrong input."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from three_heads import QUERIES, WEIGHTS, make_model

from irkit import Dense, Model, Retriever
from irkit.data import Document
from irkit.errors import BadTypeError, BadValueError, ConfigError, CorruptError, IrkitError
from irkit.index import Limits, SeveralIndex, Store, compact, use_limits
from irkit.index.array_files import read_manifest
from irkit.index.layout import check_layout
from irkit.retrieval.fusing import score_several
from irkit.retrieval.windows import split_documents

WORDS = ["search", "index", "vector", "token", "model", "neural", "text"]
NOTES = [
    {
        "_id": f"d{i}",
        "text": " ".join(WORDS[(i * k) % 7] for k in range(1, 4 + i % 5)),
        "metadata": {"year": 2000 + i % 4},
    }
    for i in range(24)
]


@pytest.fixture(scope="module")
def model(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tiny_bert, tmp_path_factory.mktemp("several") / "model")


@pytest.fixture(scope="module")
def built(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("several-index") / "index"
    Retriever.build(model, NOTES, path).close()
    return path


@pytest.fixture
def retriever(model: Model, built: Path, tmp_path: Path) -> Retriever:
    shutil.copytree(built, tmp_path / "index")
    return Retriever.load(tmp_path / "index", model)


def exact(model: Model, weights: dict[str, float], texts: list[str]) -> np.ndarray[Any, Any]:
    """The weighted sum of the similarities of all heads, of queries and texts."""
    total = np.zeros((len(QUERIES), len(texts)))
    for name, weight in weights.items():
        head = model.heads[name]
        scores = head.similarity(head.encode_query(QUERIES), head.encode_document(texts))
        total += weight * scores.numpy()
    return total


def test_fused_by_weights_hits_have_the_sum_of_all_scores(model: Model, retriever: Retriever) -> None:
    expected = exact(model, WEIGHTS, [note["text"] for note in NOTES])
    for row, hits in enumerate(retriever.search(QUERIES, 24, fuse=WEIGHTS)):
        found = {int(hit.id[1:]): hit.score for hit in hits}
        assert len(found) == 24  # a dense head finds them all
        np.testing.assert_allclose([found[i] for i in range(24)], expected[row], atol=1e-5)
    # one head alone
    alone = exact(model, {"sparse": 1.0}, [note["text"] for note in NOTES])
    hits = retriever.search(QUERIES[0], 24, fuse={"sparse": 1.0})
    assert {hit.id for hit in hits} == {f"d{i}" for i in np.flatnonzero(alone[0])}


def test_by_ranks_it_is_the_hybrid_of_an_index_for_each_head(
    model: Model, retriever: Retriever, tmp_path: Path
) -> None:
    from irkit.retrieval.hybrid import Hybrid

    single = [
        Retriever.build(head, NOTES, tmp_path / name, index="flat") for name, head in model.heads.items()
    ]
    expected, got = Hybrid(single).run(dict(enumerate_queries())), retriever.run(dict(enumerate_queries()))
    for query, _ in enumerate_queries():
        ours, theirs = dict(got[query]), dict(expected[query])
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert dict(retriever.run({"q0": QUERIES[0]}, fuse="rrf")["q0"]) == dict(got["q0"])


def enumerate_queries() -> list[tuple[str, str]]:
    return [(f"q{number}", text) for number, text in enumerate(QUERIES)]


def test_options_of_a_search_hold_for_all_heads(retriever: Retriever) -> None:
    for fuse in ("rrf", WEIGHTS):
        options: Any = {"fuse": fuse}
        everything = retriever.search(QUERIES[0], 24, **options)
        chosen = retriever.search(QUERIES[0], 24, {"year": {">=": 2002}}, **options)
        assert {hit.metadata["year"] for hit in chosen} == {2002, 2003}
        assert len(chosen) == 12
        page = retriever.search(QUERIES[0], 5, offset=3, fields=["title"], **options)
        assert [hit.id for hit in page] == [hit.id for hit in everything[3:8]]
        assert not any(hit.text for hit in page)
        groups = retriever.search(QUERIES[0], 4, group_by="year", **options)
        assert sorted(hit.metadata["year"] for hit in groups) == [2000, 2001, 2002, 2003]
        bar = everything[4].score
        assert len(retriever.search(QUERIES[0], 24, threshold=bar, **options)) >= 5
    assert retriever.search("", 3)[0].score > 0


def test_rerank_and_explain(model: Model, retriever: Retriever) -> None:
    ids = ["d3", "d5", "d1"]
    texts = [NOTES[int(name[1:])]["text"] for name in ids]
    for weights in (WEIGHTS, None):
        expected = exact(model, weights or dict.fromkeys(WEIGHTS, 1.0), texts)[0]
        for candidates in (ids, dict(zip(ids, texts, strict=True))):
            hits = retriever.rerank(QUERIES[0], candidates, fuse=weights)
            found = {hit.id: hit.score for hit in hits}
            np.testing.assert_allclose([found[name] for name in ids], expected, atol=1e-5)
    explanation = retriever.explain(QUERIES[0], "d3")
    assert [*explanation.parts] == ["dense", "sparse", "multi_vector"]
    summed = exact(model, dict.fromkeys(WEIGHTS, 1.0), texts[:1])[0, 0]
    assert explanation.score == pytest.approx(summed, abs=1e-5)
    assert explanation.words().parts["multi_vector"].matches
    assert [*explanation.to_dict()["parts"]] == ["dense", "sparse", "multi_vector"]
    page = explanation.to_html()
    assert all(f"<h2>{name}</h2>" in page for name in explanation.parts)


def test_changes_hold_for_all_heads_at_once(model: Model, retriever: Retriever, tmp_path: Path) -> None:
    retriever.add([{"_id": "new", "text": "neural vector model"}])
    retriever.update([{"_id": "d0", "text": "the token of the text"}])
    retriever.remove(["d1", "d2"])
    texts = {note["_id"]: note["text"] for note in NOTES}
    texts |= {"new": "neural vector model", "d0": "the token of the text"}
    del texts["d1"], texts["d2"]
    expected = Retriever.build(model, texts, tmp_path / "anew").search(QUERIES, 30, fuse=WEIGHTS)

    def ranked(lists: Any) -> list[dict[str, float]]:
        return [{hit.id: round(hit.score, 5) for hit in hits} for hits in lists]

    assert ranked(retriever.search(QUERIES, 30, fuse=WEIGHTS)) == ranked(expected)
    retriever.save(tmp_path / "copy")
    compact(tmp_path / "index")
    for path in (tmp_path / "copy", tmp_path / "index"):
        again = Retriever.load(path, verify=True)  # finds the model by its name
        assert ranked(again.search(QUERIES, 30, fuse=WEIGHTS)) == ranked(expected)
    assert len(again) == len(texts)
    stats = again.stats()
    assert stats["kind"] == stats["representation"] == "several"
    assert [part["documents"] for part in stats["parts"].values()] == [len(texts)] * 3
    assert sum(part["bytes"] for part in stats["parts"].values()) < stats["bytes"]


def test_compacting_keeps_compressed_tokens(model: Model, tmp_path: Path) -> None:
    with use_limits(Limits(plaid_uncompressed=8, plaid_scan=8)):
        settings = {"kind": "several", "indexes": {"multi_vector": "plaid"}}
        with Retriever.build(model, NOTES, tmp_path / "index", index=settings) as retriever:
            retriever.remove(["d3"])
            expected = retriever.search(QUERIES, 30, fuse=WEIGHTS)
        compact(tmp_path / "index")
        with Retriever.load(tmp_path / "index", model) as retriever:
            assert retriever.index.parts["multi_vector"].covered == len(NOTES) - 1
            assert retriever.search(QUERIES, 30, fuse=WEIGHTS) == expected


@pytest.mark.parametrize(
    "index",
    [
        "auto",
        {"kind": "several", "indexes": {"dense": "hnsw", "multi_vector": "plaid"}},
        {
            "kind": "several",
            "indexes": {"dense": {"kind": "dense", "keep": "float32"}, "multi_vector": "auto"},
        },
    ],
)
def test_each_head_has_an_index_of_its_own_kind(
    model: Model, tmp_path: Path, index: Any, retriever: Retriever
) -> None:
    other = Retriever.build(model, NOTES, tmp_path / "other", index=index)
    assert isinstance(other.index, SeveralIndex)
    other.add([{"_id": "x", "text": "search"}])
    hits = Retriever.load(tmp_path / "other", model).search("search", 3, fuse={"dense": 1.0, "sparse": 2.0})
    assert {"x"} & {hit.id for hit in hits}


def test_a_failed_change_changes_no_head(retriever: Retriever, monkeypatch: pytest.MonkeyPatch) -> None:
    def ranked() -> list[Any]:
        return [
            (hit.query_id, hit.doc_id, hit.score) for hit in retriever.run(enumerate_queries(), fuse=WEIGHTS)
        ]

    before = ranked()
    append = Store.append

    def fail(self: Store, name: str, array: Any) -> None:
        if name.startswith("multi_vector__"):
            raise OSError(28, "no space left")
        append(self, name, array)

    monkeypatch.setattr(Store, "append", fail)
    with pytest.raises(OSError, match="no space"):
        retriever.add([{"_id": "new", "text": "text"}])
    monkeypatch.undo()
    assert ranked() == before
    assert isinstance(retriever.index, SeveralIndex)
    assert {len(part) for part in retriever.index.parts.values()} == {24}
    retriever.add([{"_id": "new", "text": "text"}])
    assert {len(part) for part in retriever.index.parts.values()} == {25}


LONG = [{"_id": f"d{i}", "text": " ".join(Random(i).choices(WORDS[:7], k=9 * i))} for i in range(8)]


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_documents_in_windows(model: Model, tmp_path: Path, pool: str) -> None:
    """Each head pools the windows of a document; the passage has the highest weighted sum of the heads."""
    windows: Any = {"length": 6, "stride": 4, "pool": pool}
    retriever = Retriever.build(model, LONG, tmp_path / "index", windows=windows)
    assert retriever.stats()["windows"] > 40
    assert all(part.windows == retriever.index.windows for part in retriever.index.parts.values())
    weights = {"dense": 0.7, "sparse": 0.1, "multi_vector": 0.2}
    hits = retriever.search(QUERIES[0], 8, fuse=weights)
    assert len(hits) == 8
    for hit in hits:
        spans = split_documents(model, retriever.index.windows, [Document(hit.id, hit.text)])[0].tolist()
        texts = [hit.text[start:end] for start, end in spans]
        heads = {name: exact(model, {name: weight}, texts)[0] for name, weight in weights.items()}
        pooled = sum(getattr(np, pool)(scores) for scores in heads.values())
        assert hit.score == pytest.approx(pooled, abs=1e-5)
        best = sum(heads.values())
        assert best[spans.index([*hit.passage])] == pytest.approx(best.max(), abs=1e-5)
    again = retriever.rerank(QUERIES[0], {note["_id"]: note["text"] for note in LONG}, fuse=weights)
    assert [(hit.id, hit.passage) for hit in again] == [(hit.id, hit.passage) for hit in hits]
    np.testing.assert_allclose([hit.score for hit in again], [hit.score for hit in hits], atol=1e-5)
    known = retriever.rerank(QUERIES[0], [hit.id for hit in hits])
    matched = 0
    for hit in known:
        found = retriever.explain(QUERIES[0], hit.id)
        assert found.score == pytest.approx(hit.score, abs=1e-5)
        assert {*found.parts} == {*weights}
        places = [match.document for match in found.parts["multi_vector"].matches]
        places = [place for place in places if place.start < place.end]
        assert all(found.document[place.start : place.end] == place.token for place in places)
        assert all(hit.passage.start <= place.start < place.end <= hit.passage.end for place in places)
        matched += len(places)
    assert matched
    for row in retriever.search(QUERIES, 3):  # by ranks
        assert all(0 <= hit.passage.start < hit.passage.end <= len(hit.text) for hit in row if hit.text)


def test_changes_of_documents_in_windows(model: Model, tmp_path: Path) -> None:
    retriever = Retriever.build(model, LONG[:5], tmp_path / "index", windows={"length": 6})
    retriever.add(LONG[5:])
    retriever.remove(["d3", "d6"])
    retriever.update([{"_id": "d4", "text": "neural search"}])
    before = retriever.search(QUERIES, 9, fuse=WEIGHTS)
    assert {hit.id for hit in before[0]} == {"d0", "d1", "d2", "d4", "d5", "d7"}
    assert len(retriever) == len(retriever.documents.find(["d1"])) + 5
    retriever.close()
    compact(tmp_path / "index")
    again = Retriever.load(tmp_path / "index", model)
    assert again.search(QUERIES, 9, fuse=WEIGHTS) == before
    assert again.stats()["removed"] == 0
    fresh = [note for note in LONG if note["_id"] not in ("d3", "d4", "d6")]
    fresh.append({"_id": "d4", "text": "neural search"})
    built = Retriever.build(model, fresh, tmp_path / "fresh", windows={"length": 6})
    for row, wanted in zip(built.search(QUERIES, 9, fuse=WEIGHTS), before, strict=True):
        expected = {hit.id: hit.score for hit in wanted}
        assert {hit.id: hit.score for hit in row} == pytest.approx(expected, abs=1e-5)


def test_windows_that_do_not_belong_to_the_documents(model: Model, tmp_path: Path) -> None:
    Retriever.build(model, LONG[:3], tmp_path / "index", windows={"length": 6}).close()
    manifest = tmp_path / "index" / "irkit.json"
    state = read_manifest(manifest.read_bytes(), manifest)
    check_layout(tmp_path, state.arrays, state.meta)
    meta = copy.deepcopy(state.meta)
    meta["index"]["parts"]["sparse"].pop("windows")
    with pytest.raises(CorruptError, match="windows of sparse"):
        check_layout(tmp_path, state.arrays, meta)


@pytest.mark.parametrize(
    ("fuse", "error", "message"),
    [
        (
            {"other": 1.0},
            BadValueError,
            r"weights of \['other'\]; expected one or more of dense, multi_vector, sparse",
        ),
        ({}, BadValueError, "expected one or more"),
        ({"dense": -1.0}, BadValueError, "expected weights above 0"),
        ({"dense": "much"}, BadValueError, "expected weights above 0"),
        ("sum", BadTypeError, "expected 'rrf' or weights by head"),
    ],
)
def test_wrong_fusions_are_refused(
    retriever: Retriever, fuse: Any, error: type[IrkitError], message: str
) -> None:
    with pytest.raises(error, match=message):
        retriever.search("text", fuse=fuse)
    with pytest.raises(error, match=message):
        retriever.rerank("text", ["d1"], fuse=fuse)


def test_wrong_calls_are_refused(
    model: Model, tiny_dense: Path, retriever: Retriever, tmp_path: Path
) -> None:
    with pytest.raises(BadValueError, match="the index has one representation; leave it out"):
        Retriever.build(tiny_dense, NOTES, tmp_path / "one").search("text", fuse="rrf")
    with pytest.raises(BadValueError, match="documents are scored; expected weights by head"):
        retriever.rerank("text", ["d1"], fuse="rrf")  # type: ignore[call-overload]
    index = {"kind": "several", "indexes": {"other": "flat"}}
    with pytest.raises(ConfigError, match=r"indexes of \['other'\]; the model has the heads dense"):
        Retriever.build(model, NOTES, tmp_path / "other", index=index)
    with pytest.raises(BadValueError, match=r"an index of kind 'plaid' holds multi_vector, got dense"):
        Retriever.build(model, NOTES, tmp_path / "plaid", index="plaid")
    with pytest.raises(BadValueError, match="not with"):
        Retriever.load(tmp_path / "index", model.heads["dense"])
    rows = Dense(torch.zeros(1, 32))
    with pytest.raises(BadValueError, match="the index has the parts dense, multi_vector, sparse"):
        retriever.index.search(rows, 1)
    with pytest.raises(BadValueError, match="the index has the parts dense, multi_vector, sparse"):
        retriever.index.rescore(rows, np.zeros((1, 1)))
    with pytest.raises(BadTypeError, match="got Dense, expected Several with the parts dense, multi"):
        retriever.index.add(rows)
    assert not any((tmp_path / name).exists() for name in ("other", "plaid"))


def test_what_takes_one_head_refuses_several(
    model: Model, command: Any, retriever: Retriever, tmp_path: Path
) -> None:
    from irkit.exporting import export

    with pytest.raises(BadValueError, match="export: "):
        export(retriever, "vespa", tmp_path / "out")
    (tmp_path / "texts.txt").write_text("a text\n")
    words = ("encode", model.name, str(tmp_path / "texts.txt"), "--out", str(tmp_path / "x.safetensors"))
    for more in ((), ("--head", "other")):
        code, _, error = command(*words, *more)
        assert code != 0
        assert "has dense, sparse, multi_vector; a file holds one representation" in error
    for name in model.heads:
        code, _, error = command(*words[:-1], str(tmp_path / f"{name}.safetensors"), "--head", name)
        assert code == 0, error
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "dense.safetensors")
    expected = model.heads["dense"].encode_document(["a text"], normalize_embeddings=True)
    np.testing.assert_allclose(stored["values"].numpy(), expected, atol=1e-2)  # stored from bfloat16 at most


def test_damaged_manifests_are_refused(retriever: Retriever, tmp_path: Path) -> None:
    path = tmp_path / "index"
    for change in (
        lambda about: about.pop("parts"),
        lambda about: about["parts"].pop("sparse"),
        lambda about: about["parts"]["dense"].update(rows=3),
        lambda about: about["parts"]["dense"].update(config=about["config"]),
        lambda about: about.update(representation="dense"),
    ):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        with Store.open(copy) as store, store.update():
            change(store.meta["index"])
        with pytest.raises(CorruptError):
            Store.open(copy)


def test_scores_of_rows_leave_gaps_out(model: Model, retriever: Retriever) -> None:
    queries: Any = model.encode_representation(QUERIES[:1], "query")
    index: Any = retriever.index
    scores = score_several(index, queries, np.array([[3, -1]]), None)
    assert np.isneginf(scores[0, 1])
    assert np.isfinite(scores[0, 0])


def test_the_command_line_indexes_searches_and_explains(
    model: Model, command: Any, write_beir: Any, tmp_path: Path
) -> None:
    texts = {note["_id"]: note["text"] for note in NOTES}
    corpus = write_beir(tmp_path / "notes", texts, {"q": QUERIES[0]}, {"q": {"d3": 1}}, "test")
    code, _, error = command("index", model.name, str(corpus), "--out", str(tmp_path / "index"))
    assert code == 0, error
    for fuse in ("rrf", "dense=0.4, sparse=0.2"):
        code, out, error = command(
            "search", str(tmp_path / "index"), "--text", QUERIES[0], "--k", "3", "--fuse", fuse
        )
        assert (code, len(out.splitlines()) >= 3) == (0, True), error
    code, out, _ = command("search", str(tmp_path / "index"), str(corpus), "--qrels", str(corpus))
    assert code == 0
    assert "nDCG@10" in out
    code, out, error = command("explain", str(tmp_path / "index"), QUERIES[0], "d3")
    assert code == 0
    assert [line.split("head ")[1].split()[0] for line in error.splitlines() if "head " in line] == [
        "dense:",
        "sparse:",
        "multi_vector:",
    ]
    code, out, _ = command("info", model.name)
    assert "heads.sparse.kind" in out
    for wrong, message in (
        ("dense=much", "expected rrf or weights by head"),
        ("other=1", "weights of ['other']"),
    ):
        code, _, error = command("search", str(tmp_path / "index"), "--text", "a", "--fuse", wrong)
        assert code != 0
        assert message in error
