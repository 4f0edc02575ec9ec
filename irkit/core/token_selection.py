"""Fewer, more or wider token vectors of a text, before they are compared.

Source: Multi-Vector Attention Models for Deep Re-ranking, section 2.2.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from irkit.arguments import brief
from irkit.core.ragged import Ragged
from irkit.errors import BadTypeError, BadValueError


def first_tokens(rows: Ragged, k: int) -> Ragged:
    """Keep the first ``k`` elements of each row: First-K pooling.

    Source: Multi-Vector Attention Models for Deep Re-ranking, section 2.2.
    """
    check_count("first_tokens", "k", k)
    return Ragged(rows.values[rows.positions() < k], rows.lengths.clamp(max=k))


def prepend(rows: Ragged, values: Tensor) -> Ragged:
    """Put ``values (k, ...)`` before every row.

    Multiple-CLS pooling puts ids or learned embeddings of ``k`` tokens before each text, runs the encoder and
    applies `first_tokens` with the same ``k``.

    Examples:
        >>> list(prepend(Ragged.from_rows([[7, 8], [9]]), torch.tensor([101, 101])))
        [tensor([101, 101,   7,   8]), tensor([101, 101,   9])]

    Source: Multi-Vector Attention Models for Deep Re-ranking, section 2.2.
    """
    if values.dim() == 0 or values.shape[1:] != rows.values.shape[1:]:
        raise BadValueError(
            f"prepend: values have shape {tuple(values.shape)}, expected (k, *{tuple(rows.values.shape[1:])})"
        )
    parts = [part for row in rows for part in (values, row)]
    return Ragged(torch.cat([*parts, rows.values[:0]]), rows.lengths + len(values))


def temporal_pooling(rows: Ragged, factor: int) -> Ragged:
    """Concatenate every ``factor`` successive vectors to a wider one; the last one is padded with zeros.

    Args:
        rows: Ragged ``(total, width)``.
        factor: Number of vectors, at least 1 (rho of the paper).

    Returns:
        Ragged ``(total', factor * width)``: a row of ``n`` vectors has ``ceil(n / factor)``.

    Source: Multi-Vector Attention Models for Deep Re-ranking, section 2.2.
    """
    check_count("temporal_pooling", "factor", factor)
    lengths = -(-rows.lengths // factor)
    starts = (torch.cumsum(lengths, 0) - lengths).to(rows.device) * factor
    padded = rows.values.new_zeros(int(lengths.sum()) * factor, rows.values.shape[1])
    padded = padded.index_copy(0, starts[rows.row_ids()] + rows.positions(), rows.values)
    return Ragged(padded.reshape(-1, factor * rows.values.shape[1]), lengths)


def check_count(operation: str, name: str, count: int) -> None:
    """Raise an error of ``operation`` unless its argument ``name`` is a whole number of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise BadTypeError(f"{operation}: {name} is {brief(count)}, expected a whole number")
    if count < 1:
        raise BadValueError(f"{operation}: {name} is {count}, expected 1 or more")
