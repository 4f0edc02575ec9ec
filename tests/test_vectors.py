"""Vectors that were computed elsewhere: indexed, searched and read from files without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit import Dense, Hybrid, Model, MultiVector, Ragged, Retriever, Run, Sparse, evaluate, score
from irkit.cli import main
from irkit.data import Document, Query, parse_documents, read_documents, read_queries
from irkit.data.vector_files import write_vectors
from irkit.encoder_free import Impacts, Vectors
from irkit.errors import BadTypeError, BadValueError, ConfigError, StorageError
from irkit.index import compact

RANDOM = np.random.default_rng(0)
DENSE = RANDOM.standard_normal((40, 8)).astype(np.float32)
TOKENS = [RANDOM.standard_normal((length, 8)).astype(np.float32) for length in RANDOM.integers(1, 6, 40)]
IDS = [f"d{number}" for number in range(40)]
QUERIES = {"dense": DENSE[:3] + np.float32(0.1), "multi_vector": [rows[::-1] + 1 for rows in TOKENS[:3]]}
VECTORS: dict[str, Any] = {"dense": DENSE, "multi_vector": TOKENS}


def representation(kind: str, vectors: Any) -> Dense | MultiVector:
    return (
        Dense(torch.from_numpy(np.stack(vectors)))
        if kind == "dense"
        else MultiVector(Ragged.from_rows(vectors))
    )


def expected(kind: str, queries: Any, vectors: Any = None) -> np.ndarray[Any, Any]:
    vectors = VECTORS[kind] if vectors is None else vectors
    return score(representation(kind, queries), representation(kind, vectors)).numpy()


@pytest.fixture(params=["dense", "multi_vector"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def retriever(kind: str, tmp_path: Path) -> Iterator[Retriever]:
    records = ({"_id": name, "text": f"about {name}", "n": i} for i, name in enumerate(IDS))
    documents = ({**record, "vector": row} for record, row in zip(records, VECTORS[kind], strict=True))
    with Retriever.build("vectors", documents, tmp_path / "index", chunk_size=7) as made:
        yield made


def test_scores_are_those_of_the_vectors(kind: str, retriever: Retriever) -> None:
    truth = expected(kind, QUERIES[kind])
    for opened in (
        retriever,
        Retriever.load(retriever.store.path),
        Retriever.load(retriever.store.path, "vectors"),
    ):
        found = opened.search(list(QUERIES[kind]), k=50)
        for hits, line in zip(found, truth, strict=True):
            assert [hit.id for hit in hits] == [IDS[row] for row in np.argsort(-line, kind="stable")]
            np.testing.assert_allclose([hit.score for hit in hits], np.sort(line)[::-1], rtol=1e-5, atol=1e-5)
        assert found[0][0].text == f"about {found[0][0].id}"
        assert opened.stats()["model"]["dim"] == 8
        assert opened.stats()["representation"] == kind


def test_queries_come_in_many_forms(kind: str, retriever: Retriever) -> None:
    vectors = list(QUERIES[kind])
    several = retriever.search(vectors)
    for same in (
        representation(kind, QUERIES[kind]),
        [row.tolist() for row in vectors],
        [torch.tensor(row) for row in vectors],
        iter(vectors),
        tuple(vectors),
        [row.astype(np.float64) for row in vectors],
    ):
        assert retriever.search(same) == several  # type: ignore[call-overload]
    for one in (vectors[0], vectors[0].tolist(), torch.tensor(vectors[0])):
        assert retriever.search(one) == several[0]
    assert retriever.search(np.stack([vectors[1], vectors[1]])) == [several[1]] * 2  # type: ignore[comparison-overlap]
    assert retriever.search([]) == []
    half = retriever.search(torch.tensor(vectors[0]).bfloat16())  # type: ignore[call-overload]
    assert half[0].id == several[0][0].id


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_queries_without_tokens_stand_anywhere(make: Any) -> None:
    model = Vectors(representation="multi_vector", dim=2)
    some, none = make([[1.0, 0.0]]), make([])
    for queries, lengths in (
        ([none, some], [0, 1]),
        ([some, none], [1, 0]),
        ([none, none, some], [0, 0, 1]),
        ([none], [0]),
    ):
        rows, single = model.split_queries(queries)
        made = model.encode_representation(rows, "query")
        assert isinstance(made, MultiVector)
        assert (single, made.tokens.lengths.tolist()) == (False, lengths)


def test_runs_filters_reranking_and_measures(kind: str, retriever: Retriever) -> None:
    named = dict(zip(["a", "b", "c"], QUERIES[kind], strict=True))
    run = retriever.run(named, k=5)
    assert {name: dict(run[name]) for name in named} == {
        name: {hit.id: hit.score for hit in retriever.search(vector, 5)} for name, vector in named.items()
    }
    assert list(retriever.run([Query(name, "", vector) for name, vector in named.items()], 5)) == list(run)
    few = retriever.search(QUERIES[kind][0], filter={"n": {"<": 2}})
    assert {hit.id for hit in few} == {"d0", "d1"}
    assert retriever.search(QUERIES[kind][0], filter=["nobody"]) == []
    again = retriever.rerank(named, run)
    for name in named:
        assert [document for document, _ in again[name]] == [document for document, _ in run[name]]
        assert dict(again[name]) == pytest.approx(dict(run[name]), rel=1e-5, abs=1e-5)
    best = {name: {run[name][0][0]: 1} for name in named}
    assert evaluate(run, best, "RR@10").mean["RR@10"] == 1.0


def test_changes(kind: str, retriever: Retriever) -> None:
    vectors = dict(zip(IDS, VECTORS[kind], strict=True))
    fresh = VECTORS[kind][0] * 3
    retriever.add([("new", fresh)])
    retriever.update({"d1": {"vector": fresh * 2, "text": "changed"}})
    retriever.remove(["d0", "d2"])
    vectors |= {"new": fresh, "d1": fresh * 2}
    del vectors["d0"], vectors["d2"]
    for stage in (retriever.store.path, compact(retriever.store.path)):
        del stage
        with Retriever.load(retriever.store.path) as opened:
            hits = opened.search(QUERIES[kind][0], k=50)
            scores = expected(kind, QUERIES[kind][:1], list(vectors.values()))[0]
            assert {hit.id: hit.score for hit in hits} == pytest.approx(
                dict(zip(vectors, scores.tolist(), strict=True)), rel=1e-5, abs=1e-5
            )
    for bad in (fresh[..., :3], {"x": 1.0}, "a text"):
        with pytest.raises((BadValueError, BadTypeError)):
            Retriever.load(retriever.store.path).add([("bad", bad)])
    assert len(Retriever.load(retriever.store.path)) == len(vectors)


def test_copies_and_processes(kind: str, retriever: Retriever, tmp_path: Path) -> None:
    retriever.save(tmp_path / "copy")
    first = Retriever.load(tmp_path / "copy").search(QUERIES[kind][0])
    assert first == retriever.search(QUERIES[kind][0])


@pytest.mark.parametrize("index", ["hnsw", "auto", "plaid", "muvera", {"kind": "flat", "dtype": "int8"}])
def test_any_index_of_the_kind(index: Any, tmp_path: Path) -> None:
    kind = "multi_vector" if index in ("plaid", "muvera") or isinstance(index, dict) else "dense"
    retriever = Retriever.build("vectors", zip(IDS, VECTORS[kind], strict=True), tmp_path, index=index)
    best = expected(kind, QUERIES[kind]).argmax(1)
    assert [hits[0].id for hits in retriever.search(list(QUERIES[kind]))] == [IDS[row] for row in best]


def test_an_index_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="multi_vector"):
        Retriever.build("vectors", DENSE, tmp_path / "new", index="plaid")
    assert not (tmp_path / "new").exists()


def test_bare_arrays_are_numbered_and_streams_are_bounded(tmp_path: Path) -> None:
    np.save(tmp_path / "all.npy", DENSE)
    mapped = np.load(tmp_path / "all.npy", mmap_mode="r")
    read, stored, ahead = [0], [0], []

    def stream() -> Iterator[Any]:
        for row in mapped:
            read[0] += 1
            ahead.append(read[0] - stored[0])
            yield row

    def progress(stage: str, count: int, total: int | None) -> None:
        stored[0] += count if stage == "encoding" else 0

    place = tmp_path / "streamed"
    with (
        Retriever.build("vectors", stream(), place, chunk_size=4, progress=progress) as streamed,
        Retriever.build("vectors", mapped, tmp_path / "mapped") as whole,
    ):
        assert max(ahead) <= 5  # a chunk, and the first, which says of which width all are
        assert whole.search(DENSE[7], k=3) == streamed.search(DENSE[7], k=3)
        assert {hit.id for hit in whole.search(DENSE[7], k=40)} == set(map(str, range(40)))


def test_cosine(kind: str, tmp_path: Path) -> None:
    longer = [rows * 7 for rows in VECTORS[kind]]
    with Retriever.build(Vectors("cosine"), zip(IDS, longer, strict=True), tmp_path) as retriever:
        norm = [rows / np.linalg.norm(rows, axis=-1, keepdims=True) for rows in VECTORS[kind]]
        query = QUERIES[kind][0]
        unit = query / np.linalg.norm(query, axis=-1, keepdims=True)
        scores = expected(kind, np.stack([unit]), np.stack(norm) if kind == "dense" else norm)[0]
        found = {hit.id: hit.score for hit in retriever.search(query * 5, k=50)}
    assert found == pytest.approx(dict(zip(IDS, scores.tolist(), strict=True)), rel=1e-5, abs=1e-6)
    with pytest.raises(BadValueError, match=r"similarity cosine\), not with vectors \(similarity dot"):
        Retriever.load(tmp_path, Vectors("dot"))
    assert Retriever.load(tmp_path, Vectors("cosine", dim=8)).search(query)
    zero = Retriever.load(tmp_path).search(query * 0, k=1)
    assert [hit.score for hit in zero] == [0.0]


def test_weights_by_term_are_impacts(tmp_path: Path) -> None:
    sparse = {"a": {"vector": {"bear": 2.0}}, "b": {"vector": {"copper": 1.0}}}
    with Retriever.build("vectors", sparse, tmp_path / "a") as retriever:
        assert isinstance(retriever.model, Impacts)
        assert retriever.index.config.kind == "inverted"
        assert [(hit.id, hit.score) for hit in retriever.search({"bear": 1.5})] == [("a", 3.0)]
    with pytest.raises(BadTypeError, match=r"document 'a' has \{'bear': 2.0\}, expected numbers"):
        Retriever.build(Vectors("cosine"), sparse, tmp_path / "b")


def dense_model(folder: Path) -> Model:
    with pytest.warns(UserWarning, match="taking the mean"):
        return Model.from_pretrained(folder)


# ---- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ([1.0, float("nan")], "the number at 1 is nan"),
        ([[1.0, 2.0], [3.0, float("inf")]], "the number at 1, 1 is inf"),
        ([1e39], "the number at 0 is inf in float32"),
        (3.0, "shape \\(\\)"),
        (np.zeros((2, 2, 2)), "shape \\(2, 2, 2\\)"),
        (np.zeros((3, 0)), "shape \\(3, 0\\)"),
        ([[1.0], [1.0, 2.0]], "rows of as many numbers"),
        (["1", "2"], "expected weights by term, numbers"),
        ([True, False], "expected weights by term, numbers"),
        (np.array([1j]), "expected weights by term, numbers"),
        (object(), "expected weights by term, numbers"),
    ],
)
def test_what_is_no_vector(vector: Any, message: str) -> None:
    for make in (Document, Query):
        with pytest.raises((BadValueError, BadTypeError), match=message):
            make("x", "", vector=vector)
    with pytest.raises((BadValueError, BadTypeError), match=message):
        Vectors(dim=1, representation="dense").encode_representation([vector], "document")
    with pytest.raises(BadValueError, match="item 1 of the documents given: "):
        list(parse_documents([("a", [1.0]), ("b", vector)]))


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ("a text", "a query is the text 'a text', but this index has no model for texts; give its vector"),
        (["a text"], "the text 'a text'"),
        (np.zeros(3), r"shape \(3,\), expected \(8,\), as the first document"),
        (np.zeros((2, 3)), r"shape \(3,\), expected \(8,\)"),
        (np.zeros((2, 2, 8)), r"shape \(2, 8\), expected \(8,\)"),
        ({"bear": 1.0}, "expected numbers; weights by term go into an index of their own"),
        (None, "a query has None, expected numbers"),
        (7, "a query: vector: expected"),
        (np.array(1.0), r"a query: vector: expected numbers .*, got shape \(\)"),
        (torch.tensor(1.0), r"a query: vector: expected numbers .*, got shape \(\)"),
        (MultiVector(Ragged.from_rows(TOKENS)), "got multi_vector queries, but the documents are dense"),
        (Sparse.from_dense(torch.tensor([[0.0, 1.0]])), "got sparse queries, but the documents are dense"),
        (Dense(torch.zeros(2, 5)), r"shape \(5,\), expected \(8,\)"),
        (Dense(torch.full((1, 8), torch.nan)), "is nan"),
    ],
)
def test_queries_that_do_not_fit(queries: Any, message: str, tmp_path: Path) -> None:
    with (
        Retriever.build("vectors", DENSE, tmp_path) as retriever,
        pytest.raises((BadValueError, BadTypeError), match=message),
    ):
        retriever.search(queries)


def test_documents_that_do_not_fit(tmp_path: Path) -> None:
    attempts: list[tuple[Any, str]] = [
        (
            {"a": "a text"},
            "document 'a' has no vector; expected vector: \\[numbers\\], because there is no model",
        ),
        ([("a", [1.0, 2.0]), ("b", [1.0])], "document 'b' has a vector of shape \\(1,\\), expected \\(2,\\)"),
        ([("a", [1.0, 2.0]), ("b", [[1.0, 2.0]])], "document 'b' has a vector of shape \\(1, 2\\)"),
        ([("a", [[1.0, 2.0]]), ("b", [1.0, 2.0])], "shape \\(2,\\), expected \\(tokens, 2\\)"),
        ([], "no document and no setting says of which kind and width"),
    ]
    for number, (documents, message) in enumerate(attempts):
        with pytest.raises(BadValueError, match=message):
            Retriever.build("vectors", documents, tmp_path / str(number))
        with pytest.raises(StorageError):
            Retriever.load(tmp_path / str(number))
    with pytest.raises(BadValueError, match=r"shape \(1,\), expected \(3,\)"):
        Retriever.build(Vectors(dim=3), [("a", [1.0])], tmp_path / "said")
    assert not (tmp_path / "said").exists()
    with pytest.raises(ConfigError, match="similarity"):
        Vectors("euclidean")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="documents:2: id 'a' was used before, at 1"):
        Retriever.build("vectors", [("a", [1.0]), ("a", [2.0])], tmp_path / "twice")


def test_an_empty_index_of_known_width(tmp_path: Path) -> None:
    with Retriever.build(Vectors(dim=2, representation="dense"), [], tmp_path) as retriever:
        assert retriever.search([1.0, 2.0]) == []
        retriever.add([("a", [1.0, 0.0])])
        assert [hit.id for hit in retriever.search([1.0, 2.0])] == ["a"]


def test_a_document_without_tokens_is_no_hit(tmp_path: Path) -> None:
    pairs = [("some", np.ones((2, 4))), ("none", np.empty((0, 4)))]
    with Retriever.build("vectors", pairs, tmp_path) as retriever:
        assert [hit.id for hit in retriever.search(np.ones((1, 4)))] == ["some"]


def test_a_killed_build_goes_on_with_the_same_vectors_only(tmp_path: Path) -> None:
    def killed(vectors: Any) -> Iterator[Any]:
        yield from zip(IDS[:20], vectors, strict=False)
        raise KeyboardInterrupt

    told: list[Any] = []
    for vectors in (DENSE, DENSE + 1):
        with pytest.raises(KeyboardInterrupt):
            Retriever.build("vectors", killed(DENSE), tmp_path / "index", chunk_size=8)
        told.clear()
        pairs = list(zip(IDS, vectors, strict=True))
        with Retriever.build(
            "vectors", pairs, tmp_path / "index", chunk_size=8, progress=lambda *stage: told.append(stage)
        ) as retriever:
            kept = retriever.index.representations(np.arange(40))
            assert isinstance(kept, Dense)
            np.testing.assert_array_equal(kept.values.numpy(), vectors)
        assert (told[0][1] == 16) is (vectors is DENSE)
        for file in (tmp_path / "index").iterdir():
            file.unlink()


def test_models_and_vectors_do_not_mix(tiny_bert: Path, tmp_path: Path) -> None:
    model = dense_model(tiny_bert)
    texts = {"a": "a vector index", "b": "neural search of the text", "c": "the token"}
    vectors = model.encode_document(list(texts.values()))
    documents = [Document(name, text) for name, text in texts.items()]
    given = [replace(document, vector=row) for document, row in zip(documents, vectors, strict=True)]
    with (
        Retriever.build(model, documents, tmp_path / "model") as one,
        Retriever.build(Vectors(model.similarity_name), given, tmp_path / "vectors") as two,
    ):
        queries = ["text", "the index"]
        asked = model.encode_query(queries)
        for first, second in zip(one.search(queries), two.search(asked), strict=True):
            assert {hit.id: hit.score for hit in first} == pytest.approx(
                {hit.id: hit.score for hit in second}
            )
        with pytest.raises(BadValueError, match=r"built with vectors .*, not with"):
            Retriever.load(tmp_path / "vectors", model)
        with pytest.raises(BadValueError, match="not with vectors"):
            Retriever.load(tmp_path / "model", "vectors")
        with pytest.raises(BadTypeError, match="expected texts"):
            one.search(asked)
        with pytest.raises(BadValueError, match="query 'q': it has a vector and no text"):
            one.run([Query("q", "", asked[0])])
        with pytest.raises(BadValueError, match="belong to no words"):
            two.explain("text", "a")
        both = Hybrid([one, two]).run([Query("q", "text", asked[0])])
        assert [name for name, _ in both["q"]] == [hit.id for hit in one.search("text")]
        with pytest.raises(BadValueError, match="query 'q' has no vector"):
            Hybrid([one, two]).run({"q": "text"})
        words = Retriever.build("bm25", given, tmp_path / "bm25")  # takes the texts, leaves the vectors
        assert words.search("neural")[0].id == "b"
        assert words.documents["b"].metadata == {}
    for other in (model, "bm25"):
        with pytest.raises(BadValueError, match="document 'a': it has a vector and no text"):
            Retriever.build(other, zip("abc", vectors, strict=True), tmp_path / "none", overwrite=True)


# ---- files ---------------------------------------------------------------------------------------


def irkit(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return int(str(stop.value.code))


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3), max_size=5), kind=st.sampled_from(["dense", "multi_vector", "sparse"])
)
def test_files_come_back(lengths: list[int], kind: str, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("files") / "vectors.safetensors"
    names = [f"é{number}\n" for number in range(len(lengths))]
    rows = [torch.rand(length, 4) for length in lengths]
    stored: Any = {
        "dense": lambda: Dense(torch.rand(len(lengths), 4)),
        "multi_vector": lambda: MultiVector(
            Ragged(torch.cat([torch.empty(0, 4), *rows]), torch.tensor(lengths))
        ),
        "sparse": lambda: Sparse.from_dense((torch.rand(len(lengths), 4) - 0.5).relu()),
    }[kind]()
    write_vectors(path, iter([(names, stored)]))
    documents = list(read_documents(path))
    assert [document.id for document in documents] == names
    assert list(read_queries(path)) == [Query(item.id, "", item.vector) for item in documents]
    for document, number in zip(documents, range(len(lengths)), strict=True):
        row: Any = stored[[number]]
        if kind == "sparse":
            assert document.vector == dict(
                zip(map(str, row.terms.values.tolist()), row.weights.tolist(), strict=True)
            )
        else:
            values = row.values[0] if kind == "dense" else row.tokens.values
            np.testing.assert_array_equal(document.vector, values.numpy())


def _broken(tmp_path: Path, change: Callable[[bytes], bytes]) -> Path:
    path = tmp_path / "broken.safetensors"
    write_vectors(path, iter([(["a", "b"], Dense(torch.ones(2, 3)))]))
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: content[:40],
        lambda content: content[:-10],
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content.replace(b'"dense"', b'"other"'),
        lambda content: content.replace(b"__metadata__", b"__metadat___"),
        lambda content: content.replace(b'"shape": [2, 3]', b'"shape": [3, 2]'),
        lambda content: content.replace(b"F32", b"Q32"),
    ],
)
def test_broken_files_are_refused(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = _broken(tmp_path, change)
    with pytest.raises(BadValueError, match=r"broken.safetensors: expected what irkit encode writes"):
        list(read_documents(path))


def test_arrays_that_are_no_vectors(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.ones(4))
    np.save(tmp_path / "object.npy", np.array([{"a": 1}]), allow_pickle=True)
    np.save(tmp_path / "nan.npy", np.array([[1.0], [np.nan]]))
    for name, message in (
        ("flat", r"shape \(4,\)"),
        ("object", "expected an array"),
        ("nan", "npy:2: .*nan"),
    ):
        with pytest.raises(BadValueError, match=message):
            list(read_documents(tmp_path / f"{name}.npy"))
    with pytest.raises(StorageError, match="No such file"):
        read_documents(tmp_path / "none.npy")


@pytest.mark.parametrize(
    ("make", "suffix"),
    [
        ("dense", "jsonl"),
        ("dense", "safetensors"),
        ("multi", "safetensors"),
        ("sparse", "jsonl"),
        ("sparse", "safetensors"),
    ],
)
def test_what_encode_writes_is_indexed_and_searched(
    make: str, suffix: str, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {
        "dense": lambda: dense_model(tiny_bert),
        "multi": lambda: Model.multi_vector(tiny_bert, "linear"),
        "sparse": lambda: Model.sparse(tiny_bert),
    }[make]()
    model.save_pretrained(tmp_path / "model")
    texts = {"a": "a vector index", "b": "neural search of the text", "c": "the token"}
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"_id": name, "text": text}) + "\n" for name, text in texts.items()))
    for side in ("document", "query"):
        out = tmp_path / f"{side}.{suffix}"
        words = ("encode", tmp_path / "model", corpus, "--out", out, "--side", side, "--dtype", "float32")
        assert irkit(*words) == 0
    files = [tmp_path / f"{side}.{suffix}" for side in ("document", "query")]
    assert irkit("index", "vectors", files[0], "--out", tmp_path / "dry", "--dry-run") == 0
    assert irkit("index", "vectors", files[0], "--out", tmp_path / "index") == 0
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{name}\t{name}\t1\n" for name in texts))
    searched = ("search", tmp_path / "index", files[1], "--out", tmp_path / "run.jsonl", "--qrels", qrels)
    assert irkit(*searched) == 0
    assert "nDCG@10" in capsys.readouterr().out
    run = Run.read(tmp_path / "run.jsonl")
    with Retriever.build(model, texts, tmp_path / "own", index="flat") as own:
        truth = own.run(texts)
    for name in texts:
        assert dict(run[name]) == pytest.approx(dict(truth[name]), rel=1e-5, abs=1e-6)
    recipe = tmp_path / "index" / "recipe.yaml"
    assert irkit("index", "--index", recipe, "--out", tmp_path / "again") == 0
    assert Retriever.load(tmp_path / "again").stats()["documents"] == 3
    capsys.readouterr()
    assert irkit("search", tmp_path / "index", "--text", "bear") == 2
    assert "the text 'bear'" in capsys.readouterr().err or make == "sparse"


def test_command_line_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "v.npy", DENSE)
    for words, message in (
        (("index", "vectors", tmp_path / "v.npy", "--dtype", "int8"), "has no weights; leave dtype"),
        (("encode", "vectors", tmp_path / "v.npy"), "encodes nothing without an index"),
        (("index", "bm25", tmp_path / "v.npy"), "it has a vector and no text"),
    ):
        assert irkit(*words, "--out", tmp_path / "out.jsonl") == 2
        assert message in capsys.readouterr().err
    assert irkit("index", "vectors", tmp_path / "v.npy", "--out", tmp_path / "index", "--index", "hnsw") == 0
    assert (
        irkit("search", tmp_path / "index", tmp_path / "v.npy", "--k", 1, "--out", tmp_path / "run.trec") == 0
    )
    run = Run.read(tmp_path / "run.trec")
    truth = expected("dense", DENSE).argmax(1)
    assert [run[str(row)][0][0] for row in range(40)] == [str(best) for best in truth]


def test_identity_of_queries() -> None:
    query = Query("q", "", [1.0, 2.0])
    assert query == Query("q", "", np.array([1.0, 2.0]))
    assert query != Query("q", "", [1.0, 3.0])
    assert query != Query("q", "")
    assert query != Query("q", "", {"a": 1.0})
    assert query != "q"
    assert hash(query) == hash(Query("q", ""))


@pytest.mark.data
def test_vectors_of_sentence_transformers_rank_as_the_model_does(
    minilm: Path, data_dir: Path, tmp_path: Path
) -> None:
    from itertools import islice

    from sentence_transformers import SentenceTransformer

    documents = list(islice(read_documents(data_dir / "scifact"), 30))
    queries = list(islice(read_queries(data_dir / "scifact"), 12))
    other = SentenceTransformer(str(minilm), device="cpu")
    vectors = other.encode([document.full_text for document in documents])
    asked = other.encode([query.text for query in queries])
    with (
        Retriever.build(str(minilm), documents, tmp_path / "own") as own,
        Retriever.build(
            "vectors", zip((d.id for d in documents), vectors, strict=True), tmp_path / "v"
        ) as given,
    ):
        first = own.run(queries, 10)
        second = given.run(zip((query.id for query in queries), asked, strict=True), 10)
    for query in queries:
        assert [name for name, _ in first[query.id]] == [name for name, _ in second[query.id]]
        assert dict(first[query.id]) == pytest.approx(dict(second[query.id]), abs=1e-5)
