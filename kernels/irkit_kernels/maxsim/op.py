"""``irkit::maxsim``: late interaction scores of ragged queries and documents, with gradients, or in int8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._products import product_gradients
from . import cpu_kernel
from .reference import Tokens, maxsim_forward

__all__ = ["maxsim", "maxsim_int8", "maxsim_stored"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_INT8 = 2**16  # dimensions; above 2^17 the int32 sums could overflow
_FEW = 64  # up to so many numbers, a check in Python is faster than one in torch


def maxsim(
    queries: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    document_offsets: Tensor,
    pairs: Tensor | None = None,
    maxima: int | None = None,
) -> Tensor:
    """Sum, over the tokens of a query, the largest inner product with a token of the document.

    The matrix of similarities is never stored. Sums are float32 for every dtype. A query without tokens
    scores 0; a query with tokens scores ``-inf`` against a document without tokens. The gradient flows
    through the maximum alone (the first of equal ones) and is deterministic. The call uses
    `torch.get_num_threads` threads, or CUDA, and works under ``torch.compile``. On CUDA offsets and pairs
    are not checked, because reading them would make the host wait.

    Args:
        queries: ``(total_q, d)`` float32, bfloat16 or float16.
        query_offsets: ``(n_q + 1,)`` int32; query ``i`` is ``queries[query_offsets[i]:query_offsets[i +
            1]]``.
        documents: ``(total_d, d)`` of the same dtype.
        document_offsets: ``(n_d + 1,)`` int32, likewise.
        pairs: ``(p, 2)`` int64 rows of queries and of documents; only these pairs are scored.
        maxima: Total number of query tokens over all pairs. With None, CUDA counts them if a gradient is
            needed, and the host waits for the count.

    Returns:
        ``(n_q, n_d)`` float32, or ``(p,)`` with pairs.

    Raises:
        ValueError: Shapes, dtypes, devices, offsets or pairs do not fit together.

    Examples:
        >>> ends = torch.tensor([0, 2], dtype=torch.int32)
        >>> maxsim(torch.eye(2), ends, torch.tensor([[1.0, 0.0], [0.5, 0.5]]), ends)
        tensor([[1.5000]])

    Source: Khattab and Zaharia 2020 (ColBERT), equation 3.
    """
    return _scores(Tokens(queries, query_offsets), Tokens(documents, document_offsets), pairs, maxima)


def maxsim_int8(
    queries: Tensor,
    query_scales: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    document_scales: Tensor,
    document_offsets: Tensor,
    pairs: Tensor | None = None,
) -> Tensor:
    """Compute `maxsim` of int8 token vectors from `quantize_rows`; without gradient.

    Inner products are exact and then multiplied by the scales of both tokens.

    Args:
        queries: ``(total_q, d)`` int8.
        query_scales: ``(total_q,)`` float32, not negative.
        query_offsets: ``(n_q + 1,)`` int32.
        documents: ``(total_d, d)`` int8.
        document_scales: ``(total_d,)`` float32.
        document_offsets: ``(n_d + 1,)`` int32.
        pairs: See `maxsim`.

    Returns:
        ``(n_q, n_d)`` float32, or ``(p,)`` with pairs.

    Raises:
        ValueError: Shapes, dtypes, devices, offsets or pairs do not fit together.
    """
    first = Tokens(queries, query_offsets, query_scales)
    return _scores(first, Tokens(documents, document_offsets, document_scales), pairs)


def maxsim_stored(
    queries: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    document_offsets: Tensor,
    document_scales: Tensor | None = None,
    pairs: Tensor | None = None,
) -> Tensor:
    """Compute `maxsim` of float32 queries with documents that are stored in fewer bits; without gradient.

    The documents are converted to float32, on a CPU a few tokens at a time, in the cache.

    Args:
        queries: ``(total_q, d)`` float32.
        query_offsets: ``(n_q + 1,)`` int32.
        documents: ``(total_d, d)`` float16, or int8 with scales.
        document_offsets: ``(n_d + 1,)`` int32.
        document_scales: ``(total_d,)`` float32, by which int8 is multiplied.
        pairs: See `maxsim`.

    Returns:
        ``(n_q, n_d)`` float32, or ``(p,)`` with pairs.

    Raises:
        ValueError: Shapes, dtypes, devices, offsets or pairs do not fit together.
    """
    dtype = torch.float16 if document_scales is None else torch.int8
    if queries.dtype != torch.float32 or documents.dtype != dtype:
        raise ValueError(
            "maxsim_stored: expected queries in float32, documents in float16, or in int8 with scales, got "
            f"{queries.dtype} and {documents.dtype} with{'out' if document_scales is None else ''} scales"
        )
    first, second = Tokens(queries, query_offsets), Tokens(documents, document_offsets, document_scales)
    plan = cpu_kernel.plan_for_stored(dtype, pairs is not None) if queries.is_cpu else None
    if plan is None:
        return maxsim(queries, query_offsets, second.floats().values, document_offsets, pairs)
    check_kinds(first, second, pairs, stored=True)
    check_values(first, second, pairs)
    return cpu_kernel.maxsim(first, second, pairs, False, plan)[0]


def _scores(queries: Tokens, documents: Tokens, pairs: Tensor | None, maxima: int | None = None) -> Tensor:
    check_kinds(queries, documents, pairs)
    differentiable = queries.values.requires_grad or documents.values.requires_grad
    if torch.compiler.is_compiling():
        compiled: Tensor = torch.ops.irkit.maxsim(*queries, *documents, pairs, maxima)[0]
        return compiled
    if differentiable and torch.is_grad_enabled():
        arguments = (queries.values, queries.offsets, documents.values, documents.offsets, pairs, maxima)
        scores: Tensor = _MaxSim.apply(*arguments)  # type: ignore[no-untyped-call]
        return scores
    return _run(queries, documents, pairs, with_argmax=False)[0]


def _forward(*tensors: Any) -> tuple[Tensor, Tensor]:
    return _run(Tokens(*tensors[:3]), Tokens(*tensors[3:6]), tensors[6], with_argmax=True, maxima=tensors[7])


def _run(
    queries: Tokens, documents: Tokens, pairs: Tensor | None, with_argmax: bool, maxima: int | None = None
) -> tuple[Tensor, Tensor]:
    if queries.values.is_cuda:
        from . import triton_kernel

        return triton_kernel.forward(queries, documents, pairs, with_argmax, maxima)
    check_values(queries, documents, pairs)
    plan = cpu_kernel.plan_for(queries.values.dtype, pairs is not None)
    if plan is None:
        return maxsim_forward(queries.floats(), documents.floats(), pairs)
    return cpu_kernel.maxsim(queries, documents, pairs, with_argmax, plan)


def _backward(
    grad: Tensor,
    queries: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    document_offsets: Tensor,
    pairs: Tensor | None,
    argmax: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and documents; each maximum is one inner product of two tokens."""
    if queries.is_cuda and pairs is None:
        from . import triton_gradients

        sides = Tokens(queries, query_offsets), Tokens(documents, document_offsets)
        return triton_gradients.backward(grad, *sides, argmax)
    entries = _entries(grad, query_offsets, len(queries), pairs, argmax)
    return product_gradients(queries, documents, *entries)


def _entries(
    grad: Tensor, query_offsets: Tensor, total: int, pairs: Tensor | None, argmax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """List the inner products that were maxima, for the backward.

    Returns:
        Per maximum: the row of its query token, int32; the row of its document token, int32, -1 for none; and
        its gradient, float32. All three are ``(e,)``.
    """
    device = grad.device
    if pairs is None:
        tokens = torch.arange(total, dtype=torch.int32, device=device).repeat(argmax.shape[0])
        queries = torch.arange(len(query_offsets) - 1, device=device)
        rows = torch.repeat_interleave(queries, query_offsets.diff(), output_size=total)
        return tokens, argmax.flatten(), grad.float().T[:, rows].flatten()
    lengths = query_offsets.diff()
    query, counts = pairs[:, 0], lengths[pairs[:, 0]]
    jobs = torch.repeat_interleave(
        torch.arange(len(pairs), device=device), counts, output_size=argmax.shape[0]
    )
    shift = query_offsets[query] - (counts.cumsum(0) - counts)  # from index of the maximum to query token
    tokens = torch.arange(argmax.shape[0], device=device) + shift[jobs]
    return tokens.int(), argmax, grad.float()[jobs]


def check_kinds(queries: Tokens, documents: Tokens, pairs: Tensor | None, stored: bool = False) -> None:
    q, d, name = queries.values, documents.values, _name(queries)
    dtypes = _FLOATS if queries.scales is None else (torch.int8,)
    if q.dim() != 2 or d.dim() != 2 or not 0 < q.shape[1] == d.shape[1]:
        raise ValueError(
            f"{name}: expected queries and documents (tokens, d) of one d, got {tuple(q.shape)} and "
            f"{tuple(d.shape)}"
        )
    if not stored and (q.dtype != d.dtype or q.dtype not in dtypes):
        raise ValueError(f"{name}: expected one dtype among {dtypes}, got {q.dtype} and {d.dtype}")
    if queries.scales is not None and q.shape[1] > _MAX_INT8:
        raise ValueError(f"{name}: got {q.shape[1]} dimensions, expected at most {_MAX_INT8}")
    for label, (values, offsets, scales) in (("query", queries), ("document", documents)):
        if offsets.dtype != torch.int32 or offsets.dim() != 1 or offsets.numel() == 0:
            raise ValueError(
                f"{name}: {label}_offsets must be (n + 1,) int32, got {tuple(offsets.shape)} {offsets.dtype}"
            )
        if scales is not None and (scales.dtype != torch.float32 or scales.shape != values.shape[:1]):
            raise ValueError(
                f"{name}: {label}_scales must be ({values.shape[0]},) float32, got "
                f"{tuple(scales.shape)} {scales.dtype}"
            )
    if pairs is not None and (pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2):
        raise ValueError(f"{name}: pairs must be (p, 2) int64, got {tuple(pairs.shape)} {pairs.dtype}")
    devices = {tensor.device for tensor in (*queries, *documents, pairs) if tensor is not None}
    if len(devices) > 1 or not (q.is_cpu or q.is_cuda):
        raise ValueError(
            f"{name}: expected all tensors on one CPU or CUDA device, got {sorted(map(str, devices))}"
        )


def check_values(queries: Tokens, documents: Tokens, pairs: Tensor | None) -> None:
    """Check the values that the compiled code trusts: wrong offsets would read outside of the tensors."""
    for label, (values, offsets, _) in (("query", queries), ("document", documents)):
        if not _rises(offsets, values.shape[0]):
            raise ValueError(
                f"{_name(queries)}: {label}_offsets must rise from 0 to {len(values)}, the number of tokens, "
                f"got {offsets.tolist()!s:.200}"
            )
    if pairs is not None:
        extremes = pairs if pairs.numel() <= _FEW else torch.stack(torch.aminmax(pairs, dim=0))
        n_q, n_d = queries.rows, documents.rows
        for query, document in extremes.tolist():
            if not (0 <= query < n_q and 0 <= document < n_d):
                raise ValueError(
                    f"{_name(queries)}: pairs must be rows of {n_q} queries and {n_d} documents, "
                    f"got rows {query} and {document}"
                )
    if queries.scales is not None and (queries.scales < 0).any():
        raise ValueError(f"{_name(queries)}: query_scales must not be negative")


def _rises(offsets: Tensor, total: int) -> bool:
    if offsets.numel() > _FEW:
        return bool(offsets[0] == 0) and bool(offsets[-1] == total) and not bool((offsets.diff() < 0).any())
    ends = offsets.tolist()
    return ends[0] == 0 and ends[-1] == total and sorted(ends) == ends


def _name(queries: Tokens) -> str:
    return "maxsim" if queries.scales is None else "maxsim_int8"


# Define the operators as torch.library.custom_op does, but without importing torch._dynamo, which takes 2 s.
torch.library.define(
    "irkit::maxsim",
    "(Tensor queries, Tensor query_offsets, Tensor? query_scales, Tensor documents, Tensor document_offsets, "
    "Tensor? document_scales, Tensor? pairs, SymInt? maxima) -> (Tensor, Tensor)",
)
torch.library.define(
    "irkit::maxsim_backward",
    "(Tensor grad, Tensor queries, Tensor query_offsets, Tensor documents, Tensor document_offsets, "
    "Tensor? pairs, Tensor argmax) -> (Tensor, Tensor)",
)
for _device in ("cpu", "cuda"):
    torch.library.impl("irkit::maxsim", _device, _forward)
    torch.library.impl("irkit::maxsim_backward", _device, _backward)


@torch.library.register_fake("irkit::maxsim")  # type: ignore[untyped-decorator]
def _(*tensors: Any) -> tuple[Tensor, Tensor]:
    queries, documents, pairs = Tokens(*tensors[:3]), Tokens(*tensors[3:6]), tensors[6]
    shapes: Any = (queries.rows, documents.rows), (documents.rows, queries.values.shape[0])
    if pairs is not None:  # one maximum per query token of each pair
        maxima = torch.library.get_ctx().new_dynamic_size() if tensors[7] is None else tensors[7]
        shapes = pairs.shape[:1], (maxima,)
    return queries.values.new_empty(shapes[0], dtype=torch.float32), queries.offsets.new_empty(shapes[1])


@torch.library.register_fake("irkit::maxsim_backward")  # type: ignore[untyped-decorator]
def _(grad: Tensor, queries: Tensor, _: Tensor, documents: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (queries, documents))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    queries, query_offsets, _, documents, document_offsets, _, pairs, _ = inputs
    ctx.save_for_backward(queries, query_offsets, documents, document_offsets, pairs, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    d_queries, d_documents = torch.ops.irkit.maxsim_backward(grad, *ctx.saved_tensors)
    return d_queries, None, None, d_documents, None, None, None, None


torch.library.register_autograd("irkit::maxsim", _gradients, setup_context=_save)


class _MaxSim(torch.autograd.Function):
    """``irkit::maxsim`` with its gradients, without the operator, which costs more time than the launches."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        query_offsets: Tensor,
        documents: Tensor,
        document_offsets: Tensor,
        pairs: Tensor | None,
        maxima: int | None,
    ) -> Tensor:
        sides = Tokens(queries, query_offsets), Tokens(documents, document_offsets)
        scores, argmax = _run(*sides, pairs, with_argmax=True, maxima=maxima)
        ctx.save_for_backward(queries, query_offsets, documents, document_offsets, pairs, argmax)
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_queries, d_documents = _backward(grad, *ctx.saved_tensors)
        return d_queries, None, d_documents, None, None, None
