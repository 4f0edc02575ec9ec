"""Why a document has its score: what of it answers what of the query; as data, on a terminal, as HTML."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from irkit.errors import BadValueError
from irkit.files import write_text
from irkit.representation import MultiVector, Sparse
from irkit.scoring import score
from irkit.tokenizer import Piece, strings, well_formed

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from irkit.model import Model, Side

__all__ = [
    "Explanation",
    "Match",
    "TermWeights",
    "TokenVectors",
    "explain",
    "match_terms",
    "match_tokens",
]

_ALONE = r"\u0e00-\u0eff\u2e80-\u9fff\uf900-\ufaff"  # scripts without spaces: each letter is a word
_WORD = re.compile(rf"[{_ALONE}]|(?:(?![{_ALONE}])[\w\u0300-\u036f\u0900-\u0dff])+")  # with combining signs
_HEAT = (255, 176, 32)  # of what matters most


@dataclass(frozen=True, slots=True)
class Match:
    """What a token of the query found in the document.

    Attributes:
        query: The token, and where it is in the query.
        document: What it found there, and where.
        score: Its part of the score of the document.
        weights: Of a sparse representation: those in the query and in the document, which multiply.
    """

    query: Piece
    document: Piece
    score: float
    weights: tuple[float, float] | None = None


@dataclass(frozen=True)
class Explanation:
    """The score of a document for a query and the matches that add up to it; rich prints it in colour.

    Attributes:
        query: The text.
        document: The text.
        score: As `irkit.score` gives it.
        matches: Of tokens in the order of the query, of terms by falling score.
    """

    query: str
    document: str
    score: float
    matches: tuple[Match, ...]

    def words(self) -> Explanation:
        """The same by words: the scores of tokens of one word that match one word are added up.

        A word is a run of letters and digits, and each letter of scripts without spaces. Tokens that were
        added to a text are taken together by their names. What was added up has no ``weights``.
        """
        in_query, in_document = _to_words(self.query), _to_words(self.document)
        merged: dict[tuple[Piece, Piece], Match] = {}
        for match in self.matches:
            key = in_query(match.query), in_document(match.document)
            before = merged.get(key)
            merged[key] = (
                replace(match, query=key[0], document=key[1])
                if before is None
                else Match(*key, before.score + match.score)
            )
        return replace(self, matches=tuple(merged.values()))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a token is ``{"token", "start", "end"}``, start equals end if it is not in the text.

        The score is None where it is -inf, which JSON lacks: of a document without tokens.
        """
        return {
            "query": self.query,
            "document": self.document,
            "score": self.score if isfinite(self.score) else None,
            "matches": [
                {"query": match.query._asdict(), "document": match.document._asdict(), "score": match.score}
                | ({"weights": list(match.weights)} if match.weights else {})
                for match in self.matches
            ],
        }

    def to_html(self) -> str:
        """A page of its own: both texts, what matched in colour, and a table."""
        rows = [[match.query.token, match.document.token, _score(match)] for match in self.matches]
        table = "\n".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        query, document = ("".join(map(_mark, _segments(*side))) for side in self._sides())
        return _PAGE.format(
            title=escape(self.query), query=query, document=document, table=table, score=self.score
        )

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

        table = Table(box=None, pad_edge=False, header_style="bold")
        highest = max((match.score for match in self.matches), default=0.0)
        table.add_column("query", overflow="fold")
        table.add_column("document", overflow="fold")
        table.add_column("score")
        for match in self.matches:
            bar = "█" * round(20 * max(0.0, match.score) / highest) if highest > 0 else ""
            cells = [match.query.token, match.document.token, f"{_score(match)} {bar}"]
            table.add_row(*map(Text, cells))
        document = _shaded(_segments(*self._sides()[1]))
        return Group(table, Text(), document, Text(f"\nscore {self.score:.4f}", style="bold"))

    def _sides(self) -> list[tuple[str, list[tuple[Piece, Piece, float]]]]:
        """Of each text: its pieces, what each matched, and the score."""
        return [
            (self.query, [(match.query, match.document, match.score) for match in self.matches]),
            (self.document, [(match.document, match.query, match.score) for match in self.matches]),
        ]


class TokenVectors(NamedTuple):
    """A text, a MultiVector of one row, and the token that each of its vectors stands for."""

    text: str
    vectors: MultiVector
    pieces: Sequence[Piece]


def match_tokens(query: TokenVectors, document: TokenVectors) -> Explanation:
    """Which vector of the document each vector of the query is nearest to: the parts of MaxSim.

    Raises:
        BadValueError: There is not one row, or not one token for each vector.

    Examples:
        >>> import torch
        >>> from irkit import Ragged
        >>> vectors = MultiVector(Ragged.from_rows([torch.eye(2)]))
        >>> query = TokenVectors("big cat", vectors, [Piece("big", 0, 3), Piece("cat", 4, 7)])
        >>> document = TokenVectors("cats roar", vectors, [Piece("roar", 5, 9), Piece("cats", 0, 4)])
        >>> [(match.query.token, match.document.token, match.score)
        ...  for match in match_tokens(query, document).matches]
        [('big', 'roar', 1.0), ('cat', 'cats', 1.0)]
    """
    for side in (query, document):
        if len(side.vectors) != 1 or len(side.vectors.tokens.values) != len(side.pieces):
            raise BadValueError(
                f"match_tokens: {len(side.vectors)} rows of {len(side.vectors.tokens.values)} vectors and "
                f"{len(side.pieces)} tokens; expected one row and a token for each vector"
            )
    total = score(query.vectors, document.vectors).item()
    matches: list[Match] = []
    if document.pieces and query.pieces:
        q, d = query.vectors.tokens.values.float(), document.vectors.tokens.values.float()
        best, places = (q @ d.T).max(dim=1)
        matches = [
            Match(piece, document.pieces[place], value)
            for piece, place, value in zip(query.pieces, places.tolist(), best.tolist(), strict=True)
        ]
    return Explanation(query.text, document.text, total, tuple(matches))


class TermWeights(NamedTuple):
    """A text, a Sparse of one row, its terms as strings, and the tokens of the text."""

    text: str
    weights: Sparse
    vocabulary: Sequence[str]
    pieces: Sequence[Piece]


def match_terms(query: TermWeights, document: TermWeights) -> Explanation:
    """Which terms query and document share, by falling score: the parts of the sparse inner product.

    A term stands where it first occurs in a text; one that the model has added to it stands nowhere.

    Raises:
        BadValueError: There is not one row, or the vocabularies differ in size.

    Examples:
        >>> import torch
        >>> from irkit import Ragged
        >>> def weights(text, terms, values, *pieces):
        ...     row = Sparse(Ragged.from_rows([terms]), torch.tensor(values), 3)
        ...     return TermWeights(text, row, ["cat", "dog", "pet"], pieces)
        >>> query = weights("my cat", [0, 2], [2.0, 0.5], Piece("cat", 3, 6))
        >>> document = weights("A pet", [1, 2], [0.25, 1.5], Piece("pet", 2, 5))
        >>> [match] = match_terms(query, document).matches
        >>> match.query.token, match.score, match.weights
        ('pet', 0.75, (0.5, 1.5))
    """
    if len(query.weights) != 1 or len(document.weights) != 1 or query.weights.dim != document.weights.dim:
        raise BadValueError(
            f"match_terms: {len(query.weights)} and {len(document.weights)} rows over {query.weights.dim} "
            f"and {document.weights.dim} terms; expected one row each over the same vocabulary"
        )
    places: list[dict[str, Piece]] = []
    for side in (query, document):
        places.append({piece.token: piece for piece in reversed(side.pieces)})
    found = dict(zip(document.weights.terms.values.tolist(), document.weights.weights.tolist(), strict=True))
    matches = []
    for term, weight in zip(query.weights.terms.values.tolist(), query.weights.weights.tolist(), strict=True):
        if term not in found:
            continue
        name = query.vocabulary[term]
        first, second = (
            place.get(name) or Piece(name, len(side.text), len(side.text))
            for side, place in zip((query, document), places, strict=True)
        )
        matches.append(Match(first, second, weight * found[term], (weight, found[term])))
    matches.sort(key=lambda match: -match.score)
    total = score(query.weights, document.weights).item()
    return Explanation(query.text, document.text, total, tuple(matches))


def explain(model: Model, query: str, document: str) -> Explanation:
    """Explain the score that a model gives a document, by tokens or by terms.

    Where a multi-vector model pools tokens, what is explained is the score of the vectors before that.

    Args:
        model: One that makes a vector of each token, or weights of terms.
        query: A text.
        document: A text.

    Raises:
        BadTypeError: Query or document is not a string.
        BadValueError: The model makes something else.
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
        TokenVectors(query, *model.represent_with_tokens(query, "query")),
        TokenVectors(document, *model.represent_with_tokens(document, "document")),
    )


def _term_weights(model: Model, text: str, side: Side) -> TermWeights:
    weights = cast(Sparse, model.represent([text], side))
    return TermWeights(text, weights, model.vocabulary, model.pieces(text, side))


def _to_words(text: str) -> Callable[[Piece], Piece]:
    """What turns a piece of ``text`` into the word, or words, it is part of."""
    spans = [found.span() for found in _WORD.finditer(text)]
    starts, ends = [start for start, _ in spans], [end for _, end in spans]

    def word(piece: Piece) -> Piece:
        start, end = piece.start, piece.end
        while start < end and text[start].isspace():  # some tokenizers count the space before a word in
            start += 1
        if start >= end:
            return piece
        first, after = bisect_right(ends, start), bisect_left(starts, end)
        if first < after:
            start, end = min(start, starts[first]), max(end, ends[after - 1])
        return Piece(text[start:end], start, end)

    return word


def _score(match: Match) -> str:
    product = "" if match.weights is None else " = {:.4f} x {:.4f}".format(*match.weights)
    return f"{match.score:.4f}{product}"


class _Segment(NamedTuple):
    text: str
    heat: float  # of its matches together, 1 for the hottest of the text
    found: list[tuple[str, float]]  # tokens on the other side, and their scores


def _segments(text: str, spans: Sequence[tuple[Piece, Piece, float]]) -> list[_Segment]:
    """Cut a text wherever a piece starts or ends."""
    inside = [span for span in spans if span[0].start < span[0].end]
    cuts = sorted({0, len(text), *(place for piece, *_ in inside for place in (piece.start, piece.end))})
    found = [
        [(other.token, part) for piece, other, part in inside if piece.start <= start and end <= piece.end]
        for start, end in pairwise(cuts)
    ]
    heats = [max(0.0, sum(part for _, part in parts)) for parts in found]
    highest = max(heats, default=0.0) or 1.0
    return [
        _Segment(text[start:end], heat / highest, parts)
        for (start, end), heat, parts in zip(pairwise(cuts), heats, found, strict=True)
    ]


def _shaded(segments: list[_Segment]) -> Text:
    from rich.text import Text

    shaded = Text()
    for segment in segments:
        red, green, blue = (round(255 + (level - 255) * segment.heat) for level in _HEAT)
        style = f"black on rgb({red},{green},{blue})" if segment.heat else ""
        shaded.append(segment.text, style)
    return shaded


def _mark(segment: _Segment) -> str:
    if not segment.found:
        return escape(segment.text)
    title = ", ".join(f"{token} {part:.4f}" for token, part in segment.found)
    color = "rgba({},{},{},{:.3f})".format(*_HEAT, segment.heat)
    return f'<mark title="{escape(title)}" style="background:{color}">{escape(segment.text)}</mark>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 16px/1.6 system-ui, sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em; }}
p {{ white-space: pre-wrap; }}
mark {{ color: inherit; border-radius: 3px; }}
td, th {{ text-align: left; padding: 0 1.5em 0 0; }}
</style>
</head>
<body>
<h1>{query}</h1>
<p>{document}</p>
<table>
<tr><th>query</th><th>document</th><th>score</th></tr>
{table}
<tr><th></th><th>total</th><th>{score:.4f}</th></tr>
</table>
</body>
</html>
"""
