"""Retriever: build, search, change, resume and refuse, with a model of random weights."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from irkit import Hybrid, Model, Retriever, score
from irkit.data import Document, Query
from irkit.errors import (
    BadTypeError,
    BadValueError,
    ConfigError,
    CorruptError,
    IrkitError,
    LockedError,
    StorageError,
)
from irkit.retrieval.retriever import Hit

WORDS = ["search", "index", "vector", "token", "model", "neural", "text", "cab", "dig", "fez", "gnu", "hip"]


def collection(n: int, seed: int = 0) -> list[Document]:
    """Documents of one to nine words, every other with a title, all with metadata."""
    random = np.random.default_rng(seed)

    def words(most: int) -> str:
        return " ".join(random.choice(WORDS, random.integers(1, most)))

    return [
        Document(
            f"d{i}", words(10), words(3) if i % 2 else "", {"year": 1990 + i % 30, "tags": ["x", f"t{i % 3}"]}
        )
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def model(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    with pytest.warns(UserWarning, match="mean"):
        bare = Model.from_pretrained(tiny_bert)
    bare.prompts = {"query": "search ", "document": "text "}
    path = tmp_path_factory.mktemp("model") / "tiny"
    bare.save_pretrained(path)
    return Model.from_pretrained(path)


@pytest.fixture
def retriever(model: Model, tmp_path: Path) -> Retriever:
    return Retriever.build(model, collection(50), tmp_path / "index", chunk_size=16)


def by_id(hits: Iterable[Hit]) -> dict[str, float]:
    return {hit.id: hit.score for hit in hits}


def assert_close(left: Iterable[Hit], right: Iterable[Hit]) -> None:
    """The same documents; scores of a text depend on what it is encoded with, by a rounding."""
    assert by_id(left) == pytest.approx(by_id(right), abs=1e-5)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "irkit.lock"}


# ---- building and searching ----------------------------------------------------------------------


@pytest.mark.parametrize("index", ["flat", "hnsw", {"kind": "faiss", "factory": "Flat"}])
def test_search_ranks_by_score_of_prompted_texts(model: Model, tmp_path: Path, index: object) -> None:
    documents, queries = collection(50), ["neural search", "gnu", ""]
    retriever = Retriever.build(model, documents, tmp_path / "index", index=index, chunk_size=16)
    q = model.encode([f"search {query}" for query in queries], normalize_embeddings=True, prompt="")
    d = model.encode(
        [f"text {document.full_text}" for document in documents], normalize_embeddings=True, prompt=""
    )
    for found, expected in zip(retriever.search(queries, k=7), q @ d.T, strict=True):
        order = np.argsort(-expected, kind="stable")[:7]
        assert [hit.score for hit in found] == pytest.approx(expected[order], abs=1e-5)
        for hit in found:
            document = documents[int(hit.id[1:])]
            assert hit.score == pytest.approx(expected[int(hit.id[1:])], abs=1e-5)
            assert (hit.text, hit.title, hit.metadata) == (document.text, document.title, document.metadata)
    assert_close(retriever.search(queries[0], k=7), retriever.search(queries, k=7)[0])


def test_scores_are_those_of_the_definition(retriever: Retriever, model: Model) -> None:
    expected = score(
        model.encode_representation(["gnu"], "query"),
        model.encode_representation([d.full_text for d in collection(50)], "document"),
    )
    ranking = dict(retriever.run({"q": "gnu"}, k=50)["q"])
    assert [ranking[f"d{i}"] for i in range(50)] == pytest.approx(expected[0].tolist(), abs=1e-5)


def test_run_agrees_with_search(retriever: Retriever) -> None:
    texts = {f"q{i}": " ".join(WORDS[i : i + 3]) for i in range(9)}
    run = retriever.run(texts, k=60)
    assert run.query_ids == list(texts)
    for name, hits in zip(texts, retriever.search(list(texts.values()), k=60), strict=True):
        assert run[name] == [(hit.id, hit.score) for hit in hits]
        assert len(hits) == 50
    forms = [[Query(name, text) for name, text in texts.items()], list(texts.items()), iter(texts.items())]
    assert all(list(retriever.run(form, k=60)) == list(run) for form in forms)


def test_many_queries_cross_the_borders_of_batches(retriever: Retriever) -> None:
    done: list[int] = []
    run = retriever.run([(str(i), WORDS[i % 12]) for i in range(2100)], k=50, progress=done.append)
    assert sum(done) == len(run) == 2100
    assert len(done) > 1
    for i in (1023, 1024, 2099):
        assert dict(run[str(i)]) == pytest.approx(dict(run[str(i % 12)]), abs=1e-5)


def test_documents_in_every_form(model: Model, tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_text("a\tneural text\nb\tindex\n")
    forms = [
        {"a": "neural text", "b": "index"},
        {"a": {"title": "neural", "text": "text"}, "b": {"text": "index"}},
        [("a", "neural text"), ("b", "index")],
        [{"_id": "a", "text": "neural text"}, {"id": "b", "contents": "index"}],
        iter([Document("a", "text", "neural"), ("b", "index")]),
        tmp_path / "c.tsv",
        str(tmp_path / "c.tsv"),
    ]
    built = [Retriever.build(model, form, tmp_path / str(number)) for number, form in enumerate(forms)]
    for retriever in built:
        assert_close(retriever.search("gnu"), built[0].search("gnu"))
        assert by_id(retriever.search("gnu")).keys() == {"a", "b"}


def test_texts_are_numbered(model: Model, tmp_path: Path) -> None:
    retriever = Retriever.build(model, ["neural", "index"], tmp_path / "index")
    retriever.add(["gnu"])
    assert sorted(hit.id for hit in retriever.search("text")) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([("a", "x"), ("a", "y")], "'a'"),
        ([("a", "x"), ("b", "x"), ("c", "x"), ("b", "y")], "documents:4: id 'b' was used before, at 2"),
        ([("", "x")], "item 0 .* id"),
        ([("a", "x"), {"text": "no id"}], "item 1 .*_id"),
        ([("a", 5)], "item 0 .*string"),
        ([Document("a", "x", metadata={"when": object()})], "documents:1: metadata"),
        ([17], "item 0 .*17"),
        ({"a": {"title": "no text"}}, "item 0 .*text"),
    ],
)
def test_bad_documents_build_nothing(model: Model, tmp_path: Path, documents: object, message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        Retriever.build(model, documents, tmp_path / "index", chunk_size=3)
    assert list(tmp_path.iterdir()) == []  # what can be read twice is, before anything is made
    documents = iter(documents.items() if isinstance(documents, dict) else documents)
    with pytest.raises(BadValueError):
        Retriever.build(model, documents, tmp_path / "index", chunk_size=3)
    with pytest.raises(StorageError, match="not finished"):
        Retriever.load(tmp_path / "index")


def test_an_id_that_comes_twice_in_a_file_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "corpus.tsv"
    path.write_text("".join(f"d{i % 5000}\ttext {i}\n" for i in range(5001)))
    with pytest.raises(BadValueError, match=rf"^{path}:5001: id 'd0' was used before, at 1; ids must be"):
        Retriever.build("no such model", path, tmp_path / "index")
    assert list(tmp_path.iterdir()) == [path]


def test_no_collection(model: Model, tmp_path: Path) -> None:
    with pytest.raises(BadTypeError, match="5"):
        Retriever.build(model, 5, tmp_path / "index")
    with pytest.raises(StorageError, match="nowhere"):
        Retriever.build(model, tmp_path / "nowhere.jsonl", tmp_path / "index")


def test_empty_collection_and_its_first_documents(model: Model, tmp_path: Path) -> None:
    retriever = Retriever.build(model, [], tmp_path / "index")
    assert len(retriever) == 0
    assert retriever.search("text") == []
    assert retriever.search([]) == []
    assert retriever.run({"q": "text"})["q"] == []
    assert retriever.search("text", filter=["d1"]) == []
    retriever.add(collection(3))
    assert len(Retriever.load(tmp_path / "index", model).search("text")) == 3


@pytest.mark.parametrize("k", [0, -1, 1.5, "3"])
def test_bad_k(retriever: Retriever, k: object) -> None:
    with pytest.raises((BadValueError, BadTypeError), match="k is"):
        retriever.search("text", k=k)


def test_k_beyond_all_documents(retriever: Retriever) -> None:
    assert len(retriever.search("text", k=10**12)) == 50


# ---- filters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "qualifies"),
    [
        (["d1", "d7", "unknown"], lambda d: d.id in ("d1", "d7")),
        ({"d3"}, lambda d: d.id == "d3"),
        ([], lambda d: False),
        ({"year": {">=": 2000, "<": 2010}}, lambda d: 2000 <= d.metadata["year"] < 2010),
        ({"tags": ["t1", "t2"]}, lambda d: int(d.id[1:]) % 3 > 0),
        ({"_id": ["d1", "d2", "d15"], "year": {">": 1991}}, lambda d: d.id in ("d2", "d15")),
        ({"_id": "d4"}, lambda d: d.id == "d4"),
        ({}, lambda d: True),
    ],
)
def test_filters(retriever: Retriever, condition: object, qualifies: Callable[[Document], bool]) -> None:
    everything = retriever.search("neural gnu", k=50)
    documents = {document.id: document for document in collection(50)}
    expected = [hit for hit in everything if qualifies(documents[hit.id])]
    assert_close(retriever.search("neural gnu", k=50, filter=condition), expected)
    run = retriever.run({"q": "neural gnu"}, filter=condition)
    assert dict(run["q"]) == pytest.approx(by_id(expected), abs=1e-5)


@pytest.mark.parametrize(
    "condition",
    [
        "d1",
        5,
        {"year": {"~": 3}},
        {"_id": [1, 2]},
        {"_id": {">": "d1"}},
        [None],
        {"year": {"in": 3}},
        {"nothing": 1},
        {"yaer": 1990},
        {"year": "1990"},
        {"year": {"!=": "1990"}},
        {"year": [1990, "1991"]},
        {"tags": 1},
    ],
)
def test_bad_filters(retriever: Retriever, condition: object) -> None:
    with pytest.raises((BadValueError, BadTypeError), match="filter"):
        retriever.search("text", filter=condition)


# ---- changing ------------------------------------------------------------------------------------


def kinds_of_files(path: Path) -> list[str]:
    return sorted(re.sub(r"\.g\d+\.", ".", name) for name in contents(path))


def same_results(left: Retriever, right: Retriever) -> None:
    queries = {word: word for word in WORDS}
    for word in queries:
        a, b = dict(left.run(queries, k=500)[word]), dict(right.run(queries, k=500)[word])
        assert a.keys() == b.keys()
        assert [a[name] for name in b] == pytest.approx(list(b.values()), abs=1e-5)


@pytest.mark.parametrize("index", ["flat", "hnsw"])
def test_changes_equal_a_fresh_build(model: Model, tmp_path: Path, index: str) -> None:
    documents, others = collection(80), collection(80, seed=1)
    retriever = Retriever.build(model, documents[:50], tmp_path / "index", index=index)
    retriever.add(documents[50:])
    retriever.remove([f"d{i}" for i in range(10, 30)])
    retriever.remove("d79")
    retriever.update(others[40:60])
    retriever.add(others[10:12])
    final = documents[:10] + others[10:12] + documents[30:40] + others[40:60] + documents[60:79]
    fresh = Retriever.build(model, final, tmp_path / "fresh", index=index)
    assert len(retriever) == len(fresh) == 61
    same_results(retriever, fresh)
    same_results(Retriever.load(tmp_path / "index", model), fresh)
    assert retriever.search("gnu", filter={"_id": "d45"})[0].text == others[45].text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.add([("new", "x"), ("d7", "y")]), "'d7'"),
        (lambda r: r.add([("new", "x"), ("new", "y")]), "'new'"),
        (lambda r: r.add([*((f"n{i}", "x") for i in range(3000)), ("n0", "again")]), "'n0'"),
        (lambda r: r.add([("new", "x"), 5]), "item 1"),
        (lambda r: r.remove(["d1", "d2", "missing"]), "'missing'"),
        (lambda r: r.remove("d1 "), "'d1 '"),
        (lambda r: r.update([("d1", "x"), ("missing", "y")]), "'missing'"),
        (lambda r: r.update([("d1", "x"), ("d1", "y")]), "'d1'"),
    ],
)
def test_bad_changes_change_nothing(
    retriever: Retriever, tmp_path: Path, change: object, message: str
) -> None:
    before, results = contents(tmp_path / "index"), retriever.search(WORDS)
    with pytest.raises(BadValueError, match=message):
        change(retriever)
    assert contents(tmp_path / "index") == before
    assert retriever.search(WORDS) == results
    retriever.add([("new", "x")])
    assert len(retriever) == 51


def test_failing_encoder_changes_nothing(
    retriever: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(tmp_path / "index")

    def fails(*_: object, **__: object) -> Iterator[None]:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(retriever.model, "stream_representations", fails)
        with pytest.raises(MemoryError):
            retriever.update(collection(3, seed=1))
    assert contents(tmp_path / "index") == before
    retriever.update(collection(3, seed=1))


def test_reader_sees_the_old_index_until_it_asks(retriever: Retriever, model: Model, tmp_path: Path) -> None:
    reader = Retriever.load(tmp_path / "index", model)
    before = reader.search(WORDS, k=60)
    retriever.update(collection(20, seed=1))
    retriever.remove(["d40"])
    assert reader.search(WORDS, k=60) == before
    assert reader.refresh()
    assert not reader.refresh()
    assert reader.search(WORDS, k=60) == retriever.search(WORDS, k=60) != before


def test_one_writer_at_a_time(retriever: Retriever, model: Model, tmp_path: Path) -> None:
    other = Retriever.load(tmp_path / "index", model)
    with retriever.store.update():
        for change in (lambda: other.remove("d1"), lambda: other.add([("n", "x")])):
            with pytest.raises(LockedError, match="somebody"):
                change()
    other.remove("d1")
    assert len(other) == 49


def test_writer_that_was_left_behind_catches_up(retriever: Retriever, model: Model, tmp_path: Path) -> None:
    other = Retriever.load(tmp_path / "index", model)
    retriever.remove("d1")
    with pytest.raises(BadValueError, match="d1"):
        other.remove("d1")
    other.add([("d1", "text")])
    assert len(other) == 50


# ---- models --------------------------------------------------------------------------------------


def test_model_is_loaded_from_where_it_was(model: Model, retriever: Retriever, tmp_path: Path) -> None:
    loaded = Retriever.load(tmp_path / "index")
    assert loaded.search("gnu") == retriever.search("gnu")
    assert loaded.model.name == str(Path(model.name).resolve())
    assert Retriever.load(tmp_path / "index", model.name).search("gnu") == retriever.search("gnu")


def test_another_model_is_refused(model: Model, retriever: Retriever, tmp_path: Path) -> None:
    other = Model.from_pretrained(model.name)
    other.name = "the-other"
    with torch.no_grad():
        next(other.encoder.parameters()).mul_(2)
    with pytest.raises(BadValueError, match=rf"{re.escape(model.name)} .*not with the-other"):
        Retriever.load(tmp_path / "index", other)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(BadValueError, match=r"not with .*/other"):
        Retriever.load(tmp_path / "index", tmp_path / "other")


def test_a_document_prompt_is_part_of_the_model_of_an_index(
    model: Model, retriever: Retriever, tmp_path: Path
) -> None:
    other = copy.deepcopy(model)
    other.prompts["query"] = "another "
    assert len(Retriever.load(tmp_path / "index", other)) == 50
    other.prompts["document"] = "passage "
    with pytest.raises(BadValueError, match=r"after 'text ', .*, not with .*after 'passage ', "):
        Retriever.load(tmp_path / "index", other)
    with retriever.store.update():  # as it was before prompts were noted
        del retriever.store.meta["model"]["document_prompt"]
    assert len(Retriever.load(tmp_path / "index", other).search("text", 3)) == 3


def test_a_length_of_documents_is_part_of_the_model_of_an_index(
    model: Model, retriever: Retriever, tmp_path: Path
) -> None:
    other = copy.deepcopy(model)
    other.tokenizer.max_length = 8
    with pytest.raises(BadValueError, match=r"not with .*, 8 tokens of a document, "):
        Retriever.load(tmp_path / "index", other)
    with retriever.store.update():  # as it was before lengths were noted
        del retriever.store.meta["model"]["document_length"]
    assert len(Retriever.load(tmp_path / "index", other)) == 50


def test_a_similarity_is_part_of_the_model_of_an_index(
    model: Model, retriever: Retriever, tmp_path: Path
) -> None:
    other = copy.deepcopy(model)
    other.similarity_name = "dot"
    with pytest.raises(BadValueError, match=r"dense 32, cosine, .*, not with .*dense 32, dot, "):
        Retriever.load(tmp_path / "index", other)


def test_a_mean_is_another_matter_of_queries_alone(tiny_bert: Path, tmp_path: Path) -> None:
    model = Model.multi_vector(tiny_bert, device="cpu")
    Retriever.build(model, ["a gnu", "a bear"], tmp_path / "index")
    model.similarity_name = "meanmaxsim"
    with pytest.warns(UserWarning, match="meanmaxsim.* makes something else of queries"):
        Retriever.load(tmp_path / "index", model)


def test_a_model_that_was_not_saved(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.multi_vector(tiny_bert, device="cpu")
    Retriever.build(model, ["a gnu", "a bear"], tmp_path / "index")
    monkeypatch.chdir(tiny_bert)  # a model directory, which is not meant
    with pytest.raises(StorageError, match=r"index .*/index: .* was not saved .*; give it: Retriever.load"):
        Retriever.load(tmp_path / "index").search("gnu")
    assert len(Retriever.load(tmp_path / "index", model).search("gnu")) == 2
    model.save_pretrained(tmp_path / "model")
    Retriever.build(model, ["a gnu", "a bear"], tmp_path / "again")
    assert len(Retriever.load(tmp_path / "again").search("gnu")) == 2


def test_moved_model(model: Model, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    Retriever.build(tmp_path / "model", collection(5), tmp_path / "index")
    (tmp_path / "model").rename(tmp_path / "moved")
    retriever = Retriever.load(tmp_path / "index")
    assert retriever.stats()["documents"] == 5
    with pytest.raises(StorageError, match=f"index .*/index: .*{tmp_path}/model: .*; give it: .*--model"):
        retriever.search("gnu")
    assert len(Retriever.load(tmp_path / "index", tmp_path / "moved").search("gnu")) == 5


def test_replaced_by_an_index_of_another_kind(retriever: Retriever, model: Model, tmp_path: Path) -> None:
    reader = Retriever.load(tmp_path / "index", model)
    Retriever.build(model, collection(4), tmp_path / "index", index="hnsw", overwrite=True)
    assert len(reader.search("gnu", k=60)) == 50
    reader.refresh()
    for use in (lambda: reader.search("gnu"), lambda: reader.add(["x"]), lambda: retriever.remove("d1")):
        with pytest.raises(StorageError, match="load it again"):
            use()


def test_directory_that_is_no_index(tmp_path: Path, tiny_bert: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tiny_bert):
        with pytest.raises(StorageError, match=re.escape(str(path))):
            Retriever.load(path)


def test_damaged_index_is_refused(retriever: Retriever, tmp_path: Path) -> None:
    retriever.close()
    file = next((tmp_path / "index").glob("documents.*"))
    whole = file.read_bytes()
    file.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    with pytest.raises(CorruptError, match="documents"):
        Retriever.load(tmp_path / "index")
    file.write_bytes(whole[:-1])
    with pytest.raises(CorruptError, match="documents"):
        Retriever.load(tmp_path / "index", verify=False)


# ---- copies, resumed builds ----------------------------------------------------------------------


@pytest.mark.parametrize("index", ["flat", "hnsw"])
def test_save_copies_the_state_that_is_shown(model: Model, tmp_path: Path, index: str) -> None:
    retriever = Retriever.build(model, collection(50), tmp_path / "index", index=index)
    retriever.remove("d3")
    reader = Retriever.load(tmp_path / "index", model)
    retriever.update(collection(9, seed=1)[4:])
    reader.save(tmp_path / "copy")
    copy = Retriever.load(tmp_path / "copy", model)
    assert copy.search(WORDS, k=60) == reader.search(WORDS, k=60)
    copy.add([("new", "x")])
    assert len(copy) == 50
    with pytest.raises(
        StorageError, match=r"^saving an index to .*: there is one already; choose another dir\w*$"
    ):
        reader.save(tmp_path / "copy")


def test_index_of_a_newer_version_is_named(retriever: Retriever, model: Model) -> None:
    with retriever.store.update():
        retriever.store.meta["index"]["config"]["new_key"] = 1
    path = retriever.store.path
    with pytest.raises(
        ConfigError,
        match=rf"opening index {path}: .*'new_key'.*; open it with the version of irkit that wrote it",
    ):
        Retriever.load(path, model)


def test_existing_index_is_replaced_only_if_asked(retriever: Retriever, model: Model, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="overwrite"):
        Retriever.build(model, collection(3), tmp_path / "index")
    with pytest.raises(BadValueError, match="documents:2: id 'a' was used before, at 1"):
        Retriever.build(model, [("a", "x"), ("a", "y")], tmp_path / "index", overwrite=True)
    assert len(Retriever.load(tmp_path / "index", model)) == 50
    assert len(Retriever.build(model, collection(3), tmp_path / "index", overwrite=True)) == 3
    assert len(Retriever.load(tmp_path / "index", model)) == 3


@pytest.mark.parametrize("chosen", ["bm25", "vectors", None])
@pytest.mark.parametrize(
    "wrong",
    [
        *({"chunk_size": value} for value in (0, -1, 2.5, "5", None, True, math.nan, 10**30)),
        *({"overwrite": value} for value in ("no", 1, None)),
        {"progress": 5},
        {"index": "hsnw"},
        {"index": 5},
    ],
)
def test_wrong_arguments_of_a_build_touch_nothing(
    model: Model, tmp_path: Path, chosen: str | None, wrong: dict[str, Any]
) -> None:
    texts = {"a": [1.0, 0.0], "b": [0.0, 1.0]} if chosen == "vectors" else {"a": "neural", "b": "gnu"}
    Retriever.build(chosen or model, texts, tmp_path / "index")
    before = {path.name: path.read_bytes() for path in (tmp_path / "index").iterdir()}
    with pytest.raises(IrkitError, match=f"{next(iter(wrong))}.* (is|got|unknown) "):
        Retriever.build(chosen or model, texts, tmp_path / "index", **{"overwrite": True, **wrong})
    assert {path.name: path.read_bytes() for path in (tmp_path / "index").iterdir()} == before
    with pytest.raises(IrkitError):
        Retriever.build(chosen or model, texts, tmp_path / "new", **{"overwrite": True, **wrong})
    assert not (tmp_path / "new").exists()


class Stop(Exception):
    pass


def stopping(documents: list[Document], after: int) -> Iterator[Document]:
    yield from documents[:after]
    raise Stop


def counting(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Documents that are encoded from now on."""
    seen: list[str] = []
    stream = model.stream_representations

    def watched(texts: Iterator[str], *args: object, **options: object) -> Iterator[object]:
        return stream((seen.append(text) or text for text in texts), *args, **options)

    monkeypatch.setattr(model, "stream_representations", watched)
    return seen


def test_progress_of_a_change_names_the_stages(
    model: Model, tmp_path: Path, small_limits: Callable[..., None]
) -> None:
    small_limits(faiss_scan=20, faiss_add=16)
    told: list[tuple[str, int, int | None]] = []
    retriever = Retriever.build(model, collection(30), tmp_path / "index", index="IVF2,Flat")
    retriever.add({f"new{i}": f"text {i}" for i in range(40)}, progress=lambda *given: told.append(given))
    assert told == [("encoding", 40, None), ("adding", 0, 40), *(("adding", n, 40) for n in (16, 16, 8))]
    told.clear()
    changed = {f"new{i}": f"model {i}" for i in range(21)}
    retriever.update(changed, progress=lambda *given: told.append(given))
    assert told[:2] == [("encoding", 21, None), ("adding", 0, 21)]


@pytest.mark.sampled
@pytest.mark.parametrize("after", [0, 5, 16, 33, 49])
@pytest.mark.parametrize("index", ["flat", "hnsw"])
def test_killed_build_goes_on(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, index: str
) -> None:
    documents, path = collection(50), tmp_path / "index"
    with pytest.raises(Stop):
        Retriever.build(model, stopping(documents, after), path, index=index, chunk_size=8)
    with pytest.raises(StorageError, match="not finished"):
        Retriever.load(path)
    told: list[tuple[str, int, int | None]] = []
    encoded = counting(model, monkeypatch)
    retriever = Retriever.build(
        model, documents, path, index=index, chunk_size=8, progress=lambda *given: told.append(given)
    )
    assert sum(count for _, count, _ in told) == len(retriever) == 50
    assert {(stage, total) for stage, _, total in told} == {("encoding", None)}
    assert len(encoded) <= 50 - max(0, after // 8 - 1) * 8  # the chunk at work when it stopped is done again
    same_results(retriever, Retriever.build(model, documents, tmp_path / "fresh", index=index))


@pytest.mark.parametrize("path", [None, 5, b"index"])
def test_names_that_are_none(model: Model, path: Any) -> None:
    for use in (Retriever.load, lambda path: Retriever.build(model, ["a text"], path)):
        with pytest.raises(BadTypeError, match=r"index: got .* as its directory, expected a path"):
            use(path)


def test_what_fails_at_once_leaves_nothing(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {"HNSW32,oops": "FAISS cannot make", "plaid": "holds multi_vector", "Refine(Flat)": "FAISS cannot"}
    for index, message in bad.items():
        with pytest.raises(BadValueError, match=message):
            Retriever.build(model, ["a text"], tmp_path / "index", index=index)
    monkeypatch.setattr(model, "similarity_name", "euclidean")
    with pytest.raises(BadValueError, match="no inner product"):
        Retriever.build(model, ["a text"], tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


READ_ONLY = """
import ctypes, os, sys
if os.geteuid() == 0:  # root may write anywhere, unless it gives up its capabilities: capset(2)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0
from irkit import Retriever
from irkit.cli import main
from irkit.errors import StorageError

index, model = sys.argv[1:]
retriever = Retriever.load(index, model)
print([hit.id for hit in retriever.search("the index", k=2)])
changes = (
    lambda: retriever.add(["a new text"]),
    lambda: retriever.update({"d0": "another text"}),
    lambda: retriever.remove(["d0"]),
    lambda: Retriever.build(model, ["a text"], index, overwrite=True),
    lambda: Retriever.build(model, ["a text"], index + "/../new"),
)
for change in changes:
    try:
        change()
    except StorageError as error:
        print(error)
print(len(retriever), retriever.refresh())
for words in (["info", index], ["search", index, "--text", "the index", "--k", "1", "--model", model]):
    try:
        main(words)
    except SystemExit as stop:
        print("exit", stop.code)
"""


def test_read_only_directory(model: Model, tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    index, copy = folder / "index", folder / "model"
    expected = Retriever.build(model, collection(50), index, index="IVF2,Flat").search("the index", k=2)
    model.save_pretrained(copy)
    everything = (folder, *folder.rglob("*"))
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path.name: path.read_bytes() for path in index.iterdir()}
    try:
        words = [sys.executable, "-c", READ_ONLY, str(index), str(copy)]
        result = subprocess.run(words, capture_output=True, text=True, check=False)
    finally:
        for path in everything:
            path.chmod(0o755)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == str([hit.id for hit in expected])
    assert lines[1:4] == [f"locking {index}: Permission denied; the index can be read, not changed"] * 3
    refused = "is not writable; choose another directory"
    assert lines[4] == f"building an index in {index}: {index} {refused}"
    assert lines[5] == f"building an index in {index}/../new: {folder} {refused}"
    assert lines[6] == "50 False"
    assert lines.count("exit 0") == 2
    assert {path.name: path.read_bytes() for path in index.iterdir()} == before


def test_killed_build_of_other_documents(model: Model, tmp_path: Path) -> None:
    documents, path = collection(50), tmp_path / "index"
    with pytest.raises(Stop):
        Retriever.build(model, stopping(documents, 40), path, chunk_size=8)
    others = [*documents[:3], Document("d3", "changed"), *documents[4:]]
    for other in (others, documents[:3], documents[1:]):
        with pytest.raises(BadValueError, match="other documents"):
            Retriever.build(model, other, path)
    with pytest.raises(BadValueError, match="other documents"):
        Retriever.build(model, iter(others), path, overwrite=True)
    retriever = Retriever.build(model, others, path, overwrite=True)
    same_results(retriever, Retriever.build(model, others, tmp_path / "fresh"))


def test_killed_build_of_another_kind_is_dropped(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "index"
    with pytest.raises(Stop):
        Retriever.build(model, stopping(collection(50), 40), path, chunk_size=8)
    assert len(Retriever.build(model, collection(9, seed=3), path, index="hnsw")) == 9


KILLED = """
import os, random, signal, sys
from irkit import Model, Retriever
from irkit.data import read_documents

model, corpus, place = Model.from_pretrained(sys.argv[1]), sys.argv[2], sys.argv[3]
model.encode_representation(["what is compiled once is compiled here"], "document")

def build(path, moment=0):
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    seen = 0
    def watch(event, arguments):
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir") and path in repr(arguments):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)
    Retriever.build(model, corpus, path, chunk_size=4, overwrite=True)
    with open(place + "/moments", "w") as stream:
        stream.write(str(seen))
    os._exit(0)

assert build(place + "/whole") == 0
moments = int(open(place + "/moments").read())
for moment in random.Random(0).sample(range(1, moments + 1), 20):
    path = f"{place}/killed{moment}"
    assert build(path, moment) == signal.SIGKILL
    assert build(path) == 0
"""


@pytest.mark.slow
def test_sigkill_at_20_moments(model: Model, tmp_path: Path) -> None:
    """Processes kill themselves as they are about to open, rename, remove or cut a file of the index."""
    corpus = tmp_path / "corpus.tsv"
    corpus.write_text("".join(f"{document.id}\t{document.full_text}\n" for document in collection(24)))
    command = [sys.executable, "-c", KILLED, model.name, str(corpus), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    whole = Retriever.load(tmp_path / "whole", model)
    killed = sorted(tmp_path.glob("killed*"))
    assert len(killed) == 20
    for path in killed:
        same_results(Retriever.load(path, model), whole)
        assert kinds_of_files(path) == kinds_of_files(tmp_path / "whole")  # nothing is left over


def test_what_it_says_of_itself(retriever: Retriever, model: Model) -> None:
    retriever.remove("d1")
    stats = retriever.stats()
    assert (stats["documents"], stats["removed"], stats["kind"]) == (49, 1, "flat")
    assert stats["model"]["fingerprint"] == model.fingerprint
    assert "49 documents" in repr(retriever)
    with retriever as same:
        assert same is retriever


@pytest.mark.parametrize("index", ["flat", "hnsw", "words"])
def test_threads_search_at_once(model: Model, tmp_path: Path, index: str) -> None:
    chosen: Any = ("bm25", None) if index == "words" else (model, index)
    documents = list(collection(50))
    retriever = Retriever.build(chosen[0], documents, tmp_path / "index", index=chosen[1])
    queries = [document.text for document in documents]
    expected = [retriever.search(query, k=50) for query in queries]
    opened = Retriever.load(tmp_path / "index", retriever.model)  # nothing of it was read before
    with ThreadPoolExecutor(4) as pool:
        for found, hits in zip(pool.map(partial(opened.search, k=50), queries), expected, strict=True):
            assert_close(found, hits)


@pytest.mark.parametrize("given", [np.ones(4), torch.ones(2, 4), [np.ones(4)]])
def test_vectors_in_place_of_texts(retriever: Retriever, given: Any) -> None:
    with pytest.raises(BadTypeError, match=r"of shape \((2, )?4,?\), expected texts.*index\.search"):
        retriever.search(given)
    with pytest.raises(BadTypeError, match="expected texts"):
        retriever.rerank(given, [["d1"]])


def test_documents_by_id_and_in_order(retriever: Retriever) -> None:
    retriever.remove("d3")
    retriever.update({"d1": "another text"})
    expected = [item for item in collection(50) if item.id not in ("d1", "d3")]
    assert list(retriever.documents) == [*expected, Document("d1", "another text")]
    assert retriever.documents["d1"].text == "another text"
    assert ["d1" in retriever.documents, "d3" in retriever.documents, 1 in retriever.documents] == [1, 0, 0]
    with pytest.raises(BadValueError, match="none of id 'd3'"):
        retriever.documents["d3"]
    with pytest.raises(BadTypeError, match="got 0, expected the id"):
        retriever.documents[0]  # type: ignore[index]


def test_retrievers_go_to_other_processes(model: Model, retriever: Retriever, tmp_path: Path) -> None:
    for held in (retriever, Retriever.load(tmp_path / "index", model)):
        with pytest.raises(BadTypeError, match=r"given as an object.*pickle Retriever\.load"):
            pickle.dumps(held)
    opened = Retriever.load(tmp_path / "index")
    expected = opened.search(["text", "vector index"], 5)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).search(['text', 'vector index'], 5))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(opened), capture_output=True, check=True, cwd="/"
    )
    assert done.stdout.decode().strip() == repr(expected)
    Retriever.build("bm25", collection(50), tmp_path / "words").close()
    words = Retriever.load(tmp_path / "words", {"k1": 2, "b": 0})
    both = Hybrid([words, opened])
    again = pickle.loads(pickle.dumps(both))
    assert again.search("text", 5) == both.search("text", 5)
    assert again.retrievers[0].search("text", 5) == words.search("text", 5)
    assert again.retrievers[0].model.config.k1 == 2


@pytest.mark.parametrize("given", [None, 5, ["a", None], [1], {"q1": "what"}, b"what"])
def test_what_is_no_text_is_named(retriever: Retriever, given: Any) -> None:
    before = len(retriever)
    for method in (retriever.search, retriever.remove):
        with pytest.raises(BadTypeError, match="expected a string or several"):
            method(given)
    assert len(retriever) == before


@pytest.mark.filterwarnings("ignore:.*taking the mean of its tokens:UserWarning")
def test_stored_indexes_are_searched_without_heavy_imports(
    model: Model, tiny_bert: Path, tmp_path: Path
) -> None:
    """Starting up is what a search from the command line costs: torch, and of irkit what the index needs."""
    models = {"multi_vector": Model.multi_vector(tiny_bert, "linear"), "sparse": Model.sparse(tiny_bert)}
    for name, each in models.items():
        each.save_pretrained(tmp_path / name)
    for name, saved in {
        "bm25": "bm25",
        "dense": model.name,
        **{name: tmp_path / name for name in models},
    }.items():
        Retriever.build(saved, collection(9), tmp_path / f"{name} index").close()
    code = """
import sys
from pathlib import Path
from irkit import Retriever
for place in sorted(Path(sys.argv[1]).glob("* index")):  # that of BM25 comes first
    assert Retriever.load(place).search("vector")
    heavy = {"transformers", "faiss", "scipy", "sklearn", "pandas", "numba", "datasets", "torch._dynamo"}
    heavy |= {"sentence_transformers", "huggingface_hub", "ir_measures", "sympy", "triton", "rich"}
    print(place.name, sorted(heavy & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [f"{name} index []" for name in sorted(["bm25", "dense", *models])]


def test_an_index_whose_files_are_cut_in_use_is_not_read(tmp_path: Path) -> None:
    texts = {f"d{number}": f"common word{number}" for number in range(3000)}
    retriever = Retriever.build("bm25", texts, tmp_path / "index")
    for file in (tmp_path / "index").glob("*.g*"):
        os.truncate(file, 0)  # as cp does that writes another index over it
    with pytest.raises(CorruptError, match="cut short while it is in use"):
        retriever.search("common", 3)
    with pytest.raises(CorruptError, match="it has 0 bytes"):
        retriever.add(["new"])


def test_a_build_goes_on_whatever_json_makes_of_the_metadata(model: Model, tmp_path: Path) -> None:
    documents = [
        Document(f"d{number}", "text", metadata={"tags": ("a", "b"), "by": {1: "x"}})  # type: ignore[dict-item]
        for number in range(20)
    ]
    with pytest.raises(Stop):
        Retriever.build(model, stopping(documents, 12), tmp_path / "index", chunk_size=5)
    with Retriever.build(model, documents, tmp_path / "index", chunk_size=5) as built:
        assert built.documents["d3"].metadata == {"tags": ["a", "b"], "by": {"1": "x"}}
        assert len(built) == 20
