"""Load a server for minutes: no answer may be wrong, no document lost, memory and times must not grow.

A client adds a document, searches for it, and removes it. Half of its searches rank the whole index, and half
have a filter that only the new document meets.

The outcome goes to ``results/serve_soak.jsonl``. What the process owns and what it has mapped of the files of
the index are told apart. Its own memory rises and falls: it holds lists of up to 1,024 rows that were added
last, and rows that were removed until the next compaction. So a run of a few minutes shows less than 30.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, data_dir, write_results
from benchmarks.servers import Server, exchange

CLIENTS, SEARCHES = 16, 8
MOST_GROWTH = 1.0  # MB a minute, after the first sixth of the time
MOST_SLOWER = 1.25  # times the median of the first half, in the second one


class Soak:
    """Clients that search, add and remove until an end, and what they saw."""

    def __init__(self, server: Server, texts: list[str], end: float) -> None:
        self.server, self.texts, self.end = server, texts, end
        self.problems: list[str] = []
        self.counts = {"documents": 0, "search": 0}
        self.times: list[tuple[float, float]] = []  # when a search ended, and how long it took

    def work(self, client: int) -> None:
        """Add a document, search for it, and remove it, again and again, until the end or a problem."""
        try:
            self.repeat(client)
        except (OSError, ValueError, http.client.HTTPException) as error:  # a thread would end unseen
            self.problems.append(f"client {client}: {error!r}"[:300])

    def repeat(self, client: int) -> None:
        """Do the work of a client."""
        number = 0
        with contextlib.closing(self.server.connect()) as link:
            while time.monotonic() < self.end and not self.problems:
                number += 1
                name = f"soak{client}x{number}"  # one word, which no other document has
                text = f"{name} {self.texts[(client + 97 * number) % len(self.texts)]}"
                self.ask(link, "documents", {"documents": [{"id": name, "text": text}]}, "POST", 201)
                # in a long document one rare word weighs less than the other words do elsewhere
                query = f"{f'{name} ' * 16}{text[:80]}"
                for turn in range(SEARCHES):
                    body = {"queries": query, "k": 5} | ({} if turn % 2 else {"filter": [name]})
                    start = time.monotonic()
                    hits = self.ask(link, "search", body, "POST", 200)["results"][0]["hits"]
                    self.times.append((time.monotonic(), time.monotonic() - start))
                    ids = [hit["id"] for hit in hits]
                    if ids[:1] != [name] or len(ids) != (5 if turn % 2 else 1):
                        self.problems.append(f"{name} was added, and the search {body} finds {ids}")
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
        memory = list[tuple[float, dict[str, float]]]()
        while any(thread.is_alive() for thread in threads):
            memory.append((time.monotonic(), server.memory()))
            time.sleep(min(5.0, 2 * minutes))
        left = json.loads(server.ask("/indexes/words")[1])["documents"]
        server.close()
    if left != len(documents) and not soak.problems:
        soak.problems.append(f"{left} documents are left, expected {len(documents)}")
    row = summarise(soak, memory, minutes)
    write_results("serve_soak", [row])
    return int(not row["passed"])


def summarise(soak: Soak, memory: list[tuple[float, dict[str, float]]], minutes: float) -> Row:
    """Return what was done, how memory and times went, and whether all is well."""
    row: Row = {"minutes": minutes, "clients": CLIENTS, **soak.counts}
    late = memory[len(memory) // 6 :]
    seconds = [second for second, _ in late]
    for name in ("own", "mapped"):
        sizes = [size[name] for _, size in late]
        growth = 60 * statistics.linear_regression(seconds, sizes).slope if len(late) > 1 else 0.0
        row[f"{name} MB"] = [round(sizes[0], 1), round(max(sizes), 1), round(sizes[-1], 1)]
        row[f"{name} MB a minute"] = round(growth, 2)
    if row["own MB a minute"] > MOST_GROWTH:
        soak.problems.append("memory grows")
    count = len(soak.times)
    halves = soak.times[count // 6 : count // 2], soak.times[count // 2 :]
    medians = [round(1000 * statistics.median(took for _, took in half), 2) for half in halves if half]
    row["p50 ms of each half"] = medians
    if medians[-1] > MOST_SLOWER * medians[0]:
        soak.problems.append("searches become slower")
    return row | {"problems": soak.problems[:10], "passed": not soak.problems}
