"""Load a server for minutes: no answer may be wrong, no document lost, and memory must not grow."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import data_dir
from benchmarks.serve import Server, exchange

CLIENTS, SEARCHES = 16, 8
MOST_GROWTH = 1.0  # MB a minute, after the first sixth of the time


class Soak:
    """Clients that search, add and remove until an end, and what they saw."""

    def __init__(self, server: Server, texts: list[str], end: float) -> None:
        self.server, self.texts, self.end = server, texts, end
        self.problems: list[str] = []
        self.counts = {"documents": 0, "search": 0}
        self.times: list[tuple[float, float]] = []  # when a search ended, and how long it took

    def work(self, client: int) -> None:
        """Add a document, search for it, and remove it, again and again."""
        number = 0
        with contextlib.closing(self.server.connect()) as link:
            while time.monotonic() < self.end and not self.problems:
                number += 1
                name, text = f"soak-{client}-{number}", self.texts[(client + 97 * number) % len(self.texts)]
                self.ask(link, "documents", {"documents": [{"id": name, "text": text}]}, "POST", 201)
                for _ in range(SEARCHES):
                    start = time.monotonic()
                    body = {"queries": text[:80], "k": 5, "filter": [name]}
                    hits = self.ask(link, "search", body, "POST", 200)["results"][0]["hits"]
                    self.times.append((time.monotonic(), time.monotonic() - start))
                    if [hit["id"] for hit in hits] != [name]:
                        self.problems.append(f"{name} was added and is not found: {hits}")
                self.ask(link, "documents", {"ids": [name]}, "DELETE", 200)

    def ask(self, link: Any, path: str, body: Any, method: str, expected: int) -> Any:
        """Send a request, and note an answer with another status."""
        status, data = exchange(link, f"/indexes/words/{path}", json.dumps(body).encode(), method)
        self.counts[path] += 1
        if status != expected:
            self.problems.append(f"{method} {path}: {status} {data[:200]!r}")
            raise SystemExit  # of this thread
        return json.loads(data)


def run_soak(minutes: float) -> int:
    """Search, add and remove with 16 clients; return 1 if something is wrong."""
    from irkit import Retriever
    from irkit.data import read_documents

    documents = [*read_documents(data_dir() / "scifact")]
    with tempfile.TemporaryDirectory() as folder:
        Retriever.build("bm25", documents, Path(folder) / "words").close()
        server = Server([sys.executable, "-m", "irkit", "serve", f"{folder}/words", "--port", "PORT"])
        soak = Soak(server, [document.text for document in documents], time.monotonic() + 60 * minutes)
        threads = [threading.Thread(target=soak.work, args=(client,)) for client in range(CLIENTS)]
        for thread in threads:
            thread.start()
        memory = []
        while any(thread.is_alive() for thread in threads):
            memory.append((time.monotonic(), server.memory()))
            time.sleep(min(5.0, 2 * minutes))
        left = json.loads(server.ask("/indexes/words")[1])["documents"]
        server.close()
    if left != len(documents) and not soak.problems:
        soak.problems.append(f"{left} documents are left, expected {len(documents)}")
    report(soak, memory, minutes)
    return int(bool(soak.problems))


def report(soak: Soak, memory: list[tuple[float, float]], minutes: float) -> None:
    """Print what was done, and how memory and times went; note growth as a problem."""
    late = memory[len(memory) // 6 :]
    growth = 60 * statistics.linear_regression(*zip(*late, strict=True)).slope if len(late) > 1 else 0.0
    print(f"{minutes} minutes, {CLIENTS} clients: {soak.counts}")
    print(f"memory {late[0][1]:.0f} to {late[-1][1]:.0f} MB, {growth:+.2f} MB a minute")
    first, last = soak.times[len(soak.times) // 6 : len(soak.times) // 2], soak.times[len(soak.times) // 2 :]
    medians = [1000 * statistics.median(took for _, took in part) for part in (first, last)]
    print(f"p50 of a search {medians[0]:.1f} ms, then {medians[1]:.1f} ms")
    if growth > MOST_GROWTH:
        soak.problems.append(f"memory grows by {growth:.2f} MB a minute")
    print("\n".join(soak.problems[:10]) or "no error, no lost document, memory flat")
