"""MaxSim of chosen documents, which are read where they lie in a large array."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cpu_kernel
from .op import check_kinds, check_values, maxsim
from .reference import Tokens

__all__ = ["maxsim_chosen"]

_MOST = 2**31 - 1  # tokens from the first chosen document to the last
_KINDS = {(torch.float32, True), (torch.float16, True), (torch.int8, False)}  # dtype, whether unscaled


def maxsim_chosen(
    queries: Tensor,
    query_offsets: Tensor,
    documents: Tensor,
    spans: Tensor,
    chosen_by: Tensor,
    document_scales: Tensor | None = None,
) -> Tensor:
    """Compute `maxsim` of each chosen document and the query that chose it, on a CPU; without gradient.

    A score has the bits that `maxsim`, or `maxsim_stored`, gives it.

    Args:
        queries: ``(total_q, d)`` float32.
        query_offsets: ``(n_q + 1,)`` int32, see `maxsim`.
        documents: ``(total_d, d)`` float32, float16, or int8 with scales; it may be a mapped file.
        spans: ``(n, 2)`` int64: the first token of each chosen document, and the token after its last.
        chosen_by: ``(n,)`` int64 rows of queries.
        document_scales: ``(total_d,)`` float32, by which int8 is multiplied.

    Returns:
        ``(n,)`` float32.

    Raises:
        ValueError: Shapes, dtypes, spans or rows do not fit together.
    """
    sides = Tokens(queries, query_offsets), Tokens(documents, spans, document_scales)
    _check(*sides, chosen_by)
    if not len(spans):
        return queries.new_empty(0)

    # offsets have 32 bits, so they count from the first chosen document
    first, last = int(spans.min()), int(spans.max())
    plan = (
        cpu_kernel.plan_for(torch.float32, paired=True)
        if documents.dtype == torch.float32
        else cpu_kernel.plan_for_stored(documents.dtype, paired=True)
    )
    if plan is None or last - first > _MOST:
        copied = _copied(sides[1])
        pairs = torch.stack([chosen_by, torch.arange(len(spans), device="cpu")], dim=1)
        return maxsim(queries, query_offsets, copied.values, copied.offsets, pairs)
    scales = None if document_scales is None else document_scales[first:last]
    offsets = (spans - first).int().flatten()
    part = Tokens(documents[first:last], offsets, scales)

    # every other text between two offsets is a chosen one, the rest are gaps
    pairs = torch.stack([chosen_by, torch.arange(0, 2 * len(spans), 2, device="cpu")], dim=1)
    tokens = int((spans[:, 1] - spans[:, 0]).sum())
    work = tokens * len(queries) // sides[0].rows * queries.shape[1]
    return cpu_kernel.maxsim(sides[0], part, pairs, False, plan, work)[0]


def _copied(documents: Tokens) -> Tokens:
    """Return chosen documents in float32, back to back."""
    lengths = documents.offsets[:, 1] - documents.offsets[:, 0]
    ends = lengths.cumsum(0)
    shifts = torch.repeat_interleave(documents.offsets[:, 0] - (ends - lengths), lengths)
    positions = torch.arange(len(shifts), device="cpu") + shifts
    scales = None if documents.scales is None else documents.scales[positions]
    offsets = torch.cat([ends.new_zeros(1), ends]).int()
    return Tokens(documents.values[positions], offsets, scales).floats()


def _check(queries: Tokens, documents: Tokens, chosen_by: Tensor) -> None:
    """Raise ValueError for arguments with which the compiled code would read outside of the tensors."""
    dtype, spans, scales = documents.values.dtype, documents.offsets, documents.scales
    if queries.values.dtype != torch.float32 or (dtype, scales is None) not in _KINDS:
        raise ValueError(
            "maxsim_chosen: expected queries in float32, documents in float32, float16, or in int8 with "
            f"scales, got {queries.values.dtype} and {dtype} with{'out' if scales is None else ''} scales"
        )
    if not (queries.values.is_cpu and spans.is_cpu):
        raise ValueError("maxsim_chosen: expected tensors on the CPU; use maxsim with pairs elsewhere")
    one = torch.tensor([0, len(documents.values[:1])], dtype=torch.int32, device="cpu")
    some = documents.values[:1], one, scales if scales is None else scales[:1]
    if spans.dtype != torch.int64 or spans.dim() != 2 or spans.shape != (len(chosen_by), 2):
        raise ValueError(
            f"maxsim_chosen: spans must be ({len(chosen_by)}, 2) int64, got {tuple(spans.shape)} "
            f"{spans.dtype}"
        )
    pairs = torch.stack([chosen_by, torch.zeros_like(chosen_by)], dim=-1)
    check_kinds(queries, Tokens(*some), pairs, stored=True)
    check_values(queries, Tokens(*some), pairs)
    total = len(documents.values)
    if scales is not None and len(scales) != total:
        raise ValueError(f"maxsim_chosen: document_scales must be ({total},) float32, got {len(scales)}")
    begin, end = spans.T
    if ((begin < 0) | (begin > end) | (end > total)).any():
        raise ValueError(f"maxsim_chosen: spans must go up within 0 to {total}, the number of tokens")
