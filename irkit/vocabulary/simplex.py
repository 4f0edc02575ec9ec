"""Sparsemax: the nearest point of the probability simplex, most of whose coordinates are zero."""

from __future__ import annotations

import torch
from torch import Tensor

from irkit.core.ragged import Ragged
from irkit.core.representation import Sparse
from irkit.errors import BadValueError

_FIRST = 128  # scores per row that are sorted first; more are sorted only if these do not decide


def sparsemax(scores: Tensor) -> Sparse:
    """Turn each row of scores into weights that add up to 1, exactly.

    Weights are ``max(score - t, 0)`` with the threshold ``t`` that makes their sum 1. Only scores within 1 of
    the largest can have a weight, so only the highest scores are sorted, as many as decide the threshold.

    Args:
        scores: ``(n, dim)`` floating point, ``dim`` at least 1.

    Returns:
        The weights above zero, the largest first in each row, in the dtype of the scores.

    Raises:
        BadValueError: Scores have another shape, or the largest of a row is NaN or infinite.

    Examples:
        >>> sparsemax(torch.tensor([[0.75, 0.25, -1.0], [3.0, 1.0, 2.5]])).to_dense().tolist()
        [[0.75, 0.25, 0.0], [0.75, 0.0, 0.25]]

    Source: Martins and Astudillo 2016, "From Softmax to Sparsemax", algorithm 1.
    """
    if scores.dim() != 2 or scores.shape[1] == 0 or not scores.is_floating_point():
        raise BadValueError(f"sparsemax: got {scores.dtype} {tuple(scores.shape)}, expected floats (n, dim)")
    dim, most = scores.shape[1], min(_FIRST, scores.shape[1])
    while True:
        best, columns = scores.topk(most, dim=1)
        if not bool(best[:, 0].isfinite().all()):  # topk puts NaN first
            raise BadValueError("sparsemax: the largest score of a row is NaN or infinite, expected numbers")
        best = best.double() - best[:, :1].double()  # the same result, with more exact sums
        excess = best.cumsum(1) - 1.0
        count = torch.arange(1, most + 1, device=scores.device)
        inside = count * best > excess  # True up to the last weight above zero, False after it
        support = inside.sum(1, keepdim=True)
        if most == dim or not bool((support == most).any()):
            break
        most = min(4 * most, dim)
    threshold = excess.gather(1, support - 1) / support
    weights = (best - threshold).to(scores.dtype)
    positive = inside & (weights > 0)
    return Sparse(Ragged.from_padded(columns, positive), weights[positive], dim)
