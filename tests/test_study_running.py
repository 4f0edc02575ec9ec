"""Runs of a study: processes, failures, interruptions; a script stands in for the trainer."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from irkit import Model, evaluate
from irkit.cli import main
from irkit.errors import BadValueError, ConfigError, IrkitError, LockedError, StorageError
from irkit.study import StudyConfig, check_study, run_study
from irkit.study import study_run as module
from irkit.study.study_run import check_parts
from irkit.training import model_recipe
from irkit.training.model_recipe import make_model

# Says what it found, then what it scores: the more, the higher the learning rate. Names of models are orders.
TRAINER = """
import json, os, pathlib, sys, time, yaml
recipe, out = yaml.safe_load(open(sys.argv[2])), pathlib.Path(sys.argv[4])
out.mkdir(parents=True, exist_ok=True)
found = {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
found["verb"] = sys.argv[1]
with open(out / "calls.jsonl", "a") as calls:
    calls.write(json.dumps(found) + "\\n")
order = recipe["model"]["name"]
if order == "meet":  # the other run, which must be there at the same time
    end = time.monotonic() + 30
    while len(list(out.parents[1].glob("*/seed-1/calls.jsonl"))) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert time.monotonic() < end
if order == "wait":
    time.sleep(60)
if order == "fail" and not pathlib.Path("repaired").exists():
    print("loading")
    sys.exit("irkit: error: loss is nan at step 3")
(out / "recipe.yaml").touch()
if order != "forget":
    with open(out / "evaluation.jsonl", "w") as results:
        for query in range(5):
            value = recipe["train"].get("learning_rate", 0.5) + query / 100 + recipe["train"]["seed"] / 1000
            row = {"dataset": "beir", "measure": "nDCG@10", "query_id": str(query), "value": value}
            results.write(json.dumps(row) + "\\n")
(out / "model.safetensors").touch()
(out / "modules.json").touch()
"""

RECIPE = {
    "model": {"name": "none"},
    "data": {"source": "beir", "split": "train"},
    "losses": {"kind": "infonce"},
    "evaluation": {"source": "beir"},
}
VARIANTS = {"slow": {"train.learning_rate": 0.1}, "fast": {"train.learning_rate": 0.2}}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The working directory, with the script in the trainer's place."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "IRKIT", [sys.executable, str(tmp_path / "trainer.py")])
    monkeypatch.setattr(module, "check_parts", lambda recipes: {})  # which are orders
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def study_of(**changes):
    study = {"recipe": RECIPE, "variants": VARIANTS, "baseline": "slow", "seeds": [1, 2], **changes}
    return StudyConfig.parse(study)


def calls(trial):
    return [json.loads(line) for line in (trial.folder / "calls.jsonl").read_text().splitlines()]


def test_a_recipe_that_says_something_of_the_vocabulary_has_a_verb_of_its_own(place):
    variants = {"none": {"vocabulary": None}, "some": {"vocabulary": {"texts": "beir", "target": "bert"}}}
    recipe = RECIPE | {"model": {"name": "none", "kind": "sparse"}}
    runs = run_study(study_of(recipe=recipe, variants=variants, baseline="none", seeds=[1]), "out")
    assert [calls(trial)[0]["verb"] for trial in runs] == ["transfer-vocab"] * 2
    runs = run_study(study_of(seeds=[1]), "other")
    assert [calls(trial)[0]["verb"] for trial in runs] == ["train"] * 2
    wrong = variants | {"some": {"vocabulary": {"adaption": {}}}}
    with pytest.raises(ConfigError, match="did you mean 'adaptation'"):
        check_study(study_of(recipe=recipe, variants=wrong, baseline="none"), place / "no")


def test_a_recipe_with_pretraining_has_a_verb_of_its_own(place):
    plan = {"texts": "beir", "objectives": {"kind": "bag_of_words"}, "train": {"max_steps": 3}}
    variants = {"none": {"pretraining": None}, "some": {"pretraining": plan}}
    runs = run_study(study_of(variants=variants, baseline="none", seeds=[1]), "out")
    assert [calls(trial)[0]["verb"] for trial in runs] == ["pretrain"] * 2
    wrong = variants | {"some": {"pretraining": plan | {"objectives": {"kind": "bag_of_word"}}}}
    with pytest.raises(ConfigError, match="did you mean 'bag_of_words'"):
        check_study(study_of(variants=wrong, baseline="none"), place / "no")


def test_every_run_once(place):
    ended = []
    runs = run_study(study_of(), "out", progress=lambda trial, seconds: ended.append((trial, seconds)))
    assert [(trial.variant, trial.seed) for trial in runs] == [
        ("slow", 1),
        ("fast", 1),
        ("slow", 2),
        ("fast", 2),
    ]
    assert [trial for trial, _ in ended] == runs
    assert all(trial.finished and trial.failure is None and seconds > 0 for trial, seconds in ended)
    assert yaml.safe_load(Path("out/runs/fast/seed-2.yaml").read_text()) == {
        **RECIPE,
        "train": {"learning_rate": 0.2, "seed": 2},
    }
    report = Path("out/report.md").read_text()
    assert "4 of 4 runs finished" in report
    assert "| slow (baseline) | 0.1215 ± 0.0007 |" in report
    assert "| fast | **0.2215** ± 0.0007† |" in report
    assert "| fast | +0.1000 (<0.0001) |" in report
    run_study(study_of(), "out")
    assert all(len(calls(trial)) == 1 for trial in runs)
    more = run_study(study_of(seeds=[1, 2, 3]), "out")  # a study may grow
    assert [len(calls(trial)) for trial in more] == [1] * 6


def test_two_at_once_share_the_processor(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    recipe = {**RECIPE, "model": {"name": "meet"}}
    runs = run_study(study_of(recipe=recipe, seeds=[1]), "out", jobs=2)
    assert all(trial.finished for trial in runs)
    assert [calls(trial)[0]["OMP_NUM_THREADS"] for trial in runs] == ["3", "3"]


@pytest.mark.parametrize(("visible", "names"), [(None, ["0", "1"]), ("3,5", ["3", "5"])])
def test_gpus_are_dealt_out(monkeypatch, visible, names):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    runs = run_study(study_of(recipe={**RECIPE, "model": {"name": "meet"}}, seeds=[1]), "out")
    assert [calls(trial)[0]["CUDA_VISIBLE_DEVICES"] for trial in runs] == names


@pytest.mark.parametrize(
    ("order", "failure"), [("fail", "exit code 1: loss is nan at step 3"), ("forget", "exit code 0: it said")]
)
def test_a_failure_does_not_stop_the_others(order, failure):
    study = study_of(variants={**VARIANTS, "odd": {"model.name": order}})
    runs = run_study(study, "out")
    assert [trial.variant for trial in runs if not trial.finished] == ["odd", "odd"]
    assert runs[2].failure.startswith(failure)
    report = Path("out/report.md").read_text()
    assert f"* odd, seed 1: {failure}" in report
    assert "4 of 6 runs finished" in report
    if order == "fail":  # the same command tries it again
        Path("repaired").touch()
        again = run_study(study, "out")
        assert all(trial.finished and trial.failure is None for trial in again)
        assert [len(calls(trial)) for trial in again] == [1, 1, 2, 1, 1, 2]
        assert "Failed" not in Path("out/report.md").read_text()


def test_an_interruption_ends_what_runs_and_the_next_call_goes_on():
    study = study_of(variants={**VARIANTS, "late": {"model.name": "wait"}}, seeds=[1])

    def interrupt(trial, seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(study, "out", jobs=3, progress=interrupt)
    log = Path("out/runs/late/seed-1.log")
    with log.open() as held:  # nobody has it
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    Path("trainer.py").write_text(TRAINER.replace("time.sleep(60)", "pass"))
    assert all(trial.finished for trial in run_study(study, "out"))


def test_what_still_runs_is_not_started_again():
    log = Path("out/runs/slow/seed-1.log")
    log.parent.mkdir(parents=True)
    with log.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match="still being trained"):
            run_study(study_of(), "out")


def test_a_run_begun_with_another_recipe_is_not_gone_on_with():
    run_study(study_of(seeds=[1]), "out")
    changed = study_of(variants={**VARIANTS, "fast": {"train.learning_rate": 0.3}})
    with pytest.raises(ConfigError, match=r"fast/seed-1 was begun with train.learning_rate: 0.2, .* 0.3"):
        run_study(changed, "out")
    with pytest.raises(ConfigError, match=r"train.max_steps: None, the study now says 7"):
        run_study(study_of(), "out", overrides=["train.max_steps=7"])
    run_study(study_of(variants={**VARIANTS, "fast": {"model.name": "fail"}}), "other")
    assert all(trial.finished for trial in run_study(study_of(), "other"))  # nothing had begun


def test_models_need_not_stay():
    study = study_of(keep_models=False)
    runs = run_study(study, "out")
    for trial in runs:
        kept = sorted(path.name for path in trial.folder.iterdir())
        assert kept == ["calls.jsonl", "evaluation.jsonl", "recipe.yaml"]
    assert all(len(calls(trial)) == 1 for trial in run_study(study, "out"))
    assert "4 of 4 runs finished" in Path("out/report.md").read_text()


def test_all_recipes_are_checked_before_the_first_run():
    study = study_of(variants={**VARIANTS, "odd": {"train.learning_rat": 1}})
    with pytest.raises(ConfigError, match=r"variant 'odd': .*did you mean 'learning_rate'"):
        run_study(study, "out")
    with pytest.raises(ConfigError, match="nothing to compare"):
        check_study(study_of(variants={**VARIANTS, "odd": {"evaluation": []}}), Path("out"))
    with pytest.raises(BadValueError, match="0 jobs"):
        run_study(study_of(), "out", jobs=0)
    assert not Path("out").exists()
    Path("out").touch()
    with pytest.raises(StorageError, match="out is a file"):
        run_study(study_of(), "out")


def test_the_command(command):
    study = {"recipe": "base.yaml", "variants": VARIANTS, "baseline": "slow", "seeds": [1]}
    Path("base.yaml").write_text(yaml.safe_dump(RECIPE))
    Path("study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    code, out, err = command("study", "study.yaml", "--out", "out", "--dry-run")
    assert (code, err) == (0, "")
    assert out == "variant\tseed\tstate\nslow\t1\tto do\nfast\t1\tto do\n"
    assert not Path("out").exists()
    code, out, err = command("study", "study.yaml", "--out", "out", "--set", "train.max_steps=3")
    assert code == 0
    assert out.splitlines()[0] == "variant\tmeasure\tdataset\tseeds\tmean\tdeviation\tdifference\tp (holm)"
    assert out.splitlines()[1:] == [
        "slow\tnDCG@10\tbeir\t1\t0.1210\t\t0.0000\t",
        "fast\tnDCG@10\tbeir\t1\t0.2210\t\t0.1000\t0.0000",
    ]
    assert "irkit: fast, seed 1: finished in" in err
    assert yaml.safe_load(Path("out/study.yaml").read_text())["recipe"]["train"] == {"max_steps": 3}
    report = Path("out/report.md").read_text()
    Path("out/report.md").unlink()
    assert command("study", "--report", "out") == (0, out, "irkit: report: out/report.md\n")
    assert Path("out/report.md").read_text() == report


def test_a_study_that_is_ended_ends_its_runs(place):
    study = {
        "recipe": RECIPE | {"model": {"name": "wait"}},
        "variants": VARIANTS,
        "baseline": "slow",
        "seeds": [1],
    }
    Path("study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))

    def study_in_child():
        with Path("messages").open("w") as messages:
            os.dup2(messages.fileno(), 2)
            sys.stderr = messages
            main(["study", "study.yaml", "--out", "out"])

    process = multiprocessing.get_context("fork").Process(target=study_in_child)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a fork beside threads
        process.start()
    run = Path("out/runs/slow/seed-1")
    while not (run / "calls.jsonl").exists():
        assert process.is_alive(), Path("messages").read_text()
        time.sleep(0.01)
    process.terminate()
    process.join()
    assert (process.exitcode, Path("messages").read_text()) == (
        143,
        "irkit: terminated - give the same command again to go on with this study\n",
    )
    with run.with_suffix(".log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the run held


def test_the_command_says_what_failed(command):
    variants = {**VARIANTS, "odd": {"model.name": "fail"}}
    study = {"recipe": RECIPE, "variants": variants, "baseline": "slow", "seeds": [1]}
    Path("study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    code, out, err = command("study", "study.yaml", "--out", "out")
    assert code == 2
    assert len(out.splitlines()) == 3
    assert re.search(r"irkit: odd, seed 1: failed in [\d,]+ s: exit code 1: loss is nan at step 3", err)
    assert "error: 1 of 3 runs failed, such as 'odd' with seed 1: exit code 1: loss is nan at step 3" in err
    for words in (
        ("--report", "none"),
        ("study.yaml",),
        ("study.yaml", "--report", "out"),
        ("--report", "out", "--dry-run"),
        ("--report", "out", "--set", "a=1"),
        ("compare", "out:slow", "out:odd", "--jobs", "2"),
        (),
    ):
        assert command("study", *words)[0] == 2


def write_collection():
    corpus = [{"_id": f"d{n}", "text": f"text of index {n}"} for n in range(6)]
    queries = [{"_id": f"q{n}", "text": f"search {n}"} for n in range(4)]
    judged = ["query-id\tcorpus-id\tscore", *(f"q{n}\td{n}\t1" for n in range(4))]
    Path("beir/qrels").mkdir(parents=True)
    for name, rows in (("corpus", corpus), ("queries", queries)):
        Path(f"beir/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split in ("train", "test"):
        Path(f"beir/qrels/{split}.tsv").write_text("\n".join(judged) + "\n")
    return corpus, queries


PRETRAINING = {"texts": "beir", "objectives": {"kind": "bag_of_words"}, "train": {"max_steps": 3}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "no-model"}}, "no-model"),
        ({"data": {"source": "no-data"}}, "no-data"),
        ({"data": {"source": "beir", "split": "dev"}}, "dev"),
        ({"evaluation": {"source": "no-collection", "at_end": True}}, "no-collection"),
        ({"pretraining": PRETRAINING | {"texts": "no-texts"}}, "no-texts"),
        ({"pretraining": PRETRAINING | {"validation": "no-validation"}}, "no-validation"),
        (
            {
                "model": {"kind": "sparse", "name": "MODEL"},
                "vocabulary": {"texts": "beir", "target": "no-target"},
            },
            "no-target",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_all_runs_lack_is_said_before_the_first(monkeypatch, tiny_bert, changes, message):
    monkeypatch.setattr(module, "check_parts", check_parts)
    write_collection()
    recipe = {**RECIPE, "model": {"name": "MODEL", "kind": "multi_vector"}, **changes}
    recipe = json.loads(json.dumps(recipe).replace("MODEL", str(tiny_bert)))
    with pytest.raises(IrkitError, match=f"study: no variant can be trained, none was started: .*{message}"):
        run_study(study_of(recipe=recipe), "out")
    assert not Path("out").exists()


def test_a_variant_that_cannot_be_trained_is_named_and_the_others_run(monkeypatch, tiny_bert):
    monkeypatch.setattr(module, "check_parts", check_parts)
    write_collection()
    opened = []
    monkeypatch.setattr(model_recipe, "make_model", lambda model: opened.append(model) or make_model(model))
    model = {"name": str(tiny_bert), "kind": "multi_vector"}
    variants = VARIANTS | {"lost": {"model.name": "no-model"}}
    with pytest.warns(UserWarning, match="study: variant 'lost' cannot be trained: .*no-model"):
        runs = run_study(study_of(recipe={**RECIPE, "model": model}, variants=variants), "out")
    assert all(trial.finished for trial in runs)  # the script takes any name
    assert [each.name for each in opened] == [str(tiny_bert), "no-model"]  # each once, for six runs
    run_study(
        study_of(recipe={**RECIPE, "model": model}, variants=variants), "out"
    )  # nothing is left to check
    assert len(opened) == 2


def test_a_model_whose_vocabulary_is_trained_first_is_not_made(monkeypatch):
    monkeypatch.setattr(module, "check_parts", check_parts)
    write_collection()
    sizes = {"layers": 2, "hidden_size": 8, "heads": 2, "max_length": 4}
    model = {"kind": "new", "preset": "2-late", "tokenizer": {"size": 50}, "sizes": sizes}
    recipe = {
        "model": model,
        "pretraining": PRETRAINING,
        **{key: RECIPE[key] for key in RECIPE if key != "model"},
    }
    study = study_of(recipe=recipe)
    assert module.check_parts({"one": module._resolve(check_study(study, Path("out"))[0])}) == {}


@pytest.mark.slow  # two processes that import everything
def test_a_real_training(place, monkeypatch, tiny_bert):
    monkeypatch.undo()  # the trainer is irkit train
    monkeypatch.chdir(place)
    corpus, queries = write_collection()
    recipe = {
        **RECIPE,
        "model": {"name": str(tiny_bert), "kind": "multi_vector", "projection": {"dim": 8}},
        "train": {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True},
        "evaluation": {"source": "beir", "split": "test", "at_end": True},
    }
    variants = {"linear": {}, "deep": {"model.projection.depth": 2}}
    runs = run_study(study_of(recipe=recipe, variants=variants, baseline="linear", seeds=[3]), "out", jobs=2)
    assert [trial.failure for trial in runs] == [None, None]
    assert Model.from_pretrained(runs[1].folder).kind == "multi_vector"
    for line in Path("out/results.jsonl").read_text().splitlines():
        cell = json.loads(line)
        model = Model.from_pretrained(f"out/runs/{cell['variant']}/seed-3")
        scores = model.similarity(
            model.encode_query([query["text"] for query in queries]),
            model.encode_document([document["text"] for document in corpus]),
        )
        run = {
            f"q{q}": {f"d{d}": float(score) for d, score in enumerate(row)} for q, row in enumerate(scores)
        }
        assert cell["mean"] == pytest.approx(evaluate(run, "beir").mean["nDCG@10"])
