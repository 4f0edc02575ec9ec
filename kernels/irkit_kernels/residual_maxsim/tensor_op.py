"""The steps of a search for torch tensors: pairs of queries and documents on CUDA, or slowly anywhere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .reference import NBITS, WINDOW, bits_of, packed_width

__all__ = ["TensorTokens", "levels_of", "tensor_interaction", "tensor_maxsim", "tensor_probe"]

_CODEBOOKS = [(2 ** (WINDOW - nbits), 2**nbits) for nbits in NBITS]


class TensorTokens(NamedTuple):
    """`Tokens` on a device.

    Attributes:
        codes: ``(n,)`` uint16 or int32.
        coefficients: ``(n, 2)`` float16.
        packed: ``(n, bytes)`` uint8.
    """

    codes: Tensor
    coefficients: Tensor
    packed: Tensor


def tensor_probe(list_offsets: Tensor, lists: Tensor, visits: Tensor, n_q: int, n: int) -> Tensor:
    """Count how many of a query's visits find each document.

    Args:
        list_offsets: ``(K + 1,)`` int64; documents of centroid ``c`` lie from the ``c``-th on; trusted.
        lists: int32 documents of all centroids; those that are not below ``n`` are passed over.
        visits: ``(v, 2)`` int64, query and centroid of each; a centroid of -1 is none. Trusted.
        n_q: Number of queries.
        n: Number of documents.

    Returns:
        ``(n_q, n)`` int32.
    """
    given = (("list_offsets", list_offsets, torch.int64, 1), ("lists", lists, torch.int32, 1))
    _check_dtypes("tensor_probe", lists.device, *given, ("visits", visits, torch.int64, 2))
    counts = torch.zeros(n_q, n, dtype=torch.int32, device=lists.device)
    if lists.is_cuda:
        from . import triton_kernel

        return triton_kernel.probe(list_offsets, lists, visits, counts)
    query, centroid = visits[visits[:, 1] >= 0].T
    sizes = list_offsets.diff()[centroid]
    places = torch.arange(int(sizes.sum()), device=lists.device)
    places += torch.repeat_interleave(list_offsets[centroid] - sizes.cumsum(0) + sizes, sizes)
    query, found = query.repeat_interleave(sizes), lists[places].long()
    inside = (found >= 0) & (found < n)
    found = (query * n + found)[inside]
    counts.view(-1).scatter_add_(0, found, torch.ones_like(found, dtype=torch.int32))
    return counts


def tensor_interaction(
    table: Tensor, query_offsets: Tensor, codes: Tensor, document_offsets: Tensor, pairs: Tensor
) -> Tensor:
    """Score pairs roughly: MaxSim with document tokens replaced by their centroids.

    Args:
        table: ``(K, total_q)`` floating point or uint8, ``centroids @ queries.T`` on any scale.
        query_offsets: ``(n_q + 1,)`` int32; trusted, as are the other offsets and the pairs.
        codes: ``(n,)`` uint16 or int32. One that is no centroid counts as the last.
        document_offsets: ``(n_d + 1,)`` int64.
        pairs: ``(p, 2)`` int64 rows of queries and of documents.

    Returns:
        ``(p,)`` float32; minus infinity for a document without tokens, else 0 for a query without.
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
    """Score pairs: MaxSim with the encoded tokens, products of a token as ``a * table + b * levels @ query``.

    Args:
        queries: ``(total_q, d)`` float32, float16 or bfloat16: what levels are multiplied in.
        table: ``(K, total_q)`` floating point, ``centroids @ queries.T``.
        query_offsets: ``(n_q + 1,)`` int32; trusted, as are the other offsets and the pairs.
        tokens: Of all documents.
        document_offsets: ``(n_d + 1,)`` int64.
        codebook: ``(2**(8 - nbits), 2**nbits)`` int8, that of `encode`.
        pairs: ``(p, 2)`` int64 rows of queries and of documents.

    Returns:
        ``(p,)`` float32, as `tensor_interaction`.
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
    codes = codes.long()
    codes = codes.where((codes >= 0) & (codes < len(table)), len(table) - 1)
    out = table.new_full((len(pairs),), -torch.inf, dtype=torch.float32)
    for i, (query, document) in enumerate(pairs.tolist()):
        rows = slice(*query_offsets[query : query + 2].tolist())
        at = slice(*document_offsets[document : document + 2].tolist())
        scores = table[codes[at], rows].float()
        if residual is not None:
            queries, a, rest = residual
            scores = a[at] * scores + rest[at] @ queries[rows].T
        if len(scores):
            out[i] = scores.amax(0).sum()
    return out


def levels_of(packed: Tensor, codebook: Tensor, dim: int) -> Tensor:
    """The levels ``(n, dim)`` float32 that ``packed (n, bytes)`` stands for."""
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


def _check_dtypes(name: str, device: torch.device, *given: tuple[str, Tensor, torch.dtype, int]) -> None:
    for what, x, dtype, dims in given:
        if x.dtype != dtype or x.dim() != dims or x.device != device:
            expected = "torch.uint16 or torch.int32" if what == "codes" else dtype
            raise ValueError(
                f"{name}: {what} must be {expected} with {dims} dimension(s) on "
                f"{device}, got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
