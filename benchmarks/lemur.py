"""Suite ``lemur``: a learned map of token vectors to one vector per document, beside plaid.

Features of a token are trained so that linear maps of them are its highest products with documents. Least
squares then give every document a vector whose product with the features of a query, summed over its tokens,
is near the MaxSim. The index `dense` finds candidates by these vectors, and MaxSim in float32 ranks them.

Source: LEMUR, arXiv 2601.21853.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Row, interleave, write_results
from benchmarks.token_vectors import TokenVectors, generate, passages

FEATURES, EPOCHS, BATCH, RIDGE = 2048, 8, 512, 1e-3
TOKENS, TARGETS = 1 << 14, 512  # the features are trained on: tokens, and documents
CANDIDATES, HITS, QUERIES = (50, 70, 100, 200), 10, 100


def main(only: Sequence[str] = ("generated", "passages")) -> None:
    """Measure generated documents and real passages, and store the rows."""
    torch.set_num_threads(1)
    made = {"generated": partial(generate, 5000, 5000), "passages": passages}
    write_results("lemur", [row for name in only for row in measure(name, made[name]())])


def measure(name: str, vectors: TokenVectors) -> Iterator[Row]:
    """Build both indexes of a collection, and search them in turns."""
    from irkit import Dense, MultiVector, Ragged, score
    from irkit.index import Store, create_index, open_index

    lengths = torch.from_numpy(vectors.document_lengths())
    documents = MultiVector(Ragged(torch.from_numpy(np.array(vectors.tokens)).float(), lengths))
    start = time.perf_counter()
    layer = train(documents)
    learned = fit(layer, documents)
    seconds = time.perf_counter() - start
    parts = [torch.from_numpy(np.array(vectors.query(number))) for number in range(len(vectors.exact))]
    queries = [MultiVector(Ragged.from_rows([part])) for part in parts[:QUERIES]]
    with tempfile.TemporaryDirectory() as folder:
        built = {}
        for kind, rows in (("dense", Dense(learned)), ("plaid", documents)):
            with Store.build(Path(folder, kind)) as store:
                index = create_index(store, {"kind": kind})
                index.add(rows)
                index.finish()
                store.publish()
            built[kind] = open_index(Store.open(Path(folder, kind)))

        def by_lemur(count: int, query: MultiVector) -> Any:
            made = features(layer, query.tokens.values).sum(0, keepdim=True)
            found = built["dense"].search(Dense(made), count).rows[0]
            return found[score(query, documents[found])[0].topk(HITS).indices.numpy()]

        ways = {"plaid": lambda query: built["plaid"].search(query, HITS).rows[0]}
        ways |= {f"lemur, {count} candidates": partial(by_lemur, count) for count in CANDIDATES}
        found = {way: [search(query) for query in queries] for way, search in ways.items()}
        times = interleave({way: partial(lambda run: [*map(run, queries)], ways[way]) for way in ways})
        for way, rows in found.items():
            pairs = zip(rows, vectors.exact, strict=False)
            yield {
                "collection": name,
                "documents": len(documents),
                "index": way,
                "ms/query": 1000 * float(np.median(times[way])) / len(queries),
                "recall@10": float(np.mean([len({*own} & {*best[:HITS]}) / HITS for own, best in pairs])),
                "s to learn": None if way == "plaid" else seconds,
            }


def train(documents: Any) -> Any:
    """Return a layer whose features predict the highest product of a token with each of some documents."""
    torch.manual_seed(0)
    tokens = drawn(documents)
    targets = highest(tokens, documents[torch.randperm(len(documents))[:TARGETS]])
    layer, heads = torch.nn.Linear(tokens.shape[1], FEATURES), torch.nn.Linear(FEATURES, targets.shape[1])
    optimizer = torch.optim.Adam([*layer.parameters(), *heads.parameters()], lr=1e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(tokens)).split(BATCH):
            loss = (heads(features(layer, tokens[rows])) - targets[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return layer.requires_grad_(False)


def fit(layer: Any, documents: Any, block: int = 256) -> Tensor:
    """Return ``(n, FEATURES)``: least squares fits of the highest products of tokens with each document."""
    tokens = drawn(documents)
    made = features(layer, tokens)
    half = torch.linalg.cholesky(made.T @ made + RIDGE * len(made) * torch.eye(FEATURES))
    blocks = (documents[at : at + block] for at in range(0, len(documents), block))
    return torch.cat([torch.cholesky_solve(made.T @ highest(tokens, each), half).T for each in blocks])


def drawn(documents: Any) -> Tensor:
    """Return random tokens of documents."""
    return documents.tokens.values[torch.randperm(len(documents.tokens.values))[:TOKENS]]


def features(layer: Any, tokens: Tensor) -> Tensor:
    """Return ``(m, FEATURES)`` of token vectors."""
    return torch.nn.functional.gelu(layer(tokens))


def highest(tokens: Tensor, documents: Any) -> Tensor:
    """Return ``(m, n)``: the highest product of each token vector with the tokens of each document."""
    from irkit import MultiVector, Ragged, score

    return score(MultiVector(Ragged(tokens, torch.ones(len(tokens), dtype=torch.int64))), documents)
