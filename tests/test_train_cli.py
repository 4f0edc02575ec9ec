"""``irkit train`` from recipe to model, with tiny random models, and what it refuses before a step."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import irkit.training.train_run
from irkit import Model, Retriever, evaluate
from irkit.cli import main
from irkit.errors import ConfigError, IrkitError, StorageError
from irkit.training import TrainRecipe, train
from irkit.training.interaction import load_interaction
from irkit.training.losses import LOSSES
from irkit.training.regularizers import REGULARIZERS
from irkit.training.train_run import prepare

TEXTS = ["a search index", "neural text model", "the token of a model", "vector search", "an index of text"]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    write_lines(folder / "corpus.jsonl", [{"_id": f"d{n}", "text": text} for n, text in enumerate(TEXTS * 3)])
    write_lines(folder / "queries.jsonl", [{"_id": f"q{n}", "text": text} for n, text in enumerate(TEXTS)])
    for split in ("train", "test"):
        lines = "".join(f"q{n}\td{n}\t1\n" for n in range(5))
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)
    return folder


def recipe(tiny_bert: Path, collection: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """Two batches of examples an epoch."""
    return {
        "model": {"kind": kind, "name": str(tiny_bert)},
        "data": {"source": str(collection), "split": "train", "documents": 1},
        "losses": {"kind": "infonce", "temperature": 0.5},
        "train": {
            "per_device_train_batch_size": 4,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "logging_steps": 1,
        },
    } | changes


def call(*words: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    if stop.value.code != 0:
        raise AssertionError(stop.value.code)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(Model.from_pretrained(path, device="cpu").state_dict())


SPARSE = {"regularizers": {"kind": "flops", "query": 1e-3, "document": 1e-3}}


@pytest.mark.parametrize(("kind", "changes"), [("multi_vector", {}), ("sparse", SPARSE), ("pretrained", {})])
def test_trains_and_measures(
    kind: str, changes: dict[str, Any], tiny_bert: Path, collection: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "pretrained":  # a bare encoder would be taken for one with a warning
        Model.multi_vector(tiny_bert).save_pretrained("start")
        changes = {"model": "start"}
    evaluation = {"source": str(collection), "split": "test", "k": 10}
    settings = recipe(tiny_bert, collection, kind, evaluation=evaluation, **{"model": {}} | changes)
    settings["model"] = changes.get("model", {"kind": kind, "name": str(tiny_bert)})
    Path("recipe.yaml").write_text(yaml.safe_dump(settings))
    call("train", "recipe.yaml", "--out", "out", "--set", "train.eval_on_start=true")
    shown = capsys.readouterr()
    assert "trained in" in shown.err
    model = Model.from_pretrained("out")
    before = Model.from_pretrained("start") if kind == "pretrained" else None
    if before is not None:
        assert model.fingerprint != before.fingerprint
    log = [json.loads(line) for line in Path("out/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "loss" in line] == [1, 2, 3]
    assert [line["step"] for line in log if "eval_nDCG@10" in line] == [0, 2, 3]
    lines = [json.loads(line) for line in Path("out/evaluation.jsonl").read_text().splitlines()]
    retriever = Retriever.build("out", str(collection), "index")
    expected = evaluate(retriever.run(str(collection), 10), str(collection)).per_query["nDCG@10"]
    assert {line["query_id"]: line["value"] for line in lines} == expected
    assert shown.out.splitlines()[1] == f"collection\tnDCG@10\t{sum(expected.values()) / 5:.4f}"
    assert TrainRecipe.resolve("out/recipe.yaml") == TrainRecipe.resolve(
        "recipe.yaml", ["train.eval_on_start=true"]
    )


def test_same_seed_gives_the_same_model(tiny_bert: Path, collection: Path) -> None:
    settings = recipe(tiny_bert, collection, "multi_vector")
    settings["model"]["projection"] = {"dim": 8}
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        train(settings, name, overrides=[f"train.seed={seed}"])
    one, same, other = (weights(Path(name)) for name in ("one", "same", "other"))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_interrupted_training_goes_on(
    tiny_bert: Path, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe(tiny_bert, collection, "multi_vector")
    settings["train"] |= {"max_steps": 4, "save_steps": 2}
    whole = train(settings, "whole")
    log = irkit.training.train_run.TrainingLog.on_log

    def stopping(self: Any, args: Any, state: Any, control: Any, **given: Any) -> None:
        log(self, args, state, control, **given)
        if state.global_step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(irkit.training.train_run.TrainingLog, "on_log", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(settings, "halves")
    assert not Path("halves/modules.json").exists()
    with pytest.raises(StorageError, match=r"has another recipe, halves/recipe.yaml"):
        train(settings, "halves", overrides=["train.seed=3"])
    monkeypatch.setattr(irkit.training.train_run.TrainingLog, "on_log", log)
    with Path("halves/log.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # as a kill may leave it
    for left in (
        ".model.part-x",
        ".model.part-1-abcdefgh.part",
        "checkpoints/.checkpoint-4.partial",
        "checkpoints/..checkpoint-4.partial-x",
    ):
        Path("halves", left, "new").mkdir(parents=True)
    train(settings, "halves")
    assert not [path for path in Path("halves").rglob("*") if ".part" in path.name]
    assert weights(Path("halves")).keys() == whole.state_dict().keys()
    assert all(
        torch.equal(value, weights(Path("whole"))[name]) for name, value in weights(Path("halves")).items()
    )
    steps = [json.loads(line)["step"] for line in Path("halves/log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 4]


@pytest.mark.slow
def test_killed_while_measured_takes_no_further_step(
    tiny_bert: Path, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe(tiny_bert, collection, "multi_vector")
    settings["evaluation"] = {"source": str(collection), "split": "test", "at_end": True}
    whole = train(settings, "whole")
    write = irkit.training.train_run.write_results

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(irkit.training.train_run, "write_results", killed)
    with pytest.raises(KeyboardInterrupt):
        train(settings, "again")
    assert not Path("again/modules.json").exists()
    monkeypatch.setattr(irkit.training.train_run, "write_results", write)
    train(settings, "again")
    again = weights(Path("again"))
    assert all(torch.equal(again[name], value) for name, value in whole.state_dict().items())
    assert Path("again/evaluation.jsonl").read_text() == Path("whole/evaluation.jsonl").read_text()


def test_best_model_is_kept_and_training_stops_early(tiny_bert: Path, collection: Path) -> None:
    settings = recipe(tiny_bert, collection, "multi_vector")
    settings["evaluation"] = {"source": str(collection), "split": "test"}
    settings["train"] |= {
        "learning_rate": 0.3,
        "max_steps": 30,
        "eval_steps": 1,
        "early_stopping_patience": 2,
    }
    train(settings, "out")
    log = [json.loads(line) for line in Path("out/log.jsonl").read_text().splitlines()]
    values = [line["eval_nDCG@10"] for line in log if "eval_nDCG@10" in line]
    assert len(values) == values.index(max(values)) + 3 < 30
    lines = [json.loads(line) for line in Path("out/evaluation.jsonl").read_text().splitlines()]
    assert sum(line["value"] for line in lines) / len(lines) == pytest.approx(max(values))


def test_nan_stops_and_leaves_the_last_checkpoint(
    tiny_bert: Path, collection: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = recipe(tiny_bert, collection, "sparse")
    settings["train"] |= {"learning_rate": 1e30, "save_steps": 1, "warmup_steps": 1, "max_steps": 9}
    Path("recipe.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(SystemExit) as stop:
        main(["train", "recipe.yaml", "--out", "out"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "learning_rate" in message
    left = re.search(r"The last good checkpoint is (\S+)", message)
    assert left
    assert all(bool(value.isfinite().all()) for value in weights(Path(left[1])).values())
    assert not Path("out/modules.json").exists()


def test_help_lists_the_kinds_of_losses(command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = command("train", "--help")
    words = out.replace(",", " ").split()
    assert code == 0
    assert {*LOSSES, *REGULARIZERS} <= {*words}


def test_lora_is_merged_into_what_is_saved(tiny_bert: Path, collection: Path) -> None:
    settings = recipe(tiny_bert, collection, "multi_vector")
    settings["train"]["lora"] = {"r": 2, "target_modules": ["qkv"]}
    model = train(settings, "out")
    saved = Model.from_pretrained("out")
    torch.testing.assert_close(
        saved.encode_representation(TEXTS, "document").tokens.values,
        model.encode_representation(TEXTS, "document").tokens.values,
    )
    start = Model.multi_vector(tiny_bert, "linear").state_dict()
    changed = [name for name, value in saved.state_dict().items() if not torch.equal(value, start[name])]
    assert changed
    assert all("qkv" in name or "head" in name for name in changed)


def test_what_is_there_is_kept_unless_told_otherwise(tiny_bert: Path, collection: Path) -> None:
    settings = recipe(tiny_bert, collection, "sparse")
    settings["train"]["max_steps"] = 2
    train(settings, "out")
    with pytest.raises(StorageError, match="it holds a trained model"):
        train(settings, "out")
    first = weights(Path("out"))
    train(settings, "out", overrides=["train.seed=5"], overwrite=True)
    assert TrainRecipe.resolve("out/recipe.yaml").train["seed"] == 5
    second = weights(Path("out"))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert not Path("out/replaced").exists()
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(StorageError, match=r"holds other files \(thesis.txt\)"):
            train(settings, "mine", overwrite=overwrite)
    with pytest.raises(StorageError, match=r"thesis.txt is a file"):
        train(settings, "mine/thesis.txt/deep")


def test_a_model_that_is_replaced_is_kept_until_the_new_one_is_complete(
    tiny_bert: Path, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe(tiny_bert, collection, "sparse")
    settings["train"]["max_steps"] = 2
    train(settings, "out")
    first = weights(Path("out"))
    with monkeypatch.context() as patch:
        patch.setattr("irkit.training.train_run.Trainer.train", fail)
        for seed in (5, 6):  # the second replaces what the first did not finish
            with pytest.raises(KeyboardInterrupt):
                train(settings, "out", overrides=[f"train.seed={seed}"], overwrite=True)
            assert not Path("out/modules.json").exists()
            kept = weights(Path("out/replaced"))
            assert all(torch.equal(value, kept[name]) for name, value in first.items())
            Model.from_pretrained("out/replaced").encode_query("bears")
    train(settings, "out", overrides=["train.seed=6"])
    assert not Path("out/replaced").exists()
    rename = Path.replace
    second = weights(Path("out"))
    with monkeypatch.context() as patch:  # killed before each of what is put aside

        def killed(path: Path, target: Path) -> Path:
            if target.parent.name == "replaced" and next(calls) == 1:
                raise KeyboardInterrupt
            return rename(path, target)

        patch.setattr(Path, "replace", killed)
        patch.setattr("irkit.training.train_run.Trainer.train", fail)
        for _ in range(12):
            calls = count()
            with pytest.raises(KeyboardInterrupt):
                train(settings, "out", overrides=["train.seed=7"], overwrite=True)
    kept = weights(Path("out/replaced"))
    assert all(torch.equal(value, kept[name]) for name, value in second.items())
    assert any(not torch.equal(value, first[name]) for name, value in second.items())


def fail(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


REFUSALS = [
    ({"data": {"source": "nowhere.jsonl"}}, "nowhere.jsonl"),
    ({"data": {"source": "pairs.jsonl"}, "losses": {"kind": "kl"}}, "scores"),
    ({"losses": {"kind": "pairwise"}}, "pairwise compares the documents of a query, and examples have one"),
    ({"regularizers": {"kind": "flops", "document": 0.1}}, "sparse"),
    ({"losses": {"kind": "embedding", "guide": "start"}}, "vector"),
    ({"model": "nowhere/at-all"}, "nowhere/at-all"),
    ({"evaluation": {"source": "nowhere"}}, "nowhere"),
    ({"evaluation": {"source": "collection", "measures": "nDGC@10"}}, "nDGC@10"),
    ({"train": {"learning_rates": {"encodr": 0}, "max_steps": 1}}, "encodr"),
    ({"train": {"lr_scheduler_type": "steep"}}, "steep"),
    ({"train": {"torch_compile": True, "torch_compile_mode": "swift"}}, "train: .*swift"),
    (
        {"evaluation": {"source": "collection"}, "train": {"metric_for_best_model": "RR@10"}},
        "RR@10 is not measured; expected nDCG@10",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_bad_recipes_fail_before_anything_is_written(
    changes: dict[str, Any], message: str, tiny_bert: Path, collection: Path
) -> None:
    write_lines(Path("pairs.jsonl"), [{"query": "a search", "document": "an index"}] * 3)
    settings = recipe(tiny_bert, collection, "multi_vector") | changes
    with pytest.raises(IrkitError, match=message):
        train(settings, "out")
    assert not Path("out").exists()


def test_streams_need_an_end(tiny_bert: Path, collection: Path) -> None:
    settings = recipe(tiny_bert, collection, "multi_vector", train={})
    settings["data"] = {"source": "pairs.jsonl", "streaming": True}
    write_lines(Path("pairs.jsonl"), [{"query": "a search", "document": "an index"}] * 3)
    with pytest.raises(ConfigError, match=r"train.max_steps: a streamed dataset has no end"):
        prepare(TrainRecipe.resolve(settings), "out")


def test_dry_run_and_config(tiny_bert: Path, collection: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe(tiny_bert, collection, "sparse")))
    call("train", "recipe.yaml", "--out", "out", "--dry-run")
    assert "would train" in (message := capsys.readouterr().err)
    assert "5 examples into out" in message
    assert not Path("out").exists()
    call("train", "recipe.yaml", "--set", "train.seed=9", "--print-config")
    assert yaml.safe_load(capsys.readouterr().out)["train"]["seed"] == 9
    for words, message in [((), "no --out"), (("--out", "out", "--set", "trian.seed=1"), "'train'")]:
        with pytest.raises(SystemExit) as stop:
            main(["train", "recipe.yaml", *words])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_attention_is_trained_measured_and_saved(tiny_bert: Path, collection: Path) -> None:
    settings = recipe(tiny_bert, collection, "multi_vector", interaction={"kind": "mva", "dim": 8})
    settings["evaluation"] = {"source": str(collection), "split": "test", "k": 15}
    train(settings, "out")
    lines = [json.loads(line) for line in Path("out/evaluation.jsonl").read_text().splitlines()]
    model, attention = Model.from_pretrained("out"), load_interaction("out")
    documents = model.encode_representation(TEXTS * 3, "document")
    with torch.no_grad():
        scores = attention(model.encode_representation(TEXTS, "query"), documents)  # type: ignore[arg-type]
    found = {
        f"q{n}": {f"d{m}": value for m, value in enumerate(row)} for n, row in enumerate(scores.tolist())
    }
    expected = evaluate(found, str(collection)).per_query["nDCG@10"]
    assert {line["query_id"]: line["value"] for line in lines} == expected
    with pytest.raises(ConfigError, match="compares token vectors, the model makes sparse ones"):
        train(settings, "other", overrides=["model.kind=sparse"])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_train_one_model(tiny_bert: Path, collection: Path, launcher: str) -> None:
    shutil.copytree(tiny_bert, "start")
    config = json.loads(Path("start/config.json").read_text())
    rates = {name: 0.0 for name in config if name.endswith("dropout_prob")}  # else each process has its own
    Path("start/config.json").write_text(json.dumps(config | rates))
    settings = recipe(Path("start"), collection, "multi_vector")
    settings["train"] |= {"per_device_train_batch_size": 2, "max_steps": 1, "warmup_steps": 0, "optim": "sgd"}
    Path("recipe.yaml").write_text(yaml.safe_dump(settings))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    if launcher == "accelerate":  # which starts several processes on CPUs through MPI alone
        if not shutil.which("mpirun"):
            pytest.skip("mpirun is not installed")
        Path("hosts").write_text("localhost slots=2\n")
        command = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
        command += ["--mpirun_hostfile=hosts"]
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = subprocess.run(
        [sys.executable, *command, "-m", "irkit", "train", "recipe.yaml", "--out", "two"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    train(settings, "one", overrides=["train.per_device_train_batch_size=4"])
    one, two = weights(Path("one")), weights(Path("two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value)
    start = Model.multi_vector("start", device="cpu").state_dict()
    assert any(not torch.equal(one[name], start[name]) for name in one)
