"""Gradients of MaxSim on CUDA: a launch for the tokens of queries, and one for those of documents."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import Tokens
from .triton_kernel import OPTIONS, WIDEST, on_device_of

__all__ = ["backward", "document_gradients", "query_gradients"]

_TOKENS = 64  # of a document, whose gradients a program computes at once


@triton.jit(do_not_specialize=["n_q", "n_d", "total"])
def query_gradients(
    out,
    query_of,
    grad,
    query_offsets,
    documents,
    argmax,
    n_q,
    n_d,
    total,
    D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the gradient of a query token: the sum of its maxima's document tokens, weighted by ``grad``.

    Program i has query token i, and stores in ``query_of`` the query that it belongs to. Documents are added
    in their order, ``BLOCK_E`` at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    # the query of this token: the last one that starts at it or before, by bisection
    query, above = n_q * 0, n_q
    while above - query > 1:
        middle = (query + above) // 2
        before = tl.load(query_offsets + middle) <= row
        query, above = tl.where(before, middle, query), tl.where(before, above, middle)
    tl.store(query_of + row, query)
    # weighted document tokens
    grads = grad + query.to(tl.int64) * n_d
    sums = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, n_d, BLOCK_E):
        document = first + tl.arange(0, BLOCK_E)
        index = tl.load(argmax + document.to(tl.int64) * total + row, mask=document < n_d, other=-1)
        weight = tl.load(grads + document, mask=index >= 0, other=0.0)
        pointers = documents + index.to(tl.int64)[:, None] * D + columns[None, :]
        values = tl.load(pointers, mask=(index >= 0)[:, None] & (columns < D)[None, :], other=0.0)
        sums += tl.sum(weight[:, None] * values.to(tl.float32), 0)
    tl.store(out + row * D + columns, sums, mask=columns < D)


@triton.jit
def _add_rows(sums, hit, weight, values):
    """Add ``where(hit, weight, 0) @ values`` to ``sums``, with weights in (nearly) full float32 precision.

    Args:
        sums: ``(n, d)`` float32.
        hit: ``(n, e)`` bool.
        weight: ``(e,)`` float32.
        values: ``(e, d)`` float32, bfloat16 or float16.

    The matrix units multiply numbers of few bits, so a weight is split in two, of 16 bits together for
    bfloat16. float16 has too small a range for weights. Its values are multiplied in TF32, which holds them
    exactly; weights then have 22 bits.
    """
    if values.dtype == tl.float32:
        return tl.dot(tl.where(hit, weight[None, :], 0.0), values, sums, input_precision="ieee")
    if values.dtype == tl.float16:
        values = values.to(tl.float32)
        high = (weight.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # without 13 low bits
        low = weight - high
    else:
        high = weight.to(values.dtype)
        low = (weight - high.to(tl.float32)).to(values.dtype)
    zero = tl.zeros([1, 1], values.dtype)
    sums = tl.dot(tl.where(hit, high[None, :], zero), values, sums, input_precision="tf32")
    return tl.dot(tl.where(hit, low[None, :], zero), values, sums, input_precision="tf32")


@triton.jit(do_not_specialize=["n_d", "total"])
def document_gradients(
    out,
    query_of,
    grad,
    queries,
    document_offsets,
    argmax,
    n_d,
    total,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the gradients of tokens of a document: the sum of the query tokens whose maxima they were.

    Program ``(i, j, k)`` has blocks j, j + j_max, ... of the tokens of document i, and block k of the
    dimensions. It multiplies a matrix of weights, ``(BLOCK_D, BLOCK_E)`` and mostly zeros, with each block of
    query tokens. That is as much work as the matrix of similarities, but needs no order of the maxima.
    """
    document = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    start, stop = tl.load(document_offsets + document), tl.load(document_offsets + document + 1)
    for first in range(start + tl.program_id(1) * BLOCK_D, stop, tl.num_programs(1) * BLOCK_D):
        tokens = first + tl.arange(0, BLOCK_D)
        sums = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
        for low in range(0, total, BLOCK_E):
            # query tokens of this step, and the weights of their maxima
            rows = low + tl.arange(0, BLOCK_E)
            index = tl.load(argmax + document * total + rows, mask=rows < total, other=-1)
            query = tl.load(query_of + rows, mask=rows < total, other=0).to(tl.int64)
            weight = tl.load(grad + query * n_d + document, mask=index >= 0, other=0.0)
            pointers = queries + rows.to(tl.int64)[:, None] * D + columns[None, :]
            values = tl.load(pointers, mask=(rows < total)[:, None] & (columns < D)[None, :], other=0.0)
            sums = _add_rows(sums, tokens[:, None] == index[None, :], weight, values)
        pointers = out + tokens.to(tl.int64)[:, None] * D + columns[None, :]
        tl.store(pointers, sums, mask=(tokens < stop)[:, None] & (columns < D)[None, :])


def backward(grad: Tensor, queries: Tokens, documents: Tokens, argmax: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a grid of scores, in two launches; sums run in a fixed order, in float32.

    Args:
        grad: ``(n_q, n_d)`` float32, the gradient of the scores.
        queries: Floating point.
        documents: The same dtype.
        argmax: ``(n_d, total_q)`` int32 from `forward`, contiguous.

    Returns:
        The gradients of the values of ``queries`` and ``documents``, in their dtype.
    """
    q, d, grad = queries.values.contiguous(), documents.values.contiguous(), grad.contiguous()
    d_queries, d_documents = torch.empty_like(q), torch.empty_like(d)
    (n_d, total), width = argmax.shape, q.shape[1]
    query_of = argmax.new_empty(total)
    block = min(WIDEST, max(16, triton.next_power_of_2(width)))
    full = q.dtype == torch.float32
    with on_device_of(q):
        if total:
            query_gradients[(total, triton.cdiv(width, block))](
                d_queries,
                query_of,
                grad,
                queries.offsets.contiguous(),
                d,
                argmax,
                queries.rows,
                n_d,
                total,
                D=width,
                BLOCK_E=32,
                BLOCK_K=block,
                num_warps=4,
                **OPTIONS,
            )
        if len(d):
            block = min(block, 64) if full else block
            parts = 1 + len(d) // n_d // _TOKENS  # all tokens of most documents at once
            document_gradients[(n_d, parts, triton.cdiv(width, block))](
                d_documents,
                query_of,
                grad,
                q,
                documents.offsets.contiguous(),
                argmax,
                n_d,
                total,
                D=width,
                BLOCK_D=_TOKENS,
                BLOCK_E=32,
                BLOCK_K=block,
                num_warps=4,
                num_stages=2 if full else 3,
                **OPTIONS,
            )
    return d_queries, d_documents
