"""The score of each kind of representation, which every index computes exactly or approximately."""

from __future__ import annotations

import torch
from irkit_kernels.maxsim import maxsim, maxsim_stored
from torch import Tensor

from irkit.core.ragged import to_device
from irkit.core.representation import Dense, MultiVector, Representation, Sparse
from irkit.errors import BadTypeError, BadValueError
from irkit.utils.forking import one_thread_after_fork

_FEW_QUERIES = 16


def score(queries: Representation, documents: Representation) -> Tensor:
    """Score every query against every document; higher is better.

    The score of Dense and Sparse is the inner product. The score of MultiVector is MaxSim: the sum over the
    query tokens of the largest inner product with a token of the document (Khattab and Zaharia 2020, eq. 3);
    a document without tokens scores ``-inf``. Scores are computed in float32 and differentiable.

    Args:
        queries: ``n_q`` representations.
        documents: ``n_d`` representations of the same kind and width, on the same device.

    Returns:
        ``(n_q, n_d)`` float32.

    Raises:
        BadTypeError: The kinds differ.
        BadValueError: The widths differ.

    Examples:
        >>> import torch
        >>> score(Dense(torch.eye(2)), Dense(torch.eye(2))).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    check_comparable(queries, documents)
    if isinstance(queries, Dense) and isinstance(documents, Dense):
        return _inner_products(queries.values.float(), documents.values.float())
    if isinstance(queries, MultiVector) and isinstance(documents, MultiVector):
        return _maxsim(queries, documents)
    assert isinstance(queries, Sparse) and isinstance(documents, Sparse)  # noqa: PT018 (checked above)
    dense = queries.to(dtype=torch.float32).to_dense()
    table = dense.T.reshape(-1).view(dense.shape[::-1])  # (vocabulary, n_q), whose columns are adjacent
    return torch.nn.functional.embedding_bag(  # row d: the sum of weight x table[term] over its terms
        documents.terms.values.int(),
        table,
        documents.terms.offsets,
        mode="sum",
        per_sample_weights=documents.weights.float(),
        include_last_offset=True,
    ).T


def score_pairs(queries: Representation, documents: Representation, pairs: Tensor | None = None) -> Tensor:
    """Score some pairs of queries and documents, see `score`.

    Args:
        queries: ``n_q`` representations.
        documents: ``n_d`` representations of the same kind and width.
        pairs: ``(p, 2)`` int64, per pair the row of a query and the row of a document. None pairs query ``i``
            with document ``i``.

    Returns:
        ``(p,)`` float32.
    """
    check_comparable(queries, documents)
    if pairs is None:
        if len(queries) != len(documents):
            raise BadValueError(
                f"score_pairs: got {len(queries)} queries and {len(documents)} documents, expected as many"
            )
        if isinstance(queries, Dense) and isinstance(documents, Dense):
            return (queries.values.float() * documents.values.float()).sum(1)
        if len(queries) == 1:  # faster than as a pair
            return score(queries, documents).view(1)
        rows = torch.arange(len(queries), device="cpu")
        pairs = torch.stack([rows, rows], dim=1)
    if isinstance(queries, Dense) and isinstance(documents, Dense):
        left, right = pairs.T
        return (queries.values.float()[left] * documents.values.float()[right]).sum(1)
    if isinstance(queries, MultiVector) and isinstance(documents, MultiVector):
        return _maxsim(queries, documents, to_device(pairs, queries.tokens.device))
    parts = [score(queries[i : i + 1], documents[j : j + 1])[0] for i, j in pairs.tolist()]
    return torch.cat(parts) if parts else torch.zeros(0, device="cpu")


def score_rows(queries: MultiVector, documents: MultiVector, rows: Tensor) -> Tensor:
    """Score some documents for each query, see `score`; the host never waits for a GPU.

    Args:
        queries: ``n_q`` queries.
        documents: ``n_d`` documents.
        rows: ``(n_q, n)`` int64 on the device of the vectors: per query, the rows of the documents to score.

    Returns:
        ``(n_q, n)`` float32.
    """
    check_comparable(queries, documents)
    own = torch.arange(len(queries), device=rows.device)[:, None].expand_as(rows)
    pairs = torch.stack([own.flatten(), rows.flatten()], dim=1)
    maxima = rows.shape[1] * len(queries.tokens.values)
    return _maxsim(queries, documents, pairs, maxima).view(rows.shape)


def check_comparable(queries: Representation, documents: Representation) -> None:
    """Raise BadTypeError unless both are of one kind, and BadValueError unless they have one width."""
    one_thread_after_fork()
    if not isinstance(queries, Representation) or type(queries) is not type(documents):
        raise BadTypeError(
            f"score: queries are {type(queries).__name__} and documents are {type(documents).__name__}; "
            "expected two Dense, two MultiVector or two Sparse"
        )
    if queries.dim != documents.dim:
        raise BadValueError(
            f"score: queries have dimension {queries.dim} and documents {documents.dim}; "
            "encode both with the same model"
        )


def _inner_products(queries: Tensor, documents: Tensor) -> Tensor:
    # On a CPU torch multiplies few rows by many columns, or a matrix by one vector, at a third of the
    # bandwidth of memory; it multiplies many rows by a few columns, at least two, at nearly all of it.
    if len(queries) == 1:
        return (documents @ queries.repeat(2, 1).T)[:, :1].T
    if len(queries) < _FEW_QUERIES:
        return (documents @ queries.T).T
    return queries @ documents.T


def _maxsim(
    queries: MultiVector, documents: MultiVector, pairs: Tensor | None = None, maxima: int | None = None
) -> Tensor:
    q, d = queries.tokens, documents.tokens
    values = (q.values, d.values)
    gradients = torch.is_grad_enabled() and (q.values.requires_grad or d.values.requires_grad)
    stored = q.values.is_cpu and [x.dtype for x in values] == [torch.float32, torch.float16]
    if stored and not gradients and not torch.compiler.is_compiling():
        return maxsim_stored(q.values, q.offsets, d.values, d.offsets, pairs=pairs)
    if q.values.dtype != d.values.dtype or q.values.dtype == torch.float64:
        values = (q.values.float(), d.values.float())
    return maxsim(values[0], q.offsets, values[1], d.offsets, pairs, maxima)
