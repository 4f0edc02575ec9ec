import numpy as np


def build(offsets, terms, weights, scales, dim, *, allocate=None):
    order = np.argsort(terms, kind="stable")
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    weights = weights.astype(np.float32)
    if scales is not None:
        weights *= scales[rows]
    starts = np.concatenate([[0], np.cumsum(np.bincount(terms, minlength=dim))])
    documents = allocate("documents", rows.shape, np.int32)
    documents[...] = rows[order]
    return {"starts": starts, "documents": documents, "weights": weights[order]}


class Searcher:
    def __init__(self, arrays, offsets, terms, weights, scales):
        self.arrays, self.n = arrays, len(offsets) - 1

    def search(self, q_offsets, q_terms, q_weights, k, *, keep=None, effort=None, threads=1):
        all_rows = np.full((len(q_offsets) - 1, k), -1)
        all_scores = np.full(all_rows.shape, -np.inf, np.float32)
        for q in range(len(q_offsets) - 1):
            scores = np.zeros(self.n, np.float32)
            for i in range(q_offsets[q], q_offsets[q + 1]):
                term = q_terms[i]
                if term >= len(self.arrays["starts"]) - 1:
                    continue
                part = slice(*self.arrays["starts"][term : term + 2])
                scores[self.arrays["documents"][part]] += q_weights[i] * self.arrays["weights"][part]
            if keep is not None:
                scores[~keep] = 0
            order = np.argsort(-scores, kind="stable")[:k]
            order = order[scores[order] > 0]
            all_rows[q, : len(order)] = order
            all_scores[q, : len(order)] = scores[order]
        return all_rows, all_scores
