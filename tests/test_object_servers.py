"""Corpora and indexes on servers of object stores, which run on this machine, and what their faults become.

Servers come from packages that only these tests need, and each test is skipped without its own: ``pip install
s3fs "moto[server]" gcsfs gcp-storage-emulator aiohttp``.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from irkit import Retriever
from irkit.data import read_documents
from irkit.errors import StorageError

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
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_limits: Callable[..., None]) -> None:
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path / "cache"))
    small_limits(upload_pause=0)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of S3 with the bucket ``bucket``."""
    s3fs = pytest.importorskip("s3fs", reason="needs: pip install s3fs")
    moto = pytest.importorskip("moto.server", reason="needs: pip install 'moto[server]'")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _point_to(monkeypatch, *server.get_host_and_port())
    s3fs.S3FileSystem.clear_instance_cache()
    fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)  # servers of a process share what they have
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


@pytest.fixture
def gs(serve: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server of Google Cloud Storage with the bucket ``bucket``."""
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks servers of Google
    gcsfs = pytest.importorskip("gcsfs", reason="needs: pip install gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator", reason="needs: pip install gcp-storage-emulator")
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    assert emulator
    host, port = serve(partial(RequestHandler, Storage(use_memory_fs=True))).server_address
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{host}:{port}")
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    gcsfs.GCSFileSystem.clear_instance_cache()
    fsspec.filesystem("gs").mkdir("bucket")
    yield
    gcsfs.GCSFileSystem.clear_instance_cache()


class Relay(socketserver.BaseRequestHandler):
    """Passes bytes between a client and another server; cuts the connection after as many as it is told."""

    target = ("", 0)
    most_up: int | None = None
    most_down: int | None = None
    cuts = 0

    def handle(self) -> None:
        with socket.create_connection(self.target) as server:
            up = threading.Thread(target=self.pass_on, args=(self.request, server, "most_up"))
            up.start()
            self.pass_on(server, self.request, "most_down")
            up.join()

    def pass_on(self, source: socket.socket, target: socket.socket, most: str) -> None:
        """Pass on bytes until one side ends, or until there are too many."""
        count = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                limit, count = getattr(Relay, most), count + len(data)
                if limit is not None and count > limit:
                    Relay.cuts += 1
                    break
                target.sendall(data)
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Relay]]:
    """What is between the clients and S3."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": 5 << 20})  # parts of an upload
    type(fsspec.filesystem("s3")).clear_instance_cache()
    Relay.target, Relay.cuts, Relay.most_up, Relay.most_down = s3.get_host_and_port(), 0, None, None
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _point_to(monkeypatch, *server.server_address)
        yield Relay
        server.shutdown()


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


def test_google_cloud_storage_has_corpora_and_indexes(gs: None, tmp_path: Path) -> None:
    check_index("gs://bucket/folder/words", tmp_path)
    with pytest.raises(StorageError, match="gs://no-bucket"):
        Retriever.build("bm25", TEXTS, "gs://no-bucket/words")


def test_a_transfer_that_dies_leaves_what_was_there(
    relay: type[Relay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, rng = "s3://bucket/vectors", np.random.default_rng(0)
    vectors = {f"d{number}": vector for number, vector in enumerate(rng.standard_normal((9000, 256)))}
    new = Retriever.build("vectors", vectors, tmp_path / "new")  # its vectors are uploaded in parts
    old = Retriever.build("vectors", {"old": vectors["d0"]}, tmp_path / "old")

    def check_cut(work: Callable[[], Any], message: str) -> None:
        relay.cuts = 0
        with pytest.raises(StorageError, match=message):
            work()
        assert relay.cuts > 0, message
        relay.most_up = relay.most_down = None

    for most_up in (3000, 2 << 20, 6 << 20):  # in a small file, and in a part of a large one
        relay.most_up = most_up
        check_cut(lambda: new.save(uri), f"uploading {uri}")
        with pytest.raises(StorageError, match="no index is there"):
            Retriever.load(uri)
    old.save(uri)
    relay.most_up = 6 << 20
    build: Any = partial(Retriever.build, "vectors", vectors, uri, overwrite=True)
    check_cut(build, rf"uploading {uri}(?s:.*)the index is complete in")
    assert [hit.id for hit in Retriever.load(uri).search(vectors["d1"])] == ["old"]
    build().close()
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path / "other"))
    relay.most_down = 4 << 20
    check_cut(lambda: Retriever.load(uri), f"reading {uri}")
    assert not [path for path in (tmp_path / "other" / "indexes").glob("*/v-*") if path.suffix != ".part"]
    with Retriever.load(uri) as loaded:  # goes on after the files that it has
        assert loaded.search(vectors["d1"]) == new.search(vectors["d1"])
    with fsspec.open("s3://bucket/corpus.jsonl", "wb") as stream:
        stream.write(LINES.encode() * 1000)
    relay.most_down = 1 << 20
    check_cut(lambda: list(read_documents("s3://bucket/corpus.jsonl")), "s3://bucket/corpus")


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
