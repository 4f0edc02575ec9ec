"""Which tokens a vector stands for, where an encoder pools."""

from __future__ import annotations

import torch
from irkit_kernels.ragged_pool import pooled_lengths

from irkit.ragged import Ragged

__all__ = ["windows"]


def windows(tokens: Ragged, kernel: int, stride: int) -> Ragged:
    """The window of tokens behind each row of hidden states.

    Args:
        tokens: Ragged ``(total, ...)``, what the encoder gets.
        kernel: Tokens of a window; one at the end of a text has those that are left.
        stride: Tokens from the start of a window to that of the next.

    Returns:
        Ragged ``(rows, 2)`` int64: places in ``tokens.values`` of the first token, and after the last.

    Examples:
        >>> windows(Ragged.from_rows([[7, 8, 9], [5]]), 2, 2).values.tolist()
        [[0, 2], [2, 3], [3, 4]]
    """
    lengths = pooled_lengths(tokens.lengths, kernel, stride)
    rows = Ragged(torch.arange(int(lengths.sum()), device=tokens.device), lengths)
    offsets, text = tokens.offsets.long(), rows.row_ids()
    starts = offsets[text] + stride * rows.positions()
    return rows.with_values(torch.stack([starts, torch.minimum(starts + kernel, offsets[text + 1])], dim=1))
