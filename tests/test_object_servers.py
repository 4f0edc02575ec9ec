"""Corpora and indexes on servers of object stores, which run on this machine, and what their faults become.

Servers come from packages that only these tests need, and each test is skipped without its own: ``pip install
s3fs "moto[server]" aiohttp``.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from irkit import Retriever
from irkit.data import read_documents
from irkit.errors import StorageError
from irkit.index import object_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),  # of the clients
]

TEXTS = {f"d{number}": f"text {number} word{number % 3} common" for number in range(50)}
LINES = "".join(f'{{"_id": "{name}", "text": "{text}"}}\n' for name, text in TEXTS.items())
QUERIES = ["word1 text", "common 7"]
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; some names are refused, and some are cut in the middle."""

    def do_GET(self) -> None:
        if "cut" not in self.path:
            return super().do_GET()
        data = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        self.close_connection = True
        return None

    def send_head(self) -> Any:
        if "secret" in self.path:
            return self.send_error(403)
        return super().send_head()

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


class Denied(http.server.BaseHTTPRequestHandler):
    """Refuses everything, as S3 refuses who has no right."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", str(len(DENIED)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(DENIED)

    do_HEAD = do_PUT = do_POST = do_GET

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def serve() -> Iterator[Callable[[Any], http.server.ThreadingHTTPServer]]:
    """Start servers on this machine, and end them."""
    running: list[http.server.ThreadingHTTPServer] = []

    def start(handler: Any) -> http.server.ThreadingHTTPServer:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "_PAUSE", 0)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of S3 with the bucket ``bucket``."""
    s3fs = pytest.importorskip("s3fs", reason="needs: pip install s3fs")
    moto = pytest.importorskip("moto.server", reason="needs: pip install 'moto[server]'")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _point_to(monkeypatch, *server.get_host_and_port())
    s3fs.S3FileSystem.clear_instance_cache()
    fsspec.filesystem("s3").mkdir("bucket")
    yield server
    with contextlib.suppress(OSError):  # it was stopped already
        server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def _point_to(monkeypatch: pytest.MonkeyPatch, host: str, port: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


def check_index(uri: str, tmp_path: Path) -> None:
    """Build an index in a store from a corpus there; open it, replace it, and copy another one to it."""
    folder = uri.rpartition("/")[0]
    with fsspec.open(f"{folder}/corpus.jsonl", "wb") as stream:
        stream.write(LINES.encode())
    one = Retriever.build("bm25", TEXTS, tmp_path / "one", overwrite=True)
    built = Retriever.build("bm25", f"{folder}/corpus.jsonl", uri, shards=2)
    assert built.search(QUERIES) == one.search(QUERIES)
    with pytest.raises(StorageError, match="there is one already"):
        one.save(uri)
    Retriever.build("bm25", {**TEXTS, "new": "fresh"}, uri, overwrite=True).close()
    assert [hit.id for hit in Retriever.load(uri).search("fresh")] == ["new"]
    one.save(f"{uri}-saved")
    assert Retriever.load(f"{uri}-saved").search(QUERIES) == one.search(QUERIES)
    with pytest.raises(StorageError, match="no index is there"):
        Retriever.load(f"{uri}-none")
    with pytest.raises(StorageError, match="there is no such file"):
        read_documents(f"{folder}/none.jsonl")


def test_s3_has_corpora_and_indexes(s3: Any, tmp_path: Path) -> None:
    check_index("s3://bucket/folder/words", tmp_path)
    with pytest.raises(StorageError, match="s3://no-bucket"):
        Retriever.build("bm25", TEXTS, "s3://no-bucket/words")
    assert [name for name in fsspec.filesystem("s3").ls("") if "no" in name] == []
    # the copy of an index needs the marker of the store; without a server there is an error
    s3.stop()
    with pytest.raises(StorageError, match="opening s3://bucket/folder/words"):
        Retriever.load("s3://bucket/folder/words")
    with pytest.raises(StorageError, match=r"s3://bucket/folder/corpus\.jsonl"):
        list(read_documents("s3://bucket/folder/corpus.jsonl"))


def test_a_bucket_without_the_right_to_use_it(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs", reason="needs: pip install s3fs")
    _point_to(monkeypatch, *serve(Denied).server_address)
    s3fs.S3FileSystem.clear_instance_cache()
    uri = "s3://bucket/words"
    with pytest.raises(StorageError, match=r"(?s)s3://bucket/words.*right"):
        Retriever.load(uri)
    with pytest.raises(StorageError, match=r"(?s)s3://bucket/words.*right"):
        Retriever.build("bm25", TEXTS, uri)
    with pytest.raises(StorageError, match=r"(?s)s3://bucket/corpus\.jsonl.*right"):
        list(read_documents("s3://bucket/corpus.jsonl"))
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_web_server_has_corpora_and_indexes(serve: Any, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="needs: pip install aiohttp")
    root = tmp_path / "root"
    one = Retriever.build("bm25", TEXTS, tmp_path / "one")
    Retriever.build("bm25", TEXTS, f"file://{root}/words", shards=2).close()
    for name in ("corpus", "secret", "cut"):
        (root / f"{name}.jsonl").write_text(LINES)
    server = serve(partial(Files, directory=os.fspath(root)))
    site = f"http://127.0.0.1:{server.server_address[1]}"
    assert [item.id for item in read_documents(f"{site}/corpus.jsonl")] == list(TEXTS)
    assert Retriever.load(f"{site}/words").search(QUERIES) == one.search(QUERIES)
    for name in ("none", "secret", "cut"):
        with pytest.raises(StorageError, match=rf"{site}/{name}\.jsonl"):
            list(read_documents(f"{site}/{name}.jsonl"))
    for name in ("none", "secret"):
        with pytest.raises(StorageError, match=f"{site}/{name}"):
            Retriever.load(f"{site}/{name}")
    with pytest.raises(StorageError, match=site):
        one.save(f"{site}/words2")
    server.shutdown()
    server.server_close()
    with pytest.raises(StorageError, match=site):
        list(read_documents(f"{site}/corpus.jsonl"))
