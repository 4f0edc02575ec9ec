"""The definition of attention within rows, in plain torch: softmax attention row by row, nothing fused."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SCRAMBLE", "STEP", "attention_reference", "retained"]

STEP = 0x9E3779B9  # difference of the states of neighbouring keys
SCRAMBLE = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))  # rounds of lowbias32: shift, then factor
_MASK = 2**32 - 1


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    causal: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention of each row of queries to its row of keys; differentiable.

    Args:
        query: ``(total_q, heads, head_dim)``.
        key: ``(total_k, key_heads, head_dim)``; each head serves ``heads / key_heads`` heads of queries.
        value: The shape of ``key``.
        query_offsets: ``(n + 1,)``; row ``i`` is ``query[query_offsets[i]:query_offsets[i + 1]]``.
        key_offsets: ``(n + 1,)``, likewise for ``key`` and ``value``.
        window: Largest distance at which tokens attend to each other; None is any.
        dropout: Probability of dropping a weight; the others are multiplied by ``1 / (1 - dropout)``.
        seed: Decides which weights are dropped, see `retained`.
        causal: Whether a query sees no key after its own position.
        bias: ``(heads, 2 * n - 1)``, added to the scores: query ``i`` and key ``j`` get number ``n - 1 + j -
            i``. None adds no bias.

    Returns:
        ``(total_q, heads, head_dim)`` in the dtype of ``query``; zeros for queries of a row without keys.
    """
    output, heads = [query[:0]], query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    ends_q, ends_k = query_offsets.tolist(), key_offsets.tolist()
    for i in range(len(ends_q) - 1):
        q = query[ends_q[i] : ends_q[i + 1]].transpose(0, 1)  # (heads, length_q, head_dim)
        k, v = (x[ends_k[i] : ends_k[i + 1]].transpose(0, 1) for x in (key, value))
        if not k.shape[1]:
            output.append(torch.zeros_like(q).transpose(0, 1))
            continue
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
        if bias is not None:
            scores = scores + bias[:, bias.shape[1] // 2 - distance]
        if window is not None:
            scores = scores.masked_fill(distance.abs() > window, float("-inf"))
        if causal:
            scores = scores.masked_fill(distance < 0, float("-inf"))
        weights = scores.softmax(-1)
        if dropout:
            numbers = torch.arange(ends_q[i], ends_q[i + 1]) * heads + torch.arange(heads)[:, None]
            weights = weights * retained(numbers, k.shape[1], dropout, seed) / (1 - dropout)
        output.append((weights @ v).transpose(0, 1))
    return torch.cat(output)


def retained(numbers: Tensor, keys: int, dropout: float, seed: int) -> Tensor:
    """Return which weights are not dropped: a hash of seed, query and head, and key exceeds a threshold.

    Args:
        numbers: ``(...,)`` int64, the number of each query and head: token * heads + head.
        keys: Number of keys of the row.
        dropout: Probability of dropping a weight.
        seed: 64 bits.

    Returns:
        ``(..., keys)`` bool.

    Source: Wellons 2018, "Prospecting for Hash Functions", lowbias32.
    """
    state = _scramble(_scramble(numbers ^ (seed & _MASK)) ^ (seed >> 32 & _MASK))
    steps = torch.arange(keys) * STEP
    return _scramble(state[..., None] + steps) >= round(dropout * 2**32)


def _scramble(x: Tensor) -> Tensor:
    """Permute the 32-bit numbers in a way that looks random."""
    for shift, factor in SCRAMBLE:
        x = x & _MASK
        x = (x ^ (x >> shift)) * factor
    return x & _MASK
