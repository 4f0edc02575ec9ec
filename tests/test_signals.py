"""Signals in every verb: SIGINT, SIGTERM and SIGHUP clean up, say so in a line, and have exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from irkit import Model, Retriever
from irkit.cli import _VERBS

SAID = {
    signal.SIGINT: ("interrupted", 130),
    signal.SIGTERM: ("terminated", 143),
    signal.SIGHUP: ("hung up", 129),
}

# words; the file that is being opened when the signal comes; the one that is about to get its name
VERBS: dict[str, tuple[str, str, str | None]] = {
    "index": ("index bm25 notes --out new", "corpus.jsonl", "irkit.json"),
    "search": ("search words notes --out found.trec", "queries.jsonl", "found.trec"),
    "rerank": ("rerank words notes run.trec --out again.trec", "run.trec", "again.trec"),
    "explain": ("explain words search d1 --html page.html", "irkit.json", "page.html"),
    "evaluate": ("evaluate run.trec --qrels notes", "run.trec", None),
    "fuse": ("fuse run.trec other.trec --out fused.trec", "other.trec", "fused.trec"),
    "train": ("train train.yaml --out trained", "corpus.jsonl", "recipe.yaml"),
    "pretrain": ("pretrain pretrain.yaml --out trained", "corpus.jsonl", "recipe.yaml"),
    "mine": ("mine words notes --split test --out mined.jsonl", "queries.jsonl", "mined.jsonl"),
    "label": (
        "label run.trec --corpus notes --split test --teacher words --out labelled.jsonl",
        "run.trec",
        "labelled.jsonl",
    ),
    "study": ("study study.yaml --out study", "train.yaml", "study.yaml"),
    "transfer_vocab": ("transfer-vocab transfer.yaml --out moved", "corpus.jsonl", "recipe.yaml"),
    "encode": ("encode model notes --out out.safetensors", "corpus.jsonl", "out.safetensors"),
    "reshard": ("reshard words --shards 2", "irkit.json", "irkit.json"),
    "compact": ("compact words", "irkit.json", "irkit.json"),
    "export": ("export words --to jsonl --out words.jsonl", "irkit.json", "words.jsonl"),
    "plan": ("plan --documents 1M --index flat", "costs.json", None),
    "info": ("info words", "irkit.json", None),
}

RESUMED = (".mined.jsonl", ".labelled.jsonl")  # by the same command, from what it has left

due: list[tuple[str, str, signal.Signals]] = []  # event, end of the name of a file, what comes then


def send(event: str, arguments: tuple[Any, ...]) -> None:
    if due and due[0][0] == event:
        path = arguments[1 if event == "os.rename" else 0]
        if isinstance(path, str | os.PathLike) and os.fspath(path).endswith(due[0][1]):
            signal.raise_signal(due.pop(0)[2])


sys.addaudithook(send)  # for good: Python forgets none


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Nothing is handled or ignored that a process does not begin with."""
    before = {number: signal.getsignal(number) for number in SAID}
    forget()
    yield
    due.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def forget() -> None:
    for number in SAID:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="module")
def made(notes: Path, tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index, runs and recipes."""
    place = tmp_path_factory.mktemp("signals")
    (place / "notes").symlink_to(notes)
    Model.multi_vector(tiny_bert).save_pretrained(place / "model")
    run = Retriever.build("bm25", str(notes), place / "words").run(str(notes), 5)
    for name in ("run.trec", "other.trec"):
        run.write(place / name)
    data = {"source": str(notes), "split": "test"}
    steps = {"max_steps": 1, "per_device_train_batch_size": 4}
    masking = {"texts": str(notes), "objectives": {"kind": "masked_language_modeling"}}
    train = {"model": {"kind": "sparse", "name": str(tiny_bert)}, "data": data, "losses": {"kind": "infonce"}}
    masking |= {"masking": {"rate": 0.3}, "train": steps}
    train |= {"train": steps, "evaluation": data}
    recipes = {
        "train": train,
        "pretrain": train | {"pretraining": masking},
        "transfer": train | {"vocabulary": {"target": str(tiny_bert), "texts": str(notes)}},
        "study": {"recipe": "train.yaml", "variants": {"a": {}, "b": {}}, "baseline": "a", "seeds": [1]},
    }
    for name, recipe in recipes.items():
        (place / f"{name}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return place


@pytest.mark.sampled
@pytest.mark.parametrize("number", SAID, ids=lambda number: number.name)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_ends_in_a_line(
    verb: str,
    number: signal.Signals,
    made: Path,
    command: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(made)
    words, read, written = VERBS[verb]
    word, code = SAID[number]
    for moment in [("open", read)] + [("os.rename", written)] * (written is not None):
        forget()
        due.append((*moment, number))
        got, _, err = command(*words.split())
        assert not due, (moment, got, err)
        assert (got, err.splitlines()[-1].split(" - ")[0]) == (code, f"irkit: {word}"), (moment, err)
        left = [path.name for path in made.rglob("*.part")]
        assert [name for name in left if not name.startswith(RESUMED)] == []


def test_all_verbs_are_tested() -> None:
    assert {verb.__name__ for verb in _VERBS} == {*VERBS, "serve"}  # tests/test_serve_faults.py ends servers


def test_a_second_signal_does_not_stop_the_cleanup(
    made: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    due.extend([("os.rename", "both.trec", signal.SIGTERM), ("os.remove", ".part", signal.SIGTERM)])
    got = command("fuse", "run.trec", "other.trec", "--out", "both.trec")
    assert (got, due) == ((143, "", "irkit: terminated\n"), [])
    assert list(made.glob(".both.trec*")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_what_is_ignored_or_handled_stays_so(
    number: signal.Signals,
    made: Path,
    command: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(made)
    came = []
    for handler in (signal.SIG_IGN, lambda *_: came.append(number)):
        signal.signal(number, handler)
        due.append(("open", "run.trec", number))
        assert command("evaluate", "run.trec", "--qrels", "notes")[0] == 0
        assert due == []
        assert signal.getsignal(number) is handler
    assert came == [number]


@pytest.mark.parametrize("module", ["typer", "irkit.cli.search", "torch"])
def test_the_start_is_ended_as_quietly(made: Path, module: str) -> None:
    code = f"""
import runpy, signal, sys

class Ends:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGTERM)

sys.meta_path.insert(0, Ends())
sys.argv = ["irkit", "search", "words", "--text", "x"]
runpy.run_module("irkit", run_name="__main__")
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=made
    )
    assert (result.returncode, result.stdout, result.stderr) == (143, "", "irkit: terminated\n")
