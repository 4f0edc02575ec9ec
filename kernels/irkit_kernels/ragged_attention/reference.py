"""The definition that the kernels are held against: softmax attention row by row, nothing fused."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attention_reference"]


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None = None,
) -> Tensor:
    """Softmax attention of each row of queries to its row of keys, in the dtype of ``query``.

    Args:
        query: ``(total_q, heads, head_dim)``.
        key: ``(total_k, heads, head_dim)``.
        value: As ``key``.
        query_offsets: ``(n + 1,)``; row ``i`` is ``query[query_offsets[i]:query_offsets[i + 1]]``.
        key_offsets: ``(n + 1,)``, likewise for ``key`` and ``value``.
        window: Largest distance at which tokens attend to each other; None is any.

    Returns:
        ``(total_q, heads, head_dim)``; zeros for queries of a row without keys.
    """
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    ends_q, ends_k = query_offsets.tolist(), key_offsets.tolist()
    for i in range(len(ends_q) - 1):
        q = query[ends_q[i] : ends_q[i + 1]].transpose(0, 1)  # (heads, length_q, head_dim)
        k, v = (x[ends_k[i] : ends_k[i + 1]].transpose(0, 1) for x in (key, value))
        if not k.shape[1]:
            continue
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        if window is not None:
            distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
            scores = scores.masked_fill(distance.abs() > window, float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        output[ends_q[i] : ends_q[i + 1]] = (weights @ v / weights.sum(-1, keepdim=True)).transpose(0, 1)
    return output
