"""The recipe of a pre-training: checked as a whole, carried out stage by stage, after kills, and by two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from irkit import Model
from irkit.encoder import Encoder
from irkit.errors import BadValueError, ConfigError, StorageError
from irkit.heads import PooledHead
from irkit.tokenizer import Tokenizer
from irkit.training.model_recipe import make_model, trained_model
from irkit.training.new_model import NewModel
from irkit.training.pretraining.pretrain_recipe import PretrainingConfig, PretrainRecipe
from irkit.training.pretraining.pretrain_run import check, pretrain, run
from irkit.training.train_run import train

QUICK = {"per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-2, "adam_epsilon": 0.01}
BOTH = [{"kind": "masked_auto_encoding"}, {"kind": "bag_of_words"}]


def recipe_of(tokenizer: Any, notes: Path, **changes: Any) -> dict[str, Any]:
    """Four layers of which three pool, six steps and three."""
    sizes = {"layers": 4, "hidden_size": 16, "heads": 2, "intermediate_size": 32, "max_length": 8}
    return {
        "model": {"kind": "new", "preset": 1, "sizes": sizes, "tokenizer": tokenizer},
        "pretraining": {
            "texts": str(notes),
            "objectives": BOTH,
            "validation": str(notes),
            "validation_texts": 5,
            "train": {**QUICK, "max_steps": 6, "save_steps": 2, "eval_steps": 3},
        },
        "data": {"source": str(notes), "split": "test", "documents": 1},
        "losses": {"kind": "infonce"},
        "train": {**QUICK, "seed": 3, "max_steps": 3, "save_steps": 2},
        "evaluation": {"source": str(notes), "split": "test", "at_end": True},
        **changes,
    }


def log(folder: Path, name: str) -> list[tuple[float, float]]:
    """What was logged under a name, with the steps."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row[name]) for row in rows if name in row]


def results(place: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.name in ("model.safetensors", "evaluation.jsonl", "tokenizer.json")
        and "checkpoints" not in path.parts
    }


def test_every_stage_leaves_a_model_and_the_last_one_is_the_result(notes: Path, tmp_path: Path) -> None:
    given = recipe_of({"size": 60}, notes)
    out = tmp_path / "out"
    made = run(PretrainRecipe.resolve(given), out)
    assert sorted(path.name for path in (out / "stages").iterdir()) == [
        "fine_tuned",
        "pretrained",
        "tokenizer",
    ]
    models = {name: Model.from_pretrained(out / "stages" / name) for name in ("pretrained", "fine_tuned")}
    assert made.tokenizer.vocab_size == models["pretrained"].tokenizer.vocab_size <= 60
    assert made.tokenizer.max_length == 8
    text = ["searching neural indexes"]
    vectors = {name: model.encode_document(text) for name, model in models.items()}
    assert (made.encode_document(text) == vectors["fine_tuned"]).all()
    assert not (vectors["pretrained"] == vectors["fine_tuned"]).all()
    losses = [loss for _, loss in log(out / "stages" / "pretrained", "eval_loss")]
    logged = (out / "stages" / "pretrained" / "log.jsonl").read_bytes()
    assert (out / "pretraining.jsonl").read_bytes() == logged  # also where stages are removed
    assert len(losses) == 3  # before the first step, and every three
    assert losses[2] < losses[1] < losses[0]
    assert not any("pretrain" in name or "decoder" in name for name in made.state_dict())
    with pytest.raises(StorageError, match="holds a trained model"):
        run(PretrainRecipe.resolve(given), out)


def test_without_data_the_result_is_the_pretrained_model(
    tiny_bert: Path, notes: Path, tmp_path: Path
) -> None:
    given = recipe_of(str(tiny_bert), notes, data=[], losses=[], evaluation=[])
    recipe = PretrainRecipe.resolve(given)
    made = run(recipe, tmp_path / "out")
    assert recipe.pretraining is not None
    again = pretrain(make_model(recipe.model), recipe.pretraining, tmp_path / "again")
    assert made.dim == again.dim
    stage = tmp_path / "out" / "stages" / "pretrained"
    assert (stage / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_without_pretraining_it_is_a_training(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    given = recipe_of(str(tiny_bert), notes, pretraining=None)
    run(PretrainRecipe.resolve(given), tmp_path / "recipe")
    del given["pretraining"]
    train(given, tmp_path / "train")
    ours, theirs = (tmp_path / name / "evaluation.jsonl" for name in ("recipe", "train"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_pretrained_model_is_trained_further(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    given = recipe_of("", notes, model={"name": str(tiny_bert), "similarity": "dot", "max_length": 7})
    given["pretraining"] |= {
        "objectives": [{"kind": "masked_language_modeling"}, {"kind": "masked_auto_encoding"}],
        "masking": {"rate": 0.3},
    }
    with pytest.warns(UserWarning, match="does not say how a text becomes a vector"):
        made = run(PretrainRecipe.resolve(given), tmp_path / "out")
    assert (made.similarity_name, made.tokenizer.max_length) == ("dot", 7)
    names = {name for row in log_names(tmp_path / "out" / "stages" / "pretrained") for name in row}
    assert {"eval_masked_language_modeling", "eval_masked_auto_encoding"} <= names


def log_names(folder: Path) -> list[set[str]]:
    return [set(json.loads(line)) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("preset", "vector", "pools"),
    [("2-late", "mean", True), ("2-late-upscale", "mean", True), ("bert-base", "cls", False)],
)
def test_a_new_model_is_that_of_its_preset(tiny_bert: Path, preset: str, vector: str, pools: bool) -> None:
    sizes = {"layers": 4, "hidden_size": 24, "heads": 3, "max_length": 8}
    recipe = NewModel(
        kind="new", preset=preset, sizes=sizes, tokenizer=str(tiny_bert), prompts={"query": "a "}
    )
    model = make_model(recipe)
    assert model.head.pooling == (vector,)
    assert any(layer.pooling is not None for layer in model.encoder.config.layers) == pools
    assert model.dim == (48 if preset == "2-late-upscale" else 24)
    assert (model.tokenizer.max_length, model.prompts["query"]) == (8, "a ")
    tokens = model.tokenizer(["search index vector token model neural"])
    assert model.encoder(tokens).lengths.tolist() == [1 if pools else 8]


def test_a_new_model_cuts_queries_and_documents_where_its_recipe_says(
    tiny_bert: Path, tmp_path: Path
) -> None:
    sizes = {"layers": 4, "hidden_size": 16, "heads": 2, "max_length": 8}
    recipe = NewModel(
        kind="new", preset="2-late", sizes=sizes, tokenizer=str(tiny_bert), query_length=4, document_length=6
    )
    model = make_model(recipe)
    model.save_pretrained(tmp_path / "model")
    kept = make_model(trained_model(recipe, tmp_path / "model"))
    for each in (model, kept):
        for side, length in (("query", 4), ("document", 6)):
            tokens = each.pipeline(side).tokenize(["search index vector token model neural"])
            assert tokens.lengths.tolist() == [length]
    assert make_model(recipe.model_copy(update={"query_length": None})).max_length("query") == 8
    with pytest.raises(BadValueError, match="query_length"):
        make_model(recipe.model_copy(update={"query_length": 2}))  # the special tokens alone


KILLING = """
import os, signal, sys
from irkit.training import run_directory, trainer
from irkit.training.pretraining.pretrain_recipe import PretrainRecipe
from irkit.training.pretraining.pretrain_run import run
from transformers import TrainerCallback
stage, where, recipe, out = sys.argv[1:]

def killed(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if str(state.global_step) == where and stage in str(args.output_dir):
            killed()

if where == "link":
    publish = run_directory.publish_entries
    def publish_and_kill(paths, folder):
        if "stages" in folder.parts:
            publish(paths, folder)
        else:
            killed(publish(list(paths)[:1], folder))
    run_directory.publish_entries = publish_and_kill
else:
    begin = trainer.Trainer.__init__
    def init(self, *arguments, **named):
        begin(self, *arguments, **named)
        self.add_callback(Kill())
    trainer.Trainer.__init__ = init
run(PretrainRecipe.resolve(recipe), out)
"""


@pytest.mark.slow
def test_killed_in_any_stage_it_goes_on_with_the_same_losses(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = recipe_of({"size": 60}, notes)
    given["pretraining"]["masking"] = {"rate": 0.3}
    (tmp_path / "recipe.json").write_text(json.dumps(given))
    (tmp_path / "killing.py").write_text(KILLING)
    for stage, where in (("pretrained", "1"), ("pretrained", "3"), ("fine_tuned", "3"), ("all", "link")):
        words = [sys.executable, "-W", "ignore", "killing.py", stage, where, "recipe.json", "killed"]
        assert subprocess.run(words, cwd=tmp_path, check=False).returncode == -signal.SIGKILL
        assert not (tmp_path / "killed" / "modules.json").exists()
    monkeypatch.chdir(tmp_path)
    run(PretrainRecipe.resolve("recipe.json"), "killed")
    run(PretrainRecipe.resolve("recipe.json"), "whole")
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    assert len(results(tmp_path / "whole")) == 9
    for stage in ("pretrained", "fine_tuned"):
        killed, whole = (tmp_path / name / "stages" / stage for name in ("killed", "whole"))
        assert log(killed, "loss") == log(whole, "loss")
    killed, whole = (tmp_path / name / "stages" / "pretrained" for name in ("killed", "whole"))
    assert {*log(whole, "eval_loss")} <= {*log(killed, "eval_loss")}  # measured also where it goes on


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batch(
    tiny_bert: Path, notes: Path, tmp_path: Path
) -> None:
    given = recipe_of(str(tiny_bert), notes)
    new = PretrainRecipe.resolve(given).model
    assert isinstance(new, NewModel)
    tokenizer = Tokenizer.from_pretrained(tiny_bert)
    encoder = Encoder(new.settings(tokenizer.vocab_size) | {"dropout_prob": 0.0})
    Model(tokenizer, encoder, PooledHead(16, "mean")).save_pretrained(tmp_path / "model")
    (tmp_path / "recipe.json").write_text(json.dumps(given | {"model": str(tmp_path / "model")}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    together = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    for out, launcher, batch in (("one", [], 4), ("two", together, 2)):
        values = {"per_device_train_batch_size": batch, "use_cpu": True}
        values |= {"ddp_backend": "gloo"} if launcher else {}
        sets = [f"--set={key}train.{name}={values[name]}" for key in ("", "pretraining.") for name in values]
        words = [sys.executable, *launcher, "-m", "irkit", "pretrain", "recipe.json", "--out", out, *sets]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    ours, theirs = (Model.from_pretrained(tmp_path / out).state_dict() for out in ("two", "one"))
    for name, weight in theirs.items():
        assert (ours[name] - weight).abs().max() < 1e-4, name


def test_what_cannot_be_carried_out_is_refused_before_the_first_step(
    tiny_bert: Path, notes: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def refused(error: type[Exception], message: str, *overrides: str) -> None:
        with pytest.raises(error, match=message):
            check(PretrainRecipe.resolve(recipe_of(str(tiny_bert), notes), overrides), out)
        assert not out.exists()

    refused(ConfigError, "did you mean 'objectives'", "pretraining.objective={}")
    refused(ConfigError, "did you mean 'bag_of_words'", "pretraining.objectives.1.kind=bag_of_word")
    refused(ConfigError, "is there twice", "pretraining.objectives.1.kind=masked_auto_encoding")
    refused(ConfigError, "'masking' hides", "pretraining.objectives.1.kind=masked_language_modeling")
    refused(ConfigError, "did you mean 'max_steps'", "pretraining.train.max_step=3")
    refused(ConfigError, "expected 1 or more, .* got 0", "pretraining.train.max_steps=0")
    refused(ConfigError, "say how many", "pretraining.train.max_steps=-1")
    refused(ConfigError, "max_steps: .* got None", "pretraining.train.max_steps=null")
    refused(ConfigError, "max_steps: .* got 'all'", "pretraining.train.max_steps=all")
    refused(ConfigError, "gradient_cache_size does nothing", "pretraining.train.gradient_cache_size=2")
    refused(ConfigError, "give `validation`", "pretraining.validation=null")
    refused(ConfigError, "dataloader_drop_last does nothing", "pretraining.train.dataloader_drop_last=true")
    workers = (
        "pretraining.train.dataloader_num_workers=1",
        "pretraining.train.dataloader_persistent_workers=1",
    )
    refused(ConfigError, "dataloader_persistent_workers does nothing", *workers)
    refused(ConfigError, "weight: .* greater than 0", "pretraining.objectives.0.weight=0")
    taught = "{kind: distillation, cosine: 0, mse: 0, states: 0}"
    refused(ConfigError, "which teaches nothing", f"pretraining.objectives.1={taught}")
    refused(ConfigError, "nothing would be hidden", "pretraining.masking={masked: 0, random: 0}")
    refused(ConfigError, "at least 1 item", "pretraining.objectives=[]")
    refused(ConfigError, "at least 1 item", "pretraining.texts=[]")
    refused(BadValueError, "max_length 2 leaves no room", "pretraining.max_length=2")
    refused(BadValueError, "reading -: .* read only once; save it", "pretraining.texts='-'")
    refused(BadValueError, "reading -: .* read only once; save it", "pretraining.validation='-'")
    stopping = ("pretraining.train.eval_steps=null", "pretraining.train.early_stopping_patience=1")
    refused(ConfigError, "early_stopping_patience needs texts", "pretraining.validation=null", *stopping)
    refused(StorageError, "nothing.jsonl", "pretraining.validation=nothing.jsonl")
    refused(StorageError, "nothing.jsonl", "pretraining.texts=nothing.jsonl")
    refused(StorageError, "no such directory", "model.tokenizer=./nothing")
    refused(ConfigError, "got '9'", "model.preset=9")
    refused(ConfigError, "do not make one row of 512", "model.sizes.max_length=512")
    refused(ConfigError, "no multiple of 3 heads", "model.sizes.heads=3")
    refused(ConfigError, "did you mean 'hidden_size'", "model.sizes.hidden_sizes=3")
    refused(ConfigError, "no 'losses'", "losses=[]")
    refused(ConfigError, "no 'data'", "data=[]")
    refused(ConfigError, "nothing to do", "data=[]", "losses=[]", "evaluation=[]", "pretraining=null")
    refused(ConfigError, "which is left out", "model.tokenizer={}", "pretraining=null")
    refused(BadValueError, "needs the scores of a teacher", "losses.kind=kl")
    masked = ("pretraining.objectives.1.kind=masked_language_modeling", "pretraining.masking={}")
    refused(BadValueError, "the encoder pools", *masked)
    (tmp_path / "blank.txt").write_text("\n\n")
    refused(BadValueError, "there are no texts", f"pretraining.texts={tmp_path / 'blank.txt'}")
    refused(BadValueError, "there are no texts", f"pretraining.validation={tmp_path / 'blank.txt'}")


def test_a_directory_in_which_nothing_but_folders_was_made_can_be_begun_in(
    tiny_bert: Path, notes: Path, tmp_path: Path
) -> None:
    """As after a kill, or by another process, before the recipe of a stage is written."""
    config = PretrainRecipe.resolve(recipe_of(str(tiny_bert), notes))
    assert config.pretraining is not None
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / ".recipe.yaml.1.part").write_text("mod")
    pretrain(make_model(config.model), config.pretraining, tmp_path / "out")
    assert not (tmp_path / "out" / ".recipe.yaml.1.part").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="holds other files"):
        pretrain(make_model(config.model), config.pretraining, tmp_path / "other")


def test_it_goes_on_however_its_directory_is_named(
    tiny_bert: Path, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = PretrainRecipe.resolve(recipe_of(str(tiny_bert), notes))
    run(recipe, tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "out" / "stages" / "fine_tuned"):
        (path / "modules.json").unlink()  # as if it had been killed
    monkeypatch.chdir(tmp_path)
    assert run(recipe, "out").name == "out"


def test_a_vocabulary_is_trained_by_pretraining_alone(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    given = recipe_of({"size": 60}, notes)
    del given["pretraining"]
    with pytest.raises(ConfigError, match="expected irkit pretrain"):
        train(given, tmp_path / "out")


def test_the_seed_of_the_training_is_that_of_all_stages(tiny_bert: Path, notes: Path) -> None:
    recipe = PretrainRecipe.resolve(recipe_of(str(tiny_bert), notes))
    assert recipe.pretraining is not None
    assert recipe.pretraining.train["seed"] == 3
    assert recipe.pretraining.texts == [str(notes)]
    assert PretrainRecipe.resolve(recipe) == recipe
    own = PretrainRecipe.resolve(recipe_of(str(tiny_bert), notes), ["pretraining.train.seed=9"])
    assert own.pretraining is not None
    assert own.pretraining.train["seed"] == 9


def test_defaults_are_the_schedule_of_the_paper(tmp_path: Path) -> None:
    config = PretrainingConfig(texts="a.jsonl", objectives=BOTH, train={"max_steps": 200_000})
    arguments = config.arguments(tmp_path)
    assert arguments.get_warmup_steps(200_000) == 3000
    assert (arguments.learning_rate, arguments.lr_scheduler_kwargs) == (1e-4, {"min_lr_rate": 0.02})
    assert config.masking is None


def test_the_command_line(tiny_bert: Path, notes: Path, tmp_path: Path, command: Any) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(recipe_of(str(tiny_bert), notes)))
    file, out = str(tmp_path / "recipe.json"), tmp_path / "out"
    code, shown, _ = command("pretrain", file, "--print-config", "--set", "train.seed=5")
    (tmp_path / "shown.yaml").write_text(shown)
    assert code == 0
    assert PretrainRecipe.resolve(tmp_path / "shown.yaml").train["seed"] == 5
    code, _, said = command("pretrain", file)
    assert code == 2
    assert "no --out" in said
    code, _, said = command("pretrain", file, "--out", str(out), "--dry-run")
    assert code == 0
    assert "would train a new 1 (dense 16" in said
    assert not out.exists()
    code, shown, said = command("pretrain", file, "--out", str(out))
    assert code == 0, said
    assert "nDCG@10" in shown
    assert "Try: irkit index" in said
    code, _, said = command("pretrain", file, "--out", str(out))
    assert code == 2
    assert "--overwrite" in said
