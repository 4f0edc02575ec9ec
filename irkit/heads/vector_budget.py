"""A fixed number of vectors for each document: clusters around the tokens that attention chooses.

The tokens with the highest attention weights are the centroids. Each token belongs to the centroid with the
highest inner product, and the vector of a cluster is the mean of its tokens, weighted by attention.

Source: Qin et al. 2026, "Multi-Vector Index Compression in Any Modality" (arXiv 2602.21202), attention-guided
clustering. There, tokens that are added to the document attend. Here, the
mean hidden state of the document attends, plus a learned vector that begins at 0: nothing is added to
documents, and the clustering works before any training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from irkit.core.ragged import Ragged

_NUMBERS = 1 << 26  # similarities of padded rows that are kept at once


def attention_clusters(states: Ragged, vectors: Ragged, query: Tensor, most: int) -> Ragged:
    """Cluster the vectors of each row to ``most`` vectors; rows with no more vectors stay as they are.

    Gradients flow through vectors and attention weights; the choice of centroids and clusters has none.

    Args:
        states: Ragged ``(total, hidden_size)`` hidden states of the tokens that have a vector.
        vectors: Ragged ``(total, dim)`` vectors of the same tokens.
        query: ``(hidden_size,)``, added to the mean hidden state that attends.
        most: Number of vectors.

    Examples:
        >>> states = Ragged.from_rows([[[9.0, 0.0], [0.0, 8.0], [0.1, 0.0]]])
        >>> attention_clusters(states, states, torch.zeros(2), 2).values.round().tolist()
        [[9.0, 0.0], [0.0, 8.0]]
    """
    if vectors.max_length <= most:
        return vectors
    size = max(1, _NUMBERS // (vectors.max_length * most))
    with torch.autocast(vectors.device.type, enabled=False):  # which a training in bfloat16 has on
        parts = [
            _clusters(states[at : at + size], vectors[at : at + size], query, most)
            for at in range(0, len(vectors), size)
        ]
    return parts[0] if len(parts) == 1 else Ragged.concat(parts)


def _clusters(states: Ragged, vectors: Ragged, query: Tensor, most: int) -> Ragged:
    (hidden, is_token), (padded, _) = states.to_padded(), vectors.to_padded()
    hidden, padded = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (hidden, padded))
    counts = is_token.sum(1, keepdim=True)
    centre = hidden.sum(1) / counts.clamp(min=1) + query
    scores = (hidden @ centre[:, :, None]).squeeze(2) / hidden.shape[2] ** 0.5
    weights = scores.masked_fill(~is_token, torch.finfo(scores.dtype).min).softmax(1)

    # choose centroids in the order of the text, and a cluster for each token
    ranked = scores.detach().masked_fill(~is_token, -torch.inf)
    width = min(most, padded.shape[1])
    chosen = ranked.topk(width, dim=1).indices.sort(dim=1).values
    is_real = is_token.gather(1, chosen)
    fixed = padded.detach()
    centroids = fixed.gather(1, chosen[:, :, None].expand(-1, -1, padded.shape[2]))
    alike = (fixed @ centroids.mT).masked_fill(~is_real[:, None], -torch.inf)
    clusters = alike.argmax(2)
    clusters = clusters.scatter(1, chosen, torch.arange(width, device=chosen.device).expand_as(chosen))

    # means by cluster
    share = weights.masked_fill(~is_token, 0).clamp(min=torch.finfo(weights.dtype).tiny) * is_token
    sums = padded.new_zeros(len(padded), width, padded.shape[2])
    sums = sums.scatter_add(1, clusters[:, :, None].expand_as(padded), padded * share[:, :, None])
    total = share.new_zeros(len(padded), width).scatter_add(1, clusters, share)
    filled = torch.arange(width, device=counts.device) < counts.clamp(max=width)
    means = (sums / total.clamp(min=torch.finfo(total.dtype).tiny)[:, :, None])[filled]
    return Ragged(means.to(vectors.values.dtype), filled.sum(1).cpu())
