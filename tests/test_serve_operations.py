"""A server in operation: clients that go away or wait, reloading, and workers."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving import KEY, ask, process

from irkit import Model
from irkit.retrieval.retriever import Retriever
from irkit.serve.meters import PROCESSES, exposition

SEARCH = "/indexes/words/search"


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    link = socket.create_connection((parts.hostname or "", parts.port), timeout=30)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 120  # processes start slowly on a busy machine
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_head_has_the_headers_of_get(served: Any) -> None:
    parts = urlsplit(served.url)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    for path in ("/", "/health", "/ready", "/metrics", "/indexes", "/static/page.js"):
        link.request("HEAD", path)
        response = link.getresponse()
        assert (response.status, response.read()) == (200, b""), path
        assert int(response.headers["content-length"]) > 0
    link.close()


def test_what_a_client_has_left_is_not_worked_on(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index, searched = served.catalogue.indexes["words"], list[Any]()
    begun, goes_on, work = threading.Event(), threading.Event(), index.work

    def slow(*arguments: Any) -> Any:
        searched.append(arguments)
        begun.set()
        goes_on.wait(30)
        return work(*arguments)

    monkeypatch.setattr(index, "work", slow)
    links = []
    for query in ("first", "second"):
        content = json.dumps({"queries": query}).encode()
        links.append(connect(served.url))
        head = f"POST {SEARCH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        links[-1].sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        begun.wait(30)
    wait_for(lambda: index.searches.waiting)  # the second one waits
    for link in links:
        link.close()
    wait_for(lambda: not index.searches.wanted)
    goes_on.set()
    assert ask(served.url, SEARCH, {"queries": "search"})[0] == 200
    assert "second" not in str(searched)
    assert ask(served.url, "/health", None, "GET")[0] == 200


def test_slow_headers_end_a_connection(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = served.catalogue.config
    limits = config.limits.model_copy(update={"idle_seconds": 0.1})
    monkeypatch.setattr(served.catalogue, "config", config.model_copy(update={"limits": limits}))
    silent, begun = connect(served.url), connect(served.url)
    begun.sendall(b"GET /health HTTP/1.1\r\nho")
    kept = connect(served.url)  # has sent a request, and trickles the next one
    kept.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea")
    answer = b""
    while not answer.endswith(b"}"):  # the body may come after the headers
        answer += kept.recv(1000)
    assert b"200" in answer
    for link in (silent, begun, kept):
        with link:
            try:
                rest = link.recv(1000)
            except ConnectionResetError:
                rest = b""
            assert rest == b""


def test_large_bodies_are_refused_before_they_are_read(served: Any) -> None:
    with connect(served.url) as link:
        link.sendall(f"POST {SEARCH} HTTP/1.1\r\nhost: x\r\ncontent-length: 104857600\r\n\r\n".encode())
        assert b" 413 " in link.recv(1000)


def test_all_large_bodies_together_are_limited(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = served.catalogue.config
    limits = config.limits.model_copy(update={"body_bytes": 1 << 18, "bodies_bytes": 1 << 18})
    monkeypatch.setattr(served.catalogue, "config", config.model_copy(update={"limits": limits}))
    large = json.dumps({"queries": "search", "fields": ["x" * 150_000]}).encode()
    head = f"POST {SEARCH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    announced, chunked = connect(served.url), connect(served.url)
    with announced, chunked:
        announced.sendall(f"{head}content-length: 200000\r\n\r\n".encode() + large)  # and waits
        wait_for(lambda: ask(served.url, SEARCH, large)[0] == 429)
        assert ask(served.url, SEARCH, {"queries": "search"})[0] == 200  # a small one finds room
        chunked.sendall(f"{head}transfer-encoding: chunked\r\n\r\n{len(large):x}\r\n".encode() + large)
        assert b" 429 " in chunked.recv(1000)
    wait_for(lambda: ask(served.url, SEARCH, large)[0] == 422)  # their bytes are given back


def test_reload_takes_new_keys_and_indexes(served: Any, tmp_path: Path) -> None:
    from irkit.errors import BadValueError
    from irkit.serve.access import read_keys
    from irkit.serve.catalogue import Catalogue
    from irkit.serve.serve_config import ServeConfig

    Retriever.build("bm25", {"first": "text"}, tmp_path / "words").close()
    file = tmp_path / "keys"
    file.write_text("read first-key\n")
    config = ServeConfig(paths=(str(tmp_path / "words"),), keys=read_keys(file), keys_file=str(file))
    catalogue = Catalogue(config)
    retriever = catalogue.index("words").retriever()
    file.write_text("no key")
    with pytest.raises(BadValueError, match="line 1"):
        catalogue.reload()
    assert catalogue.config == config
    file.write_text("read other-key\n")
    catalogue.reload()
    assert catalogue.config.keys == read_keys(file) != config.keys
    assert catalogue.index("words").retriever() is not retriever
    for opened in (retriever, catalogue.index("words").retriever()):
        assert [hit.id for hit in opened.search("text")] == ["first"]
        opened.close()


def test_a_reload_reads_the_indexes_behind_one_that_is_gone(served: Any, tmp_path: Path) -> None:
    from irkit.errors import StorageError
    from irkit.serve.catalogue import Catalogue
    from irkit.serve.serve_config import ServeConfig

    for name in ("first", "second"):
        Retriever.build("bm25", {"old": "text"}, tmp_path / name).close()
    catalogue = Catalogue(ServeConfig(paths=(str(tmp_path / "first"), str(tmp_path / "second"))))
    (tmp_path / "first" / "irkit.json").rename(tmp_path / "gone.json")
    before = catalogue.index("second").retriever()
    with pytest.raises(StorageError, match="first"):
        catalogue.reload()
    assert catalogue.index("second").retriever() is not before


def test_an_index_whose_model_directory_became_a_link_is_served(
    served: Any, tiny_bert: Path, tmp_path: Path
) -> None:
    from irkit.serve.catalogue import Catalogue
    from irkit.serve.serve_config import ServeConfig

    Model.sparse(tiny_bert).save_pretrained(tmp_path / "model")
    Retriever.build(str(tmp_path / "model"), {"a": "an index"}, tmp_path / "index").close()
    (tmp_path / "model").rename(tmp_path / "moved")
    (tmp_path / "model").symlink_to(tmp_path / "moved")
    catalogue = Catalogue(ServeConfig(paths=(str(tmp_path / "index"),)))
    assert [hit.id for hit in catalogue.index("index").retriever().search("index")] == ["a"]
    assert [model.indexes for model in catalogue.models.values()] == [["index"]]


def test_gauges_of_a_killed_worker_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = subprocess.Popen([sys.executable, "-c", ""])
    worker.wait()
    (tmp_path / f"gauge_livesum_{worker.pid}.db").touch()
    monkeypatch.setenv(PROCESSES, str(tmp_path))
    exposition()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_sighup_reloads_under_load(tmp_path: Path, workers: str) -> None:
    Retriever.build("bm25", {"first": "text"}, tmp_path / "words").close()
    keys = tmp_path / "keys"
    keys.write_text("write correct-horse\n")
    words = str(tmp_path / "words"), "--workers", workers, "--keys", str(keys)
    with process(*words) as (running, url):
        wrong, stop = list[Any](), threading.Event()

        def load() -> None:
            while not stop.is_set():
                try:
                    if ask(url, SEARCH, {"queries": "text"})[0] != 200:
                        wrong.append("status")
                except Exception as error:
                    wrong.append(error)

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        keys.write_text("write other-horse\n")
        running.send_signal(signal.SIGHUP)
        new = {"documents": [{"id": "new", "text": "text"}]}
        wait_for(lambda: ask(url, "/indexes/words/documents", new, headers=KEY)[0] == 401)
        stop.set()
        thread.join()
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    # a connection that waits to be accepted by a process that ends is reset
    assert [str(error) for error in wrong if "reset" not in str(error)] == []


@pytest.mark.parametrize("path", ["nowhere/at-all", "broken"])
def test_workers_do_not_start_for_a_bad_path(command: Any, tmp_path: Path, path: str) -> None:
    pytest.importorskip("fastapi", reason="needs: pip install 'irkit[serve]'")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "irkit.json").write_text("{}")
    code, _, err = command("serve", str(tmp_path / path), "--workers", "2", "--port", "0")
    assert (code, path.rpartition("/")[2] in err, err.count("\n")) == (2, True, 1), err


def test_a_commit_while_an_index_is_opened_is_seen(tmp_path: Path) -> None:
    from irkit.serve.serve_config import ServeLimits
    from irkit.serve.served_indexes import ServedIndex

    Retriever.build("bm25", {"old": "text"}, tmp_path / "words").close()

    def load(path: str) -> Retriever:
        opened = Retriever.load(path)
        with Retriever.load(path) as writer:
            writer.add({"new": "text"})
        return opened

    index = ServedIndex("words", str(tmp_path / "words"), load, lambda *_: [], ServeLimits())
    assert len(index.retriever()) == 2


def test_threads_wait_for_the_one_that_opens_a_new_index(tmp_path: Path) -> None:
    from irkit.serve.serve_config import ServeLimits
    from irkit.serve.served_indexes import ServedIndex

    Retriever.build("bm25", {"old": "text"}, tmp_path / "words").close()
    loads: list[str] = []

    def load(path: str) -> Retriever:
        loads.append(path)
        time.sleep(0.2)
        return Retriever.load(path)

    index = ServedIndex("words", str(tmp_path / "words"), load, lambda *_: [], ServeLimits())
    Retriever.build("vectors", {"a": [1.0], "b": [0.5]}, tmp_path / "words", overwrite=True).close()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: len(index.retriever()), range(8))) == [2] * 8
    assert len(loads) == 2


def test_a_cross_encoder_is_given_by_its_name_on_the_hub(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from irkit.serve.catalogue import Catalogue
    from irkit.serve.serve_config import ServeConfig

    repository = tmp_path / "models--someone--tiny-cross"
    for folder in ("refs", "snapshots"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).symlink_to(served.root / "cross")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    catalogue = Catalogue(ServeConfig(paths=("second=someone/tiny-cross",)))
    assert type(catalogue.models["second"].model).__name__ == "CrossEncoder"
