"""Find the words of a query in a text, and the passages that answer it best."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from irkit.data import Document
from irkit.encoder_free.analyzer import Analyzer
from irkit.model import Model
from irkit.retrieval.explanation import Explanation
from irkit.retrieval.scorer import score_texts

_SENTENCE = re.compile(r"\S.*?(?:[.!?\u3002][\"')\]]*(?=\s)|(?=\n\s*\n)|\Z)", re.DOTALL)
_LONG, _MOST = 400, 64  # characters of a passage, and passages of a document


class Passage(NamedTuple):
    """A part of a text, by its first character and the one after its last, and its score."""

    start: int
    end: int
    score: float


@cache
def _analyzer() -> Analyzer:
    return Analyzer()


def highlight(query: str, title: str, text: str) -> dict[str, Any]:
    """Return where title and text have words with the stem of a word of the query, and the passage with most.

    Args:
        query: Text of the query.
        title: Title of a document.
        text: Text of the document.

    Examples:
        >>> highlight("sleeping bears", "Bears", "Copper is red. A bear sleeps in winter.")
        {'title': [[0, 5]], 'text': [[17, 21], [22, 28]], 'passage': [0, 39]}
    """
    terms = set(_analyzer().terms(query))
    found = [
        [(term, start, end) for term, start, end in _analyzer().spans(part) if term in terms]
        for part in (title, text)
    ]
    passages = [
        Passage(start, end, len({term for term, first, _ in found[1] if start <= first < end}))
        for start, end in split(text)
    ]
    best = max(passages, key=lambda passage: passage.score, default=Passage(0, 0, 0))
    titles, texts = ([[start, end] for _, start, end in spans] for spans in found)
    return {"title": titles, "text": texts, "passage": [best.start, best.end]}


def split(text: str) -> Iterator[tuple[int, int]]:
    """Yield where passages of a text start and end: sentences, joined or cut to about 400 characters."""
    start = end = -1
    for match in _SENTENCE.finditer(text):
        if start >= 0 and match.end() - start > _LONG:
            yield from _cut(text, start, end)
            start = -1
        start, end = match.start() if start < 0 else start, match.end()
    if start >= 0:
        yield from _cut(text, start, end)


def _cut(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    while end - start > _LONG:
        space = text.rfind(" ", start + 1, start + _LONG)
        stop = space if space > 0 else start + _LONG
        yield start, stop
        start = stop + (text[stop] == " ")
    if start < end:
        yield start, end


def passages_of(explanation: Explanation) -> list[Passage]:
    """Return the passages of an explained document, best first, by the scores of the matches inside."""
    text = explanation.document
    passages = [
        Passage(
            start,
            end,
            sum(m.score for m in explanation.matches if start <= m.document.start < m.document.end <= end),
        )
        for start, end in split(text)
    ]
    return _best(passages)


def score_passages(model: Model, query: str, text: str) -> list[Passage]:
    """Return the passages of a text, best first, by the scores that a model gives them."""
    spans = list(split(text))[:_MOST]
    parts = [Document("passage", text[start:end]) for start, end in spans]
    [scores] = score_texts(model, [query], [parts])
    scores = np.where(np.isfinite(scores), scores, 0)
    return _best(Passage(*span, score) for span, score in zip(spans, scores.tolist(), strict=True))


def _best(passages: Iterable[Passage]) -> list[Passage]:
    return sorted(passages, key=lambda passage: -passage.score)[:_MOST]
