"""Training of models with several heads: losses of each head, self-distillation, recipes, wrong input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from irkit import Model
from irkit.errors import BadValueError, ConfigError
from irkit.training import train
from irkit.training.example import Example
from irkit.training.losses import CrossEntropy, InfoNCE
from irkit.training.several_step import HeadTraining, SelfDistillation, SeveralStep
from irkit.training.train_step import TrainStep
from irkit.training.trainer import Collator

HEADS: dict[str, Any] = {"dense": {}, "sparse": "token_weight", "multi_vector": {"projection": {"dim": 8}}}
EXAMPLES = [
    Example(query=f"{word} index", documents=(f"the {word} model", "a text of the token"), positives=1)
    for word in ("search", "vector", "neural", "token")
]


@pytest.fixture
def model(tiny_bert: Path) -> Model:
    torch.manual_seed(0)
    return Model.several(tiny_bert, HEADS, device="cpu").eval()  # no dropout


def test_the_loss_is_the_weighted_sum_of_those_of_the_heads(model: Model) -> None:
    batch, losses = Collator(model)(EXAMPLES), [InfoNCE(temperature=0.5)]
    weights = {"dense": 1.0, "sparse": 0.1, "multi_vector": 2.0}
    settings = {name: HeadTraining(weight=weight) for name, weight in weights.items()}
    step = SeveralStep(model, losses, settings).eval()
    alone = {name: TrainStep(head, losses).eval()(batch) for name, head in model.heads.items()}
    expected = sum(weights[name] * value for name, value in alone.items())
    torch.testing.assert_close(step(batch), expected)
    cached = SeveralStep(model, losses, settings, gradient_cache_size=2).eval()
    torch.testing.assert_close(cached(batch), expected)
    step(batch).backward()
    assert all(weight.grad is not None for weight in model.head.parameters())


def test_heads_learn_from_the_sum_of_all_scores(model: Model) -> None:
    batch, losses = Collator(model)(EXAMPLES), [InfoNCE(temperature=0.5)]
    distillation = SelfDistillation(weights={"sparse": 0.3}, temperature=0.5, weight=2.0)
    step = SeveralStep(model, losses, distillation=distillation).eval()
    value = step(batch)
    scores = {name: each.seen[0].all for name, each in step.heads.items()}
    assert all(each is not None for each in scores.values())
    summed: Any = scores["dense"] + 0.3 * scores["sparse"] + scores["multi_vector"]  # type: ignore[operator]
    target = (summed / 0.5).softmax(1)
    own = {
        name: -(target * (each / 0.5).log_softmax(1)).sum(1).mean()
        for name, each in scores.items()
        if each is not None
    }
    for name, expected in own.items():
        torch.testing.assert_close(torch.as_tensor(step.parts[f"{name}_self_distillation"]), expected)
    plain = SeveralStep(model, losses).eval()(batch)
    total = plain + torch.as_tensor(step.parts["sum_infonce"]) + 2.0 * sum(own.values())
    torch.testing.assert_close(value, total)


def test_a_document_without_tokens_makes_no_loss_infinite(model: Model) -> None:
    empty = Example(query="a search", documents=("the model", ""), positives=1)
    batch = Collator(model)([*EXAMPLES, empty])
    model.head.parts["multi_vector"].skip(model.tokenizer.ids(["[CLS]", "[SEP]"]))
    value = SeveralStep(model, [InfoNCE()], distillation=SelfDistillation()).eval()(batch)
    assert value.isfinite()


def test_a_recipe_trains_all_heads(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    recipe: dict[str, Any] = {
        "model": {"kind": "several", "name": str(tiny_bert), "heads": HEADS},
        "data": {"source": str(notes), "split": "test", "documents": 1},
        "losses": {"kind": "infonce"},
        "heads": {"sparse": {"weight": 0.3}},
        "self_distillation": {"weights": {"sparse": 0.3}},
        "train": {
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "save_strategy": "no",
        },
        "evaluation": {"source": str(notes), "split": "test", "name": "notes", "at_end": True},
    }
    trained = train(recipe, tmp_path / "model")
    assert [*Model.from_pretrained(tmp_path / "model").heads] == [*HEADS]
    assert trained.kind == "several"
    written = (tmp_path / "model" / "evaluation.jsonl").read_text()
    assert all(f"notes/{name}" in written for name in [*HEADS, "fusion"])
    for change, message in (
        ({"matryoshka": {"dims": [8]}}, "matryoshka: the model has several heads"),
        ({"heads": {"other": {}}}, "no head other; expected dense, sparse, multi_vector"),
        ({"self_distillation": {"weights": {"other": 1}}}, "no head other"),
        ({"model": str(tiny_bert)}, "the model has one head"),
    ):
        with (
            pytest.raises((ConfigError, BadValueError), match=message),
            pytest.warns() if "model" in change else _nothing(),
        ):
            train({**recipe, **change}, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_wrong_settings_are_refused(model: Model, tiny_dense: Path) -> None:
    with pytest.raises(
        BadValueError, match="a model of dense vectors alone; expected a model of kind several"
    ):
        SeveralStep(Model.from_pretrained(tiny_dense), [CrossEntropy()])


def test_the_best_model_may_be_chosen_by_a_head(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    recipe: dict[str, Any] = {
        "model": {"kind": "several", "name": str(tiny_bert), "heads": HEADS},
        "data": {"source": str(notes), "split": "test", "documents": 1},
        "losses": {"kind": "infonce"},
        "train": {"max_steps": 2, "eval_steps": 1, "metric_for_best_model": "notes/fusion_nDCG@10"},
        "evaluation": {"source": str(notes), "split": "test", "name": "notes"},
    }
    assert train(recipe, tmp_path / "model").kind == "several"
    recipe["train"]["metric_for_best_model"] = "notes_nDCG@10"
    with pytest.raises(ConfigError, match=r"not measured; expected .*notes/fusion_nDCG@10"):
        train(recipe, tmp_path / "other")
