"""The windows of tokens that the rows of a pooling encoder stand for."""

from __future__ import annotations

import torch
from irkit_kernels.ragged_pool import pooled_lengths

from irkit.core.ragged import Ragged


def windows(tokens: Ragged, kernel: int, stride: int) -> Ragged:
    """Return, for each hidden state left after pooling, the tokens it covers.

    Args:
        tokens: Ragged ``(total, ...)`` tokens that the encoder gets.
        kernel: Tokens per window; the last window of a text may be shorter.
        stride: Tokens from the start of a window to that of the next.

    Returns:
        Ragged ``(hidden states, 2)`` int64: [start, end) in ``tokens.values``.

    Examples:
        >>> windows(Ragged.from_rows([[7, 8, 9], [5]]), 2, 2).values.tolist()
        [[0, 2], [2, 3], [3, 4]]
    """
    lengths = pooled_lengths(tokens.lengths, kernel, stride)
    rows = Ragged(torch.arange(int(lengths.sum()), device=tokens.device), lengths)
    offsets, text = tokens.offsets.long(), rows.row_ids()
    starts = offsets[text] + stride * rows.positions()
    return rows.with_values(torch.stack([starts, torch.minimum(starts + kernel, offsets[text + 1])], dim=1))
