"""Explain the score of a document: match its tokens or terms to the query, and show the matches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from irkit.core.representation import MultiVector, Sparse
from irkit.core.scoring import score
from irkit.data import Document, Vector, parse_documents
from irkit.encoder_free import Impacts, Vectors
from irkit.errors import BadValueError
from irkit.index import WindowsConfig
from irkit.retrieval.collection import Collection
from irkit.retrieval.highlighting import Segment, split_passages, split_segments, word_finder
from irkit.retrieval.searching import find_rows
from irkit.retrieval.windows import score_in_windows
from irkit.tokenizer import TokenSpan, strings, well_formed
from irkit.utils.atomic import write_text

if TYPE_CHECKING:
    from jinja2 import Template
    from rich.console import Group

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
    Further occurrences in the document are `Match.repeats`.

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
    spans_by_token: list[dict[str, list[TokenSpan]]] = [{}, {}]  # of each term in query and document
    for side, spans in zip((query, document), spans_by_token, strict=True):
        for span in side.spans:
            spans.setdefault(span.token, []).append(span)
    by_term = dict(
        zip(document.weights.terms.values.tolist(), document.weights.weights.tolist(), strict=True)
    )
    matches = []
    for term, weight in zip(query.weights.terms.values.tolist(), query.weights.weights.tolist(), strict=True):
        if term in by_term:
            name = query.vocabulary[term]
            (first, *_), (second, *repeats) = (
                spans.get(name) or [TokenSpan(name, len(side.text), len(side.text))]
                for side, spans in zip((query, document), spans_by_token, strict=True)
            )
            weights = weight, by_term[term]
            matches.append(Match(first, second, weight * by_term[term], weights, tuple(repeats)))
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
        rows = find_rows(collection.documents, document, "explaining a score", advice)
        [item] = collection.documents.fetch(rows)
    else:
        [item] = parse_documents([document])
    if isinstance(model, Vectors):
        raise BadValueError("explaining a score: vectors that were computed elsewhere belong to no words")
    if not isinstance(model, Impacts):
        windows = collection.index.windows
        if windows is not None:
            return _explain_windows(collection, windows, cast(str, query), item)
        return explain(cast(Any, model), cast(str, query), item.full_text)
    if rows is None:
        weights = model.encode_representation([collection.content(item)], "document")
    else:
        weights = cast(Sparse, collection.index.representations(rows))
    terms, query_weights = model.vocabulary, model.encode_representation([cast(Any, query)], "query")
    return match_terms(
        TermWeights("", query_weights, terms, ()), TermWeights(item.full_text, weights, terms, ())
    )


def _explain_windows(
    collection: Collection, windows: WindowsConfig, query: str, document: Document
) -> Explanation:
    """Explain the score of a document by the matches of its best window."""
    [query] = strings([query])
    text = well_formed(document.full_text)
    [[score]], [[(start, end)]] = score_in_windows(collection, windows, [query], [Document("-", text)])
    explanation = explain(cast(Any, collection.model), query, text[start:end])

    def move(span: TokenSpan) -> TokenSpan:
        return span._replace(start=span.start + start, end=span.end + start)

    def moved(explanation: Explanation, score: float) -> Explanation:
        matches = (
            replace(match, document=move(match.document), repeats=tuple(map(move, match.repeats)))
            for match in explanation.matches
        )
        parts = {name: moved(part, part.score) for name, part in explanation.parts.items()}
        return Explanation(explanation.query, text, score, tuple(matches), parts)

    return moved(explanation, float(score))


def explain(model: Model, query: str, document: str) -> Explanation:
    """Explain the score that a model gives to a document by tokens, by terms or, if it is dense, by passages.

    For a multi-vector model that pools tokens, the score is computed from the vectors before pooling.

    Args:
        model: A model of any kind.
        query: A text.
        document: A text.

    Raises:
        BadTypeError: Query or document is not a string.
    """
    query, document = map(well_formed, strings([query, document]))  # as the tokenizer sees them
    if model.kind == "several":
        parts = {name: explain(head, query, document) for name, head in model.heads.items()}
        return Explanation(query, document, sum(part.score for part in parts.values()), (), parts)
    if model.kind == "dense":
        return _match_passages(model, query, document)
    if model.kind == "sparse":
        return match_terms(_term_weights(model, query, "query"), _term_weights(model, document, "document"))
    return match_tokens(
        TokenVectors(query, *model.encode_with_token_spans(query, "query")),
        TokenVectors(document, *model.encode_with_token_spans(document, "document")),
    )


def _match_passages(model: Model, query: str, document: str) -> Explanation:
    """Match the query to each passage that the model reads of the document, encoded on its own."""
    end = max((span.end for span in model.token_spans(document, "document")), default=0)
    spans = []
    for start, stop in split_passages(document[:end]):
        passage = document[start:stop].strip()
        if passage:
            start = document.index(passage, start)
            spans.append(TokenSpan(passage, start, start + len(passage)))
    texts = [document, *(span.token for span in spans)]
    queries = model.encode_representation([query], "query")
    total, *scores = score(queries, model.encode_representation(texts, "document"))[0].tolist()
    whole = TokenSpan(query, 0, len(query))
    matches = [Match(whole, span, value) for span, value in zip(spans, scores, strict=True)]
    return Explanation(query, document, total, tuple(sorted(matches, key=lambda match: -match.score)))


def _term_weights(model: Model, text: str, side: Side) -> TermWeights:
    weights = cast(Sparse, model.encode_representation([text], side))
    return TermWeights(text, weights, model.vocabulary, model.token_spans(text, side))


_HEAT = (255, 176, 32)  # red, green and blue of the highest score


@dataclass(frozen=True, slots=True)
class Match:
    """A token of the query and the token of the document that it matches.

    Attributes:
        query: The token of the query, and where it is.
        document: The token of the document, and where it is.
        score: The contribution to the score of the document.
        weights: For sparse representations: the weights in query and document, whose product is the score.
        repeats: For sparse representations: where else the term is in the document.
    """

    query: TokenSpan
    document: TokenSpan
    score: float
    weights: tuple[float, float] | None = None
    repeats: tuple[TokenSpan, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """The score of a document for a query, and the matches that add up to it; rich prints it in colour.

    The matches of a dense model do not add up: each is a passage, scored as a document of its own.

    Attributes:
        query: The text of the query.
        document: The text of the document.
        score: The score, as `irkit.score` computes it.
        matches: Matches of tokens, in the order of the query; or of terms or passages, by descending score.
        parts: For a model with several heads, the explanation of each head. The score is then the sum of
            their scores, and ``matches`` is empty. Empty otherwise.
    """

    query: str
    document: str
    score: float
    matches: tuple[Match, ...]
    parts: Mapping[str, Explanation] = field(default_factory=dict)

    def words(self) -> Explanation:
        """Merge the matches of tokens to matches of words; scores are added up.

        A word is a run of letters and digits, or a single letter of a script without spaces. Tokens that are
        not in the text are merged by their names. Merged matches have no ``weights``.
        """
        query_word, document_word = word_finder(self.query), word_finder(self.document)
        merged: dict[tuple[TokenSpan, TokenSpan], Match] = {}
        for match in self.matches:
            words = query_word(match.query), document_word(match.document)
            if words in merged:
                merged[words] = replace(merged[words], score=merged[words].score + match.score, weights=None)
            else:
                repeats = tuple(map(document_word, match.repeats))
                merged[words] = replace(match, query=words[0], document=words[1], repeats=repeats)
        parts = {name: part.words() for name, part in self.parts.items()}
        return replace(self, matches=tuple(merged.values()), parts=parts)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; a token is ``{"token", "start", "end"}``, with start = end if not in the text.

        A match has ``"weights"`` and ``"repeats"`` if it has any.
        The score is None if it is -inf, which JSON lacks: the score of a document without tokens.
        """
        return {
            "query": self.query,
            "document": self.document,
            "score": self.score if isfinite(self.score) else None,
            "matches": [
                {"query": match.query._asdict(), "document": match.document._asdict(), "score": match.score}
                | ({"weights": list(match.weights)} if match.weights else {})
                | ({"repeats": [span._asdict() for span in match.repeats]} if match.repeats else {})
                for match in self.matches
            ],
            **({"parts": {name: part.to_dict() for name, part in self.parts.items()}} if self.parts else {}),
        }

    def view(self) -> dict[str, Any]:
        """Return what a page shows, as JSON values.

        ``"query"`` and ``"document"`` are the texts, each in segments: ``{"text", "heat", "best",
        "matches"}``. ``heat`` is the score of a segment as a share of the highest, ``best`` is whether the
        segment is in the best passage (the sentences whose matches have the highest sum), and ``matches`` are
        pairs of a token of the other text and a score. ``"matches"`` lists the matches of the explanation:
        ``{"query", "document", "score", "weights", "in_query", "in_document"}``. A token that is not in its
        text is special, or the model has added it. ``"score"`` is the ``"score"`` of `to_dict`.
        """
        query, document = self._segments()
        return {
            "score": self.score if isfinite(self.score) else None,
            "query": [segment._asdict() for segment in query],
            "document": [segment._asdict() for segment in document],
            "matches": [
                {
                    "query": match.query.token,
                    "document": match.document.token,
                    "score": match.score,
                    "weights": match.weights,
                    "in_query": match.query.start < match.query.end,
                    "in_document": match.document.start < match.document.end,
                }
                for match in self.matches
            ],
        }

    def _segments(self) -> tuple[list[Segment], list[Segment]]:
        """Divide the query and the document."""
        queries = [(match.query, match.document, match.score) for match in self.matches]
        documents = [
            (span, match.query, match.score)
            for match in self.matches
            for span in (match.document, *match.repeats)
        ]
        return split_segments(self.query, queries), split_segments(self.document, documents)

    def to_html(self) -> str:
        """Return a page with both texts, whose matches are coloured, and a table of the matches."""
        parts = [{"name": name, **part.view()} for name, part in self.parts.items()] or [self.view()]
        return _template().render(text=self.query, parts=parts)

    def write_html(self, path: str | Path) -> None:
        """Write `to_html` to a file.

        Raises:
            StorageError: It cannot be written.
        """
        write_text(path, self.to_html())

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        if self.parts:
            lines: list[Any] = []
            for name, part in self.parts.items():
                lines += [Text(name, style="bold reverse"), part, Text()]
            return Group(*lines)
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("query", overflow="fold")
        table.add_column("document", overflow="fold")
        table.add_column("score")
        highest = max((match.score for match in self.matches), default=0.0)
        for match in self.matches:
            product = "" if match.weights is None else " = {:.4f} x {:.4f}".format(*match.weights)
            bar = "█" * round(20 * max(0.0, match.score) / highest) if highest > 0 else ""
            points = f"{match.score:.4f}{product} {bar}"
            table.add_row(*map(Text, (match.query.token, match.document.token, points)))
        shaded = Text()
        for segment in self._segments()[1]:
            red, green, blue = (round(255 + (level - 255) * segment.heat) for level in _HEAT)
            shaded.append(segment.text, f"black on rgb({red},{green},{blue})" if segment.heat else "")
        return Group(table, Text(), shaded, Text(f"\nscore {self.score:.4f}", style="bold"))


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader

    folder = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=folder, autoescape=True, keep_trailing_newline=True)
    return pages.get_template("explanation.html")
