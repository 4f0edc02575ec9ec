"""One engine of the suite ``multi_vector`` in a process of its own, under the Python that has it.

``python -m benchmarks.engines build ENGINE OPTIONS VECTORS FOLDER`` builds an index and prints what it took;
``serve`` instead of ``build`` answers requests, a line of JSON each: ``{"settings": ..., "queries": 30}``
searches for ten hits of the first 30 queries, one at a time. OPTIONS is JSON and chooses what is built.
How many threads there are, the environment says.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import peak_memory
from benchmarks.token_vectors import TokenVectors, exact_scores, read

Options = dict[str, Any]
Hits = list[int]
Search = Callable[[Any, Options], Hits]

K = 10
BUILD_LIMIT = 1800  # seconds of processor time; a longer build is ended by SIGXCPU
_CHUNK = 500  # documents given to irkit at a time


def build_nothing(vectors: TokenVectors, folder: Path, options: Options) -> None:
    """Brute force has no index."""


def open_exact(vectors: TokenVectors, folder: Path, options: Options) -> Search:
    """Matrix products of torch in ``options["dtype"]``, then maxima and sums in compiled code."""
    dtype = getattr(torch, options["dtype"])
    tokens = torch.from_numpy(_from_file(vectors.tokens, 0, len(vectors.tokens))).to(dtype)
    offsets = np.asarray(vectors.offsets)
    scores = np.empty(len(offsets) - 1, np.float32)

    def search(query: Any, settings: Options) -> Hits:
        exact_scores(tokens, offsets, torch.from_numpy(query).to(dtype), scores)
        best = np.argpartition(-scores, K)[:K]
        return best[np.argsort(-scores[best])].tolist()

    return search


def build_irkit(vectors: TokenVectors, folder: Path, options: Options) -> None:
    """Through the public interface, documents in chunks, nothing else held in memory."""
    from irkit import MultiVector, Ragged
    from irkit.index import Store, create_index

    lengths = torch.from_numpy(vectors.document_lengths())
    with Store.build(folder) as store:
        index = create_index(store, options)
        for start in range(0, len(lengths), _CHUNK):
            stop = min(len(lengths), start + _CHUNK)
            tokens = _from_file(vectors.tokens, int(vectors.offsets[start]), int(vectors.offsets[stop]))
            index.add(MultiVector(Ragged(torch.from_numpy(tokens).float(), lengths[start:stop])))
        index.finish()
        store.publish()


def open_irkit(vectors: TokenVectors, folder: Path, options: Options) -> Search:
    """Settings are fields of the index's configuration."""
    from irkit import MultiVector, Ragged
    from irkit.index import Store, open_index

    index = open_index(Store.open(folder))
    built = index.config

    def search(query: Any, settings: Options) -> Hits:
        index.config = built.model_copy(update=settings)
        queries = MultiVector(Ragged(torch.from_numpy(query), torch.tensor([len(query)])))
        return index.search(queries, K).rows[0].tolist()

    return search


def build_tachiom(vectors: TokenVectors, folder: Path, options: Options) -> None:
    """Its pipeline, with samples and neighbourhoods of a size that suits these collections."""
    folder.mkdir(parents=True)
    lengths = folder / "lengths.npy"
    np.save(lengths, vectors.document_lengths().astype(np.int32))
    tokens: Any = vectors.tokens
    token_ids: Any = vectors.token_ids
    from tachiom import Tachiom

    index = Tachiom.build(
        str(tokens.filename),
        str(token_ids.filename),
        str(lengths),
        total_centroids=65536,
        pq_sample_size=300_000,
        tac_n_iter=10,
        pq_n_iter=10,
        ef_construction=300,
    )
    index.save(str(folder / "index"))
    lengths.unlink()


def open_tachiom(vectors: TokenVectors, folder: Path, options: Options) -> Search:
    """Settings are arguments of its ``search``."""
    from tachiom import Tachiom

    index = Tachiom.load(str(folder / "index"))
    return lambda query, settings: index.search(query, K, **settings)[1].tolist()


def build_xtr_warp(vectors: TokenVectors, folder: Path, options: Options) -> None:
    """Its defaults at 4 bits."""
    from xtr_warp import XTRWarp

    XTRWarp(index=str(folder)).create(
        embeddings_source=_documents(vectors), device="cpu", nbits=4, show_progress=False
    )


def open_xtr_warp(vectors: TokenVectors, folder: Path, options: Options) -> Search:
    """Settings are arguments of its ``search``."""
    from xtr_warp import XTRWarp

    index = XTRWarp(index=str(folder))
    index.load(device="cpu", dtype=torch.float32)

    def search(query: Any, settings: Options) -> Hits:
        queries = torch.from_numpy(query)[None]
        hits = index.search(
            queries_embeddings=queries, top_k=K, num_threads=1, show_progress=False, **settings
        )
        return [row for row, _ in hits[0]]

    return search


def build_fast_plaid(vectors: TokenVectors, folder: Path, options: Options) -> None:
    """Its defaults, which are 4 bits."""
    from fast_plaid.search import FastPlaid

    FastPlaid(index=str(folder), device="cpu").create(documents_embeddings=_documents(vectors), nbits=4)


def open_fast_plaid(vectors: TokenVectors, folder: Path, options: Options) -> Search:
    """Settings are arguments of its ``search``."""
    from fast_plaid.search import FastPlaid

    index = FastPlaid(index=str(folder), device="cpu")

    def search(query: Any, settings: Options) -> Hits:
        queries = torch.from_numpy(query)[None]
        hits = index.search(queries_embeddings=queries, top_k=K, show_progress=False, **settings)
        return [row for row, _ in hits[0]]

    return search


@dataclass(frozen=True)
class Engine:
    """How to build and to open an index, and the package that does it."""

    package: str
    build: Callable[[TokenVectors, Path, Options], None]
    open: Callable[[TokenVectors, Path, Options], Search]


ENGINES = {
    "exact": Engine("torch", build_nothing, open_exact),
    "irkit": Engine("irkit", build_irkit, open_irkit),
    "tachiom": Engine("tachiom", build_tachiom, open_tachiom),
    "xtr_warp": Engine("xtr-warp-rs", build_xtr_warp, open_xtr_warp),
    "fast_plaid": Engine("fast-plaid", build_fast_plaid, open_fast_plaid),
}


def build(engine: str, options: Options, vectors: TokenVectors, folder: Path) -> dict[str, float]:
    """Build, and say how long it took, how much memory and how many bytes."""
    before, start, used = peak_memory(), time.perf_counter(), _cpu_seconds()
    ENGINES[engine].build(vectors, folder, options)
    return {
        "seconds": time.perf_counter() - start,
        "cpu": _cpu_seconds() - used,
        "memory": peak_memory() - before,
        "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
    }


def serve(engine: str, options: Options, vectors: TokenVectors, folder: Path) -> None:
    """Answer requests until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever an engine prints is no answer
    search = ENGINES[engine].open(vectors, folder, options)
    queries = [np.array(vectors.query(number)) for number in range(len(vectors.exact))]
    print(json.dumps({"version": metadata.version(ENGINES[engine].package)}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        asked, settings = queries[: request["queries"]], request["settings"]
        start, used = time.perf_counter(), time.process_time()
        hits = [search(query, settings) for query in asked]
        answer = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - used, "hits": hits}
        print(json.dumps(answer), file=answers, flush=True)


def _documents(vectors: TokenVectors) -> list[torch.Tensor]:
    """What PyLate's engines take: a tensor a document."""
    tokens = _from_file(vectors.tokens, 0, len(vectors.tokens))
    return list(torch.from_numpy(tokens).float().split(vectors.document_lengths().tolist()))


def _from_file(array: Any, start: int, stop: int) -> Any:
    """Rows of a mapped array, read without the mapping, whose pages would count as memory of the process."""
    width = array.shape[1]
    offset = array.offset + start * width * array.itemsize
    flat = np.fromfile(array.filename, array.dtype, (stop - start) * width, offset=offset)
    return flat.reshape(-1, width)


def _cpu_seconds() -> float:
    """Of this process, all threads, and of the processes it started."""
    return sum(
        resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


if __name__ == "__main__":
    verb, name, chosen, source, target = sys.argv[1:]
    if verb == "build":
        resource.setrlimit(resource.RLIMIT_CPU, (BUILD_LIMIT, BUILD_LIMIT + 10))
    work = {"build": build, "serve": serve}[verb]
    result = work(name, json.loads(chosen), read(Path(source)), Path(target))
    if result is not None:
        print(json.dumps(result))
