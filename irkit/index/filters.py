"""Conditions on metadata: what ``{"year": {">=": 2000}, "lang": ["de", "en"]}`` means."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from irkit.data.document import JSON
from irkit.errors import BadValueError

__all__ = ["parse_filter"]

_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SIGNS = ("==", "!=", *_ORDER, "in")


def parse_filter(where: Mapping[str, Any]) -> Callable[[Mapping[str, JSON]], bool]:
    """Whether metadata meets all conditions of a filter; see ``Documents.filter`` for their meaning.

    Raises:
        BadValueError: An operator or a value makes no sense.

    Examples:
        >>> meets = parse_filter({"year": {">=": 2000, "<": 2010}})
        >>> meets({"year": 2005}), meets({"year": 2010}), meets({"year": "2005"}), meets({})
        (True, False, False, False)
    """
    if not isinstance(where, Mapping) or not all(isinstance(key, str) for key in where):
        raise BadValueError(
            f"filter: got {where!r:.100}, expected a dictionary such as {{'year': {{'>=': 2000}}}}"
        )
    tests: list[tuple[str, Callable[[JSON], bool]]] = []
    for key, condition in where.items():
        if not isinstance(condition, Mapping):
            condition = {"in" if isinstance(condition, list | tuple) else "==": condition}
        tests += [(key, _test(key, sign, wanted)) for sign, wanted in condition.items()]
    return lambda metadata: all(key in metadata and test(metadata[key]) for key, test in tests)


def _test(key: str, sign: str, wanted: Any) -> Callable[[JSON], bool]:
    if sign not in _SIGNS:
        raise BadValueError(f"filter: {key!r} has the operator {sign!r}, expected one of {' '.join(_SIGNS)}")
    choices = wanted if isinstance(wanted, list | tuple) else [wanted]
    usable = all(_comparable(wanted, wanted) if sign in _ORDER else _is_scalar(choice) for choice in choices)
    if not usable or (sign == "in") != isinstance(wanted, list | tuple):
        expected = "a number or a string" if sign in _ORDER else "a number, a string, a boolean or null"
        if sign == "in":
            expected = f"a list, each {expected}"
        raise BadValueError(f"filter: {key!r} {sign} {wanted!r:.100}; expected {expected}")
    if sign == "!=":
        return lambda value: not any(_same(element, wanted) for element in _elements(value))
    if sign in _ORDER:
        above = _ORDER[sign]
        return lambda value: any(
            _comparable(element, wanted) and above(element, wanted) for element in _elements(value)
        )
    return lambda value: any(_same(element, choice) for element in _elements(value) for choice in choices)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _elements(value: JSON) -> list[JSON]:
    return value if isinstance(value, list) else [value]


def _same(left: Any, right: Any) -> bool:
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)  # in Python, True == 1


def _comparable(left: Any, right: Any) -> bool:
    """Two strings, or two numbers."""
    if isinstance(left, str) or isinstance(right, str):
        return isinstance(left, str) and isinstance(right, str)
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in (left, right))
