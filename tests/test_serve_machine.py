"""A server whose disk is really full or read-only, and one that gets the largest bodies: slow tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from serving import KEY, ask, process

from irkit import Retriever

SEARCH, DOCUMENTS = "/indexes/words/search", "/indexes/words/documents"
LARGE = {"body_bytes": 200_000_000, "bodies_bytes": 200_000_000, "body_seconds": 300, "seconds": 300}
pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_full_and_one_that_is_read_only(disk: Path) -> None:
    Retriever.build("bm25", {"first": "text"}, disk / "words").close()
    stored, number, text = {"first"}, 0, "text " + "more " * 20_000

    def add(text: str) -> int:
        nonlocal number
        number += 1
        status, answer = ask(url, DOCUMENTS, {"documents": [{"id": f"d{number}", "text": text}]}, headers=KEY)
        if status == 201:
            stored.add(f"d{number}")
        else:
            assert "traceback" not in str(answer).lower()
        return status

    def found() -> set[str]:
        status, answer = ask(url, SEARCH, {"queries": "text", "k": 1000, "fields": []})
        assert status == 200
        return {hit["id"] for hit in answer["results"][0]["hits"]}

    with process(str(disk / "words")) as (running, url):
        # full: refused, and nothing changes
        while (status := add(text)) == 201:
            assert number < 1000
        assert status == 507
        assert found() == stored
        for _ in range(5):
            assert add(text) == 507
        assert found() == stored
        # read-only
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert add("text") == 503
        assert found() == stored
        assert ask(url, DOCUMENTS, {"ids": ["first"]}, "DELETE", KEY)[0] == 503
        # there is room again
        subprocess.run(["mount", "-o", "remount,rw,size=16m", str(disk)], check=True)
        assert add(text) == 201
        assert found() == stored
        running.terminate()
        assert running.wait(60) == 0
    with process(str(disk / "words")) as (_, url):
        assert found() == stored


def test_memory_does_not_grow_by_large_bodies(tmp_path: Path) -> None:
    Retriever.build("bm25", {"first": "text"}, tmp_path / "words").close()
    size = 100 << 20

    def send(url: str, start: bytes, fill: bytes, chunked: bool) -> int:
        """Send a body of 100 MB; status, or 0 where the server has closed the connection."""
        parts = urlsplit(url)
        kind = "content-type: application/json" if start else "content-type: text/plain"
        head = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
        piece = (fill * (1 + (1 << 20) // len(fill)))[: 1 << 20]
        with socket.create_connection((parts.hostname, parts.port), timeout=300) as link:
            with contextlib.suppress(OSError):
                link.sendall(f"POST {SEARCH} HTTP/1.1\r\nhost: x\r\n{kind}\r\n{head}\r\n\r\n".encode())
                for number in range(size >> 20):
                    part = start + piece[len(start) :] if number == 0 else piece
                    link.sendall(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
                if chunked:
                    link.sendall(b"0\r\n\r\n")
            with contextlib.suppress(OSError):
                answer = link.recv(200)
                assert b"HTTP/1.1 " in answer
                return int(answer.split()[1])
        return 0

    def own_memory(pid: int) -> float:
        """Memory of a process, without files, in MB."""
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024

    bodies = [
        (b"", b"\0"),
        (b'{"queries": "', b"x"),  # without an end
        (b'{"queries": [', b"7, "),
        (b'{"queries": ', b"["),
        (b'{"queries": {"', b'a": 1, "'),
    ]
    # beyond the limit they are refused before they are read
    with process(str(tmp_path / "words")) as (running, url):
        before = own_memory(running.pid)
        for start, fill in bodies:
            for chunked in (False, True):
                assert send(url, start, fill, chunked) in (0, 413)
        assert own_memory(running.pid) - before < 64
        assert ask(url, SEARCH, {"queries": "text"})[0] == 200
    # within the limit they are read, refused and freed
    limits = [f"--set={name}={limit}" for name, limit in LARGE.items()]
    with process(str(tmp_path / "words"), *limits) as (running, url):
        after = []
        for _ in range(2):
            for start, fill in bodies:
                assert send(url, start, fill, False) in (400, 422)
            after.append(own_memory(running.pid))
        assert after[1] - after[0] < 150, after  # the last body may still be there
        highest = int(Path(f"/proc/{running.pid}/status").read_text().partition("VmHWM:")[2].split()[0])
        assert highest < 1200 << 10  # a list of 35 million numbers is 0.3 GB
        assert ask(url, SEARCH, {"queries": "text"})[0] == 200


def test_slow_clients_do_not_keep_others_waiting(tmp_path: Path) -> None:
    Retriever.build("bm25", {"first": "text"}, tmp_path / "words").close()
    with process(str(tmp_path / "words"), "--set", "body_seconds=3") as (running, url):
        parts = urlsplit(url)
        files = len([*Path(f"/proc/{running.pid}/fd").iterdir()])
        links = [socket.create_connection((parts.hostname, parts.port), timeout=60) for _ in range(200)]
        for number, link in enumerate(links):
            head = f"POST {SEARCH} HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{{"
            link.sendall(head.encode()[: 20 if number % 2 else None])
        start = time.monotonic()
        assert ask(url, SEARCH, {"queries": "text"})[0] == 200
        assert time.monotonic() - start < 3
        for link in links[::2]:
            assert b" 408 " in link.recv(100)
        for link in links:
            link.close()
        end = time.monotonic() + 30
        while len([*Path(f"/proc/{running.pid}/fd").iterdir()]) > files + 5:
            assert time.monotonic() < end
            time.sleep(0.1)
        running.terminate()
        assert running.wait(60) == 0
