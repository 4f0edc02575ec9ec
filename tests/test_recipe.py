"""Recipes: what they say becomes a model, arguments and data, and what is wrong with them is said at once."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from irkit import Model, Retriever
from irkit.errors import BadTypeError, BadValueError, ConfigError, StorageError
from irkit.evaluation.measures import Evaluation
from irkit.training.measuring import measure
from irkit.training.model_recipe import make_model
from irkit.training.result_files import write_results
from irkit.training.train_recipe import TrainRecipe
from irkit.training.train_run import train
from irkit.training.validation import (
    EvaluationConfig,
    JudgedCollection,
    open_collections,
    summarize,
)

TEXTS = ["a search index", "neural text model", "the token of a model", "vector search", "an index of text"]


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    lines = [{"_id": f"d{n}", "text": f"{text} number {n}"} for n, text in enumerate(TEXTS * 4)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"_id": f"q{n}", "text": text} for n, text in enumerate(TEXTS)]
    (folder / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    header = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels" / "train.tsv").write_text(header + "q0\td0\t1\nq1\td1\t1\nq2\td2\t1\n")
    (folder / "qrels" / "test.tsv").write_text(header + "q3\td3\t1\nq4\td4\t1\n")
    return folder


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"name": "somewhere"},
        "data": {"source": "somewhere", "documents": 1},
        "losses": {"kind": "infonce"},
    } | changes


def test_one_of_a_list_stands_alone_and_a_name_is_a_model() -> None:
    resolved = TrainRecipe.resolve(recipe(model="name"))
    assert resolved.model.name == "name"
    assert resolved.model.kind == "pretrained"
    assert [config.source for config in resolved.data] == ["somewhere"]
    assert [loss.kind for loss in resolved.losses] == ["infonce"]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "model": {
                "kind": "multi_vector",
                "name": "m",
                "projection": {"depth": 2},
                "markers": ["[Q]", "[D]"],
            }
        },
        {
            "model": {"kind": "sparse", "name": "m", "config": {"pooling": "sum"}, "queries": "static"},
            "regularizers": {"kind": "flops", "query": 1e-3, "document": 1e-3},
            "losses": [{"kind": "margin_mse"}, {"kind": "kl", "weight": 0.5}],
        },
        {
            "matryoshka": {"dims": [16, 32]},
            "train": {"learning_rates": {"embeddings": 0}, "lora": {"r": 4}},
            "evaluation": {"source": "there", "measures": "RR@10 nDCG@10", "at_end": True},
        },
    ],
)
def test_resolved_recipe_reads_back(changes: dict[str, Any], tmp_path: Path) -> None:
    resolved = TrainRecipe.resolve(recipe(**changes))
    file = tmp_path / "recipe.yaml"
    file.write_text(resolved.to_yaml())
    assert TrainRecipe.resolve(file) == resolved
    assert TrainRecipe.resolve(resolved, ["train.seed=7"]).train == {**resolved.train, "seed": 7}


def test_overrides_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(data=[{"source": "one"}, {"source": "two"}])))
    overrides = ["train.learning_rate=1e-5", "data.1.source=three", "losses.kind=kl", "model.name=other"]
    resolved = TrainRecipe.resolve(file, overrides)
    assert resolved.train == {"learning_rate": 1e-5}
    assert [config.source for config in resolved.data] == ["one", "three"]
    assert resolved.losses[0].kind == "kl"
    assert resolved.model.name == "other"
    with pytest.raises(ConfigError, match="a number below 2 in place of '2'"):
        TrainRecipe.resolve(file, ["data.2.source=three"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("los=1", "unknown key 'los'; did you mean 'losses'"),
        ("train.learnin_rate=1", "train: unknown key 'learnin_rate'; did you mean 'learning_rate'"),
        ("train.push_to_hub=true", "unknown key 'push_to_hub'; it does nothing in irkit"),
        ("train.learning_rate=fast", "train.learning_rate: .* a valid number, .*'fast'"),
        ("train=fast", "train: expected keys and values, got 'fast'"),
        ("interaction=xtr", "interaction: expected keys and values such as {kind: xtr}, got 'xtr'"),
        ("interaction=[1]", r"interaction: expected keys and values, got \[1\]"),
        ("losses=infonce", "losses: expected keys and values such as {kind: infonce}"),
        ("data=notes", "data: expected keys and values such as {source: notes}, got 'notes'"),
        ("train.gradient_cache_size=0", "train.gradient_cache_size: expected 1 or more"),
        ("train.per_device_train_batch_size=0", "train.per_device_train_batch_size: expected 1 or more"),
        ("train.learning_rate=-1e-5", "train.learning_rate: expected 0 or more, got -1e-05"),
        ("train.learning_rate=.nan", "train.learning_rate: expected 0 or more, got nan"),
        ("train.learning_rate=0", "train.learning_rate: expected more than 0, got 0"),
        ("train={learning_rate: 0, learning_rates: {head: 0}}", "train.learning_rate: expected more than 0"),
        ("train.lora={lora_alpha: 0}", "train.lora.lora_alpha: expected more than 0, got 0"),
        ("train.lora={lora_alpha: .nan}", "train.lora.lora_alpha: expected more than 0, got nan"),
        ("train.dataloader_prefetch_factor=0", "train.dataloader_prefetch_factor: expected 1 or more"),
        ("train.num_train_epochs=0", "train.num_train_epochs: expected more than 0, got 0"),
        ("train.eval_steps=0", "train.eval_steps: expected more than 0"),
        ("train.learning_rates={'(': 1e-3}", r"train.learning_rates: '\(' is no pattern"),
        ("train.learning_rates={head: -1}", "train.learning_rates: expected 0 or more for 'head', got -1"),
        ("train.eval_steps=3", "train.eval_steps needs a collection to evaluate on"),
        ("train.early_stopping_patience=3", "needs a collection to evaluate on"),
        ("train.eval_strategy=epoch", "train.eval_strategy needs a collection to evaluate on"),
        ("train.save_strategy=best", "train.save_strategy needs a collection to evaluate on"),
        ("train.warmup_steps=-1", "train.warmup_steps: expected 0 or more, got -1"),
        ("train.dataloader_pin_memory=true", "'dataloader_pin_memory'; it does nothing in irkit"),
        ("losses.weight=0", "losses.weight: Input should be greater than 0"),
        ("losses.weight=.inf", "losses.weight: Input should be a finite number"),
        ("losses.temperature=0", "losses.temperature: Input should be greater than 0"),
        ("losses=[]", "losses: .* at least 1 item"),
        ("matryoshka={dims: []}", "matryoshka.dims: .* at least 1 item"),
        ("regularizers={kind: flops, document: 0}", "both 0, which does nothing"),
        ("evaluation={source: x, measures: ' '}", "evaluation.measures: .* at least 1 character"),
        ("model.kind=spars", "model: unknown kind 'spars'; did you mean 'sparse'"),
        ("model.kind=densee", "model: unknown kind 'densee'; did you mean 'dense'"),
        ("model.projection=linear", "'model.projection'; it belongs to another part or another kind"),
        ("model.queries=lexikal", "model.queries: queries: got 'lexikal', expected 'lexical'"),
        ("losses.kind=kld", "losses: unknown kind 'kld'; did you mean 'kl'"),
        ("losses=[{kind: infonce, temperatur: 1}]", "unknown key 'losses.0.temperatur'; did you"),
        ("losses.temperatur=1", "unknown key 'losses.temperatur'; did you mean 'temperature'"),
        ("data.sorce=x", "unknown key 'data.sorce'; did you mean 'source'"),
        ("data=[]", "data: .* at least 1 item"),
        ("evaluation.split=dev", "missing key 'evaluation.source'"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainRecipe.resolve(recipe(), [override])


def test_what_has_a_rate_of_its_own_may_be_all_that_is_trained() -> None:
    resolved = TrainRecipe.resolve(recipe(), ["train={learning_rate: 0, learning_rates: {head: 1e-3}}"])
    assert resolved.train["learning_rate"] == 0


def test_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nothing.yaml"):
        TrainRecipe.resolve(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_text("model: x\ndata: {source: x}\nlosses: {kind: kl}\ntrain: {sead: 1}\n")
    with pytest.raises(ConfigError, match=r"bad.yaml: train: unknown key 'sead'; did you mean 'seed'"):
        TrainRecipe.resolve(tmp_path / "bad.yaml")
    with pytest.raises(BadTypeError, match="got 3"):
        TrainRecipe.resolve(3)  # type: ignore[arg-type]


def test_arguments_evaluate_where_there_is_something(tmp_path: Path) -> None:
    none = TrainRecipe.resolve(recipe()).arguments(tmp_path)
    assert none.eval_strategy == "no"
    only_end = TrainRecipe.resolve(recipe(evaluation={"source": "x", "at_end": True})).arguments(tmp_path)
    assert only_end.eval_strategy == "no"
    every = TrainRecipe.resolve(recipe(evaluation={"source": "x", "measures": "RR@10 P@5"})).arguments(
        tmp_path
    )
    assert every.eval_strategy == "epoch"
    assert every.metric_for_best_model == "eval_RR@10"
    assert (every.load_best_model_at_end, every.save_strategy) == (True, "epoch")
    assert not only_end.load_best_model_at_end
    for said in ({"save_steps": 7}, {"save_strategy": "no"}, {"load_best_model_at_end": False}):
        own = TrainRecipe.resolve(recipe(evaluation={"source": "x"}, train=said)).arguments(tmp_path)
        assert not own.load_best_model_at_end
        assert {key: getattr(own, key) for key in said} == said
    stopping = {"eval_steps": 5, "early_stopping_patience": 2}
    steps = TrainRecipe.resolve(recipe(evaluation={"source": "x"}, train=stopping)).arguments(tmp_path)
    assert (steps.eval_strategy, steps.save_strategy, steps.save_steps) == ("steps", "steps", 5)
    assert steps.load_best_model_at_end
    assert steps.greater_is_better
    for said in ({"save_steps": 7}, {"save_strategy": "no"}, {"load_best_model_at_end": False}):
        with pytest.raises(ConfigError, match=f"early_stopping_patience: .* leave {next(iter(said))}.* out"):
            TrainRecipe.resolve(recipe(evaluation={"source": "x"}, train=stopping | said)).arguments(tmp_path)
    asked = recipe(evaluation={"source": "x"}, train={"eval_strategy": "steps", "logging_steps": 30})
    often = TrainRecipe.resolve(asked).arguments(tmp_path)
    assert (often.eval_steps, often.save_steps, often.load_best_model_at_end) == (30, 30, True)
    for values, message in (
        ({"adam_beta1": 1}, "train: Invalid beta"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "train: .* unexpected keyword argument 'power'"),
        ({"accelerator_config": {"split": True}}, "train: .* unexpected keyword argument 'split'"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainRecipe.resolve(recipe(train=values)).arguments(tmp_path)


def test_bfloat16_needs_its_instructions_and_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = TrainRecipe.resolve(recipe(train={"bf16": True}))
    monkeypatch.setattr("irkit.training.training_arguments.prefers_bfloat16", lambda device: True)
    assert asking.arguments(tmp_path).bf16
    monkeypatch.setattr("irkit.training.training_arguments.prefers_bfloat16", lambda device: False)
    with pytest.warns(UserWarning, match=r"train.bf16.*trains in float32"):
        assert not asking.arguments(tmp_path).bf16


def test_gradient_checkpointing_keeps_its_name(tmp_path: Path) -> None:
    arguments = TrainRecipe.resolve(recipe(train={"gradient_checkpointing": True})).arguments(tmp_path)
    assert arguments.gradient_checkpointing


def test_models_are_made(tiny_bert: Path, tmp_path: Path) -> None:
    def made(**settings: Any) -> Model:
        torch.manual_seed(1)
        return make_model(TrainRecipe.resolve(recipe(model={"name": str(tiny_bert), **settings})).model)

    colbert = made(
        kind="multi_vector", projection={"dim": 8}, markers=["[Q] ", "[D] "], config={"document_length": 7}
    )
    assert (colbert.kind, colbert.dim, colbert.max_length("document")) == ("multi_vector", 8, 7)
    assert colbert.prompts["query"] == "[Q] "
    sparse = made(kind="sparse", queries="static", max_length=9)
    assert (sparse.kind, sparse.max_length("document"), sparse.max_length("query")) == ("sparse", 9, 9)
    assert sparse.query_model is not None
    sparse = made(kind="sparse", queries="static", query_length=5, document_length=9)
    assert (sparse.max_length("document"), sparse.max_length("query")) == (9, 5)
    colbert.save_pretrained(tmp_path / "colbert")
    shorter = {"query_length": 5, "document_length": 6}
    again = make_model(
        TrainRecipe.resolve(recipe(model={"name": str(tmp_path / "colbert"), **shorter})).model
    )
    assert (again.max_length("document"), again.max_length("query")) == (6, 5)
    for more, expected in (({"max_length": 5}, 5), ({"max_length": 99}, 7)):  # the model is cut at 7
        cut = make_model(TrainRecipe.resolve(recipe(model={"name": str(tmp_path / "colbert"), **more})).model)
        assert cut.max_length("document") == expected
    fixed = {"query_expansion": {"strategy": "fixed", "length": 8}}
    made(kind="multi_vector", config=fixed).save_pretrained(tmp_path / "fixed")
    said = {"name": str(tmp_path / "fixed"), "query_length": 6}
    expanded = make_model(TrainRecipe.resolve(recipe(model=said)).model)
    assert expanded.max_length("query") == 6
    assert expanded.encode_representation(["index"], "query").tokens.lengths.tolist() == [6]
    (tmp_path / "words.txt").write_text("index\nsearch\n")
    assert made(kind="sparse", vocabulary=str(tmp_path / "words.txt")).vocabulary == ["index", "search"]
    with pytest.warns(UserWarning, match="taking the mean of its tokens"):
        dense = made(similarity="dot", prompts={"query": "query: "}, max_length=1000)
    assert (dense.similarity_name, dense.prompts["query"], dense.max_length("query")) == (
        "dot",
        "query: ",
        64,
    )
    with pytest.raises(ConfigError, match=r"'maxsim' does not compare sparse .*; expected dot or cosine"):
        made(kind="sparse", similarity="maxsim")
    with pytest.raises(ConfigError, match=r"model.prompts.*'query' or 'document', got 'passage'"):
        made(prompts={"passage": "passage: "})
    with pytest.raises(StorageError, match=r"model.vocabulary: reading"):
        made(kind="sparse", vocabulary=str(tmp_path / "none.txt"))


def evaluate_model(model: Model, collection: JudgedCollection) -> Evaluation:
    return measure(model, [collection])[collection.config.title].evaluation


@pytest.mark.parametrize("kind", ["multi_vector", "sparse"])
def test_evaluation_is_that_of_an_index(kind: str, collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model.multi_vector(tiny_bert, "linear") if kind == "multi_vector" else Model.sparse(tiny_bert)
    config = EvaluationConfig(source=str(collection), split="test", measures="nDCG@10 RR@3", k=10)
    (judged,) = open_collections([config])
    model.train()
    result = evaluate_model(model, judged)
    assert model.training
    retriever = Retriever.build(model, str(collection), tmp_path / "index")
    run = retriever.run(str(collection), 10)
    from irkit import evaluate

    expected = evaluate(run, str(collection), "nDCG@10 RR@3")
    assert result.per_query == expected.per_query
    assert summarize({"one": result}) == expected.mean


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_evaluation_in_another_precision_leaves_the_model(
    dtype: str, collection: Path, tiny_bert: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of processors without such instructions
        lower = Model.sparse(tiny_bert, queries="lexical", dtype=dtype)
        model = Model.sparse(tiny_bert, queries="lexical")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        config = EvaluationConfig(source=str(collection), split="test")
        changed = config.model_copy(update={"dtype": dtype})
        plain, other = open_collections([config, changed.model_copy(update={"name": "other"})])
        result = evaluate_model(model.train(), other)
        assert model.training
        assert result.per_query == evaluate_model(lower, plain).per_query
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_sampled_evaluation_keeps_judged_documents(collection: Path) -> None:
    configs = [
        EvaluationConfig(source=str(collection), split="test", documents=n, name=str(n)) for n in (1, 7)
    ]
    few, some = open_collections(configs)
    assert [document.id for document in few.documents()] == ["d3", "d4"]
    chosen = [document.id for document in some.documents()]
    assert len(chosen) == some.total == 7
    assert {"d3", "d4"} <= set(chosen)
    (again,) = open_collections(configs[1:])
    assert [document.id for document in again.documents()] == chosen


def test_evaluation_of_a_run_scores_its_documents_alone(
    collection: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    """A run that has all documents gives the result of a search; another one ranks only what it has."""
    model = Model.sparse(tiny_bert)
    whole = EvaluationConfig(source=str(collection), split="test", measures="nDCG@10 NumRet", k=100)
    (judged,) = open_collections([whole])
    names = [document.id for document in judged.documents()]
    lines = {"all": [(q, d) for q in ("q3", "q4") for d in names], "few": [("q3", "d3"), ("q3", "d4")]}
    results = {}
    for name, pairs in lines.items():
        path = tmp_path / f"{name}.trec"
        path.write_text(
            "".join(f"{query} Q0 {doc} 1 {-number} x\n" for number, (query, doc) in enumerate(pairs))
        )
        (reranked,) = open_collections([whole.model_copy(update={"run": str(path)})])
        results[name] = evaluate_model(model, reranked)
        assert reranked.total == len({doc for _, doc in pairs})
    assert results["all"].per_query == evaluate_model(model, judged).per_query
    assert results["few"].per_query["NumRet"] == {"q3": 2, "q4": 0}
    assert results["few"].per_query["nDCG@10"]["q4"] == 0
    # a run of something else
    for text, error in [
        ("q3 Q0 none 1 1 x\n", "1 of the 1 documents"),
        ("x Q0 d3 1 1 x\n", "no document for any"),
    ]:
        (tmp_path / "wrong.trec").write_text(text)
        with pytest.raises(BadValueError, match=error):
            open_collections([whole.model_copy(update={"run": str(tmp_path / "wrong.trec")})])
    with pytest.raises(ConfigError, match="leave out 'documents'"):
        EvaluationConfig.parse({"source": "x", "run": "y", "documents": 5})


def test_evaluation_has_a_length_of_its_own(collection: Path, tiny_bert: Path) -> None:
    model, short = Model.sparse(tiny_bert), Model.sparse(tiny_bert)
    short.set_length("document", 3)
    config = EvaluationConfig(source=str(collection), split="test")
    plain, cut = open_collections([config, config.model_copy(update={"name": "cut", "document_length": 3})])
    assert evaluate_model(model, cut).per_query == evaluate_model(short, plain).per_query
    assert model.max_length("document") == 64


def test_one_step_at_almost_no_rate_measures_a_model_as_it_is(
    collection: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    """The rows of studies whose names end in "released" are measured so."""
    released = Model.sparse(str(tiny_bert))
    released.save_pretrained(tmp_path / "released")
    keys = recipe(
        model={"name": str(tmp_path / "released")},
        data={"source": str(collection), "split": "train", "documents": 1},
        evaluation={"source": str(collection), "split": "test", "at_end": True},
    )
    step = {"max_steps": 1, "warmup_steps": 0, "weight_decay": 0.01, "save_strategy": "no"}
    for rate, same in ((1e-12, True), (1e-2, False)):
        out = tmp_path / str(rate)
        model = train(keys | {"train": step | {"learning_rates": {"": rate}}}, out)
        vectors, expected = model.encode_document(TEXTS), released.encode_document(TEXTS)
        assert torch.allclose(vectors.to_dense(), expected.to_dense(), atol=1e-6) == same
        assert len((out / "evaluation.jsonl").read_text().splitlines()) > 1


def test_evaluation_says_what_is_wrong(collection: Path) -> None:
    one = EvaluationConfig(source=str(collection), split="test")
    with pytest.raises(ConfigError, match=r"named collection, collection; give each a name"):
        open_collections([one, one])
    for changes, error in [
        ({"split": "dev"}, "no split 'dev'"),
        ({"measures": "nDGC@10"}, "nDGC@10"),
        ({"source": str(collection / "nowhere")}, "nowhere"),
    ]:
        with pytest.raises((StorageError, ValueError), match=error):
            open_collections([one.model_copy(update=changes)])
    (collection / "corpus.jsonl").write_text('{"_id": "other", "text": "a"}\n')
    with pytest.raises(ValueError, match=r"no judged document is among the 1"):
        open_collections([one])


def test_results_are_written_by_query(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    (judged,) = open_collections([EvaluationConfig(source=str(collection), split="test")])
    result = evaluate_model(Model.sparse(tiny_bert), judged)
    write_results({"mine": result}, tmp_path / "evaluation.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert {line["query_id"] for line in lines} == {"q3", "q4"}
    assert all(line["dataset"] == "mine" and line["measure"] == "nDCG@10" for line in lines)
    assert sum(line["value"] for line in lines) / 2 == pytest.approx(result.mean["nDCG@10"])
    means = summarize({"a": result, "b": result})
    assert means.keys() == {"nDCG@10", "geometric_nDCG@10", "a_nDCG@10", "b_nDCG@10"}
