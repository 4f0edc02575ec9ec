"""Put the rows of several queries, which differ in number, into tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def pad_rows(rows: Sequence[Array]) -> Iterator[tuple[Array, Array]]:
    """Yield numbers of queries, and a table of their rows that is filled up with -1.

    Queries come together if that takes at most two cells a row; otherwise in tables of similar lengths, so
    that one long list does not lengthen all others. Queries without rows are left out.

    Examples:
        >>> def tables(*lengths):
        ...     pairs = pad_rows([np.arange(length) for length in lengths])
        ...     return [(numbers.tolist(), table.shape) for numbers, table in pairs]
        >>> tables(3, 0, 2)
        [([0, 2], (2, 3))]
        >>> tables(1, 9, 1)
        [([0, 2], (2, 1)), ([1], (1, 9))]
    """
    lengths = np.array([len(line) for line in rows], np.int64)
    some = np.flatnonzero(lengths)
    levels = np.frexp(lengths[some])[1]  # lengths of one level differ by less than a factor of 2
    if len(some) * lengths.max(initial=0) <= 2 * lengths.sum():
        levels[:] = 0
    for level in np.unique(levels):
        numbers = some[levels == level]
        table = np.full((len(numbers), lengths[numbers].max()), -1, np.int64)
        for line, number in zip(table, numbers, strict=True):
            line[: lengths[number]] = rows[number]
        yield numbers, table
