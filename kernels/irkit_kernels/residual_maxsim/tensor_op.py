"""The steps of a search for torch tensors: pairs of queries and documents, in Triton on CUDA, else slow."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .reference import NBITS, WINDOW, bits_of, packed_width

__all__ = ["TensorTokens", "levels_of", "tensor_interaction", "tensor_maxsim", "tensor_probe"]

_CODEBOOKS = [(2 ** (WINDOW - nbits), 2**nbits) for nbits in NBITS]


class TensorTokens(NamedTuple):
    """`Tokens` as tensors.

    Attributes:
        codes: ``(n,)`` uint16 or int32.
        coefficients: ``(n, 2)`` float16.
        packed: ``(n, bytes)`` uint8.
    """

    codes: Tensor
    coefficients: Tensor
    packed: Tensor


def tensor_probe(list_offsets: Tensor, lists: Tensor, visits: Tensor, n_q: int, n: int) -> Tensor:
    """Count, per query and document, the visited centroids that the document has.

    Args:
        list_offsets: ``(K + 1,)`` int64; the documents of centroid ``c`` start at ``list_offsets[c]``; not
            checked.
        lists: int32, the documents of all centroids; those outside of 0 to ``n - 1`` are skipped.
        visits: ``(v, 2)`` int64 pairs of query and centroid, not checked; a centroid of -1 is skipped.
        n_q: Number of queries.
        n: Number of documents.

    Returns:
        ``(n_q, n)`` int32.
    """
    index = (("list_offsets", list_offsets, torch.int64, 1), ("lists", lists, torch.int32, 1))
    _check_dtypes("tensor_probe", lists.device, *index, ("visits", visits, torch.int64, 2))
    counts = torch.zeros(n_q, n, dtype=torch.int32, device=lists.device)
    if lists.is_cuda:
        from . import triton_kernel

        return triton_kernel.probe(list_offsets, lists, visits, counts)
    query, centroid = visits[visits[:, 1] >= 0].T
    sizes = list_offsets.diff()[centroid]
    positions = torch.arange(int(sizes.sum()), device=lists.device)  # in the lists, visit by visit
    positions += torch.repeat_interleave(list_offsets[centroid] - sizes.cumsum(0) + sizes, sizes)
    query, documents = query.repeat_interleave(sizes), lists[positions].long()
    inside = (documents >= 0) & (documents < n)
    cells = (query * n + documents)[inside]
    counts.view(-1).scatter_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))
    return counts


def tensor_interaction(
    table: Tensor, query_offsets: Tensor, codes: Tensor, document_offsets: Tensor, pairs: Tensor
) -> Tensor:
    """Score pairs roughly: MaxSim with each document token replaced by its centroid.

    Args:
        table: ``(K, total_q)`` floating point or uint8, ``centroids @ queries.T`` on any scale.
        query_offsets: ``(n_q + 1,)`` int32; not checked, like the other offsets and the pairs.
        codes: ``(n,)`` uint16 or int32. A code above the last centroid is read as the last centroid.
        document_offsets: ``(n_d + 1,)`` int64.
        pairs: ``(p, 2)`` int64 rows of queries and of documents.

    Returns:
        ``(p,)`` float32; minus infinity for documents without tokens, otherwise 0 for queries without tokens.
    """
    _check("tensor_interaction", table, query_offsets, codes, document_offsets, pairs)
    if table.is_cuda:
        from . import triton_kernel

        return triton_kernel.interaction(table, query_offsets, codes, document_offsets, pairs)
    return _by_pair(table, query_offsets, codes, document_offsets, pairs, None)


def tensor_maxsim(
    queries: Tensor,
    table: Tensor,
    query_offsets: Tensor,
    tokens: TensorTokens,
    document_offsets: Tensor,
    codebook: Tensor,
    pairs: Tensor,
) -> Tensor:
    """Score pairs by MaxSim with the encoded tokens.

    The product of a token is ``a * table + b * levels @ query``.

    Args:
        queries: ``(total_q, d)`` float32, float16 or bfloat16, the dtype of the products with levels.
        table: ``(K, total_q)`` floating point, ``centroids @ queries.T``.
        query_offsets: ``(n_q + 1,)`` int32; not checked, like the other offsets and the pairs.
        tokens: The tokens of all documents.
        document_offsets: ``(n_d + 1,)`` int64.
        codebook: ``(2**(8 - nbits), 2**nbits)`` int8, the one passed to `encode`.
        pairs: ``(p, 2)`` int64 rows of queries and of documents.

    Returns:
        ``(p,)`` float32, with the same special cases as `tensor_interaction`.
    """
    _check("tensor_maxsim", table, query_offsets, tokens.codes, document_offsets, pairs)
    if codebook.dtype != torch.int8 or tuple(codebook.shape) not in _CODEBOOKS:
        raise ValueError(f"tensor_maxsim: got a codebook {codebook.dtype} of shape {tuple(codebook.shape)}")
    nbits, n = bits_of(codebook), len(tokens.codes)
    shapes = [tuple(x.shape) for x in (queries, *tokens[1:])]
    expected = [(table.shape[1], queries.shape[-1]), (n, 2), (n, packed_width(queries.shape[-1], nbits))]
    if shapes != expected:
        raise ValueError(f"tensor_maxsim: got queries, coefficients, packed of {shapes}, expected {expected}")
    if table.is_cuda:
        from . import triton_kernel

        parts = (queries, table, query_offsets, tokens, document_offsets, codebook, pairs)
        return triton_kernel.residual_maxsim(*parts)
    levels = levels_of(tokens.packed, codebook, queries.shape[1])
    a, b = tokens.coefficients[:, :1].float(), tokens.coefficients[:, 1:].float()
    return _by_pair(
        table, query_offsets, tokens.codes, document_offsets, pairs, (queries.float(), a, b * levels)
    )


def _by_pair(
    table: Tensor,
    query_offsets: Tensor,
    codes: Tensor,
    document_offsets: Tensor,
    pairs: Tensor,
    residual: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Score one pair after the other in torch; ``residual`` holds queries, a, and b * levels."""
    codes = codes.long()
    codes = codes.where((codes >= 0) & (codes < len(table)), len(table) - 1)
    out = table.new_full((len(pairs),), -torch.inf, dtype=torch.float32)
    for i, (query, document) in enumerate(pairs.tolist()):
        rows = slice(*query_offsets[query : query + 2].tolist())
        tokens = slice(*document_offsets[document : document + 2].tolist())
        scores = table[codes[tokens], rows].float()
        if residual is not None:
            queries, a, levels = residual
            scores = a[tokens] * scores + levels[tokens] @ queries[rows].T
        if len(scores):
            out[i] = scores.amax(0).sum()
    return out


def levels_of(packed: Tensor, codebook: Tensor, dim: int) -> Tensor:
    """Return the levels ``(n, dim)`` float32 of ``packed (n, bytes)``; see `reference.windows`."""
    nbits, both = bits_of(codebook), packed.long()
    both = both | torch.nn.functional.pad(both[:, :-1], (1, 0)) << WINDOW
    planes = [both >> shift & 255 for shift in range(WINDOW - nbits, -1, -nbits)]
    return codebook.flatten()[torch.cat(planes, dim=1)[:, :dim]].float()


def _check(
    name: str, table: Tensor, query_offsets: Tensor, codes: Tensor, document_offsets: Tensor, pairs: Tensor
) -> None:
    bytes_ = table.dtype == torch.uint8 and name == "tensor_interaction"
    if not (table.is_floating_point() or bytes_) or table.dim() != 2 or not len(table):
        raise ValueError(
            f"{name}: table must be (K, total_q) of floats, got {table.dtype} {tuple(table.shape)}"
        )
    _check_dtypes(
        name,
        table.device,
        ("query_offsets", query_offsets, torch.int32, 1),
        ("codes", codes, torch.uint16 if codes.dtype == torch.uint16 else torch.int32, 1),
        ("document_offsets", document_offsets, torch.int64, 1),
        ("pairs", pairs, torch.int64, 2),
    )


def _check_dtypes(name: str, device: torch.device, *tensors: tuple[str, Tensor, torch.dtype, int]) -> None:
    for what, x, dtype, dims in tensors:
        if x.dtype != dtype or x.dim() != dims or x.device != device:
            expected = "torch.uint16 or torch.int32" if what == "codes" else dtype
            raise ValueError(
                f"{name}: {what} must be {expected} with {dims} dimension(s) on "
                f"{device}, got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
