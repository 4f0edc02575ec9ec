import numpy as np


def build(lengths, terms, weights, dim, allocate):
    order = np.argsort(terms, kind="stable")
    rows = np.repeat(np.arange(len(lengths)), lengths)[order]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(terms, minlength=dim))])
    documents = allocate("documents", rows.shape, np.int32)
    documents[...] = rows
    return {"offsets": offsets, "documents": documents, "weights": weights[order], "count": np.array([len(lengths)])}


def exact(arrays, queries, k, keep):
    n = int(arrays["count"][0])
    ends = np.cumsum(queries["lengths"])
    all_rows = np.full((len(ends), k), -1)
    all_scores = np.full((len(ends), k), -np.inf, np.float32)
    for q, end in enumerate(ends):
        scores = np.zeros(n, np.float32)
        for i in range(end - queries["lengths"][q], end):
            term = queries["terms"][i]
            if term >= len(arrays["offsets"]) - 1:
                continue
            part = slice(*arrays["offsets"][term : term + 2])
            scores[arrays["documents"][part]] += queries["weights"][i] * arrays["weights"][part]
        if keep is not None:
            scores[~keep] = 0
        order = np.argsort(-scores, kind="stable")[:k]
        order = order[scores[order] > 0]
        all_rows[q, : len(order)] = order
        all_scores[q, : len(order)] = scores[order]
    return all_rows, all_scores
