"""Explain the score of a document: match its tokens or terms to the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from irkit.core.representation import MultiVector, Sparse
from irkit.core.scoring import score
from irkit.data import Document, Vector
from irkit.data.parsing import parse_documents
from irkit.encoder_free import Impacts, Vectors
from irkit.errors import BadValueError
from irkit.retrieval.collection import Collection
from irkit.retrieval.explanation import Explanation, Match
from irkit.retrieval.hits import find_rows
from irkit.tokenizer import TokenSpan, strings, well_formed

if TYPE_CHECKING:
    from irkit.heads import Side
    from irkit.model import Model


class TokenVectors(NamedTuple):
    """A text, a MultiVector of one row, and the token of each of its vectors."""

    text: str
    vectors: MultiVector
    spans: Sequence[TokenSpan]


def match_tokens(query: TokenVectors, document: TokenVectors) -> Explanation:
    """Match each vector of the query to the nearest vector of the document: the summands of MaxSim.

    Raises:
        BadValueError: There is not exactly one row, or not exactly one token per vector.

    Examples:
        >>> import torch
        >>> from irkit import Ragged
        >>> vectors = MultiVector(Ragged.from_rows([torch.eye(2)]))
        >>> query = TokenVectors("big cat", vectors, [TokenSpan("big", 0, 3), TokenSpan("cat", 4, 7)])
        >>> document = TokenVectors("cats roar", vectors, [TokenSpan("roar", 5, 9), TokenSpan("cats", 0, 4)])
        >>> [(match.query.token, match.document.token, match.score)
        ...  for match in match_tokens(query, document).matches]
        [('big', 'roar', 1.0), ('cat', 'cats', 1.0)]
    """
    for side in (query, document):
        if len(side.vectors) != 1 or len(side.vectors.tokens.values) != len(side.spans):
            raise BadValueError(
                f"match_tokens: {len(side.vectors)} rows of {len(side.vectors.tokens.values)} vectors and "
                f"{len(side.spans)} tokens; expected one row and a token for each vector"
            )
    total = score(query.vectors, document.vectors).item()
    matches: list[Match] = []
    if document.spans and query.spans:
        q, d = query.vectors.tokens.values.float(), document.vectors.tokens.values.float()
        best, positions = (q @ d.T).max(dim=1)
        matches = [
            Match(span, document.spans[position], value)
            for span, position, value in zip(query.spans, positions.tolist(), best.tolist(), strict=True)
        ]
    return Explanation(query.text, document.text, total, tuple(matches))


class TermWeights(NamedTuple):
    """A text, a Sparse of one row, the strings of its terms, and the tokens of the text."""

    text: str
    weights: Sparse
    vocabulary: Sequence[str]
    spans: Sequence[TokenSpan]


def match_terms(query: TermWeights, document: TermWeights) -> Explanation:
    """Match the terms that query and document share, by descending score: the summands of the inner product.

    The position of a term is its first occurrence in the text; a term that the model has added has none.

    Raises:
        BadValueError: There is not exactly one row, or the vocabularies differ in size.

    Examples:
        >>> import torch
        >>> from irkit import Ragged
        >>> def weights(text, terms, values, *spans):
        ...     row = Sparse(Ragged.from_rows([terms]), torch.tensor(values), 3)
        ...     return TermWeights(text, row, ["cat", "dog", "pet"], spans)
        >>> query = weights("my cat", [0, 2], [2.0, 0.5], TokenSpan("cat", 3, 6))
        >>> document = weights("A pet", [1, 2], [0.25, 1.5], TokenSpan("pet", 2, 5))
        >>> [match] = match_terms(query, document).matches
        >>> match.query.token, match.score, match.weights
        ('pet', 0.75, (0.5, 1.5))
    """
    if len(query.weights) != 1 or len(document.weights) != 1 or query.weights.dim != document.weights.dim:
        raise BadValueError(
            f"match_terms: {len(query.weights)} and {len(document.weights)} rows over {query.weights.dim} "
            f"and {document.weights.dim} terms; expected one row each over the same vocabulary"
        )
    first_spans = [{span.token: span for span in reversed(side.spans)} for side in (query, document)]
    by_term = dict(
        zip(document.weights.terms.values.tolist(), document.weights.weights.tolist(), strict=True)
    )
    matches = []
    for term, weight in zip(query.weights.terms.values.tolist(), query.weights.weights.tolist(), strict=True):
        if term in by_term:
            name = query.vocabulary[term]
            first, second = (
                spans.get(name) or TokenSpan(name, len(side.text), len(side.text))
                for side, spans in zip((query, document), first_spans, strict=True)
            )
            matches.append(Match(first, second, weight * by_term[term], (weight, by_term[term])))
    matches.sort(key=lambda match: -match.score)
    total = score(query.weights, document.weights).item()
    return Explanation(query.text, document.text, total, tuple(matches))


def explain_document(
    collection: Collection,
    query: str | Vector,
    document: str | Document | Mapping[str, Any] | tuple[str, Any],
) -> Explanation:
    """Explain the score of a document of the index, or of another one, see `irkit.Retriever.explain`."""
    model, rows = collection.model, None
    if isinstance(document, str):
        advice = "expected an id of the index; Retriever.explain takes other texts as a Document"
        rows = find_rows(collection.documents, [document], "explaining a score", advice)
        [item] = collection.documents.fetch(rows)
    else:
        [item] = parse_documents([document])
    if isinstance(model, Vectors):
        raise BadValueError("explaining a score: vectors that were computed elsewhere belong to no words")
    if not isinstance(model, Impacts):
        return explain(cast(Any, model), cast(str, query), item.full_text)
    if rows is None:
        weights = model.encode_representation([collection.content(item)], "document")
    else:
        weights = cast(Sparse, collection.index.representations(rows))
    terms, query_weights = model.vocabulary, model.encode_representation([cast(Any, query)], "query")
    return match_terms(
        TermWeights("", query_weights, terms, ()), TermWeights(item.full_text, weights, terms, ())
    )


def explain(model: Model, query: str, document: str) -> Explanation:
    """Explain the score that a model gives to a document, by tokens or by terms.

    For a multi-vector model that pools tokens, the score is computed from the vectors before pooling.

    Args:
        model: A multi-vector or sparse model.
        query: A text.
        document: A text.

    Raises:
        BadTypeError: Query or document is not a string.
        BadValueError: The model is dense.
    """
    if model.kind == "dense":
        raise BadValueError(
            "explain: the model makes dense representations, which have no tokens to match; expected "
            "multi_vector or sparse"
        )
    query, document = map(well_formed, strings([query, document]))  # as the tokenizer sees them
    if model.kind == "sparse":
        return match_terms(_term_weights(model, query, "query"), _term_weights(model, document, "document"))
    return match_tokens(
        TokenVectors(query, *model.encode_with_token_spans(query, "query")),
        TokenVectors(document, *model.encode_with_token_spans(document, "document")),
    )


def _term_weights(model: Model, text: str, side: Side) -> TermWeights:
    weights = cast(Sparse, model.encode_representation([text], side))
    return TermWeights(text, weights, model.vocabulary, model.token_spans(text, side))
