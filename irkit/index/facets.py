"""Count the values of a key of metadata."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from irkit.data.document import JSON
from irkit.index.array_files import Array
from irkit.index.field_encoding import BOOL, FLOAT, HUGE, INT, NULL, STRING
from irkit.index.fields import Fields

Counts: TypeAlias = dict[tuple[bool, JSON], list[int]]
"""Number of rows and the first row, by value; the first part of a key tells true from 1."""


def count_values(
    fields: Fields, key: str, counted: Array, k: int | None = None, numbers: Array | None = None
) -> Counts:
    """Count the rows of each value of a key.

    Values that are dictionaries or lists in a list are left out.

    Args:
        fields: The metadata.
        key: The key.
        counted: ``(rows,)`` bool, the rows that count.
        k: Other values than the ``k`` most frequent ones may be left out; None counts all.
        numbers: ``(rows,)`` number of each row, which is returned in place of the row; None for the row.
    """
    totals: Counts = {}
    for kind in fields.types(key):
        if kind not in (NULL, BOOL, INT, FLOAT, HUGE, STRING):
            continue
        column = fields.column(key, kind, len(counted))
        chosen = np.flatnonzero(counted[column.rows])
        if numbers is not None:
            chosen = chosen[np.argsort(numbers[column.rows[chosen]])]
        values, first, counts = np.unique(column.values[chosen], return_index=True, return_counts=True)
        rows = column.rows[chosen][first]
        rows = rows if numbers is None else numbers[rows]
        if kind in (INT, FLOAT) and len({INT, FLOAT, HUGE}.intersection(fields.types(key))) == 1:
            # no value comes again
            best = np.lexsort((rows, -counts))[:k]
            values, rows, counts = values[best], rows[best], counts[best]
        plain: list[Any] = values.tolist()
        if kind in (STRING, HUGE):
            plain = fields.decode(values) if kind == STRING else fields.integers(values)
        elif kind in (NULL, BOOL):
            plain = [None if kind == NULL else bool(value) for value in plain]
        for value, row, count in zip(plain, rows.tolist(), counts.tolist(), strict=True):
            total = totals.setdefault((kind == BOOL, value), [0, row])
            total[0] += count
            total[1] = min(total[1], row)
    return totals


def most_frequent(totals: Counts, k: int) -> list[tuple[JSON, int]]:
    """Return the ``k`` values with the highest counts and these counts; ties in the order of first rows."""
    order = sorted(totals.items(), key=lambda item: (-item[1][0], item[1][1]))
    return [(value, total) for (_, value), (total, _) in order[:k]]
