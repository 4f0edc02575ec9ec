"""Windows: long documents are encoded in parts, found as one, with the best part told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit import Dense, Hybrid, Model, Retriever, score
from irkit.data import Document
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.index import Store, WindowedIndex, WindowsConfig, compact, create_index
from irkit.retrieval.windows import Passage, _cut, _offsets, split_documents, text_spans, window_texts

WORDS = ["search", "index", "vector", "token", "model", "neural", "text", "cab", "dig", "fez", "gnu", "hip"]
LENGTH = {"length": 6, "stride": 4}


def collection(n: int, most: int = 60, seed: int = 0, start: int = 0) -> list[Document]:
    """Documents of none to ``most`` words, every other with a title."""
    random = np.random.default_rng(seed)
    return [
        Document(
            f"d{i}",
            " ".join(random.choice(WORDS, random.integers(0, most))),
            "vector index" if i % 2 else "",
            {"year": 1990 + i % 5},
        )
        for i in range(start, start + n)
    ]


@pytest.fixture(scope="module")
def models(tiny_bert: Path) -> dict[str, Model]:
    """A model of each kind."""
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="mean"):
        dense = Model.from_pretrained(tiny_bert)
    dense.prompts = {"query": "search ", "document": "text "}
    return {
        "dense": dense,
        "multi_vector": Model.multi_vector(tiny_bert, {"dim": 8}, device="cpu"),
        "sparse": Model.sparse(tiny_bert, device="cpu"),
    }


def expected(
    model: Any, windows: WindowsConfig, queries: tuple[str, ...], documents: list[Document]
) -> list[dict[str, tuple[float, Passage]]]:
    """By query, score and best window of each document, with each encoded alone and compared in full."""
    found: list[dict[str, tuple[float, Passage]]] = [{} for _ in queries]
    asked = model.encode_representation(list(queries), "query")
    for document in documents:
        spans = split_documents(model, windows, [document])
        rows = model.encode_representation(window_texts([document], spans), "document")
        for line, scored in zip(score(asked, rows).tolist(), found, strict=True):
            pooled = sum(line) / len(line) if windows.pool == "mean" else max(line)
            place = text_spans([document], spans)[0][line.index(max(line))]
            scored[document.id] = pooled, Passage(*place.tolist())
    return found


def stored(retriever: Retriever, query: str) -> dict[str, tuple[float, list[Passage]]]:
    """Score of each document that is not removed, by a scan of what is stored, and its best windows."""
    index, store = retriever.index, retriever.store
    assert isinstance(index, WindowedIndex)
    rows = index.inner.representations(np.arange(len(index.inner)))
    [line] = score(retriever.model.encode_representation([query], "query"), rows).numpy()
    ends, spans, found = store.read("window_ends.bin"), store.read("window_spans.bin"), {}
    pool = np.mean if index.windows.pool == "mean" else np.max
    for row, name in enumerate(retriever.documents.ids(np.arange(len(index)))):
        part = slice(int(ends[row - 1]) if row else 0, int(ends[row]))
        scores = line[part]
        best = [Passage(*place) for place in spans[part][scores >= scores.max() - 1e-5].tolist()]
        if index.live[row]:
            found[name] = float(pool(scores)), best
    return found


def check(hits: list[Any], known: dict[str, Any], k: int, recall: float = 1) -> None:
    """Compare hits with the scores and passages of a scan."""
    ranked = sorted((value for value, _ in known.values() if value not in (0, -np.inf)), reverse=True)[:k]
    assert len(hits) == len({hit.id for hit in hits}) == len(ranked)
    scores = [hit.score for hit in hits]
    assert scores == sorted(scores, reverse=True)
    close = np.isclose(scores, ranked, rtol=1e-4, atol=1e-4)
    assert close.mean() >= recall
    for hit in hits:
        value, passages = known[hit.id]
        assert hit.score == pytest.approx(value, rel=1e-4, abs=1e-4)
        assert hit.passage in passages


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "index", "pool", "recall"),
    [
        pytest.param("dense", "flat", "max", 1, marks=pytest.mark.slow),
        ("dense", "flat", "mean", 1),
        ("dense", "flat", "first", 1),
        ("dense", "dense", "max", 1),
        pytest.param("dense", "hnsw", "mean", 1, marks=pytest.mark.slow),
        ("multi_vector", "flat", "mean", 1),
        ("multi_vector", "plaid", "max", 1),
        ("multi_vector", "muvera", "max", 0),
        pytest.param("sparse", "inverted", "max", 1, marks=pytest.mark.slow),
        ("sparse", {"kind": "inverted", "mode": "exact", "dtype": "float32"}, "mean", 1),
    ],
)
def test_search(
    models: dict[str, Model], kind: str, index: Any, pool: str, recall: float, tmp_path: Path
) -> None:
    """Documents, scores and passages are those of a scan, after changes and with filters, too."""
    model, documents = models[kind], collection(40)
    retriever = Retriever.build(
        model, documents[:30], tmp_path / "i", index=index, windows={**LENGTH, "pool": pool}, chunk_size=7
    )
    retriever.add(documents[30:])
    retriever.remove(["d3", "d17"])
    changed = Document("d5", "gnu hip " * 20, "fez", {"year": 1990})
    retriever.update([changed])
    present = [changed if item.id == "d5" else item for item in documents if item.id not in ("d3", "d17")]
    assert len(retriever) == len(present)
    with Retriever.load(tmp_path / "i", model) as again:
        queries = ("gnu hip", "neural search")
        flat = index == "flat"  # what is stored is what the model makes, here and of documents outside
        made = expected(model, again.index.windows, queries, present) if flat else [{}, {}]  # type: ignore[attr-defined]
        for query, own in zip(queries, made, strict=True):
            known = stored(again, query)
            assert known.keys() == {item.id for item in present}
            check(again.search(query, 7), known, 7, recall)
            check(again.search(query, 100), known, 100, recall)
            some = {item.id: known[item.id] for item in present if item.metadata["year"] == 1991}
            check(again.search(query, 5, {"year": 1991}), some, 5, recall)
            ids = [item.id for item in present[:10]]
            check(again.rerank(query, ids), {name: known[name] for name in ids}, 10)
            run = again.run({"q": query}, 7)
            assert [item.doc_id for item in run] == [hit.id for hit in again.search(query, 7)]
            if flat:
                given = again.rerank(query, present[:10])
                check(given, {name: known[name] for name in ids}, 10)
                assert {name: value for name, (value, _) in own.items()} == pytest.approx(
                    {name: value for name, (value, _) in known.items()}, rel=1e-4, abs=1e-5
                )
                assert all(own[name][1] in known[name][1] for name in own)


def test_crowding(models: dict[str, Model], tmp_path: Path) -> None:
    """One document whose windows are all best does not keep others out."""
    documents = [Document("long", "gnu hip cab " * 200), *collection(5, 20)]
    retriever = Retriever.build(models["dense"], documents, tmp_path / "i", windows={"length": 3})
    assert retriever.stats()["windows"] > 200
    hits = retriever.search("gnu hip cab", 4)
    assert len({hit.id for hit in hits}) == 4
    check(hits, stored(retriever, "gnu hip cab"), 4)
    single = retriever.search(["gnu", "gnu hip"], 3, offset=1)
    assert [len(line) for line in single] == [3, 3]


@pytest.mark.parametrize("kind", ["dense", "multi_vector", "sparse"])
def test_explain(models: dict[str, Model], kind: str, tmp_path: Path) -> None:
    """Matches are in the best window, at places of the whole text."""
    filler = "search index vector token model neural text "
    document = Document("a", filler * 4 + "gnu hip fez dig. " + filler * 4, "cab")
    retriever = Retriever.build(models[kind], [document], tmp_path / "i", windows={"length": 8, "stride": 4})
    [hit] = retriever.search("gnu hip fez", 1)
    explained = retriever.explain("gnu hip fez", "a")
    assert explained.document == document.full_text
    assert explained.score == pytest.approx(hit.score, rel=1e-3)  # an inverted index keeps float16
    assert explained.matches
    start, end = (place + len("cab ") for place in hit.passage)
    for match in explained.matches:
        span = match.document
        if span.start < span.end:
            assert start <= span.start < span.end <= end
            assert document.full_text[span.start : span.end].lower() == span.token.lower().removeprefix("##")
    assert retriever.explain("gnu hip fez", document).score == explained.score


@settings(max_examples=60)
@given(
    text=st.text(st.sampled_from("ab xyz,\u4e2d\u00e9 \n"), max_size=200),
    length=st.integers(1, 12),
    overlap=st.integers(0, 11),
    title=st.text("ab ", max_size=8),
)
def test_no_token_is_lost(models: dict[str, Model], text: str, length: int, overlap: int, title: str) -> None:
    """Windows are in order, cover every token, and have at most as many tokens as the model reads."""
    model = models["dense"]
    windows = WindowsConfig(length=length, stride=max(1, length - overlap))
    document = Document("a", text, title)
    [spans] = split_documents(model, windows, [document])
    full = document.full_text
    assert (np.diff(spans[:, 0]) > 0).all()
    assert (spans[:, 0] <= spans[:, 1]).all()
    covered = np.zeros(len(full) + 1, bool)
    for start, end in spans:
        covered[start:end] = True
    [tokens] = _offsets(model, [full])
    assert all(covered[start:end].all() for start, end in tokens)
    assert all(len(_offsets(model, [full[a:b]])[0]) <= length + 8 for a, b in spans)
    [places] = text_spans([document], [spans])
    assert ((places >= 0) & (places <= len(text))).all()
    for (start, end), (first, last) in zip(spans.tolist(), places.tolist(), strict=True):
        assert text[first:last].strip() in full[start:end]


def test_windows_end_at_words() -> None:
    text = "alpha beta gamma"
    tokens = np.array([[0, 3], [3, 5], [6, 10], [11, 14], [14, 16]])  # al-pha beta gam-ma
    cut = _cut(text, tokens, WindowsConfig(length=4, stride=4))
    assert [text[start:end] for start, end in cut] == ["alpha beta", "gamma"]


def test_compact_and_resume(models: dict[str, Model], tmp_path: Path) -> None:
    """A compaction keeps windows, passages and hits; a build of other windows is another build."""
    model, documents = models["multi_vector"], collection(30)
    retriever = Retriever.build(model, documents, tmp_path / "i", index="plaid", windows=LENGTH)
    retriever.remove([f"d{i}" for i in range(0, 20, 2)])
    before = retriever.search(["gnu", "fez hip"], 8)
    retriever.close()
    compact(tmp_path / "i")
    with Retriever.load(tmp_path / "i", model) as again:
        assert len(again.index) == 20
        for old, new in zip(before, again.search(["gnu", "fez hip"], 8), strict=True):
            assert [(hit.id, hit.passage) for hit in old] == [(hit.id, hit.passage) for hit in new]


def test_interrupted_build(models: dict[str, Model], tmp_path: Path) -> None:
    documents = collection(30)

    def stop(stage: str, count: int, total: int | None) -> None:
        raise KeyboardInterrupt

    options: Any = {"windows": LENGTH, "chunk_size": 5}
    with pytest.raises(KeyboardInterrupt):
        Retriever.build(models["dense"], documents, tmp_path / "i", progress=stop, **options)
    resumed = Retriever.build(models["dense"], documents, tmp_path / "i", **options)
    whole = Retriever.build(models["dense"], documents, tmp_path / "j", **options)
    assert resumed.search("gnu", 30) == whole.search("gnu", 30)
    empty = Retriever.build(models["dense"], [], tmp_path / "k", windows=LENGTH)
    assert empty.search("gnu", 3) == []
    assert len(empty) == 0
    empty.add([Document("a", "gnu")])
    assert [hit.id for hit in empty.search("gnu", 3)] == ["a"]


@pytest.mark.parametrize(
    ("windows", "error", "message"),
    [
        ({"length": 10**6}, BadValueError, "expected a length of at most"),
        ({"stride": 10**6}, BadValueError, "stride of at most the length"),
        ({"length": 4, "stride": 5}, ConfigError, "would be lost"),
        ({"length": 0}, ConfigError, "length"),
        ({"pool": "sum"}, ConfigError, "pool"),
        ({"size": 3}, ConfigError, "size"),
        (7, ConfigError, "windows"),
    ],
)
def test_refused(
    models: dict[str, Model], windows: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        Retriever.build(models["dense"], collection(2), tmp_path / "i", windows=windows)
    assert not (tmp_path / "i").exists()


def test_refused_elsewhere(models: dict[str, Model], tmp_path: Path) -> None:
    """What has no sense for windows says so, and changes nothing."""
    from irkit.core.late_interaction import mean_maxsim
    from irkit.exporting import export

    documents = collection(4)
    with pytest.raises(BadValueError, match="cuts no texts"):
        Retriever.build("bm25", documents, tmp_path / "i", windows={})
    assert not (tmp_path / "i").exists()
    retriever = Retriever.build(models["multi_vector"], documents, tmp_path / "i", windows=LENGTH)
    with pytest.raises(BadValueError, match="interaction"):
        retriever.rerank("gnu", ["d1"], interaction=mean_maxsim)
    with pytest.raises(BadValueError, match="windows"):
        export(retriever, "jsonl", tmp_path / "out.jsonl")
    with pytest.raises(BadValueError, match="several representations"):
        retriever.index.representations(np.array([0]))
    index = retriever.index
    assert isinstance(index, WindowedIndex)
    part = index.inner.representations(np.array([0, 1]))
    one = np.zeros((1, 2), np.int64)
    for spans in ([one], [np.zeros((0, 2), np.int64), np.zeros((2, 2), np.int64)]):
        with pytest.raises(BadValueError, match="a row for each window"):
            index.add_windows(part, spans)
    assert [hit.id for hit in retriever.search("gnu", 9)] == [hit.id for hit in retriever.search("gnu", 9)]


def test_damaged_ends(models: dict[str, Model], tmp_path: Path) -> None:
    retriever = Retriever.build(models["dense"], collection(6), tmp_path / "i", windows=LENGTH)
    [file] = [name for name in (tmp_path / "i").iterdir() if name.name.startswith("window_ends")]
    retriever.close()
    content = np.fromfile(file, "<i8")
    content[[0, 1]] = content[[1, 0]]
    content.tofile(file)
    again = Retriever.load(tmp_path / "i", models["dense"], verify=False)
    with again, pytest.raises(CorruptError, match="not divided"):
        again.search("gnu", 3)


def test_cosines_of_a_mean_over_windows_follow_the_definition(tmp_path: Path) -> None:
    """The mean over windows, reranking and passages compare with queries of any length."""
    torch.manual_seed(0)
    rows, queries = torch.randn(12, 8), 3 * torch.randn(2, 8)
    spans = [np.arange(6).reshape(3, 2) + 10 * number for number in range(4)]
    cosines = torch.nn.functional.cosine_similarity(queries[:, None], rows, dim=2).reshape(2, 4, 3).numpy()
    with Store.build(tmp_path / "index") as store:
        windows = WindowsConfig(length=8, stride=8, pool="mean")
        index = create_index(store, {"kind": "flat", "metric": "cosine"}, windows=windows)
        assert isinstance(index, WindowedIndex)
        index.add_windows(Dense(rows), spans)
        hits = index.search(Dense(queries), 4)
        means = cosines.mean(2)
        np.testing.assert_allclose(hits.scores, -np.sort(-means, 1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(index.rescore(Dense(queries), hits.rows), hits.scores, rtol=1e-6)
        best = cosines.argmax(2)
        found = index.passages(Dense(queries), np.arange(4)[None].repeat(2, 0))
        for query in range(2):
            assert [spans[row][best[query, row]].tolist() for row in range(4)] == found[query].tolist()


def test_command_line(command: Callable[..., tuple[int, str, str]], tiny_dense: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"_id": "a", "title": "", "text": "' + "cab dig " * 9 + "gnu hip " * 3 + '"}\n')
    status, _, error = command(
        *("index", str(tiny_dense), str(corpus), "--out", str(tmp_path / "i"), "--dtype", "float32"),
        *("--windows", "6", "--set", "windows.stride=3"),
    )
    assert status == 0, error
    status, out, error = command("search", str(tmp_path / "i"), "--text", "gnu hip gnu hip gnu hip")
    assert status == 0, error
    assert len(out.split("\t")[-1].split()) <= 6  # the passage, not the whole text
    assert "windows" in (tmp_path / "i" / "recipe.yaml").read_text()
    status, _, error = command(
        *("index", "bm25", str(corpus), "--out", str(tmp_path / "j"), "--windows", "6")
    )
    assert status != 0
    assert "cuts no texts" in error


def test_served(models: dict[str, Model], tmp_path: Path) -> None:
    """Answers of a server tell the passage; those of other indexes have none."""
    from irkit.serve.messages import RerankRequest
    from irkit.serve.search_work import rerank_ids

    def rerank(retriever: Retriever, ids: list[str]) -> list[Any]:
        [answer] = rerank_ids(RerankRequest(queries=["gnu"], ids=[ids]).model_dump(), retriever)
        return cast("list[Any]", answer["hits"])

    retriever = Retriever.build(models["dense"], collection(6), tmp_path / "i", windows=LENGTH)
    hits = retriever.search("gnu", 2)
    places = [hit.passage._asdict() for hit in hits if hit.passage]
    assert [hit["passage"] for hit in rerank(retriever, [hit.id for hit in hits])] == places
    plain = Retriever.build(models["dense"], collection(6), tmp_path / "j")
    assert all(hit.passage is None for hit in plain.search("gnu", 2))
    assert "passage" not in rerank(plain, ["d1"])[0]


def test_hybrid_tells_the_passage(models: dict[str, Model], tmp_path: Path) -> None:
    """The passage is that of the retriever with windows, for documents that it holds."""
    documents = collection(12)
    words = Retriever.build("bm25", documents, tmp_path / "words")
    cut = Retriever.build(models["dense"], documents[:8], tmp_path / "cut", windows=LENGTH)
    queries = ["neural search", "gnu hip"]
    wanted = [{hit.id: hit.passage for hit in hits} for hits in cut.search(queries, 8)]
    for hits, known in zip(Hybrid([words, cut]).search(queries, 12), wanted, strict=True):
        assert {hit.id for hit in hits} > known.keys()
        assert {hit.id: hit.passage for hit in hits if hit.passage is not None} == known
    assert all(hit.passage is None for hit in Hybrid([words, words]).search("gnu hip", 3))
    assert Hybrid([words, cut]).search("gnu", 3, fields=["title"])[0].text == ""
