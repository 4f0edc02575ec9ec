"""The second pass of an evaluation: another model scores the best documents of each query again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from irkit.data import Document
from irkit.index import Hits
from irkit.retrieval.scorer import score_checked
from irkit.training.teachers import load_teacher
from irkit.training.validation import JudgedCollection, SecondPass


def score_again(
    collection: JudgedCollection, hits: Hits, second: SecondPass, documents: Iterator[Document]
) -> Hits:
    """Return hits whose first ones are in the order of another model.

    Args:
        collection: The queries.
        hits: Results of the first model, ``(n_q, k)``.
        second: The other model, and how many documents of each query it scores.
        documents: All documents; the rows of ``hits`` count them.

    Returns:
        The same rows in another order; scores are ranks, from ``k`` down to 1.

    Raises:
        BadValueError: The other model gives scores that are not finite.
    """
    scorer, rows = load_teacher(second.scorer), hits.rows.copy()
    best = rows[:, : second.top]
    row_set = set(best.ravel().tolist())
    texts = {row: document for row, document in enumerate(documents) if row in row_set}
    candidates = [[texts[row] for row in line[line >= 0].tolist()] for line in best]
    scores = score_checked(scorer, collection.queries, candidates)
    for line, values in zip(best, scores, strict=True):
        line[: len(values)] = line[: len(values)][np.argsort(-values, kind="stable")]
    ranks = np.arange(rows.shape[1], 0, -1, dtype=np.float32)
    return Hits(rows, np.broadcast_to(ranks, rows.shape))
