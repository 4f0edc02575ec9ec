"""Trainings that collapse say so, once of each kind; those that learn say nothing."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from irkit import Model
from irkit.core.ragged import Ragged
from irkit.core.representation import Dense, MultiVector
from irkit.training.collapse import CollapseWatch, chance, likeness
from irkit.training.losses import CrossEntropy, InfoNCE, KLDivergence, PairwiseCrossEntropy
from irkit.training.regularizers import AntiZero, Flops
from irkit.training.scores import Scores
from irkit.training.train_run import TrainingLog
from irkit.training.trainer import Trainer
from irkit.training.training_arguments import TrainingArguments
from irkit.training.training_data import DataConfig, TrainingRow, open_data, write_examples

WORDS = ["search", "index", "vector", "token", "model", "neural", "text", "of", "in", "the"]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path_factory.mktemp("cache")))


# what is measured


@given(st.integers(0, 2**16), st.integers(2, 9), st.integers(1, 5), st.integers(0, 3))
def test_likeness_is_the_mean_cosine_of_pairs(seed: int, count: int, width: int, zeros: int) -> None:
    vectors = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3
    vectors[: min(zeros, count)] = 0
    unit = torch.nn.functional.normalize(vectors).double().numpy()
    cosines = (unit @ unit.T)[~np.eye(count, dtype=bool)]
    tokens = MultiVector(Ragged(vectors, torch.tensor([1, count - 1])))
    for rows in (Dense(vectors), Dense(vectors.double()), tokens):
        assert float(likeness(rows)) == pytest.approx(cosines.mean(), abs=1e-5)  # type: ignore[arg-type]
    assert likeness(Dense(vectors[:1])) is None
    same = torch.ones(count, width)
    assert float(likeness(Dense(same))) == pytest.approx(1, abs=1e-6)  # type: ignore[arg-type]


def test_chance_is_what_equal_scores_lose() -> None:
    own = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    everything = torch.randn(4, 12)
    scores = Scores(
        own=own,
        mask=torch.ones(4, 3, dtype=torch.bool),
        positives=torch.ones(4, dtype=torch.int64),
        all=everything,
        columns=torch.arange(12).view(4, 3),
        relevant=torch.eye(4, dtype=torch.bool).repeat_interleave(3, 1) & (torch.arange(12) % 3 == 0),
    )
    assert float(chance(InfoNCE(temperature=0.05), scores)) == pytest.approx(math.log(12))  # type: ignore[arg-type]
    assert float(chance(CrossEntropy(), scores)) == pytest.approx(math.log(3))  # type: ignore[arg-type]
    assert float(chance(PairwiseCrossEntropy(), scores)) == pytest.approx(math.log(2))  # type: ignore[arg-type]
    assert chance(KLDivergence(), scores) is None


# what is made of it

Rows = list[tuple[int, dict[str, float]]]  # step and what is logged


def loss(value: float) -> dict[str, float]:
    return {"infonce": value, "infonce_chance": 2.0}


def terms(document: float, query: float = 20.0) -> dict[str, float]:
    return {"active_dims_document": document, "active_dims_query": query}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(step, loss(2.0)) for step in range(10, 101, 10)], {30: "as if all documents scored the same"}),
        (
            [(10, loss(1.0)), (20, loss(1.2)), (30, loss(1.99)), (40, loss(2.0))],
            {40: "as if all"},
        ),
        ([(20, loss(1.0)), (30, loss(2.0)), (35, loss(2.0)), (40, loss(1.2))], {}),  # came back soon
        ([(10, loss(9.0)), (30, loss(5.0)), (60, loss(2.5)), (100, loss(1.5))], {}),  # high, but falling
        ([(step, loss(1.9)) for step in range(10, 101, 10)], {}),  # slow, but learning
        ([(1, loss(2.0)), (10, loss(2.0)), (15, loss(2.0))], {}),  # too few steps
        ([(step, {"alike": 0.995}) for step in (10, 30, 50)], {30: "all texts look alike"}),
        ([(step, {"alike": 0.95}) for step in (10, 30, 50, 100)], {}),  # as those of an encoder of tokens
        ([(10, terms(0.5)), (20, terms(0.1)), (30, terms(0.0))], {20: "documents have 0.1 terms each"}),
        ([(10, terms(9, 0.5)), (20, terms(9, 0.1))], {20: "queries have 0.1 terms each"}),
        ([(10, terms(0.5)), (20, terms(4)), (30, terms(0.5))], {}),  # an accident
        ([(step, terms(950)) for step in (10, 30, 50, 60)], {50: "950 of 1,000 terms each"}),
        (
            [(step, terms(950 if step < 50 else 200)) for step in (10, 30, 49, 60, 100)],
            {},
        ),  # until it is full
        ([(50, terms(0.5) | loss(2.0)), (60, terms(0.5) | loss(2.0))], {60: "documents have 0.5 terms each"}),
        ([(50, {"kl": 2.0, "margin_mse": 1e9})], {}),
        # with several heads
        (
            [(step, {"sparse_active_dims_document": 0.1}) for step in (10, 20)],
            {20: "head sparse: documents have"},
        ),
        ([(step, {"dense_alike": 0.995}) for step in (10, 30, 50)], {30: "head dense: two vectors"}),
        ([(step, {"dense_alike": 0.8, "dense_infonce": 1.0}) for step in (10, 30, 50)], {}),
    ],
)
def test_the_watch_tells_a_collapse_from_a_training(rows: Rows, said: dict[int, str]) -> None:
    watch = CollapseWatch(1e-4, vocabulary=1000)
    found = {step: told for step, logs in rows if (told := watch(logs, step, 100))}
    assert list(found) == list(said)
    for step, message in said.items():
        assert message in found[step][0]
        assert found[step][0].startswith("training: ")
        assert "learning_rate (0.0001)" in found[step][0] or "max_active_dims" in found[step][0]


def test_each_kind_is_told_once_and_the_end_is_looked_at() -> None:
    watch = CollapseWatch(1e-4)
    told = [watch(loss(2.0) | {"alike": 1.0}, step, 100) for step in (30, 40, 50, 60)]
    assert list(map(len, told)) == [0, 2, 0, 0]
    assert len(CollapseWatch(1e-4)(loss(2.0), 28, 28, last=True)) == 1
    assert CollapseWatch(1e-4)(loss(2.0), 12, 12, last=True) == []


# trainings


def examples(path: Path) -> list[DataConfig]:
    def records() -> Iterator[TrainingRow]:
        numbers = torch.randint(len(WORDS), (24, 8), generator=torch.Generator().manual_seed(1)).tolist()
        for i, row in enumerate(numbers):
            words = [WORDS[number] for number in row]
            yield TrainingRow(f"q{i}", " ".join(words[:3]), (f"d{i}",), (" ".join([*words[:3], *words[3:]]),))

    write_examples(path, records())
    return [DataConfig(source=str(path))]


def trained(model: Model, path: Path, regularizers: list[Any], **values: Any) -> list[dict[str, Any]]:
    """The log of a training."""
    given: dict[str, Any] = {"per_device_train_batch_size": 8, "max_steps": 60, "logging_steps": 5}
    arguments = TrainingArguments.parse(
        {**given, "save_strategy": "no", "use_cpu": True, **values}, path / "out"
    )
    log = path / "log.jsonl"
    trainer = Trainer(
        model,
        arguments,
        open_data(examples(path / "data.jsonl")),
        [InfoNCE(temperature={"dense": 0.1, "multi_vector": 0.2, "sparse": 1.0}[model.kind])],
        regularizers,
        callbacks=[TrainingLog(log)],
    )
    trainer.train()
    return [json.loads(line) for line in log.read_text().splitlines()]


def model_of(kind: str, tiny_bert: Path) -> Model:
    torch.manual_seed(1)
    if kind == "sparse":
        return Model.sparse(tiny_bert, device="cpu")
    if kind == "multi_vector":
        return Model.multi_vector(tiny_bert, {"depth": 1, "dim": 8}, device="cpu")
    with pytest.warns(UserWarning, match="does not say how"):
        return Model.from_pretrained(tiny_bert, device="cpu")


@pytest.mark.parametrize("kind", ["dense", "multi_vector", "sparse"])
def test_a_training_that_learns_is_left_alone(kind: str, tiny_bert: Path, tmp_path: Path) -> None:
    regularizers = [Flops(document=1e-3, query=1e-3), AntiZero(document=1.0, query=1.0)]
    rate = 1e-2 if kind == "multi_vector" else 3e-3
    log = trained(
        model_of(kind, tiny_bert), tmp_path, regularizers if kind == "sparse" else [], learning_rate=rate
    )
    losses = [row["infonce"] for row in log if "infonce" in row]
    assert losses[-1] < 0.5 * losses[0]
    assert not [row for row in log if "warning" in row]
    assert not {"alike", "infonce_chance"} & {name for row in log for name in row}


@pytest.mark.parametrize("kind", ["dense", "multi_vector"])
def test_vectors_that_are_all_alike_are_told(kind: str, tiny_bert: Path, tmp_path: Path) -> None:
    model = model_of(kind, tiny_bert)
    with torch.no_grad():
        for name, weight in model.encoder.named_parameters():
            if "norm" in name.lower():
                weight.fill_(float(name.endswith("bias")))  # whatever the text, and the dropout
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = trained(model, tmp_path, [], learning_rate=1e-9)
    messages = [str(each.message) for each in caught if str(each.message).startswith("training: ")]
    assert len(messages) == 2
    assert "as if all documents scored the same (2.07)" in messages[0]  # about ln 8
    assert "all texts look alike to the model; lower the learning_rate (1e-09)" in messages[1]
    written = [row["warning"] for row in log if "warning" in row]
    assert written == ["; ".join(messages)]
    assert math.log(8) == pytest.approx(log[-2]["infonce"], abs=0.01)


def test_sparse_vectors_that_die_are_told_while_they_do(tiny_bert: Path, tmp_path: Path) -> None:
    model = model_of("sparse", tiny_bert)
    penalty = Flops(document=1e5, query=1e5, schedule="constant")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = trained(model, tmp_path, [penalty], learning_rate=3e-2)
    messages = [str(each.message) for each in caught if str(each.message).startswith("training: ")]
    dead = [message for message in messages if "sparse vectors are dying" in message]
    assert len(dead) == 2  # of queries and of documents
    assert all("anti_zero" in message for message in dead)
    first = next(row["step"] for row in log if "dying" in row.get("warning", ""))
    assert first <= 40  # of 60 steps
    assert log[-2]["active_dims_document"] < 1


def test_a_training_between_two_logged_steps_is_looked_at_in_the_end(tiny_bert: Path, tmp_path: Path) -> None:
    model = model_of("dense", tiny_bert)
    with torch.no_grad():
        for weight in model.encoder.embeddings.parameters():
            weight.zero_()
    with pytest.warns(UserWarning, match="as if all documents scored the same"):
        log = trained(model, tmp_path, [], learning_rate=1e-9, logging_steps=500, max_steps=24)
    assert "train_loss" in log[-1]
    assert "all documents scored the same" in log[-1]["warning"]
