"""Losses on logits over a vocabulary, fused with the matrix product that computes the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from irkit.core.ragged import Ragged

CELLS = 1 << 22  # logits computed at once: 16 MB in float32


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    cells: int = CELLS,
    *,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of tokens under a linear map to the vocabulary.

    Loss and gradients are computed together for a part of the tokens at a time. So nothing of the size tokens
    x vocabulary is stored, and nothing is computed twice.

    Args:
        hidden: ``(m, width)``.
        weight: ``(vocabulary, width)``, like in `torch.nn.Linear`.
        bias: ``(vocabulary,)``, or None.
        labels: ``(m,)`` int64, the right terms.
        cells: Number of logits that are computed at once, at most, unless one token has more.
        factors: ``(m,)``, multiply the loss of each token; None are all 1.

    Returns:
        The sum of the losses, and the number of right predictions, which has no gradient. Under autocast the
        products have its dtype, and everything else is float32.

    Examples:
        >>> loss, right = token_loss(torch.eye(2), torch.eye(2), None, torch.tensor([0, 0]))
        >>> round(loss.item(), 4), right.item()
        (1.6265, 1)
    """
    inputs = _cast(hidden, weight, bias)
    return _TokenLoss.apply(*inputs, labels, factors, cells, _trained(*inputs))  # type: ignore[no-any-return, no-untyped-call]


def bag_loss(
    vectors: Tensor, weight: Tensor, bias: Tensor | None, terms: Ragged, cells: int = CELLS
) -> Tensor:
    """Compute the binary cross-entropy of the set of terms of each text, as the mean over the vocabulary.

    For the gradients one matrix of the size texts x vocabulary is stored: the errors of the probabilities, in
    the dtype of the products. Without gradients no such matrix is stored.

    Args:
        vectors: ``(n, width)``, one vector per text.
        weight: ``(vocabulary, width)``, like in `torch.nn.Linear`.
        bias: ``(vocabulary,)``, or None.
        terms: Ragged int64 ``(total,)``, the distinct terms of each text.
        cells: As for `token_loss`, per text.

    Returns:
        The sum of the losses over the texts, a scalar.

    Examples:
        >>> bag_loss(torch.zeros(1, 2), torch.eye(2), None, Ragged.from_rows([[1]])).item()
        0.6931471824645996

    Source: Schlatt et al. 2025 (TITE), section 3.3, L_BOW.
    """
    rows, starts = terms.row_ids(), [0, *terms.lengths.cumsum(0).tolist()]
    inputs = _cast(vectors, weight, bias)
    return _BagLoss.apply(*inputs, rows, terms.values, starts, cells, any(_trained(*inputs)))  # type: ignore[no-any-return, no-untyped-call]


def _cast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Convert all to one dtype: the dtype of autocast, or of the weight."""
    kind, dtype = hidden.device.type, weight.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _trained(*inputs: Tensor | None) -> tuple[bool, ...]:
    """Return, per input, whether the input gets a gradient.

    With gradients switched off no input gets one; ``needs_input_grad`` would still be True.
    """
    return tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs)


def _exact(values: Tensor) -> Tensor:
    """Convert to float32, unless the values are more precise."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        factors: Tensor | None,
        cells: int,
        trained: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor]:
        total, right = _exact(weight.new_zeros(())), torch.zeros((), dtype=torch.int64, device=labels.device)
        grads = [
            torch.zeros_like(value, dtype=total.dtype) if value is not None and needed else None
            for value, needed in zip((hidden, weight, bias), trained, strict=True)
        ]
        hidden_grad, weight_grad, bias_grad = grads
        size = max(1, cells // len(weight))
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), size):
                # loss
                part, label = hidden[start : start + size], labels[start : start + size, None]
                logits = _exact(F.linear(part, weight, bias))
                right += (logits.argmax(1, keepdim=True) == label).sum()
                logits -= logits.amax(1, keepdim=True)
                label_logits = logits.gather(1, label)
                errors = logits.exp_()
                sums = errors.sum(1, keepdim=True)
                losses, scale = sums.log() - label_logits, sums.new_ones(())
                if factors is not None:
                    scale = _exact(factors[start : start + size, None])
                total += (losses * scale).sum()
                if not any(trained):
                    continue
                # gradients: softmax minus 1 at the label
                errors /= sums
                errors.scatter_add_(1, label, errors.new_full(label.shape, -1))
                errors *= scale
                low = errors.to(weight.dtype)
                if hidden_grad is not None:
                    hidden_grad[start : start + size] = low @ weight
                if weight_grad is not None:
                    weight_grad += low.T @ part
                if bias_grad is not None:
                    bias_grad += errors.sum(0)
        ctx.save_for_backward(*grads)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if x is None else (x * grad).to(ctx.dtype) for x in ctx.saved_tensors]
        return (*scaled, None, None, None, None)


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
        cells: int,
        trained: bool,
    ) -> Tensor:
        total = _exact(weight.new_zeros(()))
        errors = weight.new_empty(len(vectors) if trained else 0, len(weight))
        size = max(1, cells // len(weight))
        with torch.autocast(vectors.device.type, enabled=False):
            for start in range(0, len(vectors), size):
                part = vectors[start : start + size]
                logits = _exact(F.linear(part, weight, bias))
                postings = slice(starts[start], starts[start + len(part)])
                present = (rows[postings] - start, terms[postings])
                total += F.softplus(logits).sum() - logits[present].sum()
                if trained:
                    logits.sigmoid_()[present] -= 1
                    errors[start : start + size] = logits
        ctx.save_for_backward(vectors, weight, errors)
        return total / len(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        vectors, weight, errors = ctx.saved_tensors
        scale, needed = grad / len(weight), ctx.needs_input_grad
        grads = (
            errors @ weight if needed[0] else None,
            errors.T @ vectors if needed[1] else None,
            errors.sum(0, dtype=grad.dtype) if needed[2] else None,
        )
        scaled = [None if x is None else (_exact(x) * scale).to(weight.dtype) for x in grads]
        return (*scaled, None, None, None, None, None)
