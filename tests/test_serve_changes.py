"""Changes of an index that is served: interrupted, held up, or with a model that was trained again."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import KEY, ask, serving

pytest.importorskip("fastapi", reason="needs: pip install 'irkit[serve]'")

from fastapi.testclient import TestClient

from irkit import Model, Retriever
from irkit.errors import StorageError
from irkit.serve.access import read_keys
from irkit.serve.app import create_app
from irkit.serve.catalogue import Catalogue
from irkit.serve.problems import Problem
from irkit.serve.serve_config import ServeConfig, ServeLimits
from irkit.serve.served_indexes import ServedIndex
from irkit.shards.placement import shard_of

# ---- interrupted in shards ----


@pytest.mark.parametrize("verb", ["POST", "PUT", "DELETE"])
def test_an_interrupted_change_of_shards_can_be_repeated(
    served: Any, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {f"d{number}": f"old word{number}" for number in range(12)}
    names = [f"n{number}" for number in range(8)] if verb == "POST" else [f"d{number}" for number in range(8)]
    assert len(set(shard_of(names, 3).tolist())) > 1
    Retriever.build("bm25", old, tmp_path / "words", shards=3).close()
    body: Any = {"documents": [{"id": name, "text": f"new {name}"} for name in names]}
    if verb == "DELETE":
        body = {"ids": names}
    expected = old | {name: f"new {name}" for name in names}
    if verb == "DELETE":
        expected = {name: text for name, text in old.items() if name not in names}
    config = ServeConfig(paths=(str(tmp_path / "words"),), keys=read_keys(served.root / "keys"))
    path = "/indexes/words/documents"

    with TestClient(create_app(Catalogue(config))) as client:

        def change(content: Any) -> Any:
            return client.request(verb, path, json=content, headers=KEY)

        commits = list[Any]()

        def full(paths: Any) -> None:  # the last step of a commit
            commits.append(paths)
            if len(commits) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("irkit.index.store.sync_all", full)
            failed = change(body)
        assert (failed.status_code, "repeat the change" in failed.json()["error"]) == (507, True)
        left = {document.id: document.text for document in Retriever.load(tmp_path / "words").documents}
        assert left not in (old, expected)
        if verb == "POST":  # with another text it is no repetition
            other = [item | {"text": "other"} for item in body["documents"]]
            assert change({"documents": other}).status_code == 409
        assert change(body).status_code == (201 if verb == "POST" else 200)
        stored = {document.id: document.text for document in Retriever.load(tmp_path / "words").documents}
        assert stored == expected
        if verb != "PUT":  # complete now, so the same again is a conflict
            assert change(body).status_code == (409 if verb == "POST" else 404)


# ---- models that were trained again ----


def train_again(model: Model, folder: Path, factor: float) -> None:
    """Change the weights of a model, and save it to the directory that it has."""
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(factor)
    model.save_pretrained(folder)


def test_an_index_of_a_model_that_was_trained_again_is_served_with_it(served: Any, tmp_path: Path) -> None:
    model = Model.from_pretrained(served.root / "dense")
    model.save_pretrained(tmp_path / "model")
    texts = {"a": "neural search", "b": "an index of tokens"}
    for name in ("changed", "kept"):
        Retriever.build(str(tmp_path / "model"), texts, tmp_path / name).close()
    paths = tuple(str(tmp_path / name) for name in ("model", "changed", "kept"))
    catalogue = Catalogue(ServeConfig(paths=paths))

    def scores(retriever: Retriever) -> dict[str, float]:
        return {hit.id: hit.score for hit in retriever.search("neural", 2)}

    before = scores(catalogue.index("kept").retriever())
    train_again(model, tmp_path / "model", 1.5)
    new = Retriever.build(str(tmp_path / "model"), texts, tmp_path / "changed", overwrite=True)
    assert scores(catalogue.index("changed").retriever()) == pytest.approx(scores(new), abs=1e-5)
    assert scores(catalogue.index("kept").retriever()) == before != pytest.approx(scores(new), abs=1e-5)
    assert catalogue.model("model").retriever_model().fingerprint == new.model.fingerprint
    assert catalogue.model("model").indexes == ["changed", "kept"]
    with pytest.raises(StorageError, match="kept: it was built with"):
        catalogue.reload()  # which goes on to the last one
    assert scores(catalogue.index("kept").retriever()) == before != pytest.approx(scores(new), abs=1e-5)


def test_an_index_that_does_not_fit_its_model_leaves_the_old_one_in_use(
    served: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model.from_pretrained(served.root / "dense")
    model.save_pretrained(tmp_path / "model")
    texts = {"a": "neural search", "b": "an index of tokens"}
    Retriever.build(str(tmp_path / "model"), texts, tmp_path / "first").close()
    Retriever.build("bm25", texts, tmp_path / "second").close()
    paths = tuple(str(tmp_path / name) for name in ("first", "second"))
    catalogue = Catalogue(ServeConfig(paths=paths, keys=read_keys(served.root / "keys")))
    add = {"documents": [{"id": "new", "text": "neural"}]}
    with TestClient(create_app(catalogue)) as client:

        def search() -> Any:
            return client.post("/indexes/first/search", json={"queries": "neural"}).json()["results"]

        before = search()
        train_again(model, tmp_path / "model", 1.5)
        Retriever.build(str(tmp_path / "model"), texts, tmp_path / "first", overwrite=True).close()
        train_again(model, tmp_path / "model", 1.5)  # once more, so the index is of no model that is there
        assert [search() for _ in range(3)] == [before] * 3
        assert caplog.text.count("not renewed") == 1
        refused = client.post("/indexes/first/documents", json=add, headers=KEY)
        assert (refused.status_code, "was replaced" in refused.json()["error"]) == (503, True)
        assert str(tmp_path) not in refused.text
        assert search() == before
        second = catalogue.index("second").retriever()
        with pytest.raises(StorageError, match="first: it was built with"):
            catalogue.reload()
        assert catalogue.index("second").retriever() is not second
        Retriever.build(str(tmp_path / "model"), texts, tmp_path / "first", overwrite=True).close()
        assert client.post("/indexes/first/documents", json=add, headers=KEY).status_code == 201
        assert search() != before


# ---- changes that wait ----


def test_a_change_that_waited_in_vain_is_not_made_later(served: Any, tmp_path: Path) -> None:
    Retriever.build("bm25", {"first": "text"}, tmp_path / "words").close()
    path, statuses = "/indexes/words/documents", dict[str, Any]()
    options: Any = {"keys": read_keys(served.root / "keys"), "limits": ServeLimits(seconds=2)}

    def add(url: str, name: str) -> None:
        statuses[name] = ask(url, path, {"documents": [{"id": name, "text": "text"}]}, headers=KEY)[0]

    with serving(tmp_path / "words", **options) as url, Retriever.load(tmp_path / "words") as other:
        with other.store.update(), ThreadPoolExecutor() as pool:
            for name in ("a", "b"):
                pool.submit(add, url, name)
                time.sleep(0.7)
        add(url, "c")
        assert statuses == {"a": 409, "b": 409, "c": 201}
        assert {hit.id for hit in Retriever.load(tmp_path / "words").search("text")} == {"first", "c"}


def test_a_change_that_takes_too_long_may_be_stored(tmp_path: Path) -> None:
    Retriever.build("bm25", {"first": "text"}, tmp_path / "words").close()
    index = ServedIndex(
        "words", str(tmp_path / "words"), Retriever.load, lambda *_: [], ServeLimits(seconds=1)
    )
    goes_on, called = threading.Event(), list[str]()

    def slow(retriever: Retriever) -> None:
        called.append("slow")
        goes_on.wait(30)

    async def check() -> None:
        ends = time.monotonic() + 0.3
        running = asyncio.create_task(index.change(slow, ends))
        waiting = asyncio.create_task(index.change(lambda _: called.append("waiting"), ends))
        with pytest.raises(Problem, match="may still be stored") as problem:
            await running
        assert problem.value.status == 408
        with pytest.raises(Problem, match="nothing was changed") as problem:
            await waiting
        assert problem.value.status == 408
        goes_on.set()
        await index.change(lambda _: called.append("last"), time.monotonic() + 30)
        await index.close()

    asyncio.run(check())
    assert called == ["slow", "last"]
