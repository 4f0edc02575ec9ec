"""The definition of MaxSim of ragged texts, one pair at a time, with the backward written out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Tokens", "maxsim_backward", "maxsim_forward", "maxsim_reference", "quantize_rows"]


class Tokens(NamedTuple):
    """The token vectors of ``n`` texts, stored back to back.

    Attributes:
        values: ``(total, d)`` floating point, or int8.
        offsets: ``(n + 1,)`` int32; text ``i`` is ``values[offsets[i]:offsets[i + 1]]``.
        scales: ``(total,)`` float32, the scale of each row of int8 values.
    """

    values: Tensor
    offsets: Tensor
    scales: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of texts."""
        return self.offsets.numel() - 1  # numel() takes a third of the time of shape

    def floats(self) -> Tokens:
        """Return the tokens in float32."""
        values = self.values.float()
        return Tokens(values if self.scales is None else values * self.scales[:, None], self.offsets)


def maxsim_forward(queries: Tokens, documents: Tokens, pairs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum, over the tokens of a query, the largest inner product with a token of the document.

    A query without tokens scores 0. A query with tokens scores ``-inf`` against a document without tokens.
    NaN is larger than all numbers; among equal products the first is the maximum.

    Args:
        queries: Floating point.
        documents: The same dtype as ``queries``.
        pairs: ``(p, 2)`` int64 rows of queries and documents; None scores all queries against all documents.

    Returns:
        The scores ``(n_q, n_d)``, or ``(p,)`` with pairs, in float32 (float64 for float64). And argmax: the
        row of the document token of each maximum, int32, -1 if the document has no tokens. Its shape is
        ``(n_d, total_q)``. With pairs it is flat: one number per token of the query of each pair, back to
        back.
    """
    dtype = torch.promote_types(queries.values.dtype, torch.float32)
    scores, argmax = [], [torch.empty(0, dtype=torch.int64)]
    for query, document in _texts(queries, documents, pairs):
        tokens = torch.arange(documents.values.shape[0])[document]
        if not len(tokens):
            n = query.stop - query.start
            scores.append(torch.full((n,), -torch.inf, dtype=dtype).sum())
            argmax.append(torch.full((n,), -1))
            continue
        similarity = queries.values[query].to(dtype) @ documents.values[document].to(dtype).T
        best = similarity.argmax(1)
        scores.append(similarity.gather(1, best[:, None]).sum())
        argmax.append(tokens[best])
    result = torch.stack(scores) if scores else torch.empty(0, dtype=dtype)
    rows = torch.cat(argmax).int()
    if pairs is not None:
        return result, rows
    scores_by_document = result.view(documents.rows, queries.rows)
    return scores_by_document.T.contiguous(), rows.view(documents.rows, len(queries.values))


def maxsim_backward(
    grad: Tensor, queries: Tokens, documents: Tokens, pairs: Tensor | None, argmax: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of queries and documents; each maximum is one inner product."""
    dtype = grad.dtype
    d_queries, d_documents = (torch.zeros_like(x.values, dtype=dtype) for x in (queries, documents))
    grads = (grad if pairs is not None else grad.T).flatten().tolist()
    rows, start = argmax.flatten().long(), 0
    for g, (query, _) in zip(grads, _texts(queries, documents, pairs), strict=True):
        tokens = torch.arange(query.start, query.stop)
        best, start = rows[start : start + len(tokens)], start + len(tokens)
        tokens, best = tokens[best >= 0], best[best >= 0]
        d_queries[tokens] += g * documents.values[best].to(dtype)
        d_documents.index_add_(0, best, g * queries.values[tokens].to(dtype))
    return d_queries.to(queries.values.dtype), d_documents.to(documents.values.dtype)


def maxsim_reference(
    queries: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    document_offsets: Tensor,
    pairs: Tensor | None = None,
) -> Tensor:
    """Compute `op.maxsim` for any floating point dtype on the CPU, slowly."""
    arguments = (queries, query_offsets, documents, document_offsets, pairs)
    return _Reference.apply(*arguments)  # type: ignore[no-untyped-call]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to int8, symmetrically and with its own scale: ``x ~ scale * q``.

    Args:
        x: ``(n, d)`` floating point, finite.

    Returns:
        ``q (n, d)`` int8 from -127 to 127 and ``scale (n,)`` float32, which is 0 for rows of zeros.

    Examples:
        >>> quantize_rows(torch.tensor([[1.0, -0.5, 0.0]]))[0].tolist()
        [[127, -64, 0]]
    """
    largest = x.detach().float().abs().amax(1, keepdim=True)
    q = (x.detach().float() * (127 / largest.clamp(min=1e-30))).round()
    return q.to(torch.int8), (largest[:, 0] / 127)


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, query_offsets: Tensor, documents: Tensor, *rest: Any) -> Tensor:
        ctx.texts = Tokens(queries, query_offsets), Tokens(documents, rest[0]), rest[1]
        scores, ctx.argmax = maxsim_forward(*ctx.texts)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, documents, pairs = ctx.texts
        d_queries, d_documents = maxsim_backward(grad, queries, documents, pairs, ctx.argmax)
        return d_queries, None, d_documents, None, None


def _texts(queries: Tokens, documents: Tokens, pairs: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Yield, per pair, the slice of the query's tokens and of the document's; without pairs, by document."""
    ends = [x.offsets.tolist() for x in (queries, documents)]
    rows = (
        pairs.tolist()
        if pairs is not None
        else [(q, d) for d in range(documents.rows) for q in range(queries.rows)]
    )
    for query, document in rows:
        yield slice(*ends[0][query : query + 2]), slice(*ends[1][document : document + 2])
