"""The second part of suite ``serve``: searches of 100,000 generated documents, beside Qdrant Edge.

One server has an index of BM25, of sparse vectors, of dense vectors and of token vectors. Another one, of
FastAPI, searches what irkit exported for Qdrant Edge, after its optimizer, with the same queries: terms and
vectors are the same, so this is the same work. Token vectors are left out there, because Qdrant compares a
query with all of them. Before anything is timed, the answers of the server are compared with those of the
library, and those of Qdrant with the best documents of an exact search.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Row, data_dir
from benchmarks.servers import CLIENTS, Server, load, percentile

DOCUMENTS, WIDTH = 100_000, 128
DOCUMENT_TOKENS, QUERY_TOKENS, SIGNS = 32, 16, 4096
DOCUMENT_TERMS, QUERY_TERMS, TERMS = 120, 24, 30_000
SECONDS, WARM_SECONDS = 5.0, 1.0
CHECKED = 50  # queries
LEAST_RECALL = 0.95
QDRANT = "qdrant-edge"

PEER = """
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from irkit.remote import Qdrant

class Body(BaseModel):
    queries: list
    fields: list[str]

folder = Path(sys.argv[1])
remotes = {name: Qdrant(folder / f"{name}-edge", folder / name) for name in sys.argv[3:]}
app = FastAPI()

@app.get("/ready")
def ready():
    return {}

@app.post("/indexes/{name}/search")
def search(name: str, body: Body):
    found = remotes[name].search(body.queries, 10, fields=body.fields)
    return {"results": [{"hits": [{"id": hit.id, "score": hit.score} for hit in line]} for line in found]}

uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""


class Kind(NamedTuple):
    """How an index is built: model and index of `Retriever.build`, and makers of documents and queries."""

    model: str
    index: str | None
    document: Callable[[int], Any]
    query: Callable[[], Any]


def measure_search(folder: Path) -> Iterator[Row]:
    """Build the indexes, check answers, and yield a row for each server, index and number of clients."""
    # build the indexes, and export to the peer those of kinds that it has
    queries = {}
    for name, kind in make_kinds().items():
        yield build(folder, name, kind)
        queries[name] = [kind.query() for _ in range(500)]
    peers = export_indexes(folder, ("words", "terms", "vectors"))
    # the exact answers of the peer's index, before its server locks it
    best = {name: find_best(folder, name, queries[name][:CHECKED]) for name in peers}

    # start the servers, check their answers, and load one after the other
    command = [sys.executable, "-m", "irkit", "serve", *(str(folder / name) for name in queries)]
    servers = {"irkit": Server([*command, "--port", "PORT"])}
    if peers:
        servers[QDRANT] = Server([sys.executable, "-c", PEER, str(folder), "PORT", *peers])
    try:
        recalls = check(folder, servers, queries, best)
        for name in queries:
            bodies = [json.dumps({"queries": [query], "fields": ["id"]}).encode() for query in queries[name]]
            path = f"/indexes/{name}/search"
            for clients in CLIENTS:
                for contender in ("irkit", *([QDRANT] if name in peers else [])):
                    load(servers[contender], path, bodies, clients, WARM_SECONDS)
                    row = load(servers[contender], path, bodies, clients, SECONDS)
                    yield {
                        "index": name,
                        "contender": contender,
                        "clients": clients,
                        "recall@10": recalls[contender, name],
                        "requests/s": row["rate"],
                        "requests/CPU s": 1 / row["cpu"],
                        **{f"p{share} ms": percentile(row["times"], share / 100) for share in (50, 95, 99)},
                    }
    finally:
        for server in servers.values():
            server.close()


def make_kinds() -> Mapping[str, Kind]:
    """Return the makers of documents: texts of real passages, and generated terms and vectors."""
    import numpy as np

    from irkit.data import Document, read_documents

    rng = np.random.default_rng(0)
    # a text is two halves of passages and its number
    passages = [item.full_text for item in read_documents(data_dir() / "msmarco-dl19-pool")]
    halves = [passage[: len(passage) // 2] for passage in passages]

    def text(number: int) -> str:
        first, second = rng.integers(0, len(halves), 2)
        return f"{halves[first]} {halves[second]} {number}"

    # terms: low numbers are frequent
    def terms(count: int) -> dict[str, float]:
        chosen = np.unique((TERMS * rng.random(count) ** 2).astype(int)).tolist()
        return dict(zip(map("t{}".format, chosen), rng.random(len(chosen)).tolist(), strict=True))

    # vectors and tokens: near one of the centres, of length 1
    def points(centres: Any, shape: tuple[int, ...]) -> Any:
        noise = rng.standard_normal((*shape, WIDTH), np.float32)
        rows = centres[rng.integers(0, len(centres), shape)] + 0.7 * noise
        return rows / np.linalg.norm(rows, axis=-1, keepdims=True)

    topics = rng.standard_normal((256, WIDTH), np.float32)
    signs = rng.standard_normal((SIGNS, WIDTH), np.float32)
    return {
        "words": Kind(
            "bm25",
            None,
            lambda number: Document(str(number), text(number)),
            lambda: " ".join(halves[rng.integers(len(halves))].split()[:6]),
        ),
        "terms": Kind(
            "impacts",
            None,
            lambda number: Document(str(number), "", vector=terms(DOCUMENT_TERMS)),
            lambda: terms(QUERY_TERMS),
        ),
        "vectors": Kind(
            "vectors",
            "dense",
            lambda number: Document(str(number), "", vector=points(topics, ())),
            lambda: points(topics, ()).round(5).tolist(),
        ),
        "tokens": Kind(
            "vectors",
            "plaid",
            lambda number: Document(str(number), "", vector=points(signs, (DOCUMENT_TOKENS,))),
            lambda: points(signs, (QUERY_TOKENS,)).round(5).tolist(),
        ),
    }


def build(folder: Path, name: str, kind: Kind) -> Row:
    """Build an index, and return what it is."""
    from irkit import Retriever

    start = time.perf_counter()
    documents = map(kind.document, range(DOCUMENTS))
    with Retriever.build(kind.model, documents, folder / name, index=kind.index) as retriever:
        facts = retriever.stats()
    return {
        "index": name,
        "kind": facts["kind"],
        "documents": facts["documents"],
        "MB": facts["bytes"] / 1e6,
        "seconds of making documents and index": time.perf_counter() - start,
    }


def export_indexes(folder: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """Export indexes to Qdrant Edge and let it build its graphs; none without the package."""
    try:
        import qdrant_edge
    except ImportError:
        print("without Qdrant: pip install 'irkit[engines]'")
        return ()
    from irkit import Retriever
    from irkit.exporting import export

    for name in names:
        with Retriever.load(folder / name) as retriever:
            export(retriever, "qdrant-edge", folder / f"{name}-edge")
        shard = qdrant_edge.EdgeShard.load(str(folder / f"{name}-edge"))
        shard.optimize()
        shard.flush()
        shard.close()
    return names


def find_best(folder: Path, name: str, queries: list[Any]) -> list[list[str]]:
    """Return the ten best documents of each query, by Qdrant without its graph."""
    from irkit.remote import Qdrant

    with contextlib.closing(Qdrant(folder / f"{name}-edge", folder / name, exact=True)) as remote:
        return [[hit.id for hit in line] for line in remote.search(queries, 10, fields=["id"])]


def check(
    folder: Path,
    servers: Mapping[str, Server],
    queries: Mapping[str, list[Any]],
    best: Mapping[str, list[list[str]]],
) -> dict[tuple[str, str], float | None]:
    """Compare answers, and return the recall at 10 of each server and index; None without ``best``.

    Raises:
        SystemExit: The server does not answer what the library finds, or a recall is too low.
    """
    from irkit import Retriever

    recalls: dict[tuple[str, str], float | None] = {}
    for name, given in queries.items():
        chosen = given[:CHECKED]
        with Retriever.load(folder / name) as retriever:
            own = [[hit.id for hit in line] for line in retriever.search(chosen, 10, fields=["id"])]
        for contender, server in servers.items():
            if contender != "irkit" and name not in best:
                continue
            status, data = server.ask(f"/indexes/{name}/search", {"queries": chosen, "fields": ["id"]})
            if status != 200:
                raise SystemExit(f"benchmarks: {contender}, {name}: {status} {data[:300]!r}")
            results = json.loads(data)["results"]
            found = [[hit["id"] for hit in result["hits"]] for result in results]
            if contender == "irkit" and found != own:
                raise SystemExit(f"benchmarks: {name}: the server does not answer what the library finds")
            recalls[contender, name] = recall = overlap(found, best[name]) if name in best else None
            if recall is not None and recall < LEAST_RECALL:
                raise SystemExit(f"benchmarks: {name}: recall@10 of {contender} is {recall:.3f}")
    return recalls


def overlap(found: list[list[str]], best: list[list[str]]) -> float:
    """Return the share of the best documents that were found."""
    hits = sum(len({*line} & {*other}) for line, other in zip(found, best, strict=True))
    return hits / max(1, sum(map(len, best)))
