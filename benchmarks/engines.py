"""Engines of the suite ``multi_vector``; each runs in a process of its own, see `benchmarks.worker`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.token_vectors import TokenVectors, exact_scores, read
from benchmarks.worker import Engine, K, Options, Search, work

Hits = list[int]

_CHUNK = 500  # documents given to irkit at a time


def build_nothing(vectors: TokenVectors, folder: Path, options: Options) -> None:
    """Do nothing: brute force has no index."""


def open_exact(vectors: TokenVectors, folder: Path, options: Options) -> Search:
    """Return a search by matrix products of torch in ``options["dtype"]``; maxima and sums are compiled."""
    dtype = getattr(torch, options["dtype"])
    tokens = torch.from_numpy(_from_file(vectors.tokens, 0, len(vectors.tokens))).to(dtype)
    offsets = np.asarray(vectors.offsets)
    scores = np.empty(len(offsets) - 1, np.float32)

    def search(query: Any, settings: Options) -> Hits:
        exact_scores(tokens, offsets, torch.from_numpy(query).to(dtype), scores)
        best = np.argpartition(-scores, K)[:K]
        return best[np.argsort(-scores[best])].tolist()

    return _one_by_one(search, vectors)


def build_irkit(vectors: TokenVectors, folder: Path, options: Options) -> None:
    """Build through the public interface: documents in chunks, nothing else held in memory."""
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
    """Return a search whose settings are fields of the index's configuration."""
    from irkit import MultiVector, Ragged
    from irkit.index import Store, open_index

    index = open_index(Store.open(folder))
    built, queries = index.config, _queries(vectors)

    def search(count: int, settings: Options) -> list[Hits]:
        index.config = built.model_copy(update=settings)
        asked = (
            MultiVector(Ragged(torch.from_numpy(query), torch.tensor([len(query)])))
            for query in queries[:count]
        )
        return [index.search(query, K).rows[0].tolist() for query in asked]

    return search


def build_tachiom(vectors: TokenVectors, folder: Path, options: Options) -> None:
    """Build by its pipeline, with samples and neighbourhoods of a size that suits these collections."""
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
    return _one_by_one(lambda query, settings: index.search(query, K, **settings)[1].tolist(), vectors)


def build_xtr_warp(vectors: TokenVectors, folder: Path, options: Options) -> None:
    """Build with its defaults at 4 bits; wide vectors get a smaller sample: with its own, torch fails."""
    from xtr_warp import XTRWarp

    documents = _documents(vectors)
    sample = min(1_000_000, 2**24 // documents[0].shape[1])  # as many tokens as torch.quantile takes
    XTRWarp(index=str(folder)).create(
        embeddings_source=documents,
        device="cpu",
        nbits=4,
        codec_sample_max_tokens=sample,
        show_progress=False,
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

    return _one_by_one(search, vectors)


def build_fast_plaid(vectors: TokenVectors, folder: Path, options: Options) -> None:
    """Build with its defaults, which are 4 bits."""
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

    return _one_by_one(search, vectors)


ENGINES = {
    "exact": Engine("torch", build_nothing, open_exact),
    "irkit": Engine("irkit", build_irkit, open_irkit),
    "tachiom": Engine("tachiom", build_tachiom, open_tachiom),
    "xtr_warp": Engine("xtr-warp-rs", build_xtr_warp, open_xtr_warp),
    "fast_plaid": Engine("fast-plaid", build_fast_plaid, open_fast_plaid),
}


def _one_by_one(search: Callable[[Any, Options], Hits], vectors: TokenVectors) -> Search:
    queries = _queries(vectors)
    return lambda count, settings: [search(query, settings) for query in queries[:count]]


def _queries(vectors: TokenVectors) -> list[Any]:
    return [np.array(vectors.query(number)) for number in range(len(vectors.exact))]


def _documents(vectors: TokenVectors) -> list[torch.Tensor]:
    """Return what PyLate's engines take: a tensor per document."""
    tokens = _from_file(vectors.tokens, 0, len(vectors.tokens))
    return list(torch.from_numpy(tokens).float().split(vectors.document_lengths().tolist()))


def _from_file(array: Any, start: int, stop: int) -> Any:
    """Read rows of a mapped array without the mapping, whose pages would count as memory of the process."""
    width = array.shape[1]
    offset = array.offset + start * width * array.itemsize
    flat = np.fromfile(array.filename, array.dtype, (stop - start) * width, offset=offset)
    return flat.reshape(-1, width)


if __name__ == "__main__":
    work(ENGINES, read)
