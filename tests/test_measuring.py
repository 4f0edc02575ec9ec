"""Measures and costs of a model on several collections, groups of collections, BEIR by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from irkit import Dense, Model, MultiVector, Ragged, Retriever, Sparse, evaluate, score
from irkit.errors import BadValueError, ConfigError, StorageError
from irkit.evaluation.measures import Evaluation
from irkit.index import index_names
from irkit.training.interaction import MVA, PooledAttention
from irkit.training.measuring import measure
from irkit.training.result_files import read_costs, write_costs
from irkit.training.train_recipe import TrainRecipe
from irkit.training.train_run import prepare
from irkit.training.validation import (
    EvaluationConfig,
    expand_suites,
    geometric_mean,
    open_collections,
    summarize,
)
from irkit.training.vector_costs import Costs

TEXTS = ["a search index", "neural text model", "the token of a model", "vector search", "an index of text"]


@pytest.fixture
def collection(write_beir: Callable[..., Path], tmp_path: Path) -> Path:
    """20 documents; query 3 and 4 have one relevant document each, q3 has the id of a document."""
    texts = {f"d{n}": f"{text} number {n}" for n, text in enumerate(TEXTS * 4)}
    texts["q3"] = TEXTS[3]
    folder = write_beir(
        tmp_path / "one", texts, {f"q{n}": t for n, t in enumerate(TEXTS)}, {"q3": {"d3": 1}}, "test"
    )
    (folder / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t1\n")
    return folder


def config(folder: Path, **changes: Any) -> EvaluationConfig:
    settings = {"source": str(folder), "split": "test", "measures": "nDCG@10 RR", "k": 30}
    return EvaluationConfig.parse(settings | changes)


def models(tiny_bert: Path) -> dict[str, Model]:
    torch.manual_seed(0)
    return {"multi_vector": Model.multi_vector(tiny_bert, "linear"), "sparse": Model.sparse(tiny_bert)}


def test_shared_documents_are_encoded_once(
    collection: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each result is that of a collection alone, whole, cut to some documents, or as a run."""
    run = collection / "some.trec"
    run.write_text("".join(f"q1 Q0 d{n} 1 {n} x\n" for n in range(5)))
    parts = [
        config(collection, name="test"),
        config(collection, name="dev", split="dev"),
        config(collection, name="few", documents=7),
        config(collection, name="run", split="dev", run=str(run)),
        config(collection, name="cut", document_length=3),
    ]
    model = models(tiny_bert)["sparse"]
    alone = {
        name: measure(model, [one])[name] for one in open_collections(parts) for name in [one.config.name]
    }
    encoded: list[int] = []
    stream = Model.stream_representations

    def counted(self: Model, texts: Any, side: Any, **options: Any) -> Iterator[Any]:
        if side == "document":
            texts = list(texts)
            encoded.append(len(texts))
        return stream(self, texts, side, **options)

    monkeypatch.setattr(Model, "stream_representations", counted)
    together = measure(model, open_collections(parts))
    assert encoded == [21, 21]  # again for other lengths
    assert list(together) == ["test", "dev", "few", "run", "cut"]
    assert together == alone


@pytest.mark.parametrize("kind", ["multi_vector", "sparse"])
def test_an_index_finds_what_a_retriever_with_it_finds(
    kind: str, collection: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    model = models(tiny_bert)[kind]
    index = {"multi_vector": "plaid", "sparse": {"kind": "inverted"}}[kind]
    measured = measure(model, open_collections([config(collection, index=index)]))["one"]
    retriever = Retriever.build(model, str(collection), tmp_path / "index", index=index)
    run = retriever.run(str(collection), 30)
    expected = evaluate(run, str(collection), "nDCG@10 RR")
    assert measured.evaluation == expected
    assert measured.costs["index bytes"] > 0
    assert measured.costs["ms per query"] > 0
    exact = measure(model, open_collections([config(collection)]))["one"]
    assert exact.costs.keys() == {"query length", "document length", "floats", "FLOPS"}
    few = measure(model, open_collections([config(collection, index=index, documents=7)]))["one"]
    assert few.costs["index bytes"] < measured.costs["index bytes"]


def test_an_index_that_does_not_suit_is_refused_before_training(
    collection: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    recipe = {
        "model": {"name": str(tiny_bert), "kind": "multi_vector"},
        "data": {"source": str(collection), "split": "test", "documents": 1},
        "losses": {"kind": "infonce"},
        "train": {"use_cpu": True},
        "evaluation": {"source": str(collection), "split": "test", "index": "inverted"},
    }
    with pytest.raises(BadValueError, match="inverted"):
        prepare(TrainRecipe.resolve(recipe), tmp_path / "out")
    changes = ["evaluation.index=plaid", "interaction={kind: mva}"]
    with pytest.raises(ConfigError, match=r"evaluation.index: one is searched .* leave index out"):
        prepare(TrainRecipe.resolve(recipe, changes), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"unknown kind 'plad'; did you mean 'plaid'"):
        config(collection, index="plad")
    with pytest.raises(ConfigError, match="takes no 'index'"):
        config(collection, index="plaid", run="x.trec")
    assert "plaid" in index_names()


def test_costs_by_hand() -> None:
    queries = Sparse.from_dense(torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0]]))
    costs = Costs(queries)
    for row in ([[1.0, 1.0, 1.0]], [[0.0, 0.0, 1.0]]):
        costs.add(Sparse.from_dense(torch.tensor(row)))
    overlaps = [2, 0, 1, 0]  # of all pairs
    assert costs.means() == {
        "query length": 1.5,
        "document length": 2.0,
        "floats": 2.0,
        "FLOPS": sum(overlaps) / 4,
    }
    vectors = MultiVector(Ragged.from_rows([torch.ones(2, 8), torch.ones(4, 8)]))
    costs = Costs(vectors)
    costs.add(vectors)
    assert costs.means() == {"query length": 3, "document length": 3, "floats": 24, "FLOPS": 72}
    costs = Costs(Dense(torch.ones(2, 768)))
    costs.add(Dense(torch.ones(5, 768)))
    assert costs.means() == {"query length": 1, "document length": 1, "floats": 768, "FLOPS": 768}


def test_costs_of_table_5() -> None:
    """The rows of the paper: floats, and megaFLOPS for 1,000 documents. It rounds the length of a query."""
    for dim, length, floats, flops in ((128, 70, 17920, 130), (64, 24, 3072, 25), (32, 16, 1024, 8)):
        attention = PooledAttention(768, MVA(dim=dim))
        queries = MultiVector(Ragged.from_rows([torch.ones(7, 768), torch.ones(8, 768)]))
        documents = MultiVector(Ragged.from_rows([torch.ones(length, 768)]))
        costs = Costs(attention.project_queries(queries), attention=True)
        costs.add(attention.project_documents(documents))
        means = costs.means()
        assert means["floats"] == floats
        assert means["FLOPS"] / 1000 == pytest.approx(flops, rel=0.08)


def test_attention_is_measured_by_its_scores(collection: Path, tiny_bert: Path) -> None:
    """Keys and values are computed once, and the scores are those of the attention as a whole."""
    model = models(tiny_bert)["multi_vector"]
    attention = PooledAttention(model.dim, MVA(dim=4, pooling="first_k", size=3)).eval()
    (judged,) = open_collections([config(collection)])
    by_parts = measure(model, [judged], attention)["one"]
    whole = measure(model, [judged], lambda queries, documents: attention(queries, documents))["one"]
    assert by_parts.evaluation == whole.evaluation
    assert by_parts.costs["document length"] == 3
    assert by_parts.costs["floats"] == 24


@pytest.mark.parametrize("kind", ["multi_vector", "sparse", "attention"])
def test_a_run_is_reranked_by_scores_of_its_pairs_alone(
    kind: str, collection: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are those of a search of all documents, and no other pair is compared."""
    wanted = {"q1": ["d5", "d2", "q3"], "q2": ["d2"], "q3": ["d0", "d2", "d1", "d19"]}  # none for q0 and q4
    run = collection / "some.trec"
    lines = [f"{query} Q0 {d} 1 1 x" for query, documents in wanted.items() for d in documents]
    run.write_text("\n".join(lines))
    judged = "".join(f"q{n}\td{n}\t1\n" for n in range(5))
    (collection / "qrels" / "all.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    monkeypatch.setattr("irkit.training.measuring.evaluate", lambda run, *_, **__: run)
    model = models(tiny_bert)["sparse" if kind == "sparse" else "multi_vector"]
    attention = PooledAttention(model.dim, MVA(dim=4)).eval() if kind == "attention" else score
    compared: list[int] = []

    def counted(queries: Any, documents: Any) -> torch.Tensor:
        compared.append(len(queries) * len(documents))
        return attention(queries, documents)

    def ranked(compare: Any, **changes: Any) -> Any:
        (opened,) = open_collections([config(collection, split="all", measures="RR", **changes)])
        return measure(model, [opened], compare)["one"].evaluation

    everything, reranked = ranked(attention), ranked(attention, run=str(run))
    for query, documents in wanted.items():
        scores = dict(zip(*everything.columns(query), strict=True))
        found = dict(zip(*reranked.columns(query), strict=True))
        assert sorted(found) == sorted(documents)
        assert found == pytest.approx({d: scores[d] for d in documents}, abs=1e-5)
        assert list(found.values()) == sorted(found.values(), reverse=True)
    assert "q4" not in reranked or not len(reranked.columns("q4")[0])
    ranked(counted, run=str(run))
    assert sum(compared) == 8


@pytest.mark.parametrize("name", ["R@31", "recall_31"])
def test_a_measure_of_more_documents_than_are_retrieved_is_refused(name: str, collection: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{name} looks at 31 documents .* only 30 .* set k: 31"):
        open_collections([config(collection, measures=f"RR@10 {name}")])
    assert open_collections([config(collection, measures=f"AP {name}", k=31)])


def test_a_second_model_scores_the_best_documents_again(
    collection: Path, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = models(tiny_bert).values()
    second.save_pretrained(tmp_path / "second")
    queries = ["q1", "q2", "q3"]
    monkeypatch.setattr("irkit.training.measuring.evaluate", lambda run, *_, **__: run)

    def ranked(model: Model, **changes: Any) -> dict[str, list[str]]:
        parts = open_collections([config(collection, split=None, measures="RR", **changes)])
        run: Any = measure(model, parts)[parts[0].config.title].evaluation
        return {query: list(run.columns(query)[0]) for query in queries if query in run}

    one, other = ranked(first), ranked(second)
    for top in (4, 30):
        both = ranked(first, second_pass={"scorer": str(tmp_path / "second"), "top": top})
        for query, documents in one.items():
            assert both[query][top:] == documents[top:]
            wanted = sorted(documents[:top], key=other[query].index)
            assert sorted(both[query][:top]) == sorted(wanted)
            assert both[query][0] in (wanted[0], *(d for d in wanted if d[-1] == wanted[0][-1]))
    with pytest.raises(StorageError):
        open_collections([config(collection, second_pass={"scorer": str(tmp_path / "none"), "top": 1})])
    with pytest.raises(ConfigError, match="top"):
        config(collection, second_pass={"scorer": "x", "top": 0})


def test_multiplications_of_a_cross_encoder_by_hand(
    collection: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    """Linear layers of h x h (4 a layer) and h x i (2), the products of attention, then one token's score."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    settings = BertConfig.from_pretrained(tiny_bert, num_labels=1, type_vocab_size=2)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    for part in (BertForSequenceClassification(settings), tokenizer):
        part.save_pretrained(tmp_path / "cross")
    first = models(tiny_bert)["sparse"]
    (alone,) = open_collections([config(collection)])
    second_pass = {"scorer": f"cross-encoder:{tmp_path / 'cross'}", "top": 1}
    (judged,) = open_collections([config(collection, second_pass=second_pass)])
    assert judged.pairs == 21
    added = measure(first, [judged])["one"].costs["FLOPS"] - measure(first, [alone])["one"].costs["FLOPS"]
    h, i, layers = settings.hidden_size, settings.intermediate_size, settings.num_hidden_layers
    possible = set()
    for document in judged.source:
        n = len(tokenizer(judged.queries[0].text, document.full_text).input_ids)
        possible.add(layers * (n * (4 * h * h + 2 * h * i) + 2 * n * n * h) + h * h + h)
    assert round(added * judged.pairs) in possible
    run = collection / "some.trec"
    run.write_text("q3 Q0 d3 1 2.0 r\nq3 Q0 d4 2 1.0 r\n")
    assert open_collections([config(collection, run=str(run))])[0].pairs == 2


def test_documents_with_the_id_of_the_query_may_be_ignored(collection: Path, tiny_bert: Path) -> None:
    model = models(tiny_bert)["sparse"]
    configs = [config(collection, name="all"), config(collection, name="others", drop_identical_ids=True)]
    results = measure(model, open_collections(configs))
    ranks = {name: 1 / result.evaluation.mean["RR"] for name, result in results.items()}
    assert ranks["others"] == pytest.approx(ranks["all"] - 1)  # q3 itself was first
    least = {"k": round(ranks["all"]) - 1, "measures": "RR", "drop_identical_ids": True}
    for changes in (least, least | {"index": "flat"}):
        (result,) = measure(model, open_collections([config(collection, **changes)])).values()
        assert 1 / result.evaluation.mean["RR"] == pytest.approx(ranks["others"])


def test_beir_has_a_name() -> None:
    entry = {"source": "beir-14", "at_end": True, "measures": "nDCG@10"}
    parts = expand_suites([EvaluationConfig.parse(entry)])
    assert len(parts) == 25
    assert sum(part.group == "CQADupStack" for part in parts) == 12
    assert len({part.title for part in parts}) == 25
    assert all(part.source.startswith("ir_datasets:beir/") and part.drop_identical_ids for part in parts)
    assert [part.title for part in parts[:13]] == [
        part.title for part in expand_suites([EvaluationConfig(source="beir-13")])
    ]
    recipe = {"model": "m", "data": {"source": "d"}, "losses": {"kind": "kl"}, "evaluation": entry}
    resolved = TrainRecipe.resolve(recipe)
    assert len(resolved.evaluation) == 25
    assert TrainRecipe.resolve(resolved) == resolved
    for key in ("name", "split", "run", "group"):
        with pytest.raises(ConfigError, match=f"beir-13 is 13 collections; '{key}'"):
            TrainRecipe.resolve(recipe | {"evaluation": {"source": "beir-13", key: "x"}})
    kept = EvaluationConfig(source="beir-13", drop_identical_ids=False)
    assert not any(part.drop_identical_ids for part in expand_suites([kept]))


@pytest.mark.parametrize("entry", [{"source": "b", "at_end": [1]}, {"source": "b", "indx": "flat"}, "b"])
def test_a_wrong_value_beside_a_suite_is_named_by_its_written_place(entry: Any) -> None:
    recipe = {"model": "m", "data": {"source": "d"}, "losses": {"kind": "kl"}}
    evaluation = [{"source": "beir-14"}, {"source": "a"}, entry]
    with pytest.raises(ConfigError, match=r"evaluation\.2"):
        TrainRecipe.resolve(recipe | {"evaluation": evaluation})


def test_beir_is_what_ir_datasets_has() -> None:
    library = pytest.importorskip("ir_datasets")
    for part in expand_suites([EvaluationConfig(source="beir-14")]):
        dataset = library.load(part.source.removeprefix("ir_datasets:"))
        assert dataset.has_docs()
        assert dataset.has_queries()
        assert dataset.has_qrels()


def test_a_group_counts_once() -> None:
    values = {"a": 0.2, "b": 0.4, "c": 0.9}
    evaluations = {name: Evaluation({"AP": value}, {"AP": {"q": value}}) for name, value in values.items()}
    means = summarize(evaluations, {"a": "ab", "b": "ab", "c": ""})
    assert means == pytest.approx(
        {"AP": 0.6, "geometric_AP": math.sqrt(0.3 * 0.9), "ab_AP": 0.3, "c_AP": 0.9}
    )
    assert geometric_mean([0.5, 0.0]) == 0.0


def test_costs_are_written_and_read(tmp_path: Path) -> None:
    write_costs({"a": {"FLOPS": 2.5}}, tmp_path / "costs.jsonl")
    assert read_costs(tmp_path / "costs.jsonl") == {("FLOPS", "a"): 2.5}
    (tmp_path / "costs.jsonl").write_text(json.dumps({"dataset": "a"}))
    with pytest.raises(StorageError, match=r"costs.jsonl: .*remove its folder"):
        read_costs(tmp_path / "costs.jsonl")


def test_a_missing_file_comes_with_its_command(tmp_path: Path) -> None:
    recipe = {
        "model": "m",
        "data": {"source": "mined.jsonl"},
        "losses": {"kind": "kl"},
        "prepare": {str(tmp_path): "mkdir", "mined.jsonl": "irkit mine bm25 scifact --out mined.jsonl"},
    }
    with pytest.raises(StorageError, match=r"no mined.jsonl .*it comes from: irkit mine bm25 scifact"):
        prepare(TrainRecipe.resolve(recipe), tmp_path / "out")


def test_the_first_measure_may_have_commas_and_spaces() -> None:
    for measures, first in (
        ("P(rel=2, judged_only=True)@5 R@100", "P(rel=2, judged_only=True)@5"),
        ("nDCG@10,R@100", "nDCG@10"),
    ):
        assert EvaluationConfig(source="x", measures=measures).measure == first


def test_pooling_that_does_not_suit_the_model_is_refused_before_training(
    tiny_dense: Path, collection: Path, tmp_path: Path
) -> None:
    recipe = {
        "model": str(tiny_dense),
        "data": {"source": str(collection), "split": "test"},
        "losses": {"kind": "infonce"},
        "train": {"max_steps": 1},
        "evaluation": {
            "source": str(collection),
            "split": "test",
            "at_end": True,
            "token_pooling": {"vectors": 3},
        },
    }
    with pytest.raises(BadValueError, match=r"evaluation.token_pooling of .*: the model makes dense vectors"):
        prepare(TrainRecipe.parse(recipe), tmp_path / "out")
    assert not (tmp_path / "out").exists()
