"""Adaptation to a new vocabulary, calibration, and the way without a new tokenizer."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from torch import nn

from irkit import Model
from irkit.errors import BadValueError, ConfigError, StorageError
from irkit.heads import SparseConfig
from irkit.training import TrainingArguments
from irkit.training.masked_lm_step import MaskedLMStep
from irkit.training.train_run import TrainingLog
from irkit.vocabulary import AdaptationConfig, adapt, calibrate, head_only, probe
from irkit.vocabulary.sparse_alignment import AlignmentCollator, AlignmentStep, highest_logits

TEXTS = ["search the index of a vector model", "neural text", "in the token model on an index", "a search"]
SMALL = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "use_cpu": True}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(TEXTS * 5))
    return path


@pytest.fixture
def model(tiny_bert: Path) -> Model:
    return Model.sparse(tiny_bert, device="cpu")


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def logs(out: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


# adaptation


def test_embeddings_and_head_learn_and_the_rest_stays(model: Model, corpus: Path, tmp_path: Path) -> None:
    before, out = weights(model), tmp_path / "out"
    new = torch.zeros(model.tokenizer.vocab_size, dtype=torch.bool)
    new[::2] = True
    train = {**SMALL, "max_steps": 60, "learning_rate": 3e-2, "logging_steps": 10}
    config = {"texts": corpus, "validation": str(corpus), "validation_texts": 8, "train": train}
    adapted = adapt(model, config, out, is_new=new)
    changed = {name for name, value in weights(adapted).items() if not torch.equal(value, before[name])}
    assert {name.partition(".")[0] for name in changed} == {"encoder", "head"}
    assert {name for name in changed if name.startswith("encoder")} == {"encoder.embeddings.word.weight"}
    assert all(parameter.requires_grad for parameter in adapted.parameters())
    measured = logs(out, "eval_loss")
    assert len(measured) == 11  # before the first step, and ten times
    assert measured[-1] < 0.8 * measured[0]
    assert logs(out, "eval_accuracy")[-1] > logs(out, "eval_accuracy")[0]
    loaded = Model.from_pretrained(out, device="cpu")
    assert loaded.kind == "sparse"
    assert torch.equal(loaded.head.weight, adapted.head.weight)
    assert loaded.head.weight is loaded.encoder.word_embeddings
    vectors = loaded.encode_document(TEXTS).to_dense()
    assert not vectors[:, loaded.tokenizer.special_tokens()].any()
    with pytest.raises(StorageError, match="holds a trained model"):
        adapt(model, config, out)


def test_embeddings_alone_may_learn(model: Model, corpus: Path, tmp_path: Path) -> None:
    before = weights(model)
    train = {**SMALL, "max_steps": 2, "warmup_steps": 0}
    adapted = adapt(model, {"texts": str(corpus), "train_head": False, "train": train}, tmp_path / "out")
    changed = {name for name, value in weights(adapted).items() if not torch.equal(value, before[name])}
    assert "encoder.embeddings.word.weight" in changed
    assert changed <= {"encoder.embeddings.word.weight", "head.weight"}  # one matrix, which both sides use


def test_learning_rates_go_before_the_freezing(model: Model, corpus: Path, tmp_path: Path) -> None:
    before = weights(model)
    train = {**SMALL, "max_steps": 1, "warmup_steps": 0, "learning_rates": {r"layers\.1\.": 1e-3}}
    adapted = adapt(model, {"texts": str(corpus), "train": train}, tmp_path / "out")
    changed = {name for name, value in weights(adapted).items() if not torch.equal(value, before[name])}
    assert any(name.startswith("encoder.layers.1.") for name in changed)
    assert not any(name.startswith("encoder.layers.0.") for name in changed)


def test_an_interrupted_phase_ends_with_the_same_weights(
    tiny_bert: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {**SMALL, "max_steps": 6, "save_steps": 2, "logging_steps": 1, "seed": 9}
    config: dict[str, Any] = {"texts": str(corpus), "train": train}

    def run(out: str, **changed: Any) -> Model:
        return adapt(Model.sparse(tiny_bert, device="cpu"), config | changed, tmp_path / out)

    whole = run("whole")
    log = TrainingLog.on_log

    def stopping(self: Any, args: Any, state: Any, control: Any, **given: Any) -> None:
        log(self, args, state, control, **given)
        if state.global_step == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(TrainingLog, "on_log", stopping)
    with pytest.raises(KeyboardInterrupt):
        run("halves")
    monkeypatch.setattr(TrainingLog, "on_log", log)
    assert not (tmp_path / "halves" / "modules.json").exists()
    with pytest.raises(StorageError, match="has another recipe"):
        run("halves", max_length=64)
    resumed = run("halves")
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(resumed).items())
    assert logs(tmp_path / "halves", "loss") == logs(tmp_path / "whole", "loss")


def test_killed_after_its_last_step_it_saves_the_model_and_ends(
    tiny_bert: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"texts": str(corpus), "train": {**SMALL, "max_steps": 2, "save_steps": 1}}
    with monkeypatch.context() as patch:
        patch.setattr(MaskedLMStep, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            adapt(Model.sparse(tiny_bert, device="cpu"), config, tmp_path / "out")
    epochs = iter([None] * 9)  # next() fails after the last one: the texts have no end
    monkeypatch.setattr(TrainingLog, "on_epoch_begin", lambda *_, **__: next(epochs))
    adapt(Model.sparse(tiny_bert, device="cpu"), config, tmp_path / "out")
    assert (tmp_path / "out" / "modules.json").exists()


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("preset", "steps", "warmup"), [(500, 500, 100), ("20k", 20_000, 4000)])
def test_presets_are_the_schedule_of_the_paper(
    preset: Any, steps: int, warmup: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AdaptationConfig(texts=["corpus.txt"], preset=preset)
    arguments = config.arguments(tmp_path, {})
    assert (arguments.max_steps, arguments.get_warmup_steps(steps)) == (steps, warmup)
    assert (arguments.learning_rate, arguments.lr_scheduler_type) == (3e-4, "cosine")
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 2048
    assert config.max_length == 128
    assert (config.masking.rate, config.masking.emphasis) == (0.3, 2.0)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(TrainingArguments, "parse", lambda values, *_: values)  # no process group is there
    several: Any = AdaptationConfig(texts=["a.txt"], train={"per_device_train_batch_size": 32})
    assert several.arguments(tmp_path, {})["gradient_accumulation_steps"] == 8


def test_adaptation_refuses_what_cannot_be(model: Model, corpus: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {"texts": str(corpus), "train": SMALL | {"max_steps": 2}}
    with pytest.raises(ConfigError, match=r"train.eval_steps needs texts to evaluate on; give `validation`"):
        adapt(model, {**config, "train": {"eval_steps": 2}}, tmp_path / "a")
    with pytest.raises(ConfigError, match="unknown key 'lerning_rate'; did you mean 'learning_rate'"):
        adapt(model, {**config, "train": {"lerning_rate": 2}}, tmp_path / "a")
    with pytest.raises(StorageError, match="nowhere"):
        adapt(model, {**config, "texts": ["nowhere.txt"]}, tmp_path / "a")
    with pytest.raises(BadValueError, match="is_new is"):
        adapt(model, config, tmp_path / "a", is_new=torch.zeros(2, dtype=torch.bool))
    assert not (tmp_path / "a").exists()


# calibration


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rate=st.floats(0.05, 0.85))
def test_the_rate_that_was_asked_for_is_that_of_encoded_texts(tiny_bert: Path, rate: float) -> None:
    model = Model.sparse(tiny_bert, device="cpu")
    special = model.tokenizer.special_tokens()
    calibration = calibrate(model, TEXTS, {"rate": rate})
    vectors = model.encode_document(TEXTS).to_dense()
    terms = model.dim - len(special)
    assert calibration.after.rate == pytest.approx(rate, abs=0.51 / (terms * len(TEXTS)))
    assert float((vectors > 0).sum()) / (terms * len(TEXTS)) == pytest.approx(
        calibration.after.rate, abs=1e-3
    )
    assert float(vectors.max()) == pytest.approx(calibration.after.largest, rel=1e-5)
    assert float(vectors[vectors > 0].mean()) == pytest.approx(calibration.after.mean, rel=1e-5)
    dead = (vectors == 0).all(0)
    assert (float(dead.sum()) - len(special)) / terms == pytest.approx(calibration.after.dead)
    assert sum(calibration.after.counts) == int((vectors > 0).sum())
    assert not vectors[:, special].any()


def test_a_given_shift_is_taken_from_every_bias_but_those_of_excluded_terms(model: Model) -> None:
    before, plain = model.head.bias.detach().clone(), probe(model, TEXTS)
    calibration = calibrate(model, iter(TEXTS), {"shift": 1.5, "lowest": 0.0, "highest": 1.0})
    special = model.tokenizer.special_tokens()
    changed = before - model.head.bias.detach()
    assert not changed[special].any()
    changed[special] = 1.5
    assert torch.equal(changed, torch.full_like(changed, 1.5))
    assert (calibration.shift, calibration.before) == (1.5, plain)
    assert calibration.after == probe(model, TEXTS)
    facts = json.loads(json.dumps(calibration.facts()))
    assert facts["after"]["rate"] == calibration.after.rate
    assert len(facts["before"]["edges"]) == len(facts["before"]["counts"]) + 1


@pytest.mark.parametrize("activation", ["relu", "log1p_relu", "log1p_log1p_relu"])
def test_weights_are_those_of_the_activation(model: Model, activation: Any) -> None:
    model.head.config = SparseConfig(activation=activation)
    found, vectors = probe(model, TEXTS), model.encode_document(TEXTS).to_dense()
    assert found.largest == pytest.approx(float(vectors.max()), rel=1e-5)
    assert found.mean == pytest.approx(float(vectors[vectors > 0].mean()), rel=1e-5)


def test_a_head_without_a_bias_gets_one(model: Model, tmp_path: Path) -> None:
    model.head.bias = None
    calibration = calibrate(model, TEXTS)
    assert model.head.bias is not None
    assert torch.equal(model.head.bias.detach(), torch.full((model.dim,), -calibration.shift))
    model.save_pretrained(tmp_path / "model")
    assert probe(Model.from_pretrained(tmp_path / "model", device="cpu"), TEXTS) == calibration.after


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shift": 1e3}, r"0\.00% of the terms .* would be dead; the shift that gives 40% is "),
        ({"shift": -1e3}, r"100\.00% of the terms .* would be dense; the shift that gives 40%"),
    ],
)
def test_dead_and_dense_models_are_refused(model: Model, given: dict[str, Any], message: str) -> None:
    before = weights(model)
    with pytest.raises(BadValueError, match=message):
        calibrate(model, TEXTS, given)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


def test_models_that_cannot_be_calibrated_are_refused(model: Model, tiny_bert: Path) -> None:
    with pytest.raises(BadValueError, match="got no texts to probe"):
        calibrate(model, [])
    with pytest.raises(BadValueError, match="makes multi_vector vectors, expected a sparse one"):
        probe(Model.multi_vector(tiny_bert, device="cpu"), TEXTS)
    with pytest.raises(ConfigError, match=r"expected rate 0\.95 between lowest 0\.01 and highest 0\.9"):
        calibrate(model, TEXTS, {"rate": 0.95})
    with torch.no_grad():
        model.head.weight.zero_()  # then all logits are the bias
        model.head.layers[0].weight[0, 0] = 1.0
    with pytest.raises(BadValueError, match=r"would be dead; .*many are equal; was the head"):
        calibrate(model, TEXTS)
    with torch.no_grad():
        model.head.weight[20, 0] = math.nan
    with pytest.raises(BadValueError, match="NaN or infinite logits, in 4 of 4 texts"):
        calibrate(model, TEXTS)


def test_the_rate_is_that_of_documents_with_their_prompt(model: Model) -> None:
    model.prompts["document"] = "vector token of a model "
    texts = ["search", "index", "a text"]
    calibration = calibrate(model, texts, {"rate": 0.2})
    weighed = model.encode_document(texts).to_dense() > 0
    terms = model.dim - len(model.tokenizer.special_tokens())
    assert float(weighed.sum()) / (terms * len(texts)) == pytest.approx(calibration.after.rate, abs=1e-3)


def test_texts_without_tokens_do_not_count(model: Model, corpus: Path, tmp_path: Path) -> None:
    model.tokenizer = model.tokenizer.without_special_tokens()
    assert probe(model, ["", *TEXTS, ""]) == probe(model, TEXTS)
    assert calibrate(model, ["", *TEXTS]).after == probe(model, TEXTS)
    for function in (probe, calibrate):
        with pytest.raises(BadValueError, match="got no texts to probe"):
            function(model, ["", ""])
    # a teacher that gives them no weights is learned from
    assert not torch.stack([*highest_logits(model, model.tokenizer(["", ""]))]).any()
    model.save_pretrained(tmp_path / "model")
    corpus.write_text("\n".join(json.dumps({"text": text}) for text in ["", *TEXTS] * 5))
    corpus = corpus.rename(corpus.with_suffix(".jsonl"))
    config = {"texts": str(corpus), "teacher": str(tmp_path / "model"), "train": {**SMALL, "max_steps": 4}}
    student = Model.from_pretrained(tmp_path / "model", device="cpu")
    adapt(student, config, tmp_path / "out")
    assert all(value.isfinite().all() for value in weights(student).values())


# the head alone


@pytest.fixture
def target(tiny_bert: Path, tmp_path: Path) -> Model:
    """The same encoder on another vocabulary: the words are there, the letters are others."""
    path = tmp_path / "target"
    shutil.copytree(tiny_bert, path)
    state = json.loads((path / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    state["model"]["vocab"] = {
        token.upper() if len(token) == 1 else token: i for token, i in vocabulary.items()
    }
    Backend.from_str(json.dumps(state)).save(str(path / "tokenizer.json"))
    model = Model.sparse(path, device="cpu")
    with torch.no_grad():
        model.head.weight.copy_(
            torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(1))
        )
    return model


def test_a_replaced_head_gives_weights_to_the_terms_of_the_other(
    model: Model, target: Model, tmp_path: Path
) -> None:
    model.set_length("query", 7)
    model.similarity_name, model.prompts["plain"], model.default_prompt_name = "cosine", "", "plain"
    joined = head_only(model, target)
    assert joined.max_length("query") == 7
    assert (joined.similarity_name, joined.default_prompt_name) == ("cosine", "plain")
    with torch.no_grad():
        hidden = model.encoder(model.tokenizer(TEXTS))
        rows = [nn.Sequential(*model.head.layers)(states) @ target.head.weight.T for states in hidden]
        wanted = torch.stack([(row + target.head.bias).amax(0).relu().log1p() for row in rows])
    torch.testing.assert_close(joined.encode_document(TEXTS).to_dense(), wanted)
    assert joined.tokenizer is model.tokenizer
    with pytest.warns(UserWarning, match="sentence-transformers cannot open it"):
        joined.save_pretrained(tmp_path / "joined")
    loaded = Model.from_pretrained(tmp_path / "joined", device="cpu")
    torch.testing.assert_close(loaded.encode_document(TEXTS).to_dense(), wanted)
    assert loaded.head.vocabulary == tuple(target.tokenizer.tokens(target.dim))


@pytest.mark.filterwarnings("ignore:saving a model")
def test_the_head_alone_learns_the_terms_of_the_other(
    model: Model, target: Model, corpus: Path, tmp_path: Path
) -> None:
    joined = head_only(model, target)
    before = weights(joined)
    train = {**SMALL, "max_steps": 40, "learning_rate": 3e-2}
    config = {"texts": str(corpus), "validation": str(corpus), "train": train}
    new = torch.zeros(joined.dim, dtype=torch.bool)
    adapted = adapt(joined, config, tmp_path / "out", is_new=new, labels=target.tokenizer)
    changed = {name for name, value in weights(adapted).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith("head.")}
    assert logs(tmp_path / "out", "eval_loss")[-1] < 0.8 * logs(tmp_path / "out", "eval_loss")[0]


def test_the_logits_of_a_teacher_are_learned(
    model: Model, target: Model, corpus: Path, tmp_path: Path
) -> None:
    joined = head_only(model, target)
    target.save_pretrained(tmp_path / "teacher")
    step = AlignmentStep(joined, target)
    batch = AlignmentCollator(joined, target, 16)([(0, TEXTS[0]), (1, TEXTS[1])])
    ours, theirs = (
        torch.stack(list(highest_logits(each, tokens)))
        for each, tokens in ((joined, batch.tokens), (target, batch.teacher_tokens))
    )
    wanted = theirs.clamp(min=0).log1p()
    torch.testing.assert_close(target.encode_document(TEXTS[:2]).to_dense(), wanted)
    active = (ours > 0) | (theirs > 0)
    assert step(batch).item() == pytest.approx((ours - theirs)[active].square().mean().item(), rel=1e-5)
    assert [name for name, _ in step.named_parameters()] == [
        f"model.{name}" for name, _ in joined.named_parameters()
    ]
    train = {**SMALL, "max_steps": 30, "learning_rate": 1e-2}
    config = {"texts": str(corpus), "teacher": str(tmp_path / "teacher"), "train": train}
    config |= {"validation": str(corpus)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sentence-transformers cannot open such a model
        adapt(joined, config, tmp_path / "out")
    losses = logs(tmp_path / "out", "eval_loss")
    assert losses[-1] < 0.5 * losses[0]


def test_a_teacher_has_the_same_terms(model: Model, target: Model, tiny_bert: Path) -> None:
    with pytest.raises(ConfigError, match="and they differ; expected a sparse model on the target"):
        AlignmentStep(model, target)
    with pytest.raises(ConfigError, match="got a multi_vector model"):
        AlignmentStep(model, Model.multi_vector(tiny_bert, device="cpu"))


def test_only_sparse_models_have_such_a_head(model: Model, tiny_bert: Path) -> None:
    with pytest.raises(BadValueError, match="got a sparse and a multi_vector model"):
        head_only(model, Model.multi_vector(tiny_bert, device="cpu"))
