"""Send requests to a server, and run one in a thread or a process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

KEY = {"authorization": "Bearer correct-horse"}


def ask(
    url: str, path: str, body: Any = None, method: str = "POST", headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Send a request whose body is JSON or bytes; status and answer."""
    parts = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)) as link:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        link.request(method, path, content, {"content-type": "application/json"} | (headers or {}))
        response = link.getresponse()
        return response.status, json.loads(response.read() or b"null")


@contextlib.contextmanager
def serving(*paths: Path, **settings: Any) -> Iterator[str]:
    """Serve in a thread; the address."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs: pip install 'irkit[serve]'")
    from irkit.serve.serve_config import ServeConfig
    from irkit.serve.server import make_app

    app = make_app(ServeConfig(paths=tuple(map(str, paths)), **settings))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def process(*words: str, log: Path = Path(os.devnull)) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server in a process, which writes its log to a file; the process and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    command = [sys.executable, "-m", "irkit", "serve", *words, "--port", str(port)]
    environment = os.environ | {"IRKIT_SERVE_KEYS": "write correct-horse"}
    with log.open("ab") as file, subprocess.Popen(command, stderr=file, env=environment) as running:
        url = f"http://127.0.0.1:{port}"
        try:
            while True:
                assert running.poll() is None
                with contextlib.suppress(OSError, http.client.HTTPException):  # another program has the port
                    if ask(url, "/ready", None, "GET")[0] == 200:
                        break
                time.sleep(0.05)
            yield running, url
        finally:
            running.kill()
