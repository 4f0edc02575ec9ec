"""Alternatives to `score` for token vectors: mean MaxSim, XTR, multi-vector attention.

Each function maps ``n_q`` queries and ``n_d`` documents to scores ``(n_q, n_d)`` and is differentiable. As
with `score`, a document without tokens scores ``-inf`` and a query without tokens 0.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.core.representation import MultiVector
from irkit.core.scoring import check_comparable, score
from irkit.core.token_selection import check_count
from irkit.errors import BadTypeError, BadValueError, CorruptError
from irkit.utils.atomic import explained
from irkit.utils.weights import read_weights, write_weights


def mean_maxsim(queries: MultiVector, documents: MultiVector) -> Tensor:
    """Compute MaxSim divided by the number of query tokens, which makes queries of any length comparable.

    Args:
        queries: ``n_q`` queries.
        documents: ``n_d`` documents of the same width.

    Returns:
        ``(n_q, n_d)`` float32.

    Examples:
        >>> from irkit import Ragged
        >>> tokens = MultiVector(Ragged.from_rows([torch.eye(2)]))
        >>> mean_maxsim(tokens, tokens).tolist()
        [[1.0]]
    """
    _check("mean_maxsim", queries, documents)
    lengths = queries.tokens.lengths.clamp(min=1).to(queries.tokens.device)
    return score(queries, documents) / lengths[:, None]


def xtr(queries: MultiVector, documents: MultiVector, k: int) -> Tensor:
    """Compute XTR: each query token retrieves the best ``k`` tokens of all documents, and only these count.

    The score of a query token for a document is the highest score of the document's retrieved tokens. If the
    query token retrieved none of the document's tokens, the lowest score that the query token retrieved
    stands in: an upper bound of the missing score. The result is the mean over the query tokens.

    Args:
        queries: ``n_q`` queries.
        documents: ``n_d`` documents of the same width: the collection.
        k: Maximum number of tokens that a query token retrieves (k' of the paper).

    Returns:
        ``(n_q, n_d)``, float32 or float64.

    Examples:
        >>> from irkit import Ragged
        >>> vectors = [torch.tensor([[0.9, 0.0], [0.6, 0.1]]), 0.5 * torch.eye(2)]
        >>> documents = MultiVector(Ragged.from_rows(vectors))
        >>> xtr(MultiVector(Ragged.from_rows([torch.eye(2)])), documents, k=2)
        tensor([[0.5000, 0.5500]])

    Source: Lee et al. 2023, "Rethinking the Role of Token Retrieval in Multi-Vector Retrieval", eq. 6.
    """
    _check("xtr", queries, documents)
    values, best = _retrieve(queries, documents, k)
    lowest = values[:, -1:] if values.shape[1] else values.new_zeros(len(values), 1)
    filled = torch.where(best == -math.inf, lowest, best)
    counts = queries.tokens.lengths.clamp(min=1).to(filled.device)
    return _per_query(filled, queries, documents, counts[:, None])


def xtr_in_batch(queries: MultiVector, documents: MultiVector, k: int) -> Tensor:
    """Compute XTR as in training, where missing scores are ignored instead of imputed.

    For each query token that retrieved tokens of a document, the highest retrieved score counts. The score of
    the document is the mean of these scores over the query tokens that have one. The score is 0 if no query
    token retrieved a token of the document. Only retrieved tokens get gradients.

    Args:
        queries: ``n_q`` queries.
        documents: ``n_d`` documents of the same width: all documents of the batch.
        k: Maximum number of tokens of the batch that a query token retrieves.

    Returns:
        ``(n_q, n_d)``, float32 or float64.

    Source: Lee et al. 2023, eq. 5.
    """
    _check("xtr_in_batch", queries, documents)
    _, best = _retrieve(queries, documents, k)
    retrieved = best != -math.inf
    counts = best.new_zeros(len(queries), len(documents))
    counts = counts.index_add(0, queries.tokens.row_ids(), retrieved.to(best.dtype))
    return _per_query(torch.where(retrieved, best, 0.0), queries, documents, counts.clamp(min=1))


def xtr_ranking(scores: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Rank documents for one query by `xtr`, from the tokens that an index of tokens retrieved.

    Args:
        scores: ``(tokens, k)`` scores of the tokens that each query token retrieved, in any order.
        documents: ``(tokens, k)`` integers: the document of each of these tokens; negative numbers mark
            padding.

    Returns:
        Documents ``(n,)``, each once, best first, ties in rising order; and their scores ``(n,)``.

    Raises:
        BadTypeError: An argument is not a tensor, or documents are not integers.
        BadValueError: The shapes differ.

    Examples:
        >>> retrieved = torch.tensor([[0.9, 0.6], [0.5, 0.1]]), torch.tensor([[7, 7], [3, 7]])
        >>> [values.tolist() for values in xtr_ranking(*retrieved)]
        [[3, 7], [0.550000011920929, 0.5]]

    Source: Lee et al. 2023, eq. 6.
    """
    if not isinstance(scores, Tensor) or not isinstance(documents, Tensor):
        raise BadTypeError(
            f"xtr_ranking: got {type(scores).__name__} and {type(documents).__name__}, expected two tensors "
            "(tokens, k)"
        )
    if documents.is_floating_point():
        raise BadTypeError(f"xtr_ranking: documents are {documents.dtype}, expected integers")
    if scores.dim() != 2 or scores.shape != documents.shape:
        raise BadValueError(
            f"xtr_ranking: scores {tuple(scores.shape)} and documents {tuple(documents.shape)} must be two "
            "equal shapes (tokens, k)"
        )
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    ids, columns = torch.unique(documents, return_inverse=True)  # ascending
    best = scores.new_full((len(scores), len(ids)), -math.inf).scatter_reduce(1, columns, scores, "amax")
    real = documents >= 0
    lowest = scores.where(real, math.inf).amin(1, keepdim=True) if scores.numel() else scores[:, :0]
    best = torch.where(best == -math.inf, lowest.where(real.any(1, keepdim=True), 0.0), best)
    ids, best = ids[ids >= 0], best[:, ids >= 0]
    ranked, order = best.mean(0).sort(descending=True, stable=True)
    return ids[order], ranked


class MultiVectorAttention(nn.Module):
    """A learned reranker in which query tokens attend to document tokens by projections.

    The score is ``1/q sum_i QV_i . Attention(QK_i, DK, DV)``: each query token compares its value with the
    average of the document's values, weighted by the softmax over the document tokens of ``QK_i . DK_j /
    sqrt(dim)``. With several heads, each has its own keys and values, and the scores of the heads are added.

    Attributes:
        heads: Number of heads.
        query_key, query_value, document_key, document_value: Linear layers without bias.
        max_pairs: Maximum number of pairs of tokens compared at a time, without gradients.

    Examples:
        >>> from irkit import Ragged
        >>> attention = MultiVectorAttention(384, dim=64)
        >>> attention(MultiVector(Ragged.from_rows([torch.randn(5, 384)])),
        ...           MultiVector(Ragged.from_rows([torch.randn(9, 384), torch.randn(2, 384)]))).shape
        torch.Size([1, 2])

    Source: Multi-Vector Attention Models for Deep Re-ranking, section 2.1.
    """

    def __init__(
        self, width: int, dim: int | None = None, document_width: int | None = None, heads: int = 1
    ) -> None:
        """Create random weights.

        Args:
            width: Width of query tokens.
            dim: Width of keys and values of a head; by default ``width``.
            document_width: Width of document tokens, if it differs (after `temporal_pooling`).
            heads: Number of heads.

        Raises:
            BadTypeError: An argument is not a whole number.
            BadValueError: An argument is below 1.
        """
        super().__init__()
        self.max_pairs = 1 << 23
        dim = width if dim is None else dim
        other = width if document_width is None else document_width
        counts = {"width": width, "dim": dim, "document_width": other, "heads": heads}
        for name, count in counts.items():
            check_count("MultiVectorAttention", name, count)
        self.heads = heads
        self.query_key = nn.Linear(width, heads * dim, bias=False)
        self.query_value = nn.Linear(width, heads * dim, bias=False)
        self.document_key = nn.Linear(other, heads * dim, bias=False)
        self.document_value = nn.Linear(other, heads * dim, bias=False)

    @classmethod
    def from_pretrained(cls, path: str | Path, heads: int = 1) -> Self:
        """Load the attention from the directory ``path``, to which `save_pretrained` wrote.

        Args:
            path: A directory.
            heads: Number of heads, which the weights do not tell.

        Raises:
            StorageError: The directory has no ``model.safetensors``.
            CorruptError: The file is damaged, or has other weights.
        """
        tensors = {name: value.float() for name, value in read_weights(path).items()}
        try:
            dim, width = tensors["query_key.weight"].shape
            loaded = cls(width, dim // heads, tensors["document_key.weight"].shape[1], heads)
            loaded.load_state_dict(tensors)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CorruptError(f"loading {path}: no MultiVectorAttention: {error}") from error
        return loaded.eval()

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``model.safetensors`` to the directory ``path``.

        No configuration is written: `from_pretrained` reads the widths from the shapes of the weights.

        Raises:
            StorageError: Writing failed.
        """
        with explained(f"saving {path}"):
            Path(path).mkdir(parents=True, exist_ok=True)
            write_weights(path, self.state_dict())

    def project_queries(self, queries: MultiVector) -> MultiVector:
        """Return a vector ``(2 heads dim,)`` per query token: the keys of all heads, then their values."""
        return _project(queries, self.query_key, self.query_value)

    def project_documents(self, documents: MultiVector) -> MultiVector:
        """Return a vector ``(2 heads dim,)`` per document token: the keys of all heads, then their values.

        An index can store these vectors, and `attend` compares them later.
        """
        return _project(documents, self.document_key, self.document_value)

    if TYPE_CHECKING:  # nn.Module.__call__ returns Any

        def __call__(self, queries: MultiVector, documents: MultiVector) -> Tensor: ...  # noqa: D102

    def forward(self, queries: MultiVector, documents: MultiVector) -> Tensor:
        """Compute scores ``(n_q, n_d)`` of token vectors ``(total, width)``.

        Raises:
            BadTypeError: An argument is not a MultiVector.
            BadValueError: Vectors have another width.
        """
        _check_kinds("MultiVectorAttention", queries, documents)
        return self.attend(self.project_queries(queries), self.project_documents(documents))

    def attend(self, queries: MultiVector, documents: MultiVector) -> Tensor:
        """Compute scores ``(n_q, n_d)`` of the results of `project_queries` and `project_documents`.

        Raises:
            BadTypeError: An argument is not a MultiVector.
            BadValueError: The widths differ.
        """
        _check("MultiVectorAttention", queries, documents)
        pairs = len(queries.tokens.values) * len(documents.tokens.values)
        step = max(1, self.max_pairs * len(queries) // max(1, pairs))
        if step < len(queries) and not torch.is_grad_enabled():  # in bounded memory
            starts = range(0, len(queries), step)
            return torch.cat([self.attend(queries[start : start + step], documents) for start in starts])
        rows, shape = documents.tokens.row_ids(), (len(documents), len(queries.tokens.values))
        sides = (side.tokens.values.chunk(2 * self.heads, dim=1) for side in (queries, documents))
        query, document = sides  # keys of all heads, then values
        means = query[0].new_zeros(shape)
        for head in range(self.heads):
            qk, qv = query[head], query[self.heads + head]
            dk, dv = document[head], document[self.heads + head]
            means = means + _attended(dk @ qk.T / math.sqrt(qk.shape[1]), dv @ qv.T, rows, len(documents))
        counts = queries.tokens.lengths.clamp(min=1).to(means.device)
        return _per_query(means.T, queries, documents, counts[:, None])


def _attended(logits: Tensor, products: Tensor, rows: Tensor, n_d: int) -> Tensor:
    """Average ``products`` over the tokens of each document, by the softmax of ``logits``.

    ``QV_i . sum_j a_ij DV_j = sum_j a_ij (QV_i . DV_j)``: the average vectors are never stored.

    Args:
        logits: ``(t_d, t_q)``, for each token of a document and of a query.
        products: ``(t_d, t_q)`` inner products of values.
        rows: ``(t_d,)`` int64, the document of each token.
        n_d: Number of documents.

    Returns:
        ``(n_d, t_q)``; 0 for a document without tokens.
    """
    shape = (n_d, logits.shape[1])
    highest = logits.new_zeros(shape).scatter_reduce(
        0, rows[:, None].expand_as(logits), logits.detach(), "amax", include_self=False
    )
    weights = (logits - highest[rows]).exp()
    total = logits.new_zeros(shape).index_add(0, rows, weights)
    attended = logits.new_zeros(shape).index_add(0, rows, weights * products)
    return attended / total.clamp(min=torch.finfo(total.dtype).tiny)


def _check(operation: str, queries: MultiVector, documents: MultiVector) -> None:
    _check_kinds(operation, queries, documents)
    check_comparable(queries, documents)


def _check_kinds(operation: str, queries: MultiVector, documents: MultiVector) -> None:
    if not isinstance(queries, MultiVector) or not isinstance(documents, MultiVector):
        raise BadTypeError(
            f"{operation}: got {type(queries).__name__} and {type(documents).__name__}, expected two "
            "MultiVector: one vector a token"
        )


def _retrieve(queries: MultiVector, documents: MultiVector, k: int) -> tuple[Tensor, Tensor]:
    """Return the scores of the tokens that each query token retrieves, and the best of them per document.

    Returns:
        The scores ``(t_q, min(k, t_d))``, best first, for ``t_q`` query and ``t_d`` document tokens. And the
        highest retrieved score per query token and document, ``(t_q, n_d)``; -inf where none was retrieved.
    """
    check_count("xtr", "k", k)
    q, d = queries.tokens, documents.tokens
    kind = torch.promote_types(q.values.dtype, torch.float32)
    similarity = q.values.to(kind) @ d.values.to(kind).T
    values, tokens = similarity.topk(min(k, similarity.shape[1]), dim=1)
    best = similarity.new_full((len(similarity), len(documents)), -math.inf)
    return values, best.scatter_reduce(1, d.row_ids()[tokens], values, "amax")


def _per_query(tokens: Tensor, queries: MultiVector, documents: MultiVector, counts: Tensor) -> Tensor:
    """Sum ``tokens (t_q, n_d)`` over the tokens of each query, and divide the sums by ``counts``.

    Args:
        tokens: ``(t_q, n_d)`` scores of the query tokens.
        queries: The queries of these tokens.
        documents: The ``n_d`` documents.
        counts: Divisors that broadcast to ``(n_q, n_d)``.

    Returns:
        ``(n_q, n_d)``; -inf for a document without tokens, unless the query has no tokens either.
    """
    total = tokens.new_zeros(len(queries), len(documents)).index_add(0, queries.tokens.row_ids(), tokens)
    empty = (documents.tokens.lengths == 0).to(total.device)
    unanswered = empty[None, :] & (queries.tokens.lengths > 0).to(total.device)[:, None]
    return (total / counts).masked_fill(unanswered, -math.inf)


def _project(vectors: MultiVector, key: nn.Linear, value: nn.Linear) -> MultiVector:
    if vectors.dim != key.in_features:
        raise BadValueError(
            f"MultiVectorAttention: got vectors of width {vectors.dim}, expected {key.in_features}"
        )
    joined = F.linear(vectors.tokens.values, torch.cat([key.weight, value.weight]))
    return MultiVector(vectors.tokens.with_values(joined))
