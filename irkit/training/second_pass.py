"""The second pass of an evaluation: another model scores the best documents of each query again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from irkit.data import Document
from irkit.index import Hits
from irkit.model.cross_encoder import CrossEncoder
from irkit.retrieval.scorer import score_checked
from irkit.training.teachers import load_teacher
from irkit.training.validation import JudgedCollection, SecondPass

# the kernel of torch that its own counter does not know
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: (
        sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    )
}


def score_again(
    collection: JudgedCollection, hits: Hits, second: SecondPass, documents: Iterator[Document]
) -> tuple[Hits, float]:
    """Return the hits with the first ones in the order of another model, and the multiplications this took.

    Args:
        collection: The queries.
        hits: Results of the first model, ``(n_q, k)``.
        second: The other model, and how many documents of each query it scores.
        documents: All documents; the rows of ``hits`` count them.

    Returns:
        The same rows in another order, whose scores are ranks, from ``k`` down to 1; and the number of
        multiplications of a cross-encoder, padding included. It is 0 for other models, which read documents
        before there is a query.

    Raises:
        BadValueError: The other model gives scores that are not finite.
    """
    scorer, rows = load_teacher(second.scorer), hits.rows.copy()
    best = rows[:, : second.top]
    row_set = set(best.ravel().tolist())
    texts = {row: document for row, document in enumerate(documents) if row in row_set}
    candidates = [[texts[row] for row in line[line >= 0].tolist()] for line in best]
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        scores = score_checked(scorer, collection.queries, candidates)
    for line, values in zip(best, scores, strict=True):
        line[: len(values)] = line[: len(values)][np.argsort(-values, kind="stable")]
    ranks = np.arange(rows.shape[1], 0, -1, dtype=np.float32)
    counted = (
        counter.get_total_flops() / 2 if isinstance(scorer, CrossEncoder) else 0.0
    )  # of sums and products
    return Hits(rows, np.broadcast_to(ranks, rows.shape)), counted
