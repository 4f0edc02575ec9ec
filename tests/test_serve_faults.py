"""Bad requests, absent keys, full disks, kills and signals: each has its answer and harms nothing."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving import KEY, ask, process, serving

from irkit.client import Client
from irkit.errors import BadValueError, StorageError
from irkit.retrieval.retriever import Retriever

SEARCH, DOCUMENTS = "/indexes/words/search", "/indexes/words/documents"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/nowhere", {}, 404, "Not Found"),
        (SEARCH, b'{"queries":', 400, "not JSON"),
        (SEARCH, b"\xff\xfe", 400, ""),
        (SEARCH, b"[" * 100_000, 400, ""),
        (SEARCH, b"", 422, ""),
        (SEARCH, [], 422, ""),
        (SEARCH, {"queries": 7}, 422, "queries"),
        (SEARCH, {"queries": []}, 400, "queries"),
        (SEARCH, {"queries": ["x"] * 65}, 413, "64"),
        (SEARCH, {"queries": "x", "k": 0}, 422, "k"),
        (SEARCH, {"queries": "x", "k": 101}, 422, "limit is 100"),
        (SEARCH, {"queries": "x", "k": 10**400}, 422, "limit"),
        (SEARCH, {"queries": "x", "kk": 1}, 422, "kk"),
        (SEARCH, {"queries": "x", "filter": {"yaer": 1}}, 422, "did you mean 'year'"),
        (SEARCH, {"queries": "x", "filter": {"year": {"like": 1}}}, 422, "like"),
        (SEARCH, {"queries": "x", "fields": ["body"]}, 422, "body"),
        (SEARCH, {"queries": "x", "facets": ["none"]}, 422, "none"),
        (SEARCH, {"queries": "x", "fuse": {"indexes": ["nots"]}}, 422, "nots"),
        (SEARCH, {"queries": "x", "fuse": {"indexes": ["words"]}}, 422, "twice"),
        (SEARCH, {"queries": "x", "rerank": {"by": "../../etc/passwd"}}, 422, "no index or model"),
        (SEARCH, {"queries": "x", "explain": True, "k": 30}, 422, "at most 20"),
        (SEARCH, {"queries": ["x"] * 6, "explain": True, "k": 20}, 422, "120 hits, the limit is 100"),
        (SEARCH, {"queries": ["x"] * 5, "explain": True, "k": 20}, 200, ""),
        (SEARCH, {"queries": ["x"] * 6, "rerank": {"by": "cross"}}, 422, "cross: 72 texts of 6 queries"),
        (SEARCH, {"queries": ["x"] * 6, "rerank": {"by": "colbert"}}, 200, ""),
        (SEARCH, {"queries": ["search"] * 5, "rerank": {"by": "cross"}}, 200, ""),
        (SEARCH, {"queries": {"a": 1.0}}, 422, ""),
        (SEARCH, {"queries": [[0.5, 1.0]]}, 422, ""),
        (SEARCH, b'{"queries": "\\ud800"}', 200, ""),
        (SEARCH, b'{"queries": "x", "threshold": NaN}', 422, "finite"),
        ("/indexes/nots/search", {"queries": "x"}, 404, "did you mean 'notes'"),
        ("/indexes/..%2F..%2Fetc/search", {"queries": "x"}, 404, ""),
        ("/indexes/words/explain", {"query": "x"}, 422, "id or a document"),
        ("/indexes/words/explain", {"query": "x", "id": "none"}, 404, "no document"),
        ("/indexes/words/rerank", {"queries": ["x"], "ids": []}, 422, "lists of candidates"),
        ("/embed", {"inputs": []}, 400, "no text"),
        ("/embed", {"inputs": [1]}, 422, "inputs"),
        ("/embed", {"inputs": ["a"] * 65}, 413, "the limit is 64"),
        ("/embed", {"inputs": ["search " * 60] * 64}, 200, ""),
        ("/embed", {"inputs": "search " * 99, "truncate": False}, 413, "101 tokens"),
        ("/embed", {"inputs": ["a b c d " * 16] * 64, "model": "tokens"}, 422, "multi_vector"),
        ("/embed", {"inputs": "a", "model": "/etc/passwd"}, 404, "no model"),
        ("/embed", {"inputs": "a", "prompt_name": "none"}, 422, "no prompt"),
        ("/embed", {"inputs": "a", "dimensions": 33}, 422, "32"),
        ("/embed", {"inputs": "a\0b"}, 200, ""),
        ("/embed", {"inputs": "a", "truncate": 0.0}, 422, "truncate"),
        ("/embed", {"inputs": "a", "truncation_direction": "left"}, 422, "cut at their end only"),
        ("/rerank", {"query": "a", "texts": ["b"], "prompt_name": "query"}, 422, "send none"),
        ("/rerank", {"query": "a", "texts": ["b"], "prompt_name": None}, 200, ""),
        ("/rerank", {"query": "a", "texts": ["search " * 99], "truncate": False}, 413, "103 tokens"),
        ("/rerank", {"query": "a", "texts": ["b", "search " * 99], "truncate": True}, 200, ""),
        ("/rerank", {"query": "a " * 10_000, "texts": ["b"] * 60}, 413, "20000 characters with each of 60"),
        (
            "/rerank",
            {"query": "a", "texts": ["x " * 80], "truncate": False, "model": "tokens"},
            413,
            "limit of",
        ),
        (SEARCH, {"queries": "x", "k": True}, 422, "integer"),
        (SEARCH, {"queries": "x", "feedback": {"documents": 0}}, 422, "feedback.documents"),
        (SEARCH, {"queries": "x", "feedback": {}, "fuse": {"indexes": ["notes"]}}, 422, "without fuse"),
        ("/indexes/notes/search", {"queries": "x", "feedback": {}}, 422, "BM25"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 422, "encoding_format"),
        ("/v2/rerank", {"query": "a", "documents": [{"text": "b"}]}, 422, "documents"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 3}, 422, "cuts at"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 4096}, 200, ""),
        ("/v1/rerank", {"query": "a", "documents": [{"no": 1}]}, 422, "key text"),
        (DOCUMENTS, {"documents": []}, 401, "Bearer"),
        (f"{DOCUMENTS}%0A", {"documents": [{"id": "new"}]}, 404, "no such path"),
        (SEARCH, b'{"queries": {"a": 1' + b"0" * 400 + b"}}", 422, "finite"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(
    served: Any, path: str, body: Any, status: int, message: str
) -> None:
    got, answer = ask(served.url, path, body)
    assert got == status, answer
    if status != 200:
        assert answer["request_id"]
        assert message in (answer["error"]["message"] if path.startswith("/v1") else answer["error"])
        assert str(served.root) not in json.dumps(answer)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"documents": []}, 422),
        ({"documents": [{"text": "no id"}]}, 422),
        ({"documents": [{"id": "a", "text": "x"}] * 2}, 422),
        ({"documents": [{"id": "a"}, {"id": "d1"}]}, 409),
        ({"documents": [{"id": str(i)} for i in range(65)]}, 413),
        (b'{"documents": [{"id": "\\ud800"}]}', 422),
        (b'{"documents": [{"id": "a", "metadata": {"x": NaN}}]}', 422),
    ],
)
def test_bad_documents_change_nothing(served: Any, body: Any, status: int) -> None:
    got, answer = ask(served.url, DOCUMENTS, body, headers=KEY)
    assert got == status, answer
    with Client(served.url, "words") as client:
        assert len(client) == 12


def test_bodies_are_limited(served: Any) -> None:
    assert ask(served.url, SEARCH, b" " * (2 << 20))[0] == 413
    assert ask(served.url, "/", b" " * (2 << 20))[0] == 413
    parts = urlsplit(served.url)
    head = f"POST {SEARCH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_connection((parts.hostname, parts.port)) as link:  # of no announced length
        link.settimeout(30)
        link.sendall(head.encode())
        with contextlib.suppress(OSError):
            for _ in range(20):
                link.sendall(b"20000\r\n" + b" " * 0x20000 + b"\r\n")
        assert b"413" in link.recv(100)
    with socket.create_connection((parts.hostname, parts.port)) as link:  # goes away in the middle
        link.sendall(f"POST {SEARCH} HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n{{".encode())
    assert ask(served.url, "/health", None, "GET")[0] == 200


def test_bodies_that_are_refused_are_freed(served: Any) -> None:
    import gc

    def refused() -> set[int]:
        return {id(item) for item in gc.get_objects() if type(item).__name__ == "RequestValidationError"}

    gc.collect()
    before = refused()  # of other tests, which may keep theirs
    gc.disable()
    try:
        wrong = b'{"queries": [' + b"7," * 50_000 + b"7]}"
        for body in (b" " * 100_000, wrong, b'{"kk": "' + b"x" * 100_000 + b'"}'):
            assert ask(served.url, SEARCH, body)[0] in (400, 422)
        deadline = time.monotonic() + 3  # the server may work on after its answer
        while refused() - before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        gc.enable()


def test_what_was_sent_is_not_written_out() -> None:
    """Writing out a wrong body of 100 MB took 1.7 GB."""
    exceptions = pytest.importorskip("fastapi.exceptions", reason="needs: pip install 'irkit[serve]'")
    from irkit.serve.problems import problem_of

    class Large:
        def __repr__(self) -> str:
            raise AssertionError

    wrong = {"type": "model_attributes_type", "loc": ("body",), "msg": "no object", "input": Large()}
    problem = problem_of(exceptions.RequestValidationError([wrong]))
    assert (problem.status, str(problem)) == (422, "body: no object")


def test_errors_tell_names_instead_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="needs: pip install 'irkit[serve]'")
    from irkit.serve.catalogue import Catalogue
    from irkit.serve.problems import problem_of
    from irkit.serve.serve_config import ServeConfig

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path / "cache"))
    places = ["My Data/secret/notes", f"{tmp_path}/My Data/secret/terms", "memory://private/secret/words"]
    for place in places:
        Retriever.build("bm25", {"a": "text"}, place).close()
    Catalogue(ServeConfig(paths=(*places, f"other={places[0]}/")))
    resolved = str(tmp_path / places[0])
    for place, names in zip(
        (*places, resolved), (("notes", "other"), ("terms",), ("words",), ("notes", "other")), strict=True
    ):
        message = str(problem_of(StorageError(f"index {place}: gone, reading {place}/irkit.json")))
        assert message in {f"index {name}: gone, reading {name}/irkit.json" for name in names}
    kept = "documents: the index has none of id 'a/My Data' or 'http://x/y'"
    assert str(problem_of(BadValueError(kept))) == kept


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("SearchRequest", {"queries": [7] * 1000}),
        ("SearchRequest", {"queries": ["x"] * 1000 + [7] * 1000}),
        ("SearchRequest", {"queries": [[["x"] * 1000] * 1000]}),
        ("SearchRequest", {"queries": {str(number): "x" for number in range(1000)}}),
        ("SearchRequest", {"queries": {str(number): float("nan") for number in range(1000)}}),
        ("SearchRequest", {"queries": "x", "filter": [7] * 1000, "fields": [7] * 1000}),
        ("RerankRequest", {"queries": [7] * 1000, "ids": [[7] * 1000] * 1000}),
        ("DocumentsRequest", {"documents": [{"id": 7}] * 1000}),
        ("DocumentsRequest", {"documents": [{"id": "a", "vector": [["x"] * 1000] * 1000}]}),
        ("RemoveRequest", {"ids": [7] * 1000}),
        ("EmbedRequest", {"inputs": [7] * 1000}),
        ("RerankTextsRequest", {"query": "x", "texts": [7] * 1000}),
        ("Sentences", {"source_sentence": "x", "sentences": [7] * 1000}),
        ("EmbeddingsRequest", {"input": [7] * 1000}),
        ("CohereRerankRequest", {"query": "x", "documents": [7] * 1000}),
        ("CohereRerankV2Request", {"query": "x", "documents": [7] * 1000}),
    ],
)
def test_a_body_has_few_errors_however_large_it_is(name: str, body: Any) -> None:
    pytest.importorskip("fastapi", reason="needs: pip install 'irkit[serve]'")
    from pydantic import ValidationError

    from irkit.serve import messages, openai_routes, tei_routes

    [model] = {vars(module)[name] for module in (messages, openai_routes, tei_routes) if name in vars(module)}
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)
    assert error.value.error_count() < 20


def test_time_is_limited(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = served.catalogue.config
    short = config.limits.model_copy(update={"seconds": 0.05, "body_seconds": 0.05})
    monkeypatch.setattr(served.catalogue, "config", config.model_copy(update={"limits": short}))
    index = served.catalogue.indexes["words"]
    goes_on, work = threading.Event(), index.work
    monkeypatch.setattr(index, "work", lambda *arguments: goes_on.wait(30) and work(*arguments))
    status, answer = ask(served.url, SEARCH, {"queries": "x"})
    goes_on.set()
    assert (status, answer["error_type"]) == (408, "Timeout")
    parts = urlsplit(served.url)
    with socket.create_connection((parts.hostname, parts.port)) as link:
        link.sendall(f"POST {SEARCH} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n".encode())
        link.settimeout(30)
        assert b"408" in link.recv(100)


def test_requests_in_work_are_limited(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = served.catalogue.config
    one = config.limits.model_copy(update={"requests": 1})
    monkeypatch.setattr(served.catalogue, "config", config.model_copy(update={"limits": one}))
    index = served.catalogue.indexes["words"]
    begun, goes_on, work = threading.Event(), threading.Event(), index.work

    def wait(*arguments: Any) -> Any:
        begun.set()
        goes_on.wait(30)
        return work(*arguments)

    monkeypatch.setattr(index, "work", wait)
    first = threading.Thread(target=ask, args=(served.url, SEARCH, {"queries": "x"}))
    first.start()
    begun.wait(30)
    status, answer = ask(served.url, SEARCH, {"queries": "x"})
    goes_on.set()
    first.join()
    assert (status, answer["error_type"]) == (429, "Overloaded")


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EROFS, 503)])
def test_a_disk_that_takes_nothing(
    served: Any, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("irkit.index.store.write_at", fail)
        got, answer = ask(served.url, DOCUMENTS, {"documents": [{"id": "n", "text": "x"}]}, headers=KEY)
        assert got == status, answer
        assert ask(served.url, SEARCH, {"queries": "search"})[0] == 200
    assert ask(served.url, DOCUMENTS, {"documents": [{"id": "n", "text": "x"}]}, headers=KEY)[0] == 201
    assert ask(served.url, DOCUMENTS, {"ids": ["n"]}, "DELETE", headers=KEY)[0] == 200


def test_a_failing_model_is_no_fault_of_the_text(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("irkit.model.pipeline.Pipeline.encode_tokens", fail)
    status, answer = ask(served.url, "/embed", {"inputs": "a"})
    assert (status, answer["error_type"]) == (424, "Backend")
    monkeypatch.setattr("irkit.serve.served_models.ServedModel.encode", fail)  # a bug
    status, answer = ask(served.url, "/embed", {"inputs": "a"})
    assert (status, "memory" in json.dumps(answer)) == (500, False)


def test_keys(tmp_path: Path) -> None:
    from irkit.serve.access import check_access, read_keys
    from irkit.serve.problems import Problem

    file = tmp_path / "keys"
    file.write_text("# who may what\nread reader-key\n\nwrite writer-key\n")
    keys = read_keys(file)
    assert "reader" not in repr(keys)
    allowed = [
        ("read", b"Bearer reader-key"),
        ("read", b"bearer writer-key"),
        ("write", b"Bearer writer-key"),
    ]
    for scope, header in allowed:
        check_access(keys, scope, header)  # type: ignore[arg-type]
    refused = [
        (keys, "read", b"", 401),
        (keys, "read", b"Bearer nobody", 401),
        (keys, "read", b"Basic reader-key", 401),
        (keys, "write", b"Bearer reader-key", 403),
        ((), "write", b"Bearer writer-key", 403),
    ]
    for known, scope, header, status in refused:
        with pytest.raises(Problem) as problem:
            check_access(known, scope, header)  # type: ignore[arg-type]
        assert problem.value.status == status
    check_access((), "read", b"")
    for line in ("write", "admin some-secret", "write short", "write two secrets"):
        file.write_text(line)
        with pytest.raises(BadValueError, match="line 1") as error:
            read_keys(file)
        assert "secret" not in str(error.value)
    with pytest.raises(StorageError):
        read_keys(tmp_path / "none")
    file.write_text("read reader-key\nwrite reader-key\n")
    check_access(read_keys(file), "write", b"Bearer reader-key")
    file.write_bytes("# clé\n".encode("latin-1"))
    with pytest.raises(BadValueError, match="expected UTF-8"):
        read_keys(file)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve", "nothing was given"),
        ("serve a/x b/x", "give NAME=PATH"),
        ("serve =x", "expected NAME=PATH"),
        ("serve nowhere/at-all --device cpu", "nowhere/at-all"),
        ("serve x --set secnods=1", "secnods"),
        ("serve x --set seconds=0", "seconds"),
        ("serve x --keys nowhere", "nowhere"),
        ("serve x --port 99999", "--port"),
        ("serve x --host 1.2.3.4", "another --host"),
    ],
)
def test_bad_commands(command: Any, words: str, message: str) -> None:
    pytest.importorskip("fastapi", reason="needs: pip install 'irkit[serve]'")
    code, _, err = command(*words.split())
    assert (code, message in err, err.count("\n")) == (2, True, 1), err


def test_without_the_extra_the_command_says_what_to_install(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    code, _, err = command("serve", "x")
    assert (code, "pip install 'irkit[serve]'" in err) == (2, True)


# ---- processes ----


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_under_load_answers_what_is_in_work(tmp_path: Path, workers: str) -> None:
    Retriever.build("bm25", {f"d{i}": f"word{i} text" for i in range(500)}, tmp_path / "words").close()
    log = tmp_path / "log"
    with process(str(tmp_path / "words"), "--workers", workers, log=log) as (running, url):
        done, broken, stop = set[str](), list[str](), threading.Event()
        body = {"queries": [f"word{i}" for i in range(20)], "k": 50}

        def load(worker: int) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                name = f"load-{worker}-{number}"
                try:
                    status, answer = ask(url, SEARCH, body, headers={"x-request-id": name})
                    assert (status, len(answer["results"])) == (200, 20)
                    done.add(name)
                except ConnectionRefusedError:
                    return  # the server takes no new connections
                except Exception as error:
                    broken.append(repr(error))
                    return

        threads = [threading.Thread(target=load, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        while len(done) < 50:
            time.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
        stop.set()
        for thread in threads:
            thread.join()
        # a connection that waits to be accepted when the socket closes is reset, or breaks while it is sent
        ended = ("reset", "RemoteDisconnected", "BrokenPipe")
        assert [line for line in broken if not any(word in line for word in ended)] == []
    # a request in work is not: the client has each answer that the server logged
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    logged = {line["id"]: line["status"] for line in lines if line.get("route") == "/indexes/{name}/search"}
    assert logged == dict.fromkeys(done, 200)


@pytest.mark.slow
def test_sigkill_during_adds_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    Retriever.build("bm25", {"first": "text"}, tmp_path / "words").close()
    acknowledged, asked = {"first"}, {"first"}

    def add(url: str, prefix: str) -> None:
        for number in range(1000):
            name = f"{prefix}-{number}"
            asked.add(name)
            try:
                status, _ = ask(url, DOCUMENTS, {"documents": [{"id": name, "text": "text"}]}, headers=KEY)
            except (OSError, http.client.HTTPException):
                return
            assert status == 201
            acknowledged.add(name)

    for attempt in range(50):
        with process(str(tmp_path / "words")) as (running, url):
            threads = [threading.Thread(target=add, args=(url, f"{attempt}-{worker}")) for worker in range(4)]
            for thread in threads:
                thread.start()
            before = len(acknowledged)
            while len(acknowledged) < before + attempt % 8 and any(map(threading.Thread.is_alive, threads)):
                time.sleep(0.001)
            time.sleep(random.Random(attempt).uniform(0, 0.1))
            running.kill()
            for thread in threads:
                thread.join()
        with Retriever.load(tmp_path / "words") as retriever:
            found = {hit.id for hit in retriever.search("text", k=len(asked))}
        assert acknowledged <= found <= asked, attempt
    assert len(acknowledged) > 100


@pytest.fixture
def fuzzed(served: Any, tmp_path: Path) -> Iterator[str]:
    """The address of a server with copies of the indexes of ``served``, which may change them."""
    from irkit.serve.access import read_keys

    models, names = ("dense", "tokens", "terms", "cross"), ("words", "notes", "colbert")
    for name in names:
        shutil.copytree(served.root / name, tmp_path / name)
    paths = [*(served.root / name for name in models), *(tmp_path / name for name in names)]
    with serving(*paths, keys=read_keys(served.root / "keys")) as url:
        yield url.rstrip("/")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_schemathesis_finds_no_failure(fuzzed: str, mode: str) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="make adapters installs schemathesis")
    import hypothesis
    from hypothesis import strategies as st
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    chosen = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    ]
    schema = schemathesis.openapi.from_url(f"{fuzzed}/openapi.json")
    data = schemathesis.GenerationMode(mode)
    kept = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much]
    bad, statuses = list[str](), set[tuple[str, int]]()
    operations = [result.ok() for result in schema.get_all_operations()]
    if mode == "negative":  # nothing is wrong where nothing is sent
        operations = [operation for operation in operations if operation.body or operation.query]
    for operation in operations:

        @hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=kept, database=None)
        @hypothesis.given(
            case=operation.as_strategy(data), index=st.sampled_from(["words", "notes", "colbert"])
        )
        def check(case: Any, index: str) -> None:
            if case.path_parameters:
                case.path_parameters["name"] = (
                    index  # any other one is 404, which is all that would be tested
                )
            if mode == "positive" and isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = None
            response = case.call(headers=KEY)
            statuses.add((case.operation.label, response.status_code))
            try:
                case.validate_response(response, checks=chosen)
            except BaseExceptionGroup as failures:
                bad.append(f"{case.method} {case.path} {case.body!r}: {failures.exceptions}"[:700])

        check()
    assert bad == [], "\n".join(bad)
    reached = {label for label, status in statuses if (status < 300) == (mode == "positive")}
    missed = {operation.label for operation in operations} - reached
    assert missed <= {f"{method} /indexes/{{name}}/documents" for method in ("GET", "PUT", "DELETE")} | {
        "POST /indexes/{name}/explain"  # random ids are in no index
    }


def test_answers_are_those_of_the_schema(served: Any) -> None:
    """Compare answers that fuzzing seldom gets with the models of the schema."""
    from irkit.serve import answers

    body = {"queries": "search", "highlights": True, "snippet": True, "explain": True, "facets": ["year"]}
    document = {"documents": [{"id": "n", "text": "x"}]}
    for path, content, method, model in [
        (SEARCH, body, "POST", answers.Found),
        (SEARCH, {"queries": "search", "fuse": {"indexes": ["notes"]}}, "POST", answers.Found),
        ("/indexes/words/explain", {"query": "search", "id": "d1"}, "POST", answers.Explained),
        ("/indexes/words/facets", {"keys": ["year"]}, "POST", answers.Counts),
        ("/indexes/words/rerank", {"queries": ["search"], "ids": [["d1"]]}, "POST", answers.Ranked),
        ("/indexes", None, "GET", answers.Indexes),
        ("/models", None, "GET", answers.Models),
        (f"{DOCUMENTS}?id=d1", None, "GET", answers.StoredDocuments),
        (DOCUMENTS, document, "POST", answers.Change),
        (DOCUMENTS, {"ids": ["n"]}, "DELETE", answers.Change),
        ("/v1/embeddings", {"input": "x"}, "POST", answers.Embeddings),
        ("/v1/models", None, "GET", answers.ModelList),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, "POST", answers.CohereRanking),
        ("/v2/rerank", {"query": "x", "documents": ["y"]}, "POST", answers.CohereRankingV2),
        ("/info", None, "GET", answers.Info),
        ("/rerank", {"query": "x", "texts": ["y"], "return_text": True}, "POST", [answers.TextScore]),
        ("/embed_sparse", {"inputs": "search"}, "POST", [[answers.Weight]]),
        ("/tokenize", {"inputs": "search"}, "POST", [[answers.Token]]),
        ("/v1/rerank", {"query": 1}, "POST", answers.Error),
        ("/nowhere", None, "GET", answers.Error),
    ]:
        _, answer = ask(served.url, path, content, method, KEY)
        while isinstance(model, list):
            [model], answer = model, answer[0]
        made = model.model_validate(answer, extra="forbid").model_dump(mode="json", exclude_unset=True)
        assert made == answer


def test_the_schema_has_examples_that_fit(served: Any) -> None:
    from irkit.serve import answers

    schema = ask(served.url, "/openapi.json", None, "GET")[1]
    models, shown = schema["components"]["schemas"], 0
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation["responses"]["200" if "200" in operation["responses"] else "201"]["content"], (
                path
            )
            if "requestBody" in operation:
                sent = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                assert models[sent.rpartition("/")[2]]["examples"], (method, path)
    for name, model in models.items():
        if hasattr(answers, name):
            for example in model.get("examples", ()):
                getattr(answers, name).model_validate(example, extra="forbid")
                shown += 1
    assert shown >= 10
