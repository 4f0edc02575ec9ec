"""Find the words of a query in a text, and the passages of a text that answer it best."""

from __future__ import annotations

from functools import cache
from typing import Any

from irkit.encoder_free.analyzer import Analyzer
from irkit.retrieval.explanation import Explanation
from irkit.retrieval.highlighting import score_passages, split_passages

_SNIPPET = 320  # code points


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
        >>> highlight("sleeping bears", "Bears", "Copper is a red metal. A bear sleeps in winter.")
        {'title': [[0, 5]], 'text': [[25, 29], [30, 36]], 'passage': [23, 47]}
    """
    terms = set(_analyzer().terms(query))
    titles, texts = (
        [(term, start, end) for term, start, end in _analyzer().spans(part) if term in terms]
        for part in (title, text)
    )
    passages = split_passages(text) or [(0, 0)]
    counts = [len({term for term, first, _ in texts if start <= first < end}) for start, end in passages]
    return {
        "title": [[start, end] for _, start, end in titles],
        "text": [[start, end] for _, start, end in texts],
        "passage": list(passages[counts.index(max(counts))]),
    }


def make_snippet(query: str, title: str, text: str) -> dict[str, Any]:
    """Return the part of a text that begins with its best passage, and where it has words of a query.

    Returns:
        The ``text`` of the part; where it starts and ends in the text (``start``, ``end``) and the ``length``
        of that; places of words in the part (``marks``) and in the title (``title``). All count code points.

    Examples:
        >>> made = make_snippet("sleeping bears", "Bears", "Copper is a red metal. " * 20 + "A bear sleeps.")
        >>> made["start"], made["marks"], made["title"], made["text"][-14:]
        (154, [[308, 312], [313, 319]], [[0, 5]], 'A bear sleeps.')
    """
    highlights = highlight(query, title, text)
    start = max(0, min(highlights["passage"][0], len(text) - _SNIPPET))
    end = min(len(text), start + _SNIPPET)
    marks = [
        [first - start, last - start] for first, last in highlights["text"] if start <= first and last <= end
    ]
    snippet = {"text": text[start:end], "start": start, "end": end, "length": len(text)}
    return snippet | {"marks": marks, "title": highlights["title"]}


def rank_passages(explanation: Explanation) -> list[dict[str, Any]]:
    """Return where the passages of an explained document start and end, best first, and their scores.

    The score of a passage is the sum of the scores of the tokens or terms inside.
    """
    matches = [
        (span, match.query, match.score)
        for match in explanation.matches
        for span in (match.document, *match.repeats)
    ]
    scored = score_passages(explanation.document, matches)
    return [
        {"start": start, "end": end, "score": score}
        for start, end, score in sorted(scored, key=lambda passage: -passage[2])
    ]
