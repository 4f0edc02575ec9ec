"""Pre-training of retrievers by next-sentence prediction, with attention and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from irkit import Model, score
from irkit.errors import BadValueError
from irkit.training.interaction import MVA, make_interaction
from irkit.training.masking import MaskingConfig
from irkit.training.pretraining.next_sentence import NextSentence, PairCollator, split_text
from irkit.training.pretraining.objectives import MaskedLanguageModeling
from irkit.training.pretraining.pretrain_recipe import PretrainingConfig, PretrainRecipe
from irkit.training.pretraining.pretrain_run import pretrain, run
from irkit.training.pretraining.pretrain_step import PretrainStep

TEXTS = [
    (4, "neural search. of the index. a token model."),
    (7, "an index of vectors"),
    (9, "gnu text! cab on the token."),
]
ATTENTION = MVA(dim=8, pooling="multiple_cls", size=3, query_classes=2)


def model_of(tiny_bert: Path, **config: Any) -> Model:
    torch.manual_seed(0)
    lengths = {"query_length": 8, "document_length": 12, "skiplist_words": []}
    return Model.multi_vector(tiny_bert, None, {**lengths, **config}, device="cpu", normalize=False)


@given(st.text(alphabet="ab .!?\n", max_size=40), st.integers(0, 9))
def test_both_parts_of_a_text_are_successive_words_of_it(text: str, seed: int) -> None:
    first, rest = split_text(text, np.random.default_rng(seed))
    joined, words = [*first.split(), *rest.split()], text.split()
    assert any(words[start : start + len(joined)] == joined for start in range(len(words) + 1))
    assert bool(first) == bool(words)
    assert bool(rest) or len(words) < 2 or len(joined) < len(words) or not words


def test_a_batch_has_the_texts_of_both_sides_as_the_model_reads_them(tiny_bert: Path) -> None:
    model = model_of(tiny_bert)
    make_interaction(ATTENTION, model)
    batch = PairCollator(model, MaskingConfig(rate=0.5), seed=3)(TEXTS)
    pairs = [split_text(text, np.random.default_rng([3, number])) for number, text in TEXTS]
    for row, side in enumerate(("query", "document")):
        expected = model.pipeline(side).tokenize([pair[row] for pair in pairs])
        rows = batch.original[3 * row : 3 * row + 3]
        assert torch.equal(rows.values, expected.values)
        assert torch.equal(rows.lengths, expected.lengths)
    assert torch.equal(batch.original.values[batch.positions], batch.labels)
    assert len(batch.labels) > 0
    assert batch.ordinary[batch.positions].all()
    assert (batch.tokens.values != batch.original.values).any()
    assert len(batch) == len(set(batch.numbers.tolist())) == 6


@pytest.mark.parametrize("config", [None, ATTENTION])
def test_the_loss_is_that_of_the_scores_of_right_and_wrong_pairs(config: MVA | None, tiny_bert: Path) -> None:
    model = model_of(tiny_bert).eval()
    attention = None if config is None else make_interaction(config, model)
    step = PretrainStep(model, [NextSentence()], interaction=attention).eval()
    module: Any = step.modules_of["next_sentence"]
    with torch.no_grad():
        module.factor.fill_(0.3)
        module.bias.fill_(-0.2)
        loss = step(PairCollator(model, seed=5)(TEXTS))
        pairs = [split_text(text, np.random.default_rng([5, number])) for number, text in TEXTS]
        queries = model.encode_representation([first for first, _ in pairs], "query")
        documents = model.encode_representation([rest for _, rest in pairs], "document")
        compare: Any = attention or score
        scores = torch.as_tensor(compare(queries, documents))
    logits = (
        0.3 * torch.stack([scores[i, j] for i, j in ((0, 0), (1, 1), (2, 2), (0, 1), (1, 2), (2, 0))]) - 0.2
    )
    targets = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits, targets))
    assert 0 <= float(step.parts["next_sentence_accuracy"]) <= 1


def test_one_text_is_compared_with_what_follows_alone(tiny_bert: Path) -> None:
    model = model_of(tiny_bert)
    step = PretrainStep(model, [NextSentence(), MaskedLanguageModeling()])
    loss = step(PairCollator(model, MaskingConfig(rate=0.5))(TEXTS[:1]))
    loss.backward()
    assert torch.isfinite(loss)


def test_a_dense_model_predicts_by_its_vectors(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    config = PretrainingConfig(
        texts=[str(notes)],
        objectives=[{"kind": "masked_language_modeling"}, {"kind": "next_sentence"}],
        masking=MaskingConfig(rate=0.15, emphasis=1),
        validation=str(notes),
        train={"max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1},
    )
    model = Model.with_head("dense", tiny_bert, {"pooling": "cls"}, device="cpu")
    pretrain(model, config, tmp_path / "out")
    lines = (tmp_path / "out" / "log.jsonl").read_text()
    assert "eval_next_sentence" in lines
    assert not (tmp_path / "out" / "interaction").exists()


def test_attention_is_pretrained_and_then_trained_on(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    quick = {"per_device_train_batch_size": 4, "learning_rate": 0.01, "logging_steps": 1}
    given = {
        "model": {
            "name": str(tiny_bert),
            "kind": "multi_vector",
            "projection": None,
            "normalize": False,
            "prompts": {"document": "an index "},
            "config": {"query_length": 8, "document_length": 12},
        },
        "interaction": {"kind": "mva", "dim": 8, "pooling": "multiple_cls", "size": 3},
        "pretraining": {
            "texts": str(notes),
            "objectives": [{"kind": "masked_language_modeling"}, {"kind": "next_sentence"}],
            "masking": {"rate": 0.15},
            "train": {**quick, "max_steps": 3},
        },
        "data": {"source": str(notes), "split": "test", "documents": 1},
        "losses": {"kind": "infonce"},
        "train": {**quick, "max_steps": 1, "learning_rate": 1e-12},
    }
    run(PretrainRecipe.resolve(given), tmp_path / "out")
    stages = tmp_path / "out" / "stages"
    start = make_interaction(MVA(dim=8, pooling="multiple_cls", size=3), model_of(tiny_bert))
    pretrained = Model.from_pretrained(stages / "pretrained", device="cpu")
    prompt = pretrained.prompts["document"]
    continued = make_interaction(MVA(dim=8, pooling="multiple_cls", size=3), pretrained)
    tuned = make_interaction(
        MVA(dim=8, pooling="multiple_cls", size=3), Model.from_pretrained(tmp_path / "out", device="cpu")
    )
    assert start is not None
    assert continued is not None
    assert tuned is not None
    assert pretrained.prompts["document"] == prompt  # class tokens are added once
    last = Model.from_pretrained(tmp_path / "out", device="cpu")
    assert last.prompts["document"] == prompt == "[D_CLS][D_CLS]an index "
    assert last.max_length("document") == pretrained.max_length("document") == 14
    for name, weight in continued.state_dict().items():
        torch.testing.assert_close(tuned.state_dict()[name], weight)
        assert not torch.equal(weight, start.state_dict()[name])
    other = make_interaction(MVA(dim=8, heads=2, pooling="multiple_cls", size=3), pretrained)
    assert other is not None
    assert other.state_dict()["query_key.weight"].shape[0] == 16  # other settings start anew


def test_models_without_one_encoder_for_both_sides_are_refused(tiny_bert: Path) -> None:
    several = Model.several(tiny_bert, {"dense": {}, "multi_vector": {}}, device="cpu")
    with pytest.raises(BadValueError, match="next-sentence prediction: got a model with several heads"):
        PretrainStep(several, [NextSentence()])
    expanded = model_of(tiny_bert, query_length=None, query_expansion={"length": 8})
    with pytest.raises(BadValueError, match="fills queries with mask tokens"):
        PretrainStep(expanded, [NextSentence()])
    pooled = model_of(tiny_bert)
    pooled.add_pooling_layers({"layers": [1], "kernel": 2, "stride": 2})
    with pytest.raises(BadValueError, match="pools the texts of one side"):
        PretrainStep(pooled, [NextSentence()])
