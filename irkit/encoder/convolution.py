"""The convolution over neighbouring embeddings of DeBERTa-v2, on rows of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from irkit.encoder.dropout import Dropout
from irkit.encoder.encoder_config import Convolution, EncoderConfig
from irkit.encoder.layers import Context
from irkit.encoder.linear import ACTIVATIONS
from irkit.encoder.norms import make_norm


class ConvolutionBlock(nn.Module):
    """Adds an activated convolution over the embeddings to the output of a layer, and normalises the sum."""

    def __init__(self, config: EncoderConfig, settings: Convolution) -> None:
        super().__init__()
        size = config.hidden_size
        self.settings, self.gap = settings, settings.kernel // 2
        self.conv = nn.Conv1d(size, size, settings.kernel, padding=self.gap, groups=settings.groups)
        self.norm = make_norm(config, size)
        self.dropout = Dropout(config.hidden_dropout)

    def forward(self, embedded: Tensor, x: Tensor, context: Context) -> Tensor:
        """Return the normalised sum ``(total, size)``.

        Tokens that are not attended to count as zeros, and so do positions outside of a row.

        Args:
            embedded: Embeddings ``(total, size)``.
            x: Output of the layer, ``(total, size)``.
            context: Context of the rows.
        """
        rows = context.rows
        if not len(x):
            return x
        # all rows one behind the other, with zeros between them that are as long as the reach
        seen = context.seen(embedded)
        positions = context.seen(torch.arange(len(x), device=x.device) + rows.row_ids() * self.gap).values
        spread = embedded.new_zeros(len(x) + (len(rows) - 1) * self.gap, embedded.shape[1])
        spread = spread.index_copy(0, positions, seen.values)
        outputs = self.conv(spread.T[None])[0].T
        fresh = outputs[torch.arange(len(x), device=x.device) + rows.row_ids() * self.gap]
        normed: Tensor = self.norm(x + ACTIVATIONS[self.settings.activation](self.dropout(fresh)))
        return normed
