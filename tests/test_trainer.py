"""The training loop: what it learns, saves, resumes, refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from irkit import Model
from irkit.errors import CorruptError, StorageError
from irkit.training.arguments import TrainingArguments
from irkit.training.checkpoints import all_checkpoints, load_weights, newest_checkpoint
from irkit.training.data import Collator, DataConfig, Record, open_data, write_examples
from irkit.training.losses import InfoNCE, KLDivergence
from irkit.training.trainer import Trainer

WORDS = ["a", "the", "search", "index", "vector", "token", "model", "neural", "text", "of", "in"]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path_factory.mktemp("cache")))


def records(seed: int, count: int) -> Iterator[Record]:
    numbers = torch.randint(len(WORDS), (count, 4, 6), generator=torch.Generator().manual_seed(seed))
    for i, rows in enumerate(numbers.tolist()):
        query, *texts = (" ".join(WORDS[n] for n in row[: 2 + n % 5]) for n, row in enumerate(rows, i))
        texts[0] = f"{query} {texts[0]}"  # the best document has the words of the query, which can be learned
        names = tuple(f"{seed}-{i}-{j}" for j in range(3))
        yield Record(f"{seed}-{i}", query, names, tuple(texts), (3.0, 1.0, 0.0))


@pytest.fixture
def files(tmp_path: Path) -> list[DataConfig]:
    """Two files, of 20 and of 12 queries with three scored documents each."""
    for seed, count in ((1, 20), (2, 12)):
        write_examples(tmp_path / f"{seed}.jsonl", records(seed, count))
    return [DataConfig(source=str(tmp_path / f"{seed}.jsonl")) for seed in (1, 2)]


@pytest.fixture
def model(tiny_bert: Path) -> Model:
    torch.manual_seed(1)
    return Model.multi_vector(tiny_bert, {"depth": 1, "dim": 8})


def arguments(out: Path, **values: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
    }
    return TrainingArguments.parse(given | values, out)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_training_lowers_the_loss_and_leaves_a_model(model: Model, files: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", max_steps=-1, num_train_epochs=8, learning_rate=3e-3)
    data = open_data(files)
    trainer = Trainer(model, args, data, [KLDivergence(), InfoNCE(weight=0.01)])
    everything = Collator(model)([data[0, i, 0] for i in range(20)] + [data[1, i, 0] for i in range(12)])

    def loss() -> float:
        with torch.no_grad():
            return float(trainer.step.eval()(everything))

    before = loss()
    trainer.train()
    assert trainer.state.global_step == 8 * 8
    assert loss() < 0.7 * before
    logs = [each for each in trainer.state.log_history if "loss" in each]
    assert logs[0]["loss"] == pytest.approx(logs[0]["kl"] + 0.01 * logs[0]["infonce"], rel=1e-5)
    finished = trainer.finished_model()
    assert not finished.training
    finished.save_pretrained(tmp_path / "model")
    assert same(weights(Model.from_pretrained(tmp_path / "model")), weights(model))


def test_checkpoints_are_model_directories_and_only_the_last_stay(
    model: Model, files: Any, tmp_path: Path
) -> None:
    args = arguments(tmp_path / "out", max_steps=6, save_total_limit=2)
    trainer = Trainer(model, args, open_data(files), [KLDivergence()])
    trainer.train()
    assert [path.name for path in all_checkpoints(tmp_path / "out")] == ["checkpoint-4", "checkpoint-6"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"checkpoint-4", "checkpoint-6"}
    loaded = Model.from_pretrained(tmp_path / "out" / "checkpoint-6")
    assert same(weights(loaded), weights(model))
    state = json.loads((tmp_path / "out" / "checkpoint-6" / "training" / "trainer_state.json").read_text())
    assert state["global_step"] == 6


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [3, 5, 8, 9])
@pytest.mark.parametrize("extra", [{}, {"gradient_accumulation_steps": 2}, {"lora": {"r": 2}}])
def test_resuming_gives_the_weights_of_never_having_stopped(
    tiny_bert: Path, files: Any, tmp_path: Path, stop: int, extra: dict[str, Any]
) -> None:
    """Stopped in the middle and at the end of an epoch, between checkpoints and at one; with dropout."""

    def fresh(out: str, *callbacks: TrainerCallback) -> Trainer:
        torch.manual_seed(1)
        model = Model.multi_vector(tiny_bert, {"depth": 1, "dim": 8})
        args = arguments(tmp_path / out, max_steps=11, save_steps=3, seed=7, **extra)
        return Trainer(model, args, open_data(files), [InfoNCE()], callbacks=callbacks)

    whole = fresh("whole")
    whole.train()
    stopped = fresh("parts", Stop(stop))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = fresh("parts")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 11
    assert same(weights(whole.step), weights(resumed.step))
    assert not same(weights(whole.step), weights(stopped.step))


def test_resuming_where_there_is_nothing_starts(model: Model, files: Any, tmp_path: Path) -> None:
    trainer = Trainer(model, arguments(tmp_path / "out"), open_data(files), [KLDivergence()])
    trainer.train(resume_from_checkpoint=True)
    assert newest_checkpoint(tmp_path / "out") == tmp_path / "out" / "checkpoint-4"


def test_resuming_from_what_does_not_fit(model: Model, tiny_bert: Path, files: Any, tmp_path: Path) -> None:
    data = open_data(files)
    Trainer(model, arguments(tmp_path / "out"), data, [KLDivergence()]).train()
    other = Trainer(Model.sparse(tiny_bert), arguments(tmp_path / "other"), data, [KLDivergence()])
    with pytest.raises(CorruptError, match="of another model"):
        other.train(tmp_path / "out" / "checkpoint-4")
    with pytest.raises(StorageError, match="no such checkpoint"):
        other.train(tmp_path / "nowhere")
    path = tmp_path / "out" / "checkpoint-4" / "training" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptError, match=r"weights\.safetensors"):
        load_weights(path.parent)
