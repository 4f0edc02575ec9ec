"""Killed at any moment, a build can be resumed and an index is as it was; a reader never sees a mixture."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import small_indexes
import torch
from irkit_kernels._testing import in_child

import irkit.index.faiss_building
from irkit import Dense, MultiVector, Ragged, Sparse, score
from irkit.core.representation import Representation, Several
from irkit.data.document import Document
from irkit.index import (
    Documents,
    Hits,
    Index,
    SeveralIndex,
    Store,
    create_index,
    open_index,
    use_limits,
)

DIM, CHUNK = 4, 6
CONFIGS: dict[str, Any] = {
    **small_indexes.CONFIGS,
    "several": {"kind": "several", "indexes": {"one": "flat", "two": {"kind": "plaid", "centroids": 8}}},
}
KINDS = [pytest.param(name, marks=() if name == "dense" else pytest.mark.slow) for name in CONFIGS]
kind = "faiss"  # what this process works on


def texts(n: int, label: str) -> list[Document]:
    return [Document(f"{label}{i}", label, metadata={"label": label}) for i in range(n)]


def vectors(n: int, seed: int) -> Representation:
    rows = torch.from_numpy(np.random.default_rng(seed).standard_normal((3 * n, DIM), dtype=np.float32))
    if kind == "inverted":
        return Sparse.from_dense(rows[:n].clamp(min=0))
    if kind in ("faiss", "dense", "dense_codes"):
        return Dense(rows[:n])
    tokens = MultiVector(Ragged(rows, torch.full((n,), 3)))
    if kind == "several":
        both: Any = Several({"one": Dense(rows[:n]), "two": tokens})
        return cast(Representation, both)
    return tokens


def found_by(index: Index, queries: Any, k: int) -> Hits:
    """What the index finds; of several parts, what all of them find."""
    if not isinstance(index, SeveralIndex):
        return index.search(queries, k)
    hits = [part.search(queries.parts[name], k) for name, part in index.parts.items()]
    return Hits(*(np.concatenate(both, axis=1) for both in zip(*hits, strict=True)))


LIMITS = dataclasses.replace(small_indexes.LIMITS, read_bytes=1 << 8)  # blocks of 32 tokens in float16


def build(path: Path, seed: int = 1) -> int:
    """Build an index of 30 documents in chunks, or resume it; where it went on."""
    data, documents = vectors(30, seed), texts(30, f"s{seed}-")
    with Store.build(path, key=seed, overwrite=True) as store:
        index, stored = create_index(store, CONFIGS[kind]), Documents(store)
        begun = len(stored)
        assert begun == len(index)
        for start in range(begun, 30, CHUNK):
            with store.update():
                stored.add(documents[start : start + CHUNK])
                index.add(data[start : start + CHUNK])
        index.finish()
        store.publish()
    return begun


def update(path: Path) -> int:
    """Replace some documents and extend the structure, in one commit."""
    store = Store.open(path)
    index, stored = open_index(store), Documents(store)
    with store.update():
        if stored.find(["new0"])[0] < 0:
            index.remove(stored.find(["s0-1", "s0-7", "s0-29"]))
            stored.add(texts(20, "new"))
            index.add(vectors(20, 9))
            index.finish()
    return 0


def signature(path: Path) -> Any:
    """All that a reader can see."""
    store = Store.open(path)
    index, stored = open_index(store), Documents(store)
    hits = found_by(index, vectors(5, 99), 8)
    rows = np.arange(len(stored))
    return (
        hits.rows.tolist(),
        hits.scores.tolist(),
        stored.ids(rows),
        index.live.tolist(),
        stored.filter({"label": "new"}).tolist(),
        index.stats(),
    )


def kill_before(step: int | None) -> list[int]:
    """Kill this process before its ``step``-th step that changes the disk; a write is left half done.

    Returns:
        A list of one number: how many steps were done so far.
    """
    done = [0]

    def wrap(target: Any, name: str, half: Callable[..., object] = lambda *arguments: None) -> None:
        real = getattr(target, name)

        def function(*arguments: Any, **options: Any) -> Any:
            if done[0] == step:
                half(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            done[0] += 1
            return real(*arguments, **options)

        setattr(target, name, function)

    write = os.pwrite
    wrap(os, "pwrite", lambda file, content, position: write(file, content[: len(content) // 2], position))
    wrap(irkit.index.faiss_building, "write_structure", lambda structure, path: path.write_bytes(b"half"))
    for target, name in (
        (np, "memmap"),
        (os, "ftruncate"),
        (os, "truncate"),
        (os, "fsync"),
        (Path, "replace"),
        (Path, "unlink"),
    ):
        wrap(target, name)
    return done


def count_steps(action: str, path: Path) -> int:
    """Do the action in a child; return how many of its steps change the disk."""
    count = path.with_name("steps")

    def run() -> None:
        done = kill_before(None)
        ACTIONS[action](path)
        count.write_text(str(done[0]))

    in_child(run)
    return int(count.read_text())


def run_killed(action: str, path: Path, step: int) -> bool:
    """Do the action in a child that dies at ``step``; whether it did, rather than finish before."""
    child = os.fork()
    if not child:
        try:
            kill_before(step)
            ACTIONS[action](path)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def survive(action: str, directory: Path, wanted: int) -> dict[str, Any]:
    """Kill the action at ``wanted`` steps (0: at each), check what is left, and do the action again.

    Half of the steps are spread evenly, the others are near the end.
    """
    os.fsync = lambda descriptor: None  # a killed process loses nothing that it has written
    base, path = directory / "base", directory / "index"
    before = None
    if action == "build":
        base.mkdir()
    else:
        build(base, 0)
        before = signature(base)

    def restore() -> None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(base, path)

    restore()
    total = count_steps(action, path)
    after, names = signature(path), sorted(file.name.split(".")[0] for file in path.iterdir())
    parts, rng = wanted or total, random.Random(0)
    steps = [int((part + rng.random()) * total / parts) for part in range(parts)]  # one of each part
    if wanted:
        steps[wanted // 2 :] = range(total - 32, total, 64 // wanted)  # when all documents are stored
    resumed = set()
    for step in steps:
        restore()
        assert run_killed(action, path, step), step
        found = None
        if (path / "irkit.json").exists():
            found = signature(path)
        assert found in (before, after), step
        resumed.add(ACTIONS[action](path))
        assert signature(path) == after, step
        assert sorted(file.name.split(".")[0] for file in path.iterdir()) == names, step
    return {"steps": len(steps), "of": total, "resumed": sorted(resumed)}


def churn(path: Path, updates: int) -> None:
    """Replace everything in the index again and again, partly by building it anew; in a child."""
    torch.set_num_threads(1)  # OpenMP's other threads did not survive the fork
    with use_limits(LIMITS):
        for generation in range(1, updates):
            change(path, generation)


def change(path: Path, generation: int) -> None:
    if generation % 10 == 0:
        build(path, generation)
        return
    store = Store.open(path)
    index, stored = open_index(store), Documents(store)
    with store.update():
        index.remove(np.flatnonzero(index.live))
        stored.add(texts(30, f"s{generation}-"))
        index.add(vectors(30, generation))
        index.finish()


ACTIONS = {"build": build, "overwrite": build, "update": update}


def survive_all(which: str, directory: Path, wanted: int) -> None:
    """Survive all actions, in a child, because this process is changed by it; the results go to a file."""
    global kind
    kind, results = which, {}
    with use_limits(LIMITS):
        for action in ACTIONS:
            folder = directory / action
            folder.mkdir()
            results[action] = survive(action, folder, wanted)
    (directory / "results.json").write_text(json.dumps(results))


def check_survival(kind: str, directory: Path, steps: int) -> None:
    in_child(partial(survive_all, kind, directory, steps))
    for action, result in json.loads((directory / "results.json").read_text()).items():
        assert result["of"] > 20
        assert result["steps"] == (steps or result["of"])
        if action != "update":
            found = {0, 12, 30} & set(result["resumed"])  # some went on where others had begun
            assert len(found) >= (2 if steps else 3)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_four_moments(kind: str, tmp_path: Path) -> None:
    check_survival(kind, tmp_path, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_killed_at_every_moment(kind: str, tmp_path: Path) -> None:
    check_survival(kind, tmp_path, 0)


@pytest.mark.parametrize("which", KINDS)
def test_readers_of_a_changing_index_see_it_whole(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "kind", which)
    path = tmp_path / "index"
    build(path, 0)
    process = multiprocessing.get_context("fork").Process(target=churn, args=(path, 30))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside threads
        process.start()
    long, seen = Store.open(path), set()
    queries: Any = vectors(3, 99)
    queries = queries.parts["two"] if which == "several" else queries
    while process.is_alive():
        long.refresh()
        for store in (Store.open(path), long):
            index, stored = open_index(store), Documents(store)
            rows = np.flatnonzero(index.live)
            labels = {document.text for document in stored.fetch(rows)}
            assert (len(rows), len(labels), len(stored)) == (30, 1, len(index))
            generation = int(labels.pop()[1:-1])
            data = vectors(30, generation)
            if isinstance(index, SeveralIndex):
                index, data = index.parts["two"], data.parts["two"]  # type: ignore[union-attr]
            if which != "faiss":  # exact for what it keeps
                kept = index.representations(rows)
                values = "weights" if which == "inverted" else "values"
                assert np.abs(kept.arrays()[values] - data.arrays()[values]).max() < 1
                data = kept
            truth = score(queries, data)
            hits = index.search(queries, 30)
            order = np.argsort(-truth.numpy(), axis=1, kind="stable")
            np.testing.assert_array_equal(hits.rows - rows[0], order)
            seen.add(generation)
    process.join()
    assert process.exitcode == 0
    assert len(seen) > 3
