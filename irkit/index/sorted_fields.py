"""Columns of metadata in order of their values: what a filter looks up, instead of a scan of the column.

A *group* has all entries of a key and a type, sorted by value; strings by their bytes, integers of more than
64 bits by the numbers of their digits. The arrays are:

* ``field_order.bin`` and ``field_sorted.bin``: the row and the value of each entry, group by group.
* ``field_groups.bin`` ``(groups, 3)``: key, type and end of each group, as in ``field_runs.bin``.

`sort_fields` writes them for the entries that there are, which are the first ones of ``field_entries.bin``;
those that were added since are scanned. A look-up reads a few pages and the rows that it finds, so the first
filter after an index was opened is as fast as any other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from irkit.index.array_files import Array, corrupt
from irkit.index.field_encoding import BOOL, FLOAT, HUGE, INT, NULL, STRING
from irkit.index.fields import GROUPS, ORDER_ROWS, SORTED, Fields
from irkit.index.matching import float_bound, int_bound, is_number, to_float, to_int
from irkit.index.store import Store

_MANY = 256  # strings that are compared with the whole column at once


def sort_fields(store: Store, fields: Fields, count: int) -> None:
    """Sort the columns again if many entries are unsorted; call this inside ``store.update()``.

    Args:
        store: The store.
        fields: Its metadata.
        count: Documents.
    """
    entries, done = fields.size(), store.rows(ORDER_ROWS)
    if entries - done <= max(store.limits.unsorted, done // 8):
        return
    end, groups, rows, values = 0, [], [], []
    for key, kind in fields.kinds():
        column = fields.column(key, kind, count)
        order = _order(fields, kind, column.rows, column.values)
        rows.append(column.rows[order].astype(np.uint32))
        values.append(column.values[order].view(np.int64))
        end += len(order)
        groups.append((fields.key_number(key, kind), kind, end))
    for name in (ORDER_ROWS, SORTED, GROUPS):
        store.drop(name)
    store.append(ORDER_ROWS, np.concatenate(rows))
    store.append(SORTED, np.concatenate(values))
    store.append(GROUPS, np.array(groups, np.int64))


def _order(fields: Fields, kind: int, rows: Array, values: Array) -> Array:
    """Return the order of the entries of a group."""
    if kind == STRING:
        numbers, inverse = np.unique(values, return_inverse=True)
        strings = [fields.string(number) for number in numbers.tolist()]
        ranks = np.empty(len(numbers), np.int64)
        ranks[sorted(range(len(strings)), key=strings.__getitem__)] = np.arange(len(strings))
        values = ranks[inverse]
    order: Array = np.lexsort((rows, values))
    return order


def find_sorted(fields: Fields, key: str, kind: int, sign: str, operand: Any, count: int) -> Array | None:
    """Return the rows of the sorted entries that meet a condition; None if a look-up cannot tell.

    Args:
        fields: The metadata.
        key: Key of the condition.
        kind: Type of the entries.
        sign: ``in``, ``prefix`` or one of `irkit.index.matching.ORDER`.
        operand: Values for ``in``, otherwise one value.
        count: Documents.
    """
    rows, values = fields.sorted_group(key, kind)
    operands: Sequence[Any] = operand if sign == "in" else [operand]
    strings = [text for text in operands if isinstance(text, str)]
    if kind == HUGE or (kind == STRING and len(strings) > _MANY):
        return None
    if kind == FLOAT:
        values = values.view(np.float64)
    spans = list(_spans(fields, values, kind, sign, operands))
    chosen = np.concatenate([rows[:0], *(rows[start:end] for start, end in spans)])
    check_rows(fields, key, chosen, count)
    return chosen


def check_rows(fields: Fields, key: str, rows: Array, count: int) -> None:
    """Raise a CorruptError if a key has rows beyond the documents."""
    if len(rows) and rows.max() >= count:
        raise corrupt(fields.store.path, f"metadata {key!r:.60} has rows that are not there")


def _spans(
    fields: Fields, values: Array, kind: int, sign: str, operands: Sequence[Any]
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of values that meet a condition."""
    n = len(values)
    numbers = [number for number in operands if is_number(number)]
    if kind == NULL:
        if sign == "in" and None in operands:
            yield 0, n
    elif kind == BOOL and sign == "in":
        for flag in {int(value) for value in operands if isinstance(value, bool)}:
            yield _side(values, flag, "left"), _side(values, flag, "right")
    elif kind in (INT, FLOAT) and sign == "in":
        for number in sorted(set((to_int if kind == INT else to_float)(numbers))):
            yield _side(values, number, "left"), _side(values, number, "right")
    elif kind in (INT, FLOAT) and numbers and sign != "prefix":
        sign, bound = (int_bound if kind == INT else float_bound)(sign, numbers[0])
        position = _side(values, bound, "left" if sign in ("<", ">=") else "right")
        yield (0, position) if sign[0] == "<" else (position, n)
    elif kind == STRING:
        yield from _string_spans(fields, values, sign, [text for text in operands if isinstance(text, str)])


def _side(values: Array, value: float, side: Any) -> int:
    return int(np.searchsorted(values, values.dtype.type(value), side))


def _string_spans(
    fields: Fields, values: Array, sign: str, texts: Sequence[str]
) -> Iterator[tuple[int, int]]:
    n, positions = len(values), range(len(values))

    def string(position: int) -> bytes:
        return fields.string(int(values[position]))

    def bisect(side: Callable[..., int], text: bytes) -> int:
        return side(positions, text, key=string)

    for text in {text.encode("utf-8", "surrogatepass") for text in texts}:
        if sign in ("in", "prefix"):
            # 0xff is in no string, so it comes after all that begin with the prefix
            end = bisect(bisect_right, text) if sign == "in" else bisect(bisect_left, text + b"\xff")
            yield bisect(bisect_left, text), end
        else:
            position = bisect(bisect_left if sign in ("<", ">=") else bisect_right, text)
            yield (0, position) if sign[0] == "<" else (position, n)
