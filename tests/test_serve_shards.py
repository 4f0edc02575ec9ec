"""A server answers over shards, mapped or searched by actors of Ray, what it answers over one index."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from three_heads import QUERIES, WEIGHTS, make_model

pytest.importorskip("fastapi", reason="needs: pip install 'irkit[serve]'")

from fastapi.testclient import TestClient

from irkit import Retriever
from irkit.client import Client
from irkit.errors import BadValueError
from irkit.ray_engine.ray_start import start_ray
from irkit.serve.access import read_keys
from irkit.serve.app import create_app
from irkit.serve.catalogue import Catalogue
from irkit.serve.ray_deployment import deploy
from irkit.serve.serve_config import ServeConfig
from irkit.shards import reshard

Ask = Callable[..., Any]
KEY = {"authorization": "Bearer correct-horse"}
INDEXES, MODELS = ("words", "notes", "colbert"), ("cross",)
WORDS = ["bear", "winter", "copper", "wire", "den", "sleep", "zebra", "lion"]
DOCUMENTS = "/indexes/{}/documents"


def split(answer: Any, path: str = "") -> tuple[dict[str, Any], dict[str, float]]:
    """Return the values in an answer by place: those that are equal, and floating-point numbers."""
    values, numbers = dict[str, Any](), dict[str, float]()
    items = answer.items() if isinstance(answer, dict) else enumerate(answer)
    for key, value in items:
        if isinstance(value, dict | list):
            for all_of, some in zip((values, numbers), split(value, f"{path}/{key}"), strict=True):
                all_of |= some
        else:
            (numbers if isinstance(value, float) else values)[f"{path}/{key}"] = value
    numbers.pop("/seconds", None)
    return values, numbers


@pytest.fixture(params=[None, pytest.param("ray", marks=pytest.mark.slow)], ids=["mapped", "ray"])
def ask(request: pytest.FixtureRequest, served: Any, tmp_path: Path) -> Iterator[Ask]:
    """Send a request to a server of single indexes and to one of shards; give the answer that both give."""
    engine = request.param
    if engine:
        pytest.importorskip("ray", reason="needs: pip install 'irkit[ray]'")
    for name in INDEXES:
        for kind in ("one", "many"):
            shutil.copytree(served.root / name, tmp_path / kind / name)
        reshard(tmp_path / "many" / name, 3)
    models, keys = [str(served.root / name) for name in MODELS], read_keys(served.root / "keys")
    with ExitStack() as stack:
        clients = []
        for kind, options in (("one", {}), ("many", {"engine": engine} if engine else {})):
            paths = (*models, *(str(tmp_path / kind / name) for name in INDEXES))
            catalogue = Catalogue(ServeConfig(paths=paths, keys=keys, **options))
            clients.append(stack.enter_context(TestClient(create_app(catalogue))))

        def send(path: str, body: Any = None, method: str | None = None, status: int = 200) -> Any:
            method = method or ("GET" if body is None else "POST")
            one, many = (client.request(method, path, json=body, headers=KEY) for client in clients)
            assert (one.status_code, many.status_code) == (status, status), (one.text, many.text)
            if status < 400:  # an error names the directory
                (values, numbers), (other_values, other_numbers) = split(one.json()), split(many.json())
                assert other_values == values
                # explanations encode again, and sums of a model are rounded as its batch has it
                assert other_numbers == pytest.approx(numbers, rel=1e-5, abs=1e-6)
            return one.json()

        yield send
    if engine:
        import ray

        ray.shutdown()


def check_searches(ask: Ask) -> None:
    """Compare searches of every kind."""
    queries = ["search index", "neural tokens"]
    for name in INDEXES:
        for options in (
            {"k": 3, "offset": 1, "filter": {"year": {">=": 1}}},
            {"k": 4, "group_by": "year", "facets": ["year"]},
            {"k": 5, "explain": True, "highlights": True, "snippet": True},
            {"k": 5, "fuse": {"indexes": [other for other in INDEXES if other != name][:1]}},
            {"k": 12, "rerank": {"by": "cross"}, "fields": ["id"]},
            {"k": 12, "rerank": {"by": "colbert"}},
        ):
            results = ask(f"/indexes/{name}/search", {"queries": queries, **options})["results"]
            assert all(result["hits"] for result in results)
        body = {"query": "neural", "id": "d3"}
        assert ask(f"/indexes/{name}/explain", body)["id"] == "d3"
        ask(f"/indexes/{name}/explain", {"query": "neural", "document": {"id": "x", "text": "neural model"}})
        ask(f"/indexes/{name}/rerank", {"queries": ["neural"], "ids": [["d1", "d2", "d3"]]})
        ask(f"/indexes/{name}/facets", {"keys": ["year"], "filter": {"year": [0, 1]}})


def test_shards_are_served_as_one_index(ask: Ask) -> None:
    check_searches(ask)
    for name in INDEXES:
        path, new = DOCUMENTS.format(name), {"id": "new/1", "text": "zebra search", "metadata": {"year": 9}}
        ask(path, {"documents": [new, {"id": "new/2", "text": "neural"}]}, status=201)
        ask(path, {"documents": [new]}, status=409)
        ask(path, {"documents": [new | {"text": "lion index"}]}, "PUT")
        assert ask(f"{path}?id=new/1")["documents"][0]["text"] == "lion index"
        ask(path, {"documents": [{"id": "none"}]}, "PUT", 404)
        ask(path, {"ids": ["new/2", "d5"]}, "DELETE")
        ask(path, {"ids": ["d5"]}, "DELETE", 404)
        ask(f"{path}?id=d5", status=404)
    check_searches(ask)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("engine", [None, "ray"])
def test_a_deployment_of_ray_serve_answers_as_one_index(
    engine: str | None, tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas answer what one process finds, and see each other's changes."""
    serve = pytest.importorskip("ray.serve", reason="needs: pip install 'irkit[ray]'")
    documents = [{"_id": f"d{n}", "text": f"{word} search {word * (n % 3)}"} for n, word in enumerate(WORDS)]
    one = Retriever.build("bm25", documents, tmp_path / "one")
    Retriever.build("bm25", documents, tmp_path / "words", shards=2).close()
    model = make_model(tiny_bert, tmp_path / "model")  # of several heads
    heads = Retriever.build(model, documents, tmp_path / "heads", shards=2)
    monkeypatch.setenv("IRKIT_SERVE_KEYS", "write correct-horse")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray = start_ray(None)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        options = {"engine": engine} if engine else {}
        paths = f"{tmp_path / 'words'},{tmp_path / 'heads'}"
        serve.run(deploy({"paths": paths, "replicas": 2, **options}))
        url = f"http://127.0.0.1:{port}"
        with Client(url, "heads") as client:
            for _ in range(4):  # either replica
                for fuse in ("rrf", WEIGHTS):
                    assert client.search(QUERIES, 5, fuse=fuse) == heads.search(QUERIES, 5, fuse=fuse)
        with Client(url, "words") as stranger, pytest.raises(BadValueError, match="key"):
            stranger.remove(["d1"])
        with Client(url, "words", key="correct-horse") as client:
            for step in range(2):
                for _ in range(4):  # either replica
                    for query in ("search", *WORDS[:3]):
                        assert client.search(query, 5) == one.search(query, 5)
                if not step:
                    for retriever in (one, client):
                        retriever.add([{"_id": "new", "text": f"zebra {WORDS[0]}"}])
                        retriever.remove(["d2"])
    finally:
        serve.shutdown()
        ray.shutdown()


def test_shards_are_compacted(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(served.root / "words", tmp_path / "words")
    reshard(tmp_path / "words", 3)
    catalogue = Catalogue(ServeConfig(paths=(str(tmp_path / "words"),), keys=read_keys(served.root / "keys")))
    index, path = catalogue.indexes["words"], DOCUMENTS.format("words")
    soon = {"compact_rows": 50, "compact_removed": 3}
    monkeypatch.setattr(index, "limits", index.limits.model_copy(update=soon))
    new = [{"id": f"gone{number}", "text": "zebra"} for number in range(20)]
    with TestClient(create_app(catalogue)) as client:
        assert client.post(path, json={"documents": new}, headers=KEY).status_code == 201
        ids = {"ids": [item["id"] for item in new]}
        assert client.request("DELETE", path, json=ids, headers=KEY).status_code == 200
        end = time.monotonic() + 30
        while index.is_compacting or len(index.retriever().index) != 12:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert "no compaction" not in caplog.text
