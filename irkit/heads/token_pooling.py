"""Fewer vectors a document: tokens that say nearly the same become one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["pool_tokens"]


def pool_tokens(vectors: Tensor, factor: float, protected: int = 1) -> Tensor:
    """Replace clusters of similar vectors by their means.

    Args:
        vectors: ``(n, dim)`` of length 1; gradients flow through the means.
        factor: Keep one vector of so many, at least 1; a single one at least.
        protected: Leading vectors that stay as they are and come first.

    Returns:
        ``(m, dim)``; means are shorter than 1. Each cluster, in an order of no meaning.

    Examples:
        >>> pool_tokens(torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), 2)
        tensor([[0., 1.],
                [1., 0.]])

    Source: Clavié et al. 2024, "Reducing the Footprint of Multi-Vector Retrieval with Minimal Performance
    Impact via Token Pooling": Ward's method on cosine distances.
    """
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    rest = vectors[protected:]
    clusters = max(int(len(rest) // factor), 1)
    if clusters >= len(rest):
        return vectors
    similarity = (rest.detach().float() @ rest.detach().float().T).cpu()
    distances = squareform((1 - similarity).clamp_(0, 2).numpy(), checks=False)
    tree = hierarchy.linkage(distances, method="ward")
    labels = hierarchy.fcluster(tree, t=clusters, criterion="maxclust")
    _, places = np.unique(labels, return_inverse=True)  # ties can leave labels out
    chosen = torch.from_numpy(places).to(rest.device)
    sums = rest.new_zeros(int(places.max()) + 1, rest.shape[1]).index_add(0, chosen, rest)
    return torch.cat([vectors[:protected], sums / torch.bincount(chosen)[:, None]])
