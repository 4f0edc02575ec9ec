"""Divide a text for display into words, into passages, and into segments that are coloured by matches."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from irkit.tokenizer import TokenSpan

_UNSPACED = r"\u0e00-\u0eff\u2e80-\u9fff\uf900-\ufaff"  # scripts without spaces: each letter is a word
_WORD = re.compile(
    rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])[\w\u0300-\u036f\u0900-\u0dff])+"
)  # with combining signs
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[\u3002\uff01\uff1f])|\n\s*\n")
_SHORTEST = 20  # characters of a passage, so that "e.g. " is none

Matched = Sequence[tuple[TokenSpan, TokenSpan, float]]
"""Tokens of a text, the tokens of another text that they match, and the scores."""


def word_finder(text: str) -> Callable[[TokenSpan], TokenSpan]:
    """Return a function that extends a token of ``text`` to the word, or words, that it is part of."""
    words = [match.span() for match in _WORD.finditer(text)]
    starts, ends = [start for start, _ in words], [end for _, end in words]

    def find_word(span: TokenSpan) -> TokenSpan:
        start, end = span.start, span.end
        while start < end and text[start].isspace():  # some tokenizers include the space before a word
            start += 1
        if start >= end:
            return span
        first, last = bisect_right(ends, start), bisect_left(starts, end) - 1
        if first <= last:
            start, end = min(start, starts[first]), max(end, ends[last])
        return TokenSpan(text[start:end], start, end)

    return find_word


def split_passages(text: str, most: int = 32) -> list[tuple[int, int]]:
    """Divide a text into at most ``most`` passages of whole sentences; return where each starts and ends.

    Examples:
        >>> text = "Bears sleep in winter. Bats, e.g. those in caves, do so, too!"
        >>> [text[start:end] for start, end in split_passages(text)]
        ['Bears sleep in winter. ', 'Bats, e.g. those in caves, do so, too!']
    """
    shortest = max(_SHORTEST, -(-len(text) // most))
    passages, start = [], 0
    for cut in (match.end() for match in _SENTENCE_END.finditer(text)):
        if cut - start >= shortest:
            passages.append((start, cut))
            start = cut
    if start < len(text):
        passages.append((start, len(text)))
    return passages


def score_passages(text: str, matches: Matched) -> list[tuple[int, int, float]]:
    """Return where the passages of a text start and end, and the sum of the scores of the matches in each."""
    passages = split_passages(text)
    ends, sums = [end for _, end in passages], [0.0] * len(passages)
    for span, _, score in matches:
        if span.start < span.end:
            sums[bisect_right(ends, span.start)] += score
    return [(start, end, total) for (start, end), total in zip(passages, sums, strict=True)]


def best_passage(text: str, matches: Matched) -> tuple[int, int]:
    """Return where the passage with the highest sum of scores starts and ends; (0, 0) if none is positive."""
    best = max(score_passages(text, matches), key=itemgetter(2), default=(0, 0, 0.0))
    return best[:2] if best[2] > 0 else (0, 0)


class Segment(NamedTuple):
    """A part of a text.

    Attributes:
        text: The characters.
        heat: The score of its matches, as a share of the score of the hottest segment of the text.
        best: Whether it is in the best passage.
        matches: The tokens of the other text that match it, and their scores.
    """

    text: str
    heat: float
    best: bool
    matches: list[tuple[str, float]]


def split_segments(text: str, matches: Matched) -> list[Segment]:
    """Divide a text wherever a token with a match, or the best passage, starts or ends."""
    inside = [match for match in matches if match[0].start < match[0].end]
    best_start, best_end = best_passage(text, inside)
    borders = [cut for span, *_ in inside for cut in (span.start, span.end)]
    cuts = sorted({0, len(text), best_start, best_end, *borders})
    parts = [
        [(other.token, score) for span, other, score in inside if span.start <= start and end <= span.end]
        for start, end in pairwise(cuts)
    ]
    heats = [max(0.0, sum(score for _, score in part)) for part in parts]
    highest = max(heats, default=0.0) or 1.0
    return [
        Segment(text[start:end], heat / highest, best_start <= start and end <= best_end, part)
        for (start, end), heat, part in zip(pairwise(cuts), heats, parts, strict=True)
    ]
