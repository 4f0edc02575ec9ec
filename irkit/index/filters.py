"""Filters such as ``{"year": {">=": 2000}, "lang": ["de", "en"]}``: parsed, checked, evaluated."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, TypeAlias

import numpy as np

from irkit.arguments import brief, suggest
from irkit.errors import BadTypeError, BadValueError
from irkit.index.array_files import Array
from irkit.index.field_encoding import BOOL, DICT, FLOAT, HUGE, INT, LIST, STRING
from irkit.index.fields import Fields
from irkit.index.matching import ORDER, is_number, match_entries
from irkit.index.sorted_fields import check_rows, find_sorted

_SIGNS = ("==", "!=", *ORDER, "in", "not in", "all", "prefix", "exists")
_LISTS = ("in", "not in", "all")
_ID_SIGNS = ("==", "!=", "in", "not in")
_DEEPEST = 50  # groups inside each other
_KINDS = {
    BOOL: "true or false",
    INT: "a number",
    FLOAT: "a number",
    HUGE: "a number",
    STRING: "a string",
    DICT: "keys and values",
    LIST: "a list",
}
"""Names of types of `irkit.index.field_encoding` in messages; null and an empty list agree with each type."""


@dataclass(frozen=True)
class Condition:
    """A condition on a key: an operator and a value, or several values in a list."""

    key: str
    sign: str
    operand: Any


@dataclass(frozen=True)
class Group:
    """Filters that are combined: ``$and``, ``$or`` or ``$not``, which has one."""

    sign: str
    parts: tuple[Parsed, ...]


Parsed: TypeAlias = Condition | Group


def parse_filter(where: Mapping[str, Any]) -> Group:
    """Return a filter, which `irkit.index.Documents.filter` explains, in parts.

    Raises:
        BadTypeError: Ids are not strings.
        BadValueError: An operator or a value makes no sense.

    Examples:
        >>> parse_filter({"year": {">=": 2000}, "$not": {"lang": "de"}}).parts[0]
        Condition(key='year', sign='>=', operand=2000)
    """
    return _parse(where, 0)


def as_json(where: Mapping[str, Any]) -> str:
    """Return a filter that `parse_filter` accepts as JSON, the same for equal filters."""

    def plain(value: Any) -> Any:
        return dict(value) if isinstance(value, Mapping) else _plain(value)

    return json.dumps(where, sort_keys=True, default=plain)


def conditions(parsed: Parsed) -> Iterator[Condition]:
    """Yield the conditions of a filter."""
    if isinstance(parsed, Condition):
        yield parsed
        return
    for part in parsed.parts:
        yield from conditions(part)


def evaluate(parsed: Parsed, fields: Fields, count: int, find: Callable[[Sequence[str]], Array]) -> Array:
    """Return ``(count,)`` bool, which rows meet a filter.

    Args:
        parsed: The filter.
        fields: The metadata.
        count: Rows.
        find: Returns the rows of ids, -1 for unknown ones.
    """
    if isinstance(parsed, Condition):
        return _evaluate_id(parsed, count, find) if parsed.key == "_id" else _evaluate(parsed, fields, count)
    masks = (evaluate(part, fields, count, find) for part in parsed.parts)
    if parsed.sign == "$not":
        return ~next(masks)
    combine: Any = np.logical_or if parsed.sign == "$or" else np.logical_and
    result = next(masks, None)
    if result is None:
        return np.ones(count, np.bool_)
    for mask in masks:
        result = combine(result, mask)
    return result


def check_key(key: str, keys: Sequence[str], operation: str = "filter") -> None:
    """Refuse a key that no document has.

    Raises:
        BadValueError: ``keys`` lacks the key; the message names the nearest one.
    """
    if key not in keys:
        hint = f"there are {', '.join(map(repr, keys[:20]))}" if keys else "none has metadata"
        hint = suggest(key, keys, hint, cutoff=0.5)
        raise BadValueError(f"{operation}: no document has the key {key!r:.60}; {hint}")


def check_type(
    condition: Condition,
    kinds: Collection[int],
    first_row: Callable[[str, int], int] = lambda key, kind: 0,
    example: Callable[[str, int], Any] | None = None,
) -> None:
    """Refuse a condition that no document could meet because of the type of its value.

    Args:
        condition: Condition on a key that occurs.
        kinds: Types of the values of the key.
        first_row: Returns the first row with a value of a key and a type.
        example: Returns a value of a key and a type; None leaves examples out of the message.

    Raises:
        BadValueError: No value has the type of an operand; the message names the types that there are.
    """
    if condition.sign == "exists":
        return
    known = {_KINDS[kind] for kind in kinds if kind in _KINDS}
    for value in _listed(condition.operand):
        own = _kind_of(value)
        if known and own is not None and own not in known:
            names: dict[str, int] = {}
            for kind in sorted(kinds, key=lambda kind: first_row(condition.key, kind)):
                if kind in _KINDS:
                    names.setdefault(_KINDS[kind], kind)
            existing = " or ".join(
                f"{name}, such as {brief(example(condition.key, kind))}" if example else name
                for name, kind in names.items()
            )
            raise BadValueError(
                f"filter: {condition.key!r} {condition.sign} {brief(value)} is {own}; documents have "
                f"{existing}"
            )


def _kind_of(value: Any) -> str | None:
    """Return what messages call the type of an operand; None for null."""
    if isinstance(value, bool):
        return _KINDS[BOOL]
    return _KINDS[STRING] if isinstance(value, str) else _KINDS[INT] if is_number(value) else None


def _listed(operand: Any) -> Sequence[Any]:
    return operand if isinstance(operand, list | tuple) else [operand]


# ---- parsing ----


def _parse(where: Any, depth: int) -> Group:
    if not isinstance(where, Mapping) or not all(isinstance(key, str) for key in where):
        raise BadValueError(
            f"filter: got {brief(where, 100)}, expected a dictionary such as {{'year': {{'>=': 2000}}}}"
        )
    if depth > _DEEPEST:
        raise BadValueError(f"filter: more than {_DEEPEST} groups inside each other; expected fewer")
    parts: list[Parsed] = []
    for key, condition in where.items():
        if key.startswith("$"):
            parts.append(_parse_group(key, condition, depth + 1))
            continue
        if not isinstance(condition, Mapping):
            condition = {"in" if isinstance(condition, list | tuple) else "==": condition}
        if not condition:
            raise BadValueError(f"filter: {key!r} has no condition; expected a value, or {{'>=': 2000}}")
        parts += [_parse_condition(key, sign, operand) for sign, operand in condition.items()]
    return Group("$and", tuple(parts))


def _parse_group(sign: str, filters: Any, depth: int) -> Group:
    if sign == "$not":
        return Group(sign, (_parse(filters, depth),))
    if sign not in ("$and", "$or"):
        raise BadValueError(
            f"filter: {sign!r:.60} combines no filters; {suggest(sign, ('$and', '$or', '$not'))}"
        )
    if not isinstance(filters, list | tuple) or not filters:
        raise BadValueError(
            f"filter: {sign} has {brief(filters, 100)}; expected filters in a list, such as "
            f"{{'{sign}': [{{'year': 2000}}, {{'lang': 'de'}}]}}"
        )
    return Group(sign, tuple(_parse(part, depth) for part in filters))


def _parse_condition(key: str, sign: Any, operand: Any) -> Condition:
    if not isinstance(sign, str) or sign not in _SIGNS:
        raise BadValueError(
            f"filter: {key!r} has the operator {brief(sign)}, expected one of {' '.join(_SIGNS[:-4])}, "
            "'not in', all, prefix, exists"
        )
    if key == "_id":
        return _parse_ids(sign, operand)
    operand = tuple(map(_plain, operand)) if isinstance(operand, list | tuple) else _plain(operand)
    expected = "a number, a string, a boolean or null"
    usable = all(value is None or _kind_of(value) for value in _listed(operand))
    usable = usable and isinstance(operand, tuple) == (sign in _LISTS)
    if sign in ORDER:
        expected, usable = "a number or a string", is_number(operand) or isinstance(operand, str)
    elif sign == "prefix":
        expected, usable = "a string", isinstance(operand, str)
    elif sign == "exists":
        expected, usable = "true or false", isinstance(operand, bool)
    elif sign in _LISTS:
        expected = f"a list, each {expected}"
    if not usable or not all(map(_is_sayable, _listed(operand))):
        raise BadValueError(f"filter: {key!r} {sign} {brief(operand, 100)}; expected {expected}")
    return Condition(key, sign, operand)


def _parse_ids(sign: str, operand: Any) -> Condition:
    if sign not in _ID_SIGNS:
        raise BadValueError(f"filter: '_id' has the operator {sign!r}; expected one of {' '.join(_ID_SIGNS)}")
    names = [operand] if isinstance(operand, str) else operand
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise BadTypeError(f"filter: ids are {brief(operand, 100)}, expected strings in a list")
    return Condition("_id", sign, tuple(names))


def _plain(value: Any) -> Any:
    """Return a date as the string that metadata has for it."""
    return value.isoformat() if isinstance(value, date) else value


def _is_sayable(value: Any) -> bool:
    """Return whether a value can be compared and written: no NaN, and no integer of thousands of digits."""
    if isinstance(value, int):
        return value.bit_length() < 10_000
    return not isinstance(value, float) or value == value


# ---- evaluation ----


def _evaluate_id(condition: Condition, count: int, find: Callable[[Sequence[str]], Array]) -> Array:
    named = np.zeros(count + 1, np.bool_)
    named[find(condition.operand)] = True  # the row of an unknown id is -1, the extra element
    return ~named[:-1] if condition.sign in ("!=", "not in") else named[:-1]


def _evaluate(condition: Condition, fields: Fields, count: int) -> Array:
    key, sign, operand = condition.key, condition.sign, condition.operand
    if sign == "exists":
        present = _present(key, fields, count)
        return present if operand else ~present
    if sign in ("!=", "not in"):
        return _present(key, fields, count) & ~_any(key, "in", _listed(operand), fields, count)
    if sign == "all":
        mask = _present(key, fields, count)
        for value in operand:
            mask &= _any(key, "in", [value], fields, count)
        return mask
    if sign in ("==", "in"):
        return _any(key, "in", _listed(operand), fields, count)
    return _any(key, sign, operand, fields, count)


def _any(key: str, sign: str, operand: Any, fields: Fields, count: int) -> Array:
    """Return the rows where any element meets a condition."""
    mask = np.zeros(count, np.bool_)
    for kind in fields.types(key):
        rows = find_sorted(fields, key, kind, sign, operand, count)
        if rows is not None:
            mask[rows] = True
        column = fields.column(key, kind, count, whole=rows is None)
        met = match_entries(fields, column, kind, sign, operand) if len(column.rows) else None
        if met is not None:
            mask[column.rows[met]] = True
    return mask


def _present(key: str, fields: Fields, count: int) -> Array:
    mask = np.zeros(count, np.bool_)
    for kind in fields.types(key):
        rows = fields.sorted_group(key, kind)[0]
        check_rows(fields, key, rows, count)
        mask[rows] = True
        mask[fields.column(key, kind, count, whole=False).rows] = True
    return mask
