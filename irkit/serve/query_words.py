"""Find the words of a query in a text, and the passages of a text that answer it best."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

from irkit.encoder_free.analyzer import Analyzer
from irkit.retrieval.explanation import Explanation
from irkit.retrieval.highlighting import split_passages


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


def rank_passages(explanation: Explanation) -> list[dict[str, Any]]:
    """Return where the passages of an explained document start and end, best first, and their scores.

    The score of a passage is the sum of the scores of the tokens or terms inside.
    """
    spans = split_passages(explanation.document)
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for match in explanation.matches:
        for place in (match.document, *match.repeats):
            for start, end in spans:
                if start <= place.start < place.end and place.start < end:
                    sums[start, end] += match.score
    ranked = sorted(spans, key=lambda span: -sums[span])
    return [{"start": start, "end": end, "score": sums[start, end]} for start, end in ranked]
