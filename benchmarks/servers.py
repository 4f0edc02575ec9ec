"""Server processes and the load of many clients, for the suites ``serve`` and its soak."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Row

CLIENTS = (1, 8, 32)
TICKS = os.sysconf("SC_CLK_TCK")
KEY = {"authorization": "Bearer benchmark-key"}


class Server:
    """A server process with one thread for arithmetic."""

    def __init__(self, command: Sequence[str], path: str = "/ready") -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.port = listening.getsockname()[1]
        words = [word.replace("PORT", str(self.port)) for word in command]
        threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        keys = {"IRKIT_SERVE_KEYS": "write benchmark-key", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            words, env=os.environ | threads | keys, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 180
        while True:
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise SystemExit(f"benchmarks: {' '.join(words)[:200]} does not start")
            with contextlib.suppress(OSError):
                if self.ask(path)[0] == 200:
                    return
            time.sleep(0.1)

    def ask(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, bytes]:
        """Send one request over a new connection."""
        with contextlib.closing(self.connect()) as link:
            return exchange(link, path, None if body is None else json.dumps(body).encode(), method)

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def cpu(self) -> float:
        """Return the seconds of processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self) -> dict[str, float]:
        """Return the MB of its own memory, and of mapped files that are in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        names = {"own": "RssAnon:", "mapped": "RssFile:"}
        return {name: int(status.partition(key)[2].split()[0]) / 1024 for name, key in names.items()}

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(60)


def exchange(
    link: http.client.HTTPConnection, path: str, content: bytes | None, method: str | None = None
) -> tuple[int, bytes]:
    """Send a request over a connection; return status and body."""
    headers = {"content-type": "application/json"} | KEY
    link.request(method or ("GET" if content is None else "POST"), path, content, headers)
    response = link.getresponse()
    return response.status, response.read()


def load(server: Server, path: str, bodies: Sequence[bytes], clients: int, seconds: float) -> Row:
    """Let clients send requests for some seconds; return rate, times, and processor time per request."""
    times: list[float] = []
    wrong: list[bytes] = []
    end = time.perf_counter() + seconds

    def work(number: int) -> None:
        with contextlib.closing(server.connect()) as link:
            while (start := time.perf_counter()) < end:
                number += clients
                status, data = exchange(link, path, bodies[number % len(bodies)])
                times.append(time.perf_counter() - start)
                if status != 200:
                    wrong.append(data)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    begin, cpu = time.perf_counter(), server.cpu()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise SystemExit(f"benchmarks: {len(wrong)} of {len(times)} requests failed: {wrong[0][:300]!r}")
    took = time.perf_counter() - begin
    return {"rate": len(times) / took, "cpu": (server.cpu() - cpu) / len(times), "times": sorted(times)}


def percentile(times: Sequence[float], share: float) -> float:
    """Return the milliseconds below which this share of sorted times is."""
    return 1000 * times[min(len(times) - 1, int(share * len(times)))]
