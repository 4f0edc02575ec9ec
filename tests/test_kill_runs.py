"""Studies and vocabulary transfers, killed as they change the disk: called again, they end the same."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from irkit import Model
from irkit.errors import StorageError
from irkit.study import StudyConfig, run_study
from irkit.study import study_run as study_running
from irkit.training.run_directory import is_complete
from irkit.vocabulary import transfer_vocabulary
from irkit.vocabulary.transfer_recipe import VocabularyRecipe
from irkit.vocabulary.transfer_run import run

CHANGES = {"os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.mkdir": 0, "os.link": 1, "os.truncate": 0}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

TRAINER = """
import json, pathlib, sys, yaml
recipe, out = yaml.safe_load(open(sys.argv[2])), pathlib.Path(sys.argv[4])
out.mkdir(parents=True, exist_ok=True)
(out / "recipe.yaml").touch()
with open(out / "evaluation.jsonl.part", "w") as results:
    for query in range(5):
        value = recipe["train"]["learning_rate"] + query / 100
        row = {"dataset": "beir", "measure": "nDCG@10", "query_id": str(query), "value": value}
        results.write(json.dumps(row) + "\\n")
(out / "evaluation.jsonl.part").rename(out / "evaluation.jsonl")
(out / "modules.json").touch()
"""


def changes(root: Path, action: Callable[[], object], last: int) -> int:
    """Do something in a child, killed before it changes a path below ``root`` for the ``last``-th time.

    Returns:
        How often it had changed one.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        numbers, below = itertools.count(1), f"{root}{os.sep}"

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            path: Any = ""
            if event == "open" and arguments[2] & WRITING:
                path = arguments[0]
            elif event in CHANGES:
                path = arguments[CHANGES[event]]
            if isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(below):  # noqa: PTH100
                os.write(theirs, b".")
                if next(numbers) == last:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, "rb") as stream:
        count = len(stream.read())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (-signal.SIGKILL if count == last else 0)
    return count


def content(root: Path, *names: str) -> dict[str, bytes]:
    paths = [path for path in root.rglob("*") if path.is_file() and path.name in names]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def hidden(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.name.endswith((".part", ".partial"))]


def moments(total: int, wanted: int) -> list[int]:
    """One of each part of equal length; all of them if so many are wanted."""
    rng, parts = random.Random(total), min(total, wanted)
    return [1 + int((part + rng.random()) * total / parts) for part in range(parts)]


# ---- studies ----


def check_study(place: Path, monkeypatch: pytest.MonkeyPatch, wanted: int) -> int:
    (place / "trainer.py").write_text(TRAINER)
    monkeypatch.setattr(study_running, "IRKIT", [sys.executable, str(place / "trainer.py")])
    monkeypatch.setattr(study_running, "check_parts", lambda recipes: {})  # there is no such model
    recipe = {"model": {"name": "none"}, "data": {"source": "beir"}, "losses": {"kind": "infonce"}}
    variants = {"slow": {"train.learning_rate": 0.1}, "fast": {"train.learning_rate": 0.2}}
    recipe |= {"evaluation": {"source": "beir"}}
    study = StudyConfig.parse({"recipe": recipe, "variants": variants, "baseline": "slow", "seeds": [1]})
    results = ("results.jsonl", "report.md", "study.yaml", "seed-1.yaml", "evaluation.jsonl", "modules.json")

    def act(out: Path) -> None:
        run_study(study, out, jobs=1)

    total = changes(place, lambda: act(place / "whole"), 0)
    expected = content(place / "whole", *results)
    assert len(expected) == 3 + 3 * len(variants)
    out = place / "killed"
    chosen = moments(total, wanted)
    for moment in chosen:
        shutil.rmtree(out, ignore_errors=True)
        assert changes(place, lambda: act(out), moment) == moment
        for log in out.rglob("*.log"):  # runs go on without the study, and hold these
            with log.open("ab") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX)
        act(out)
        assert content(out, *results) == expected, moment
        assert hidden(out) == [], moment
    return len(chosen)


def test_a_study_killed_at_some_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_study(tmp_path, monkeypatch, 5) == 5


@pytest.mark.slow
def test_a_study_killed_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_study(tmp_path, monkeypatch, 10**6) > 15


# ---- vocabulary transfers ----


def check_transfer(source: Path, place: Path, wanted: int) -> int:
    """A model is moved onto its own vocabulary and takes the place of another one."""
    Model.sparse(source).save_pretrained(place / "before")
    before = Model.from_pretrained(place / "before").fingerprint
    out = place / "out"

    def act(folder: Path) -> None:
        transfer_vocabulary(Model.sparse(source), str(source)).save(folder)

    def begin() -> None:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(place / "before", out)

    total = changes(place, lambda: act(place / "whole"), 0)
    after = Model.from_pretrained(place / "whole").fingerprint
    files = content(place / "whole", "model.safetensors", "tokenizer.json", "modules.json")
    begin()
    total = changes(place, lambda: act(out), 0)
    chosen = moments(total, wanted)
    for moment in chosen:
        begin()
        assert changes(place, lambda: act(out), moment) == moment
        try:
            assert Model.from_pretrained(out).fingerprint in (before, after), moment
        except StorageError:
            assert not out.exists()  # killed between two names
        act(out)
        assert Model.from_pretrained(out).fingerprint == after
        assert content(out, *(Path(name).name for name in files)) == files, moment
        assert hidden(place) == [], moment
    return len(chosen)


@pytest.mark.slow
def test_a_transfer_killed_at_some_moments(tiny_bert: Path, tmp_path: Path) -> None:
    assert check_transfer(tiny_bert, tmp_path, 5) == 5


@pytest.mark.slow
def test_a_transfer_killed_at_every_moment(tiny_bert: Path, tmp_path: Path) -> None:
    assert check_transfer(tiny_bert, tmp_path, 10**6) > 15


@pytest.mark.slow
def test_a_transfer_of_several_stages_killed_at_six_moments(
    tiny_bert: Path, notes: Path, tmp_path: Path
) -> None:
    steps = {"max_steps": 2, "per_device_train_batch_size": 4, "save_steps": 1}
    data = {"source": str(notes), "split": "test"}
    plan = {"texts": str(notes), "target": {"size": 70}, "adaptation": {"train": steps}}
    recipe: dict[str, Any] = {"model": {"kind": "sparse", "name": str(tiny_bert)}, "vocabulary": plan}
    recipe |= {"data": data, "losses": {"kind": "infonce"}, "train": steps, "evaluation": data}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def act(out: Path) -> None:
        run(VocabularyRecipe.resolve(tmp_path / "recipe.yaml"), out)

    total = changes(tmp_path / "whole", lambda: act(tmp_path / "whole"), 0)
    files = ("model.safetensors", "evaluation.jsonl", "tokenizer.json", "modules.json")
    expected, out = content(tmp_path / "whole", *files), tmp_path / "killed"
    for moment in moments(total, 6):
        shutil.rmtree(out, ignore_errors=True)
        changes(out, lambda: act(out), moment)  # paths hold its name: not all runs change as often
        if not is_complete(out):  # nothing may be left to do but to tidy up
            act(out)
        found = content(out, *files)
        assert {name: found[name] for name in expected if "checkpoint" not in name} == {
            name: value for name, value in expected.items() if "checkpoint" not in name
        }, moment
        assert hidden(out) == [], moment
