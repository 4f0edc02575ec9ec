"""Terms of an index whose vocabulary grows with its documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock

import numpy as np

from irkit.index.array_files import corrupt
from irkit.index.layout import fitting
from irkit.index.store import Store

_FILE = "vocabulary.txt"
_SIZES = 1000  # sizes of the file whose numbers of terms are known


class Vocabulary:
    """Terms and their numbers, in the `Store` of the index; terms are numbered in order of appearance.

    New terms are known at once; `keep` stores them, together with their documents.

    Examples:
        >>> import tempfile
        >>> with Store.build(tempfile.mkdtemp()) as store:
        ...     vocabulary = Vocabulary(store)
        ...     numbers = vocabulary.learn(["cat", "dog", "cat"])
        ...     with store.update():
        ...         vocabulary.keep(2)
        >>> numbers, vocabulary.find(["dog", "cow"])
        ([0, 1, 0], [1, -1])
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._newest, self._lock = _Numbers(0), Lock()

    def __len__(self) -> int:
        """Return the number of terms that are stored."""
        return self._read()[1]

    @property
    def strings(self) -> list[str]:
        """Terms that are stored, by number."""
        numbers, stored = self._read()
        return numbers.terms[:stored]

    def learn(self, terms: Iterable[str]) -> list[int]:
        """Return the numbers of terms; new terms get one."""
        return list(map(self._read()[0].__getitem__, terms))

    def find(self, terms: Iterable[str]) -> list[int]:
        """Return the numbers of terms; -1 for a term that is not stored."""
        numbers, stored = self._read()
        known = (numbers.get(term, -1) for term in terms)
        return [number if number < stored else -1 for number in known]

    def known(self) -> int:
        """Return the number of terms, those included that are not stored yet."""
        return len(self._read()[0])

    def keep(self, count: int) -> None:
        """Store the terms with numbers below ``count`` that are not stored yet, inside ``store.update()``."""
        numbers, stored = self._read()
        new = numbers.terms[stored:count]
        if new:
            self.store.append(_FILE, np.frombuffer("".join(f"{term}\n" for term in new).encode(), np.uint8))
            numbers.stored[self.store.rows(_FILE)] = stored + len(new)

    def copy(self, source: Store) -> None:
        """Copy all terms of another index into an empty vocabulary, inside ``store.update()``."""
        if source.rows(_FILE) and not self.store.rows(_FILE):
            self.store.append(_FILE, source.read(_FILE))

    @staticmethod
    def grows(store: Store) -> bool:
        """Return whether an index has such a vocabulary."""
        return bool(store.rows(_FILE))

    def _read(self) -> tuple[_Numbers, int]:
        """Return the numbers of the terms, and how many terms are stored."""
        return self.store.derived(("terms", self), self._find)

    def _find(self) -> tuple[_Numbers, int]:
        """Read the terms added since the last call, or all if the file is new; keep the newest state."""
        size, epoch = self.store.rows(_FILE), self.store.epoch
        with self._lock:
            numbers = self._newest
            if numbers.epoch != epoch or size not in numbers.stored:
                known = max(numbers.stored, default=0)  # bytes
                # terms that were learned here, but are not stored, may have got other numbers since
                if numbers.epoch != epoch or known > size or numbers.stored.get(known, 0) < len(numbers):
                    numbers, known = _Numbers(epoch), 0
                numbers.extend(self._text(known, size))
                if len(numbers) < len(numbers.terms):
                    raise corrupt(self.store.path, "its vocabulary has a term twice")
                numbers.stored[size] = len(numbers)
                if len(numbers.stored) > _SIZES:  # searches that began so long ago read the terms anew
                    del numbers.stored[min(numbers.stored)]
                if (epoch, size) > (self._newest.epoch, max(self._newest.stored, default=-1)):
                    self._newest = numbers
        return numbers, numbers.stored[size]

    def _text(self, start: int, stop: int) -> list[str]:
        """Return the terms in bytes ``start`` to ``stop`` of the file."""
        with fitting(self.store.path):
            text = self.store.read(_FILE)[start:stop].tobytes().decode() if stop > start else ""
        return text.split("\n")[:-1]


class LooseTerms:
    """Terms that belong to no index, numbered in order of appearance, with the methods of `Vocabulary`.

    Attributes:
        strings: Terms by number.
    """

    def __init__(self) -> None:
        self._numbers = _Numbers(0)
        self.strings = self._numbers.terms

    def learn(self, terms: Iterable[str]) -> list[int]:
        """Return the numbers of terms; new terms get one."""
        return list(map(self._numbers.__getitem__, terms))

    def known(self) -> int:
        """Return the number of terms."""
        return len(self.strings)


class _Numbers(dict[str, int]):
    """A dictionary that gives an unknown term the next number.

    Attributes:
        terms: Terms in order of their numbers.
        stored: Number of terms by bytes of the file.
        epoch: Epoch of the store.
    """

    def __init__(self, epoch: int) -> None:
        self.terms, self.stored, self.epoch = list[str](), dict[int, int](), epoch
        super().__init__()

    def extend(self, terms: Sequence[str]) -> None:
        """Number terms that are stored."""
        self.update(zip(terms, range(len(self.terms), len(self.terms) + len(terms)), strict=True))
        self.terms += terms

    def __missing__(self, term: str) -> int:
        self[term] = number = len(self.terms)
        self.terms.append(term)
        return number
