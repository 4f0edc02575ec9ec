"""LayerNorm and RMSNorm of hidden states, and residual sums: one pass over memory in inference."""

from __future__ import annotations

from typing import Any

import torch
from irkit_kernels.row_norm import fits_row_norm, row_norm
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.encoder.encoder_config import EncoderConfig
from irkit.encoder.inference import is_inference
from irkit.encoder.linear import is_hooked


def make_norm(config: EncoderConfig, size: int) -> nn.Module:
    """Return a LayerNorm or an RMSNorm over ``size`` features, as configured."""
    if config.norm == "rms":
        return RMSNorm(size, config.norm_eps, config.norm_offset)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.norm_bias)


class RMSNorm(nn.RMSNorm):
    """Divides hidden states by their root mean square and multiplies by weights.

    Args:
        size: Number of features.
        eps: Added to the mean square.
        offset: Added to the weights, which are stored without it.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(size, eps=eps)
        self.offset = offset
        if offset:
            nn.init.constant_(self.weight, 1 - offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``, in float32 and back."""
        if _in_kernel(x, self):  # torch passes over memory five times
            return row_norm(x, self.weight, eps=self.eps or 0.0, rms=True, offset=self.offset)
        weight = self.weight.float() + self.offset if self.offset else self.weight
        return F.rms_norm(x, self.normalized_shape, weight.to(x.dtype), self.eps)


def plus(x: Tensor, fresh: Tensor) -> Tensor:
    """Return ``x + fresh``; without gradients the sum overwrites ``fresh``."""
    return fresh.add_(x) if is_inference() and x.dtype == fresh.dtype else x + fresh


def add_norm(x: Tensor, fresh: Tensor, norm: nn.Module, *, keep_sum: bool = False) -> tuple[Tensor, Tensor]:
    """Return ``x + fresh`` and its norm; without gradients ``fresh`` is overwritten.

    Args:
        x: Hidden states ``(total, hidden_size)``.
        fresh: What is added to them.
        norm: What `make_norm` returned.
        keep_sum: Whether the sum is needed; if not, both results may be the norm.
    """
    if (
        not isinstance(norm, nn.LayerNorm | RMSNorm)
        or is_hooked(norm)
        or (x.shape, x.dtype) != (fresh.shape, fresh.dtype)
        or not (_in_kernel(x, norm) and _in_kernel(fresh, norm))
    ):
        x = plus(x, fresh)
        return x, norm(x)
    x, fresh = x.contiguous(), fresh.contiguous()
    rms = isinstance(norm, RMSNorm)
    bias, offset = (None, norm.offset) if isinstance(norm, RMSNorm) else (norm.bias, 0.0)
    kinds: dict[str, Any] = {"eps": norm.eps, "rms": rms, "offset": offset, "keep_sum": keep_sum}
    return fresh, row_norm(x, norm.weight, bias, added=fresh, **kinds)


def _in_kernel(x: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> bool:
    """Tell whether `row_norm` can run: no gradients, no compilation, float32 unless on CUDA."""
    return fits_row_norm(x) and (x.is_cuda or norm.weight.dtype == torch.float32) and is_inference()
