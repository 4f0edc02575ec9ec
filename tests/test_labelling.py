"""Teachers of every kind, and the scores they give to training files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit import Model, Retriever
from irkit.data import Document, Query
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.heads import MultiVectorHead, Normalize, Projection
from irkit.model.cross_encoder import CrossEncoder
from irkit.retrieval.scorer import IndexScorer, ModelScorer
from irkit.training.labels import label
from irkit.training.negatives import mine
from irkit.training.teachers import load_teacher
from irkit.training.training_data import TrainingRow

TEXTS = {
    "d0": "neural search",
    "d1": "an index of vectors",
    "d2": "the text of a long token model in an index of neural search and of the search for text",
    "d3": "search",
    "d4": "vector model",
}
QUERIES = {"q0": "neural index", "q1": "search of text", "q2": "a model"}
LISTS = {"q0": ["d1", "d0", "d4"], "q1": ["d2"], "q2": ["d4", "d3", "d2", "d0", "d1"]}
RECORDS = [TrainingRow(query, None, tuple(docs)) for query, docs in LISTS.items()]
DOCUMENTS = [[Document(name, TEXTS[name]) for name in docs] for docs in LISTS.values()]
ASKED = [Query(name, text) for name, text in QUERIES.items()]

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", params=["dense", "multi_vector"])
def model(request: pytest.FixtureRequest, tiny_bert: Path) -> Model:
    with pytest.warns(UserWarning, match="mean"):
        dense = Model.from_pretrained(tiny_bert)
    if request.param == "dense":
        return dense
    torch.manual_seed(0)
    head = MultiVectorHead(32, [Projection(32, 8, bias=False), Normalize()])
    return Model(dense.tokenizer, dense.encoder, head)


def classifier(tiny_bert: Path, path: Path, labels: int = 1) -> str:
    """A cross-encoder of random weights."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    config = BertConfig.from_pretrained(tiny_bert, num_labels=labels, type_vocab_size=2)
    BertForSequenceClassification(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def cross_encoder(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return classifier(tiny_bert, tmp_path_factory.mktemp("cross-encoder"))


def assert_equal(found: list[Any], expected: list[Any], tolerance: float = 1e-5) -> None:
    assert [len(line) for line in found] == [len(line) for line in expected]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=tolerance)


def test_an_index_and_its_model_give_the_scores_of_a_search(model: Model, tmp_path: Path) -> None:
    retriever = Retriever.build(model, TEXTS, tmp_path / "index")
    hits = [{hit.id: hit.score for hit in retriever.search(text, 5)} for text in QUERIES.values()]
    expected = [[hits[i][name] for name in docs] for i, docs in enumerate(LISTS.values())]
    assert_equal(load_teacher(retriever)(ASKED, DOCUMENTS), expected)
    assert_equal(ModelScorer(model)(ASKED, DOCUMENTS), expected)
    model.save_pretrained(tmp_path / "model")
    loaded = load_teacher(tmp_path / "model")
    assert isinstance(loaded, ModelScorer)
    assert_equal(loaded(ASKED, DOCUMENTS), expected)
    assert ModelScorer(model)(ASKED[:1], [[]])[0].shape == (0,)
    assert IndexScorer(retriever.collection)(ASKED[:2], [[], []])[1].shape == (0,)


@pytest.mark.parametrize("max_length", [None, 16])
@pytest.mark.parametrize("activation", ["none", "sigmoid"])
def test_a_cross_encoder_as_in_sentence_transformers(
    peer: Any, cross_encoder: str, max_length: int | None, activation: Any
) -> None:
    teacher = load_teacher(f"cross-encoder:{cross_encoder}", max_length=max_length, activation=activation)
    found = teacher(ASKED, DOCUMENTS)
    pairs = [
        (query, TEXTS[name])
        for query, docs in zip(QUERIES.values(), LISTS.values(), strict=True)
        for name in docs
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peer.CrossEncoder(cross_encoder, device="cpu", max_length=max_length)
        act = torch.nn.Identity() if activation == "none" else torch.nn.Sigmoid()
        expected = theirs.predict(pairs, activation_fn=act)
    assert [len(line) for line in found] == [3, 1, 5]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5)
    assert np.ptp(expected) > 0.01


def test_steps_of_a_cross_encoder_change_nothing(cross_encoder: str) -> None:
    teacher = CrossEncoder(cross_encoder)
    whole = teacher(ASKED, DOCUMENTS)
    for tokens in (1, 30, 100):
        assert_equal(CrossEncoder(cross_encoder, batch_tokens=tokens)(ASKED, DOCUMENTS), whole)
    assert [len(line) for line in teacher(ASKED[:2], [[], []])] == [0, 0]
    for queries, documents, error, message in (
        (ASKED[:1], [["a text"]], BadTypeError, r"got 'a text', expected a Document, such as irkit\.data"),
        (ASKED[:1], ["a text"], BadTypeError, "got 'a text', expected a Document"),
        (["a question"], [[]], BadTypeError, "got 'a question', expected a Query"),
        (ASKED[:2], [[]], BadValueError, "got 2 queries and documents of 1"),
    ):
        with pytest.raises(error, match=message):
            teacher(queries, documents)


def test_two_labels_give_log_odds(tiny_bert: Path, tmp_path: Path) -> None:
    name = classifier(tiny_bert, tmp_path, labels=2)
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(name)(QUERIES["q1"], TEXTS["d2"], return_tensors="pt")
    with torch.inference_mode():
        odds = AutoModelForSequenceClassification.from_pretrained(name)(**inputs).logits.log_softmax(1)[0]
    found = CrossEncoder(name)(ASKED[1:2], DOCUMENTS[1:2])
    assert found[0].tolist() == pytest.approx([float(odds[1] - odds[0])], abs=1e-5)


def test_models_that_are_no_cross_encoders(tiny_bert: Path, tmp_path: Path, cross_encoder: str) -> None:
    with pytest.raises(
        BadValueError, match="BertModel with 2 labels; expected a sequence classifier with 1 or 2"
    ):
        CrossEncoder(str(tiny_bert))
    with pytest.raises(BadValueError, match="with 3 labels"):
        CrossEncoder(classifier(tiny_bert, tmp_path, labels=3))
    with pytest.raises(StorageError, match="loading the cross-encoder"):
        CrossEncoder(str(tmp_path / "none"))
    with pytest.raises(BadValueError, match="dtype 'int8'; expected float32 or bfloat16 or float16"):
        CrossEncoder(cross_encoder, dtype="int8")
    with pytest.raises(BadValueError, match="activation 'softmax'; expected none or sigmoid"):
        CrossEncoder(cross_encoder, activation="softmax")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="settings of a cross-encoder; leave them out or name one as"):
        load_teacher(cross_encoder, max_length=32)


def test_labels_are_of_texts_by_id_or_at_hand(model: Model, tmp_path: Path) -> None:
    retriever = Retriever.build(model, TEXTS, tmp_path / "index")
    expected = IndexScorer(retriever.collection)(ASKED, DOCUMENTS)
    whole = [
        TrainingRow("", QUERIES[r.query_id], (), tuple(TEXTS[name] for name in r.document_ids), None, 0)
        for r in RECORDS
    ]
    scored = [
        TrainingRow(r.query_id, QUERIES[r.query_id], r.document_ids, scores=(9,) * len(r)) for r in RECORDS
    ]
    by_id = list(label(RECORDS, IndexScorer(retriever.collection), queries=QUERIES))
    assert [(r.query_id, r.document_ids, r.positives) for r in by_id] == [
        (r.query_id, r.document_ids, r.positives) for r in RECORDS
    ]
    for records in (
        by_id,
        label(RECORDS, ModelScorer(model), queries=QUERIES, corpus=TEXTS),
        label(whole, ModelScorer(model)),
        label(scored, IndexScorer(retriever.collection)),
    ):
        assert_equal([record.scores for record in records], expected)


def test_texts_that_are_missing(model: Model, tmp_path: Path) -> None:
    teacher = ModelScorer(model)
    retriever = Retriever.build(model, {"d1": "text"}, tmp_path / "index")
    texts = TrainingRow("", "text", (), ("one", "two"))
    with pytest.raises(
        BadValueError, match="query 'q0' is given by id only; give queries, where its text is"
    ):
        list(label(RECORDS, teacher))
    with pytest.raises(BadValueError, match="document 'd1' is given by id only; give corpus"):
        list(label(RECORDS, teacher, queries=QUERIES))
    with pytest.raises(
        BadValueError, match="no document 'd0' in what is given; give the corpus that the examples"
    ):
        list(label(RECORDS, teacher, queries=QUERIES, corpus={"d1": "text"}))
    with pytest.raises(BadValueError, match="has documents without ids, which an index cannot find"):
        list(label([texts], IndexScorer(retriever.collection)))
    with pytest.raises(BadValueError, match="the index has no document 'd0'"):
        list(label(RECORDS, IndexScorer(retriever.collection), queries=QUERIES))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(-(10**5), 10**5).map(lambda n: n / 64), min_size=1, max_size=6), min_size=1)
)
def test_normalization(scores: list[list[float]]) -> None:
    records = [TrainingRow("q", "text", tuple(f"d{i}" for i in range(len(line)))) for line in scores]
    place = iter(scores)

    def teacher(queries: Any, documents: Any) -> Any:
        return [np.array(next(place), np.float32) for _ in queries]

    texts = {f"d{i}": "" for i in range(6)}
    plain = [record.scores for record in label(records, teacher, corpus=texts)]
    assert [np.float32(line).tolist() for line in plain] == scores
    for kind in ("minmax", "zscore"):
        place = iter(scores)
        for record, given_line in zip(
            label(records, teacher, corpus=texts, normalization=kind), scores, strict=True
        ):
            line, given_scores = np.array(record.scores), np.array(given_line, np.float64)
            if np.ptp(given_scores) == 0:
                assert not line.any()
            elif kind == "minmax":
                assert (line.min(), line.max()) == (0, 1)
            else:
                assert line.mean() == pytest.approx(0, abs=1e-6)
                assert line.std() == pytest.approx(1, abs=1e-6)
            assert (np.diff(line[np.argsort(given_scores)]) >= 0).all()


# ---- command line ----


@pytest.fixture
def call(tmp_path: Path, write_beir: Any, monkeypatch: pytest.MonkeyPatch, command: Call) -> Call:
    """Run a command in a folder with a BEIR folder and an index of it."""
    write_beir(tmp_path / "beir", TEXTS, QUERIES, {"q0": {"d1": 1, "d3": 0}, "q2": {"d4": 1}}, "train")
    Retriever.build("bm25", TEXTS, tmp_path / "bm25").close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path / "cache"))
    return command


def read(path: str) -> dict[str, dict[str, Any]]:
    return {row["query_id"]: row for row in map(json.loads, Path(path).read_text().splitlines())}


def test_the_command_line(call: Call, cross_encoder: str) -> None:
    teacher = f"cross-encoder:{cross_encoder}"
    assert call("mine", "bm25", "beir", "--out", "train.jsonl", "--negatives", "2")[0] == 0
    with Retriever.load("bm25") as retriever:
        qrels = {"q0": {"d1": 1}, "q2": {"d4": 1}}
        expected = list(mine(retriever, QUERIES, qrels, teacher=load_teacher(teacher)))
    code, out, err = call(
        "label", "train.jsonl", "--corpus", "beir", "--teacher", teacher, "--out", "labelled.jsonl"
    )
    assert (code, out) == (0, "")
    assert err.startswith("irkit: labelled the documents of 2 queries in ")
    for record in expected:
        row = read("labelled.jsonl")[record.query_id]
        scores = dict(zip(record.document_ids, record.scores or (), strict=True))
        assert row["scores"] == pytest.approx([scores[name] for name in row["document_ids"]], abs=1e-5)
    # a BEIR folder and a run, which have ids only
    code, _, err = call("label", "beir", "--teacher", "bm25", "--out", "beir.jsonl")
    assert code == 0, err
    assert read("beir.jsonl")["q0"]["document_ids"] == ["d1", "d3"]
    Path("run.trec").write_text("q0 Q0 d4 1 3.5 x\nq0 Q0 d1 2 2.5 x\n")
    code, _, err = call(
        *(
            "label",
            "run.trec",
            "--corpus",
            "beir",
            "--split",
            "train",
            "--teacher",
            teacher,
            "--out",
            "run.jsonl",
        ),
        *("--normalization", "minmax"),
    )
    assert code == 0, err
    row = read("run.jsonl")["q0"]
    assert (row["document_ids"], row["positives"], set(row["scores"])) == (["d1", "d4"], 1, {0.0, 1.0})


def test_an_interrupted_run_goes_on(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    call("mine", "bm25", "beir", "--out", "train.jsonl", "--negatives", "2")
    rows = Path("train.jsonl").read_text()
    Path("train.jsonl").write_text(35 * rows)  # 70 rows, of which 64 are scored together
    words = ("label", "train.jsonl", "--teacher", "bm25", "--out", "labelled.jsonl")
    real, asked = IndexScorer.__call__, []

    def interrupted(self: Any, queries: Any, documents: Any) -> Any:
        if asked:
            raise KeyboardInterrupt
        asked.append(queries[0].id)
        return real(self, queries, documents)

    monkeypatch.setattr(IndexScorer, "__call__", interrupted)
    assert call(*words)[::2] == (130, "irkit: interrupted - give the same command again to go on\n")
    assert not Path("labelled.jsonl").exists()
    monkeypatch.setattr(IndexScorer, "__call__", real)
    code, _, err = call(*words)
    assert code == 0
    assert "labelled the documents of 70 queries (64 of them before) in" in err
    resumed = Path("labelled.jsonl").read_bytes()
    assert call(*words, "--overwrite")[0] == 0
    assert Path("labelled.jsonl").read_bytes() == resumed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.jsonl", "--teacher", "bm25", "--normalization", "max"), "expected none, minmax, zscore"),
        (("none.jsonl", "--teacher", "bm25"), "none.jsonl"),
        (("broken.jsonl", "--teacher", "bm25"), "broken.jsonl:2"),
        (("train.jsonl", "--teacher", "bm25", "--activation", "sigmoid"), "settings of a cross-encoder"),
        (("train.jsonl", "--teacher", "cross-encoder:none"), "loading the cross-encoder none"),
        (("train.jsonl", "--teacher", "bm25"), "query 'q0' is given by id only; give queries"),
        (("train.jsonl", "--teacher", "bm25", "--queries", "train.jsonl"), "train.jsonl"),
        (("last.jsonl", "--teacher", "bm25", "--queries", "beir"), "there is no query 'none' in beir"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_commands(call: Call, words: tuple[str, ...], message: str) -> None:
    Path("train.jsonl").write_text('{"query_id": "q0", "document_ids": ["d1"]}\n')
    Path("last.jsonl").write_text('{"query_id": "none", "document_ids": ["d1"]}\n')
    Path("broken.jsonl").write_text(
        '{"query_id": "q0", "query": "x", "document_ids": ["d1"]}\n{"query_id": "q1"}\n'
    )
    code, out, err = call("label", *words, "--out", "out.jsonl")
    assert (code, out) == (2, "")
    assert message in err
    assert not Path("out.jsonl").exists()


def test_a_batch_of_no_rows_is_refused(cross_encoder: str) -> None:
    for size in (0, -1):
        with pytest.raises(BadValueError, match="batch_size"):
            list(label(iter([]), CrossEncoder(cross_encoder), batch_size=size))


def test_a_cross_encoder_whose_first_positions_are_of_padding(tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, RobertaConfig, RobertaForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    config = RobertaConfig(
        **sizes, vocab_size=len(tokenizer), max_position_embeddings=20, pad_token_id=0, num_labels=1
    )
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    teacher = CrossEncoder(str(tmp_path))
    assert teacher.max_length == 19
    assert teacher(ASKED[:1], [[Document("d", "search " * 50)]])[0].shape == (1,)


def test_a_decoder_as_cross_encoder_that_names_no_padding(tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=64, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    teacher = CrossEncoder(str(tmp_path))
    together = teacher(ASKED[:1], [[Document("a", "search"), Document("b", "a neural search model")]])[0]
    alone = teacher(ASKED[:1], [[Document("a", "search")]])[0]
    np.testing.assert_allclose(together[:1], alone, atol=1e-5)
