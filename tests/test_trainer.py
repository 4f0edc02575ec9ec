"""The training loop: what it learns, saves, resumes, refuses."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from irkit import Model
from irkit.errors import (
    BadTypeError,
    ConfigError,
    CorruptError,
    MissingDependencyError,
    StorageError,
    TrainingError,
)
from irkit.model.hardware import prefers_bfloat16
from irkit.training.checkpoints import (
    all_checkpoints,
    load_weights,
    newest_checkpoint,
    rotate,
    save_weights,
    saving,
)
from irkit.training.losses import InfoNCE, KLDivergence
from irkit.training.regularizers import Flops
from irkit.training.trainer import Trainer
from irkit.training.training_arguments import TrainingArguments
from irkit.training.training_data import Collator, DataConfig, TrainingRow, open_data, write_examples

WORDS = ["a", "the", "search", "index", "vector", "token", "model", "neural", "text", "of", "in"]


_SHAPES = """
import sys
import torch
from irkit.training.training_arguments import TrainingArguments
from irkit.training.trainer import Trainer
Trainer(torch.nn.Linear(1, 1), TrainingArguments(sys.argv[1], use_cpu=True), torch.utils.data.DataLoader([1]))
weight = torch.zeros(64, 64, dtype=torch.bfloat16)
for rows in (100, *range(200, 270), 100):
    torch.zeros(rows, 64, dtype=torch.bfloat16) @ weight
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path_factory.mktemp("cache")))


def records(seed: int, count: int) -> Iterator[TrainingRow]:
    numbers = torch.randint(len(WORDS), (count, 4, 6), generator=torch.Generator().manual_seed(seed))
    for i, rows in enumerate(numbers.tolist()):
        query, *texts = (" ".join(WORDS[n] for n in row[: 2 + n % 5]) for n, row in enumerate(rows, i))
        texts[0] = f"{query} {texts[0]}"  # the best document has the words of the query, which can be learned
        names = tuple(f"{seed}-{i}-{j}" for j in range(3))
        yield TrainingRow(f"{seed}-{i}", query, names, tuple(texts), (3.0, 1.0, 0.0))


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


@pytest.mark.parametrize(
    ("stop", "extra"),
    [
        pytest.param(3, {}, marks=pytest.mark.slow),
        (8, {}),
        pytest.param(5, {"gradient_accumulation_steps": 3, "tokens_per_batch": 200}, marks=pytest.mark.slow),
        pytest.param(7, {"lora": {"r": 2}, "gradient_cache_size": 3}, marks=pytest.mark.slow),
    ],
)
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
    finished = weights(model)
    trainer.train(resume_from_checkpoint=True)  # nothing is left to do
    assert trainer.state.global_step == 4
    assert same(weights(model), finished)


def test_resuming_from_what_does_not_fit(model: Model, tiny_bert: Path, files: Any, tmp_path: Path) -> None:
    data = open_data(files)
    Trainer(model, arguments(tmp_path / "out"), data, [KLDivergence()]).train()
    other = Trainer(Model.sparse(tiny_bert), arguments(tmp_path / "other"), data, [KLDivergence()])
    with pytest.raises(CorruptError, match="of another model"):
        other.train(tmp_path / "out" / "checkpoint-4")
    with pytest.raises(StorageError, match="no such checkpoint"):
        other.train(tmp_path / "nowhere")
    state = tmp_path / "out" / "checkpoint-4" / "training"
    again = Trainer(model, arguments(tmp_path / "out"), data, [KLDivergence()])
    (state / "optimizer.pt").rename(state / "optimizer.bin")  # as fsdp names it
    with pytest.raises(ConfigError, match=r"trained with fsdp, .* this training is without"):
        again.train(resume_from_checkpoint=True)
    path = state / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptError, match=r"weights\.safetensors"):
        load_weights(path.parent)


class Poison(TrainerCallback):
    """Makes a weight infinite at the end of a step."""

    def __init__(self, step: int, weight: nn.Parameter) -> None:
        self.step, self.weight = step, weight

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.weight.data.view(-1)[0] = float("inf")


def test_a_loss_that_is_no_number_ends_training_and_keeps_the_last_checkpoint(
    model: Model, files: Any, tmp_path: Path
) -> None:
    poison = Poison(3, model.head.layers[0].linear.weight)
    args = arguments(tmp_path / "out", max_steps=9, gradient_accumulation_steps=2)
    trainer = Trainer(model, args, open_data(files), [KLDivergence()], callbacks=[poison])
    message = r"loss is nan at step 4, learning rate 0\.00\d+; try a lower .* checkpoint is .*checkpoint-2$"
    with pytest.raises(TrainingError, match=message):
        trainer.train()
    good = Model.from_pretrained(newest_checkpoint(tmp_path / "out"))
    assert all(bool(value.isfinite().all()) for value in good.parameters())


@pytest.mark.parametrize("norm", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_a_step_waits_for_a_gpu_once(
    model: Model,
    files: Any,
    tmp_path: Path,
    norm: float,
    record_dispatch: Any,
) -> None:
    """For its losses and the norm of its gradient, before the weights change."""

    class OnDevice(Trainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            return inputs.to(record_dispatch.device)

    args = arguments(tmp_path / "out", max_grad_norm=norm, gradient_accumulation_steps=2)
    trainer = OnDevice(model, args, open_data(files), [KLDivergence(), InfoNCE()])
    batches = list(itertools.islice(trainer.get_train_dataloader(), 2))
    trainer.step.to(record_dispatch.device)
    trainer.create_optimizer_and_scheduler(4)
    trainer.current_gradient_accumulation_steps = 2
    for _ in range(2):  # the state of the optimizer is there in the second
        record_dispatch.clear()
        for batch in batches:
            trainer.training_step(trainer.step, batch)
        clipped = trainer._clip_grad_norm(trainer.step) if norm else None
        assert trainer._get_grad_norm(trainer.step, clipped) > 0
        trainer.optimizer.step()
        assert len(record_dispatch.waits) == 1
        assert record_dispatch.pageable == record_dispatch.waits  # these numbers
    trainer.training_step(trainer.step, batches[0])
    trainer._losses[-1] *= torch.nan
    with pytest.raises(TrainingError, match="the loss is nan at step 1"):
        trainer._get_grad_norm(trainer.step)


def test_a_weight_that_is_no_number_is_never_saved(model: Model, files: Any, tmp_path: Path) -> None:
    poison = Poison(2, model.head.layers[0].linear.weight)
    trainer = Trainer(
        model, arguments(tmp_path / "out"), open_data(files), [KLDivergence()], callbacks=[poison]
    )
    with pytest.raises(
        TrainingError, match=r"the weight head\.layers\.0\.linear\.weight is no number.*no checkpoint"
    ):
        trainer.train()
    assert not list((tmp_path / "out").iterdir())


class Rooted(nn.Module):
    """An objective of its own, whose gradient is infinite at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, batch: torch.Tensor, progress: float) -> torch.Tensor:
        return (self.weight * batch).sum().clamp(min=0).sqrt()


def test_a_gradient_that_is_no_number_ends_training(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", max_steps=3)
    data = DataLoader([torch.ones(2), torch.zeros(2)], batch_size=1)
    trainer = Trainer(Rooted(), args, data)
    with pytest.raises(TrainingError, match="the gradient has a norm of nan at step 2"):
        trainer.train()


def test_any_module_that_returns_its_loss_is_trained_and_resumed(tmp_path: Path) -> None:
    class Squares(Rooted):
        seen: list[float] = []  # noqa: RUF012

        def forward(self, batch: torch.Tensor, progress: float) -> torch.Tensor:
            self.seen.append(progress)
            return ((self.weight - batch) ** 2).mean()

    data = DataLoader(torch.zeros(8, 2), batch_size=2)
    trainer = Trainer(Squares(), arguments(tmp_path / "out", learning_rate=0.1), data)
    trainer.train()
    assert Squares.seen == [0.0, 0.25, 0.5, 0.75]
    assert float(trainer.step.weight.detach().max()) < 0.9
    again = Trainer(Squares(), arguments(tmp_path / "out", learning_rate=0.1, max_steps=6), data)
    again.train(resume_from_checkpoint=True)
    assert len(Squares.seen) == 6
    with pytest.raises(BadTypeError, match="got a Squares and losses"):
        Trainer(Squares(), arguments(tmp_path / "out"), data, [KLDivergence()])


def test_learning_rates_by_pattern(model: Model, files: Any, tmp_path: Path) -> None:
    before = weights(model)
    rates = {"embeddings": 0.0, r"^head\.": 1e-2, r"layers\.1\.": 1e-4}
    args = arguments(tmp_path / "out", learning_rates=rates, weight_decay=0.1, lr_scheduler_type="constant")
    trainer = Trainer(model, args, open_data(files), [KLDivergence()])
    trainer.create_optimizer()
    found = {}
    for group in trainer.optimizer.param_groups:
        found |= {id(parameter): (group["lr"], group["weight_decay"]) for parameter in group["params"]}
    by_name = {name: found.get(id(parameter)) for name, parameter in model.named_parameters()}
    assert by_name["encoder.embeddings.word.weight"] is None
    assert by_name["head.layers.0.linear.weight"] == (1e-2, 0.1)
    assert by_name["encoder.layers.1.qkv.weight"] == (1e-4, 0.1)
    assert by_name["encoder.layers.1.qkv.bias"] == (1e-4, 0.0)
    assert by_name["encoder.layers.0.qkv.weight"] == (1e-3, 0.1)
    trainer.train()
    after = weights(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "embeddings" not in name}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rates": {"encodr": 1e-5}}, "'encodr' is found in no name"),
        ({"learning_rates": {"": 0}}, "all parameters are frozen"),
        ({"fsdp": True}, "train: fsdp: .*torchrun"),
        ({"max_steps": 0}, "train.max_steps: expected 1 or more, .* got 0"),
        ({"max_steps": -2}, "train.max_steps: expected 1 or more, .* got -2"),
        ({"report_to": ["tensorbord"]}, "train: report_to: unknown 'tensorbord'; there are .*tensorboard"),
        ({"lora": {"rank": 4}}, "lora: .*rank"),
        ({"lora": {"target_modules": ["nothing"]}}, "lora: .*nothing"),
    ],
)
def test_arguments_that_do_not_fit_the_model(
    model: Model, files: Any, tmp_path: Path, values: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(model, arguments(tmp_path / "out", **values), open_data(files), [KLDivergence()])


def test_tensorboard_gets_what_is_logged(model: Model, files: Any, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    args = arguments(tmp_path / "out", report_to="tensorboard", max_steps=2)
    trainer = Trainer(
        model, args, open_data(files), [KLDivergence()], evaluation=lambda model: {"nDCG@10": 0.5}
    )
    trainer.train()
    trainer.evaluate()
    found = reader.EventAccumulator(str(next((tmp_path / "out" / "runs").iterdir()))).Reload()
    for name in ("loss", "kl"):
        logged = {each["step"]: each[name] for each in trainer.state.log_history if name in each}
        assert logged.keys() == {1, 2}
        assert {each.step: each.value for each in found.Scalars(f"train/{name}")} == pytest.approx(logged)
    assert [each.value for each in found.Scalars("eval/nDCG@10")] == [0.5]


def test_reporting_to_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    integrations = transformers.integrations.integration_utils
    monkeypatch.setattr(integrations, "get_available_reporting_integrations", lambda: ["tensorboard"])
    with pytest.raises(MissingDependencyError, match=r"report_to: wandb .* pip install wandb"):
        arguments(tmp_path, report_to=["tensorboard", "wandb"])


def test_lora_trains_adapters_and_saves_their_sum(tiny_bert: Path, files: Any, tmp_path: Path) -> None:
    model = Model.multi_vector(tiny_bert, {"depth": 1, "dim": 8})
    before = weights(model)
    args = arguments(tmp_path / "out", lora={"r": 2, "lora_alpha": 8}, learning_rate=1e-2)
    trainer = Trainer(model, args, open_data(files), [KLDivergence()])
    trainer.train()
    saved = load_weights(tmp_path / "out" / "checkpoint-4" / "training")
    assert any("lora" in name for name in saved)
    assert not any("base_layer" in name for name in saved)
    finished = trainer.finished_model()
    after = weights(finished)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "encoder.layers.0.qkv.weight" in changed
    assert "encoder.embeddings.word.weight" not in changed
    loaded = Model.from_pretrained(tmp_path / "out" / "checkpoint-4")
    texts = ["a neural search model", "vector"]
    for other in (loaded, trainer.step.model):  # from disk, and with adapters beside the weights
        values = other.encode_representation(texts, "document").tokens.values
        expected = finished.encode_representation(texts, "document").tokens.values
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)


def test_the_best_model_is_kept_and_training_stops_early(model: Model, files: Any, tmp_path: Path) -> None:
    values = iter([0.1, 0.5, 0.4, 0.3, 0.9])
    seen: list[dict[str, torch.Tensor]] = []

    def evaluation(current: Model) -> dict[str, float]:
        seen.append(weights(current))
        current.encode_representation(["an index"], "document")  # leaves the model in evaluation mode
        return {"nDCG@10": next(values)}

    args = arguments(
        tmp_path / "out",
        max_steps=10,
        eval_steps=2,
        save_steps=2,
        metric_for_best_model="nDCG@10",
        greater_is_better=True,
        early_stopping_patience=2,
        save_total_limit=1,
    )
    data = open_data(files)
    trainer = Trainer(model, args, data, [KLDivergence()], evaluation=evaluation)
    trainer.train()
    assert trainer.state.global_step == 8
    assert len(seen) == 4
    assert trainer.state.best_metric == 0.5
    assert same(weights(trainer.finished_model()), seen[1])
    assert [path.name for path in all_checkpoints(tmp_path / "out")] == ["checkpoint-4"]
    assert [each["eval_nDCG@10"] for each in trainer.state.log_history if "eval_nDCG@10" in each] == [
        0.1,
        0.5,
        0.4,
        0.3,
    ]


@pytest.mark.parametrize("interrupted", [pytest.param(6, marks=pytest.mark.slow), 8])
def test_patience_goes_on_after_an_interruption(
    tiny_bert: Path, files: Any, tmp_path: Path, interrupted: int
) -> None:
    """It is interrupted between the two evaluations without a gain, or after the one that ends it."""

    class Interrupt(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == interrupted:
                raise KeyboardInterrupt

    values = {2: 0.1, 4: 0.5, 6: 0.4, 8: 0.3, 10: 0.2, 12: 0.1}
    args = arguments(
        tmp_path / "out",
        max_steps=12,
        eval_steps=2,
        metric_for_best_model="nDCG@10",
        greater_is_better=True,
        early_stopping_patience=2,
    )

    def trainer(*callbacks: TrainerCallback) -> Trainer:
        made = Trainer(
            Model.multi_vector(tiny_bert, {"depth": 1, "dim": 8}),
            args,
            open_data(files),
            [KLDivergence()],
            evaluation=lambda _: {"nDCG@10": values[made.state.global_step]},
            callbacks=callbacks,
        )
        return made

    with pytest.raises(KeyboardInterrupt):
        trainer(Interrupt()).train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    assert resumed.state.best_metric == 0.5
    assert resumed.state.best_global_step == 4


def test_the_best_model_is_found_in_a_directory_that_was_moved(
    tiny_bert: Path, files: Any, tmp_path: Path
) -> None:
    class Interrupt(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 6:
                raise KeyboardInterrupt

    def trainer(out: Path, *callbacks: TrainerCallback) -> Trainer:
        made = Trainer(
            Model.multi_vector(tiny_bert, {"depth": 1, "dim": 8}),
            arguments(
                out, max_steps=6, eval_steps=2, load_best_model_at_end=True, metric_for_best_model="nDCG@10"
            ),
            open_data(files),
            [KLDivergence()],
            evaluation=lambda _: {"nDCG@10": 1 / made.state.global_step},
            callbacks=callbacks,
        )
        return made

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "out", Interrupt()).train()
    (tmp_path / "out").rename(tmp_path / "moved")
    resumed = trainer(tmp_path / "moved")
    resumed.train(resume_from_checkpoint=True)
    best = Model.from_pretrained(tmp_path / "moved" / "checkpoint-2", device="cpu")
    assert same(weights(resumed.finished_model()), weights(best))


@pytest.mark.parametrize(
    "values",
    [
        {"bf16": True},
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"torch_compile": True}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # both inside torch.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_other_ways_to_compute_find_about_the_same(
    tiny_bert: Path, files: Any, tmp_path: Path, values: Any
) -> None:
    found = []
    for number, extra in enumerate(({}, values)):
        torch.manual_seed(1)
        model = Model.sparse(tiny_bert)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # compiled, it draws other numbers
        args = arguments(tmp_path / str(number), max_steps=2, learning_rate=1e-4, **extra)
        regularizers = [Flops(query=1e-3, document=1e-3)]
        trainer = Trainer(model, args, open_data(files), [InfoNCE(temperature=50)], regularizers)
        trainer.train()
        found.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
        finished = trainer.finished_model()
        assert not any("forward" in vars(module) for module in finished.modules())
        assert len(finished.encode_representation(["an index"], "document")) == 1
    assert found[0] == pytest.approx(found[1], rel=0.05 if "bf16" in values else 1e-5)


def test_parts_of_the_loss_are_means_over_what_was_accumulated(
    model: Model, files: Any, tmp_path: Path
) -> None:
    args = arguments(tmp_path / "out", gradient_accumulation_steps=3, logging_steps=2)
    trainer = Trainer(model, args, open_data(files), [KLDivergence()])
    trainer.train()
    for each in trainer.state.log_history:
        if "loss" in each:
            assert each["loss"] == pytest.approx(each["kl"], rel=1e-5)


def test_old_checkpoints_are_deleted_but_for_the_best_and_the_newest(tmp_path: Path) -> None:
    for step in (5, 10, 100, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / ".checkpoint-30.partial").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    rotate(tmp_path, 3, tmp_path / "checkpoint-5")
    assert [path.name for path in all_checkpoints(tmp_path)] == [
        "checkpoint-5",
        "checkpoint-20",
        "checkpoint-100",
    ]
    rotate(tmp_path, 1)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-100"
    assert len(all_checkpoints(tmp_path)) == 1
    rotate(tmp_path, None)
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_weights_that_cannot_be_written_are_an_error_that_names_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    with pytest.raises(StorageError, match=r"saving .*checkpoint-2"), saving(checkpoint):
        save_weights(checkpoint / "training", {"weight": torch.zeros(2)})


@pytest.mark.slow
@pytest.mark.skipif(not prefers_bfloat16(torch.device("cpu")), reason="needs a CPU that multiplies bfloat16")
def test_code_for_other_shapes_is_not_kept(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    result = subprocess.run(
        [sys.executable, "-c", _SHAPES, str(tmp_path)],
        env=environment | {"ONEDNN_VERBOSE": "2"},
        capture_output=True,
        text=True,
    )
    made = [line for line in result.stdout.splitlines() if "create:cache_miss" in line]
    assert sum("100x64:64x64" in line for line in made) == 2, result.stderr
    assert sum("269x64:64x64" in line for line in made) == 1


def test_what_the_environment_says_of_shapes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "5")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    Trainer(nn.Linear(1, 1), arguments(tmp_path), DataLoader([1]))
    assert os.environ["LRU_CACHE_CAPACITY"] == "5"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"


def test_a_model_keeps_code_for_few_shapes_too(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    Model.multi_vector(tiny_bert, device="cpu")
    assert os.environ["LRU_CACHE_CAPACITY"] == "64"


def test_a_cpu_without_bfloat16_trains_in_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("irkit.training.training_arguments.prefers_bfloat16", lambda _: False)
    with pytest.warns(UserWarning, match="it trains in float32"):
        arguments = TrainingArguments.parse({"bf16": True, "use_cpu": True}, tmp_path)
    assert not arguments.bf16
    assert arguments.mixed_precision == "no"
