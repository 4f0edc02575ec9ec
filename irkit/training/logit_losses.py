"""Losses on logits over a vocabulary, fused with the product that makes these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from irkit.ragged import Ragged

__all__ = ["bag_loss", "token_loss"]

_CELLS = 1 << 22  # logits computed at once: 16 MB in float32


def token_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of tokens under a linear map to the vocabulary, whose logits are never all there.

    The gradients are computed with the loss, a piece of the tokens at a time, so that nothing of the size of
    tokens x vocabulary is kept or computed twice.

    Args:
        hidden: ``(m, width)``.
        weight: ``(vocabulary, width)``, as of `torch.nn.Linear`.
        bias: ``(vocabulary,)``, or None.
        labels: ``(m,)`` int64, the right terms.

    Returns:
        The sum of the losses, and how many terms were right, which has no gradient. Under autocast products
        are of its dtype, all else float32.

    Examples:
        >>> loss, right = token_loss(torch.eye(2), torch.eye(2), None, torch.tensor([0, 0]))
        >>> round(loss.item(), 4), right.item()
        (1.6265, 1)
    """
    inputs = _cast(hidden, weight, bias)
    return _TokenLoss.apply(*inputs, labels, _trained(*inputs))  # type: ignore[no-any-return, no-untyped-call]


def bag_loss(vectors: Tensor, weight: Tensor, bias: Tensor | None, terms: Ragged) -> Tensor:
    """Binary cross-entropy of which terms a text has, the mean over the vocabulary.

    Of the size of texts x vocabulary there is one matrix, the errors of the probabilities, in the dtype of
    the products; without gradients there is none.

    Args:
        vectors: ``(n, width)``, one of each text.
        weight: ``(vocabulary, width)``, as of `torch.nn.Linear`.
        bias: ``(vocabulary,)``, or None.
        terms: Ragged int64 ``(total,)``, the terms of each text, each once.

    Returns:
        The sum over the texts.

    Examples:
        >>> bag_loss(torch.zeros(1, 2), torch.eye(2), None, Ragged.from_rows([[1]])).item()
        0.6931471824645996

    Source: Schlatt et al. 2025 (TITE), section 3.3, L_BOW.
    """
    rows, starts = terms.row_ids(), [0, *terms.lengths.cumsum(0).tolist()]
    inputs = _cast(vectors, weight, bias)
    return _BagLoss.apply(*inputs, rows, terms.values, starts, any(_trained(*inputs)))  # type: ignore[no-any-return, no-untyped-call]


def _cast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """All of one dtype: that of autocast, or of the weight."""
    kind, dtype = hidden.device.type, weight.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _trained(*inputs: Tensor | None) -> tuple[bool, ...]:
    """Which of them get a gradient; where there are none, torch's own ``needs_input_grad`` does not know."""
    return tuple(torch.is_grad_enabled() and each is not None and each.requires_grad for each in inputs)


def _exact(values: Tensor) -> Tensor:
    """At least float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        trained: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor]:
        total, right = _exact(weight.new_zeros(())), torch.zeros((), dtype=torch.int64, device=labels.device)
        grads = [
            torch.zeros_like(value, dtype=total.dtype) if value is not None and needed else None
            for value, needed in zip((hidden, weight, bias), trained, strict=True)
        ]
        of_hidden, of_weight, of_bias = grads
        size = max(1, _CELLS // len(weight))
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), size):
                part, asked = hidden[start : start + size], labels[start : start + size, None]
                logits = _exact(F.linear(part, weight, bias))
                right += (logits.argmax(1, keepdim=True) == asked).sum()
                logits -= logits.amax(1, keepdim=True)
                told = logits.gather(1, asked)
                errors = logits.exp_()
                sums = errors.sum(1, keepdim=True)
                total += (sums.log() - told).sum()
                if not any(trained):
                    continue
                errors /= sums
                errors.scatter_add_(1, asked, errors.new_full(asked.shape, -1))
                low = errors.to(weight.dtype)
                if of_hidden is not None:
                    of_hidden[start : start + size] = low @ weight
                if of_weight is not None:
                    of_weight += low.T @ part
                if of_bias is not None:
                    of_bias += errors.sum(0)
        ctx.save_for_backward(*grads)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if each is None else (each * grad).to(ctx.dtype) for each in ctx.saved_tensors]
        return (*found, None, None)


class _BagLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vectors: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        terms: Tensor,
        starts: list[int],
        trained: bool,
    ) -> Tensor:
        total = _exact(weight.new_zeros(()))
        errors = weight.new_empty(len(vectors) if trained else 0, len(weight))
        size = max(1, _CELLS // len(weight))
        with torch.autocast(vectors.device.type, enabled=False):
            for start in range(0, len(vectors), size):
                part = vectors[start : start + size]
                logits = _exact(F.linear(part, weight, bias))
                those = slice(starts[start], starts[start + len(part)])
                there = (rows[those] - start, terms[those])
                total += F.softplus(logits).sum() - logits[there].sum()
                if trained:
                    logits.sigmoid_()[there] -= 1
                    errors[start : start + size] = logits
        ctx.save_for_backward(vectors, weight, errors)
        return total / len(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        vectors, weight, errors = ctx.saved_tensors
        scale, needed = grad / len(weight), ctx.needs_input_grad
        made = (
            errors @ weight if needed[0] else None,
            errors.T @ vectors if needed[1] else None,
            errors.sum(0, dtype=grad.dtype) if needed[2] else None,
        )
        found = [None if each is None else (_exact(each) * scale).to(weight.dtype) for each in made]
        return (*found, None, None, None, None)
