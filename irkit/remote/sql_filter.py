"""Translate filters of irkit to SQL over the columns that `irkit.exporting.to_lancedb` writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from irkit.arguments import brief
from irkit.errors import BadValueError
from irkit.exporting.marks import MARKS, mark
from irkit.index.filters import Condition, Parsed

_END = 1 << 53  # below it every whole number is a float64; 2**53 + 1 is not


def sql_filter(parsed: Parsed, types: Mapping[str, tuple[str, bool]]) -> str:
    """Return a condition in SQL that is true or false for every document, never null.

    Args:
        parsed: From `irkit.index.filters.parse_filter`.
        types: Type of the values of each key, and whether they are in lists.

    Raises:
        BadValueError: The column of a key cannot tell.

    Examples:
        >>> from irkit.index.filters import parse_filter
        >>> sql_filter(parse_filter({"year": {">": 2000}}), {"year": ("number", False)})
        '(coalesce(metadata.`year` > 2000.0, false))'
    """
    if isinstance(parsed, Condition):
        return _condition(parsed, types)
    parts = [sql_filter(part, types) for part in parsed.parts]
    if parsed.sign == "$not":
        return f"(NOT {parts[0]})"
    return _join("OR" if parsed.sign == "$or" else "AND", parts)


def _condition(condition: Condition, types: Mapping[str, tuple[str, bool]]) -> str:
    key, sign, operand = condition.key, condition.sign, condition.operand
    if key == "_id":
        named = f"(_id IN ({', '.join(map(_quote, operand))}))" if operand else "false"
        return f"(NOT {named})" if sign in ("!=", "not in") else named
    exists = _marked(mark(key))
    if sign == "exists":
        return exists if operand else f"(NOT {exists})"
    values = operand if isinstance(operand, tuple) else (operand,)
    if sign in ("==", "in", "!=", "not in", "all"):
        equal = [_equal(key, value, types) for value in values]
        if sign == "all":
            return _join("AND", [exists, *equal])
        any_equal = _join("OR", equal) if equal else "false"
        return any_equal if sign in ("==", "in") else f"({exists} AND NOT {any_equal})"
    if key not in types:  # only removed documents had it
        return "false"
    kind, in_lists = types[key]
    is_string = isinstance(operand, str)
    if in_lists or kind == "other":
        raise BadValueError(
            f"filter: {key!r} {sign} {brief(operand)}: documents have lists or values of several types, "
            "which LanceDB does not order; use ==, in or all"
        )
    if is_string != (kind == "string") or kind == "boolean":  # booleans are marks, and have no column
        return "false"
    if sign == "prefix":
        return f"coalesce(starts_with({_column(key)}, {_quote(operand)}), false)"
    return f"coalesce({_column(key)} {sign} {_literal(key, operand)}, false)"


def _equal(key: str, value: Any, types: Mapping[str, tuple[str, bool]]) -> str:
    if value is None or isinstance(value, bool):
        return _marked(mark(key, value))
    if key not in types:
        return "false"
    kind, in_lists = types[key]
    if kind == "other":
        raise BadValueError(
            f"filter: {key!r} is compared with {brief(value)}: documents have values of several types, for "
            "which LanceDB has no column; give a key one type"
        )
    if isinstance(value, str) != (kind == "string") or kind == "boolean":
        return "false"
    test = f"array_has({_column(key)}, {_literal(key, value)})"
    return f"coalesce({test if in_lists else f'{_column(key)} = {_literal(key, value)}'}, false)"


def _join(word: str, parts: Iterable[str]) -> str:
    return f"({f' {word} '.join(parts) or 'true'})"


def _marked(keyword: str) -> str:
    return f"coalesce(array_has({MARKS}, {_quote(keyword)}), false)"


def _column(key: str) -> str:
    if "`" in key:
        raise BadValueError(f"filter: {key!r}: LanceDB has no columns with backticks; rename the key")
    return f"metadata.`{key}`"


def _literal(key: str, value: Any) -> str:
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, int) and abs(value) >= _END:
        raise BadValueError(
            f"filter: {key!r} {brief(value)}: LanceDB compares whole numbers below 2**53; store larger ones "
            "as strings"
        )
    return repr(float(value)) if math.isfinite(value) else f"CAST('{float(value)}' AS DOUBLE)"


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
