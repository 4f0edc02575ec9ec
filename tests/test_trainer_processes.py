"""Training in processes of its own: killed and resumed, and two of them together."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from irkit import Model
from irkit.errors import ConfigError
from irkit.training import checkpoints, trainer
from irkit.training.losses import InfoNCE
from irkit.training.trainer import Trainer
from irkit.training.training_arguments import TrainingArguments
from irkit.training.training_data import DataConfig, TrainingRow, open_data, write_examples

STEPS = 9
SMOOTH = {"adam_epsilon": 0.01}  # steps without the sign of gradients that are nearly zero
TOGETHER = {"per_device_train_batch_size": 2, "eval_steps": 3, "ddp_backend": "gloo"}


@pytest.fixture
def folder(tiny_bert: Path, tmp_path: Path) -> Path:
    """A model without dropout, one with, and two files to be mixed."""
    settings = json.loads((tiny_bert / "config.json").read_text())
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    for name, changed in (("dropout", {}), ("plain", plain)):
        shutil.copytree(tiny_bert, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(settings | changed))
    words = ["a", "the", "search", "index", "vector", "token", "model", "neural", "text"]
    draw = random.Random(0)
    for source, count in (("one", 16), ("two", 8)):
        rows = [[" ".join(draw.choices(words, k=draw.randint(4, 9))) for _ in range(4)] for _ in range(count)]
        records = (
            TrainingRow(
                f"{source}{i}", texts[0], tuple(f"{source}{i}-{j}" for j in range(3)), tuple(texts[1:])
            )
            for i, texts in enumerate(rows)
        )
        write_examples(tmp_path / f"{source}.jsonl", records)
    return tmp_path


def make_trainer(folder: Path, out: str, base: str = "dropout", **values: Any) -> Trainer:
    torch.manual_seed(1)
    model = Model.multi_vector(folder / base, {"depth": 1, "dim": 8})
    given = {"per_device_train_batch_size": 4, "max_steps": STEPS, "save_steps": 2, "logging_steps": 1}
    args = TrainingArguments.parse({"learning_rate": 1e-2, "use_cpu": True} | given | values, folder / out)
    data = open_data(
        [DataConfig(source=str(folder / f"{name}.jsonl"), weight=1.0) for name in ("one", "two")]
    )
    evaluation = None if args.eval_strategy == "no" else lambda model: {"seen": float(os.getpid())}
    return Trainer(model, args, data, [InfoNCE(), InfoNCE(symmetric=True)], evaluation=evaluation)


def weights(trained: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in trained.step.named_parameters()}


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def shard_on_cpus() -> None:
    """Let accelerate do what it does with GPUs alone, though torch does it with CPUs as well."""
    init = AcceleratorState.__init__

    def made(self: Any, *arguments: Any, fsdp_plugin: Any = None, **values: Any) -> None:
        init(self, *arguments, fsdp_plugin=fsdp_plugin, **values)
        if fsdp_plugin is not None:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = made


def run(folder: Path, out: str, *, killed: str = "") -> None:
    """What a process of its own does."""
    if out in ("two", "sharded"):
        if out == "sharded":
            shard_on_cpus()
        made = make_trainer(folder, out, "plain", **SMOOTH, **TOGETHER, fsdp=out == "sharded")
        if killed:
            made.add_callback(Kill(int(killed)))
        made.train(resume_from_checkpoint=True)
        parts = {type(value) for value in made.step.parameters()}
        assert parts == {DTensor if out == "sharded" else torch.nn.Parameter}
        made.finished_model()  # all processes have to
        if made.args.process_index == 0:
            made.whole_step.save_pretrained(folder / f"{out}-model")
            history = json.dumps(made.state.log_history)
            (folder / "history.json").write_text(history)
        if out == "two":
            with pytest.raises(ConfigError, match="to GPUs only"):
                make_trainer(folder, out, "plain", **TOGETHER, fsdp=True)
        else:
            with pytest.raises(ConfigError, match=r"trained without fsdp, .* this training is with"):
                make_trainer(folder, "one", "plain", **SMOOTH, **TOGETHER, fsdp=True).train(True)
        torch.distributed.destroy_process_group()
        return
    made = make_trainer(folder, out)
    if killed == "saving":  # the second checkpoint, when all but its name is there
        published = trainer.publish_folder

        def publish(unfinished: Path, checkpoint: Path) -> None:
            if checkpoint.name == "checkpoint-4":
                os.kill(os.getpid(), signal.SIGKILL)
            published(unfinished, checkpoint)

        trainer.publish_folder = publish
    else:
        made.add_callback(Kill(int(killed)))
    made.train()


def start(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> int:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "IRKIT_CACHE": str(folder / "cache"),
    }
    command = [sys.executable, "-W", "ignore", *launcher, __file__, str(folder), *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


@pytest.mark.parametrize("when", [pytest.param("saving", marks=pytest.mark.slow), "at a random step"])
def test_killed_and_resumed_it_has_the_weights_of_never_having_been(
    folder: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, a mixture, and epochs of six steps that checkpoints fall into the middle of."""
    monkeypatch.setenv("IRKIT_CACHE", str(folder / "cache"))
    killed = when if when == "saving" else str(random.SystemRandom().randint(1, STEPS - 1))
    assert start(folder, "killed", killed) == -signal.SIGKILL
    names = {path.name for path in (folder / "killed").iterdir()}
    if killed == "saving":
        assert names == {"checkpoint-2", ".checkpoint-4.partial"}
    resumed, whole = make_trainer(folder, "killed"), make_trainer(folder, "whole")
    whole.train()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    a, b = weights(whole), weights(resumed)
    assert all(torch.equal(a[name], b[name]) for name in a), f"killed at {killed}"
    assert {path.name for path in (folder / "killed").iterdir()} == {"checkpoint-8", "checkpoint-9"}


@pytest.mark.slow
@pytest.mark.parametrize("out", ["two", "sharded"])
def test_two_processes_train_as_one_with_twice_the_batch(
    folder: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all weights in each process, or with half of them, killed and resumed."""
    monkeypatch.setenv("IRKIT_CACHE", str(folder / "cache"))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    one = make_trainer(folder, "one", "plain", **SMOOTH)
    one.train()
    if out == "sharded":
        assert start(folder, out, "5", launcher=launcher) != 0
        assert checkpoints.newest_checkpoint(folder / out) == folder / out / "checkpoint-4"
    assert start(folder, out, launcher=launcher) == 0
    history = json.loads((folder / "history.json").read_text())
    for name in ("loss", "grad_norm"):
        whole, parted = ([each[name] for each in h if name in each] for h in (one.state.log_history, history))
        assert len(whole) == STEPS
        assert parted == pytest.approx(whole, rel=1e-5)
    assert len([each for each in history if "eval_seen" in each]) == 3
    last = Model.from_pretrained(folder / out / "checkpoint-8")
    state = {path.name for path in (folder / out / "checkpoint-8" / "training").iterdir()}
    optimizer = "optimizer.bin" if out == "sharded" else "optimizer.pt"
    scheduler = {"scheduler.pt", "trainer_state.json", "weights.safetensors"}
    assert state == {"rng_state_0.pth", "rng_state_1.pth", optimizer} | scheduler
    saved = checkpoints.load_weights(folder / "one" / "checkpoint-8" / "training")
    for name, value in last.named_parameters():
        torch.testing.assert_close(value, saved[f"model.{name}"], rtol=1e-5, atol=1e-6)
    for name, value in Model.from_pretrained(folder / f"{out}-model").named_parameters():
        torch.testing.assert_close(value, weights(one)[f"model.{name}"], rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], killed=sys.argv[3] if len(sys.argv) > 3 else "")
