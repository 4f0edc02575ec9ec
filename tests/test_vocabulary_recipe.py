"""The recipe of a vocabulary transfer: checked as a whole, carried out stage by stage, also after kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from irkit import Model
from irkit.errors import BadValueError, ConfigError, StorageError
from irkit.tokenizer import Tokenizer
from irkit.training.model_recipe import make_model
from irkit.training.train_run import train
from irkit.vocabulary.transfer_recipe import VocabularyRecipe
from irkit.vocabulary.transfer_run import check, run

STAGES = ["vocabulary", "initialized", "adapted", "calibrated", "fine_tuned"]


def recipe_of(model: Path | str, notes: Path, **changes: Any) -> dict[str, Any]:
    quick = {"max_steps": 4, "per_device_train_batch_size": 4, "save_steps": 2, "logging_steps": 1}
    return {
        "model": {"kind": "sparse", "name": str(model), "max_length": 24},
        "vocabulary": {
            "texts": str(notes),
            "target": {"size": 70},
            "adaptation": {"train": {**quick, "gradient_accumulation_steps": 1}},
        },
        "data": {"source": str(notes), "split": "test", "documents": 1},
        "losses": {"kind": "infonce"},
        "train": {"seed": 3, "learning_rate": 1e-3, **quick},
        "evaluation": {"source": str(notes), "split": "test", "at_end": True},
        **changes,
    }


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        and path.name in ("model.safetensors", "evaluation.jsonl")
        and "checkpoints" not in path.parts
    }


def test_every_stage_leaves_a_model_and_the_last_one_is_the_result(
    tiny_bert: Path, notes: Path, tmp_path: Path, peer: Any
) -> None:
    recipe = VocabularyRecipe.resolve(recipe_of(tiny_bert, notes))
    out = tmp_path / "out"
    made = run(recipe, out)
    assert sorted(path.name for path in (out / "stages").iterdir()) == sorted(STAGES)
    words = Tokenizer.from_pretrained(out / "stages" / "vocabulary")
    assert words.vocab_size == 70 == made.dim
    assert made.tokenizer.signature == words.signature
    models = {name: Model.from_pretrained(out / "stages" / name) for name in STAGES[1:]}
    text = "searching neural indexes"
    assert (
        made.encode_document([text]).to_dense().equal(models["fine_tuned"].encode_document([text]).to_dense())
    )
    # adaptation may change all but the transformer, calibration the bias, fine-tuning everything
    states = {name: model.state_dict() for name, model in models.items()}
    changed = {
        (before, after): {
            name
            for name in states[after]
            if name in states[before] and not states[after][name].equal(states[before][name])
        }
        for before, after in pairwise(STAGES[1:])
    }
    assert changed["initialized", "adapted"] >= {"head.weight", "head.bias"}
    assert not any(
        "layers" in name and name.startswith("encoder") for name in changed["initialized", "adapted"]
    )
    assert changed["adapted", "calibrated"] == {"head.bias"}
    assert any(
        "layers" in name and name.startswith("encoder") for name in changed["calibrated", "fine_tuned"]
    )
    facts = json.loads((out / "vocabulary_transfer.json").read_text())
    assert facts["calibration"]["after"]["rate"] == pytest.approx(0.4, abs=0.01)
    assert facts["fragmentation"]["target"] < facts["fragmentation"]["source"]
    assert "<html" in (out / "report.html").read_text().lower()
    assert {json.loads(line)["measure"] for line in (out / "evaluation.jsonl").read_text().splitlines()} == {
        "nDCG@10"
    }
    sparse = peer.SparseEncoder(str(out), device="cpu")
    theirs = sparse.encode([text], convert_to_sparse_tensor=False)
    assert theirs.numpy() == pytest.approx(made.encode_document([text]).to_dense().numpy(), abs=1e-5)
    with pytest.raises(StorageError, match="holds a trained model"):
        run(recipe, out)


def test_without_data_calibration_is_the_last_stage(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    given = recipe_of(tiny_bert, notes)
    given = {key: given[key] for key in ("model", "vocabulary")}
    given["vocabulary"] = {**given["vocabulary"], "target": str(tiny_bert), "adaptation": None}
    made = run(VocabularyRecipe.resolve(given), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out" / "stages").iterdir()) == [
        "calibrated",
        "initialized",
    ]
    source = Model.sparse(tiny_bert)
    assert made.tokenizer.signature == source.tokenizer.signature
    shared = made.tokenizer.ids(["search", "token", "##s", "[CLS]"])
    assert made.encoder.word_embeddings[shared].equal(source.encoder.word_embeddings[shared])


def test_the_output_matrix_alone_may_change(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    given = recipe_of(tiny_bert, notes)
    given["vocabulary"] |= {"head_only": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sentence-transformers cannot open such a model
        made = run(VocabularyRecipe.resolve(given), tmp_path / "out")
    assert made.dim == 70
    assert made.tokenizer.signature == Model.sparse(tiny_bert).tokenizer.signature
    words = Tokenizer.from_pretrained(tmp_path / "out" / "stages" / "vocabulary")
    assert made.head.vocabulary == tuple(words.tokens(70))
    before, after = (Model.from_pretrained(tmp_path / "out" / "stages" / name) for name in STAGES[1:3])
    assert before.encoder.word_embeddings.equal(after.encoder.word_embeddings)
    assert not before.head.weight.equal(after.head.weight)


def test_texts_may_be_read_in_lower_case(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    cased = Tokenizer.from_pretrained(tiny_bert)
    cased.backend.normalizer = None
    before = cased(["Search"]).values.tolist()
    cased.lowercase()
    cased.save(tmp_path)
    again = Tokenizer.from_pretrained(tmp_path)
    assert again(["Search"]).values.tolist() == again(["search"]).values.tolist() != before
    given = recipe_of(tiny_bert, notes, vocabulary=None)
    given["model"]["lowercase"] = True
    made = make_model(VocabularyRecipe.resolve(given).model)
    assert "Lowercase" in made.tokenizer.backend.to_str()
    for queries in ("static", "lexical"):
        given["model"]["queries"] = queries
        made = make_model(VocabularyRecipe.resolve(given).model)
        assert made.query_model is not None
        assert "Lowercase" in made.query_model.tokenizer.backend.to_str()


@pytest.mark.slow
def test_two_processes_run_all_stages(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(recipe_of(tiny_bert, notes)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    keys = ("train", "vocabulary.adaptation.train")
    sets = [f"--set={key}.{value}" for key in keys for value in ("use_cpu=true", "ddp_backend=gloo")]
    words = [sys.executable, *launcher, "-m", "irkit", "transfer-vocab", "recipe.json", "--out", "out", *sets]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out" / "stages").iterdir()) == sorted(STAGES)
    assert Model.from_pretrained(tmp_path / "out").dim == 70
    assert json.loads((tmp_path / "out" / "vocabulary_transfer.json").read_text())["calibration"]


def test_without_a_vocabulary_it_is_a_training(tiny_bert: Path, notes: Path, tmp_path: Path) -> None:
    given = recipe_of(tiny_bert, notes, vocabulary=None)
    run(VocabularyRecipe.resolve(given), tmp_path / "recipe")
    del given["vocabulary"]
    train(given, tmp_path / "train")
    ours, theirs = (tmp_path / name / "evaluation.jsonl" for name in ("recipe", "train"))
    assert ours.read_bytes() == theirs.read_bytes()


KILLING = """
import os, signal, sys
from irkit.training import run_directory
from irkit.vocabulary import transfer_run as running
from irkit.vocabulary.transfer_recipe import VocabularyRecipe
stage, where, recipe, out = sys.argv[1:]

def killed(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

from transformers import TrainerCallback

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3 and stage in str(args.output_dir):
            killed()

if where == "step":
    from irkit.training import trainer
    begin = trainer.Trainer.__init__
    def init(self, *arguments, **named):
        begin(self, *arguments, **named)
        self.add_callback(Kill())
    trainer.Trainer.__init__ = init
elif where == "publish_entries":
    publish = run_directory.publish_entries
    def publish_and_kill(paths, folder):
        if "stages" in folder.parts:
            publish(paths, folder)
        else:
            killed(publish(list(paths)[:1], folder))
    run_directory.publish_entries = publish_and_kill
else:
    setattr(running if hasattr(running, where) else run_directory, where, killed)
running.run(VocabularyRecipe.resolve(recipe), out)
"""


@pytest.mark.slow
def test_killed_in_any_stage_it_goes_on_from_there(
    tiny_bert: Path, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = recipe_of(tiny_bert, notes)
    (tmp_path / "recipe.json").write_text(json.dumps(given))
    (tmp_path / "killing.py").write_text(KILLING)
    kills = (
        ("vocabulary", "fragmentation", ["vocabulary", ".initialized.partial"]),
        ("adapted", "step", ["vocabulary", "initialized", "adapted"]),
        ("calibrated", "publish_folder", ["vocabulary", "initialized", "adapted", ".calibrated.partial"]),
        ("fine_tuned", "step", STAGES),
        ("fine_tuned", "publish_entries", STAGES),
    )
    for stage, where, there in kills:
        words = [sys.executable, "-W", "ignore", "killing.py", stage, where, "recipe.json", "killed"]
        assert subprocess.run(words, cwd=tmp_path, check=False).returncode == -signal.SIGKILL
        assert {path.name for path in (tmp_path / "killed" / "stages").iterdir()} == set(there)
        assert not (tmp_path / "killed" / "modules.json").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed" / "stages").rglob("*")}
    monkeypatch.chdir(tmp_path)
    recipe = VocabularyRecipe.resolve("recipe.json")
    run(recipe, "killed")
    assert before == {path: path.stat().st_mtime_ns for path in before}  # nothing was done again
    run(recipe, "whole")
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_what_cannot_be_carried_out_is_refused_before_the_first_step(
    tiny_bert: Path, notes: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def refused(error: type[Exception], message: str, *overrides: str) -> None:
        with pytest.raises(error, match=message):
            check(VocabularyRecipe.resolve(recipe_of(tiny_bert, notes), overrides), out)
        assert not out.exists()

    refused(ConfigError, "did you mean 'adaptation'", "vocabulary.adaption={}")
    refused(ConfigError, "did you mean 'max_steps'", "vocabulary.adaptation.train.max_step=3")
    refused(ConfigError, "give `validation`", "vocabulary.adaptation.train.eval_steps=3")
    refused(StorageError, "nothing.jsonl", "vocabulary.adaptation.validation=nothing.jsonl")
    refused(StorageError, "nothing.jsonl", "vocabulary.texts=nothing.jsonl")
    refused(StorageError, "no such directory", "vocabulary.target=./nothing")
    refused(StorageError, "no such directory", "model.name=./nothing")
    refused(ConfigError, "model.kind", "model.kind=multi_vector")
    refused(ConfigError, "exclude each other", 'model.vocabulary=["a", "b"]')
    refused(ConfigError, "no 'losses'", "losses=[]")
    refused(ConfigError, "no 'data'", "data=[]")
    refused(ConfigError, "nothing to do", "data=[]", "losses=[]", "evaluation=[]", "vocabulary=null")
    refused(ConfigError, "at least 1 item", "vocabulary.texts=[]")
    for key in ("texts", "adaptation.texts", "adaptation.validation"):
        refused(BadValueError, "reading -: .* read only once; save it", f"vocabulary.{key}='-'")
    refused(ConfigError, "rate 0.95", "vocabulary.calibration.rate=0.95")
    refused(BadValueError, "needs the scores of a teacher", "losses.kind=kl")


def test_the_seed_of_the_training_is_that_of_all_stages(tiny_bert: Path, notes: Path) -> None:
    recipe = VocabularyRecipe.resolve(recipe_of(tiny_bert, notes), ["vocabulary.initialization.seed=9"])
    assert recipe.vocabulary is not None
    assert recipe.vocabulary.adaptation is not None
    assert recipe.vocabulary.initialization.seed == 9
    assert recipe.vocabulary.adaptation.train["seed"] == 3
    assert recipe.vocabulary.adaptation.texts == [str(notes)]
    assert VocabularyRecipe.resolve(recipe) == recipe
