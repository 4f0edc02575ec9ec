"""Convert texts to terms, as analyzers of Lucene do: words without stop words, stemmed."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from threading import Lock
from typing import Any

import snowballstemmer

from irkit.errors import BadValueError

# fmt: off
STOP_WORDS = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no",
    "not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to",
    "was", "will", "with",
))
# fmt: on
"""The English stop words of Lucene."""

_SINGLE = (  # Hiragana and ideographs: scripts without spaces, so that each letter is a word
    r"\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3041-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    r"\U00020000-\U0003fffd"
)
_APOSTROPHES = "'\u2019\uff07"
# characters that join two letters, or two digits
_JOINED = r"[.'\u2019\uff07\u00b7](?<=[^\W\d_].)(?=[^\W\d_])|[.,;'\u2019\uff07](?<=\d.)(?=\d)"


class Analyzer:
    """Splits texts into terms.

    Words follow Unicode (UAX 29): runs of letters, digits and underscores with combining marks. A dot or an
    apostrophe between letters does not end a word; between digits a comma or a semicolon does not
    either. Each ideograph and each letter of Hiragana is a word. Words are converted to lower case and
    normal form C, and English words lose a final ``'s``. Stop words are dropped; the other words are stemmed.

    Examples:
        >>> Analyzer().terms("The dog's 3.5 kg of bones")
        ['dog', '3.5', 'kg', 'bone']
    """

    def __init__(
        self,
        language: str = "english",
        stemming: bool = True,
        stop_words: Iterable[str] | None = None,
        cache_size: int = 1 << 20,
    ) -> None:
        """Configure the analyzer.

        Args:
            language: One of `languages`; English is stemmed by Porter's algorithm, as in Lucene.
            stemming: Whether words are stemmed.
            stop_words: Words to drop; None stands for `STOP_WORDS` for English, and for no words otherwise.
            cache_size: Number of words whose terms are remembered.

        Raises:
            BadValueError: Snowball has no stemmer for the language.
        """
        if language not in languages():
            raise BadValueError(
                f"language {language!r}: there is no stemmer for it; expected one of {', '.join(languages())}"
            )
        english = language == "english"
        words = (STOP_WORDS if english else ()) if stop_words is None else stop_words
        self.stop_words = frozenset(map(_normal, words))
        self._chosen = language, stemming, self.stop_words
        self.cache_size, self._terms = cache_size, _Terms(*self._chosen)

    def __reduce__(self) -> tuple[Any, ...]:
        return Analyzer, self._chosen  # for other processes: a stemmer has a lock

    def terms(self, text: str) -> list[str]:
        """Return the terms of a text, in order."""
        if len(self._terms) > self.cache_size:
            self._terms.clear()
        return list(filter(None, map(self._terms.__getitem__, _words(text).findall(text))))

    def spans(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Yield each term with the positions of its first character and of the character after its last."""
        for match in _words(text).finditer(text):
            if term := self._terms[match[0]]:
                yield term, match.start(), match.end()


def languages() -> list[str]:
    """Return the names of the languages with a stemmer of Snowball."""
    return [name for name in snowballstemmer.algorithms() if "porter" not in name]


class _Terms(dict[str, str]):
    """Maps words to terms, or to "" for stop words; computes each term once."""

    def __init__(self, language: str, stemming: bool, stop_words: frozenset[str]) -> None:
        super().__init__()
        self._english, self._stop_words = language == "english", stop_words
        self._stem, self._lock = str, Lock()
        if stemming:
            self._stem = snowballstemmer.stemmer("porter" if self._english else language).stemWord

    def __missing__(self, word: str) -> str:
        term = _normal(word)
        if self._english and len(term) > 2 and term[-1] == "s" and term[-2] in _APOSTROPHES:
            term = term[:-2]
        if term in self._stop_words or not any(map(str.isalnum, term)):
            term = ""
        with self._lock:  # a stemmer works on one word at a time
            self[word] = term = sys.intern(self._stem(term)) if term else ""
        return term


def _normal(word: str) -> str:
    return unicodedata.normalize("NFC", word.lower())


def _words(text: str) -> re.Pattern[str]:
    return _ASCII if text.isascii() else _unicode()


def _pattern(letter: str, mark: str = "") -> str:
    # repeated groups are not possessive: Python before 3.11.5 matches too little of these (gh-106052)
    run = rf"{letter}{{1,255}}+{mark}"  # longer words are cut, as in Lucene
    return rf"{run}(?:(?:{_JOINED}){run})*"


_ASCII = re.compile(_pattern(r"\w"))


@cache
def _unicode() -> re.Pattern[str]:
    r"""Return the pattern of a word in texts that are not ASCII.

    The pattern lets combining marks continue a word: many scripts write vowels as marks, and ``\w`` lacks
    them.
    """
    marks = "".join(chr(code) for code in range(0x10000) if unicodedata.category(chr(code))[0] == "M")
    letter = rf"[^\W{_SINGLE}]"
    return re.compile(f"[{_SINGLE}]|" + _pattern(letter, f"(?:[{marks}]{letter}*+)*"))
