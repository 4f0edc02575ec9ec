"""Terms of an index whose vocabulary grows with its documents, kept on disk."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from irkit.index.store import Store

__all__ = ["Vocabulary"]

_FILE = "vocabulary.txt"


class Vocabulary:
    """Terms and their numbers, in the `Store` of the index; numbers are given in order of appearance.

    New terms are known at once and stored by `keep`, with the documents that brought them.

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
        self._numbers = _Numbers()
        self._stored, self._epoch = 0, -1

    def __len__(self) -> int:
        """Terms that are stored."""
        self._read()
        return self._stored

    @property
    def strings(self) -> list[str]:
        """The terms that are stored, by number."""
        self._read()
        return self._numbers.terms[: self._stored]

    def learn(self, terms: Iterable[str]) -> list[int]:
        """Numbers of terms, new ones included."""
        self._read()
        return list(map(self._numbers.__getitem__, terms))

    def find(self, terms: Iterable[str]) -> list[int]:
        """Numbers of terms; -1 where it is not stored."""
        self._read()
        found = (self._numbers.get(term, -1) for term in terms)
        return [number if number < self._stored else -1 for number in found]

    def known(self) -> int:
        """Terms stored and learnt."""
        self._read()
        return len(self._numbers)

    def keep(self, count: int) -> None:
        """Store the first ``count`` terms, those that are not yet, inside ``store.update()``."""
        self._read()
        new = self._numbers.terms[self._stored : count]
        if new:
            self.store.append(_FILE, np.frombuffer("".join(f"{term}\n" for term in new).encode(), np.uint8))
            self._stored += len(new)

    def copy(self, source: Store) -> None:
        """Take over all terms of another index, inside ``store.update()``, where there are none yet."""
        if source.rows(_FILE) and not self.store.rows(_FILE):
            self.store.append(_FILE, source.read(_FILE))
            self._epoch = -1

    @staticmethod
    def grows(store: Store) -> bool:
        """Whether an index has such a vocabulary."""
        return bool(store.rows(_FILE))

    def _read(self) -> None:
        """Forget what is no longer true: the store was refreshed, or a change to it undone."""
        if self._epoch != self.store.epoch:
            text = self.store.read(_FILE).tobytes().decode() if self.store.rows(_FILE) else ""
            self._numbers = _Numbers(text.split("\n")[:-1])
            self._stored, self._epoch = len(self._numbers), self.store.epoch


class _Numbers(dict[str, int]):
    """Gives a key that is not there the next number."""

    def __init__(self, terms: Iterable[str] = ()) -> None:
        self.terms = list(terms)  # in order of their numbers
        super().__init__(zip(self.terms, range(len(self.terms)), strict=True))

    def __missing__(self, term: str) -> int:
        self[term] = number = len(self.terms)
        self.terms.append(term)
        return number
