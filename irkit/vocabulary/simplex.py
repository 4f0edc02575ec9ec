"""Sparsemax: the nearest point of the probability simplex, of which most coordinates are zero."""

from __future__ import annotations

import torch
from torch import Tensor

from irkit.errors import BadValueError
from irkit.ragged import Ragged
from irkit.representation import Sparse

__all__ = ["sparsemax"]

_FIRST = 128  # scores of a row that are sorted first; more only where these do not settle it


def sparsemax(scores: Tensor) -> Sparse:
    """Turn each row of scores into weights that add up to 1, exactly.

    Weights are ``max(score - t, 0)`` with the threshold ``t`` that makes their sum 1. Only scores within 1 of
    the largest can weigh anything, so only as many are sorted as settle where the threshold lies.

    Args:
        scores: ``(n, dim)`` floating point, ``dim`` at least 1.

    Returns:
        What is above zero, the heaviest first in each row, in the dtype of the scores.

    Raises:
        BadValueError: Scores are of another shape, or the largest of a row is NaN or infinite.

    Examples:
        >>> sparsemax(torch.tensor([[0.75, 0.25, -1.0], [3.0, 1.0, 2.5]])).to_dense().tolist()
        [[0.75, 0.25, 0.0], [0.75, 0.0, 0.25]]

    Source: Martins and Astudillo 2016, "From Softmax to Sparsemax", algorithm 1.
    """
    if scores.dim() != 2 or scores.shape[1] == 0 or not scores.is_floating_point():
        raise BadValueError(f"sparsemax: got {scores.dtype} {tuple(scores.shape)}, expected floats (n, dim)")
    dim, most = scores.shape[1], min(_FIRST, scores.shape[1])
    while True:
        best, places = scores.topk(most, dim=1)
        if not bool(best[:, 0].isfinite().all()):  # NaN counts as the largest of all
            raise BadValueError("sparsemax: the largest score of a row is NaN or infinite, expected numbers")
        best = best.double() - best[:, :1].double()  # the result is the same; sums keep their digits
        excess = best.cumsum(1) - 1.0
        count = torch.arange(1, most + 1, device=scores.device)
        inside = count * best > excess  # true up to the last weight above zero, false behind
        support = inside.sum(1, keepdim=True)
        if most == dim or not bool((support == most).any()):
            break
        most = min(4 * most, dim)
    threshold = excess.gather(1, support - 1) / support
    weights = (best - threshold).to(scores.dtype)
    kept = inside & (weights > 0)
    return Sparse(Ragged.from_padded(places, kept), weights[kept], dim)
