"""Conditions on metadata, such as ``{"year": {">=": 2000}, "lang": ["de", "en"]}``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from irkit.arguments import brief, suggest
from irkit.data.document import JSON
from irkit.errors import BadValueError

_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SIGNS = ("==", "!=", *_ORDER, "in")
_KINDS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    dict: "keys and values",
    list: "a list",
}

Seen = dict[str, dict[str, JSON]]
"""Key -> kind of value ("a number", ...) -> an example from the metadata, for the keys of a filter."""


def parse_filter(where: Mapping[str, Any]) -> Callable[[Mapping[str, JSON]], bool]:
    """Return a function that says whether metadata meets all conditions; `Documents.filter` explains them.

    Raises:
        BadValueError: An operator or a value makes no sense.

    Examples:
        >>> meets = parse_filter({"year": {">=": 2000, "<": 2010}})
        >>> meets({"year": 2005}), meets({"year": 2010}), meets({"year": "2005"}), meets({})
        (True, False, False, False)
    """
    tests = [(key, _test(sign, wanted)) for key, sign, wanted in _conditions(where)]
    return lambda metadata: all(key in metadata and test(metadata[key]) for key, test in tests)


def note_values(seen: Seen, metadata: Iterable[Mapping[str, JSON]]) -> None:
    """Note in ``seen``, which has the keys of a filter, which kinds of values metadata has for them."""
    for values in metadata:
        for key, kinds in seen.items():
            if key in values:
                for value in _elements(values[key]):
                    kinds.setdefault(_KINDS.get(type(value), ""), value)  # null is of any kind
                kinds.setdefault("", None)


def check_filter(where: Mapping[str, Any], seen: Seen, known: Callable[[], Iterable[str]]) -> None:
    """Refuse conditions that no document could meet, because of a misspelt key or a value of another type.

    Args:
        where: What `parse_filter` takes.
        seen: What `note_values` noted for the metadata of all documents.
        known: Returns all keys of the metadata; called for a message only.

    Raises:
        BadValueError: There is such a condition; the message names the nearest key, or the values of the key.
    """
    for key, sign, wanted in _conditions(where):
        if not seen[key]:
            keys = sorted(known())
            hint = f"there are {', '.join(map(repr, keys[:20]))}" if keys else "none has metadata"
            hint = suggest(key, keys, hint, cutoff=0.5)
            raise BadValueError(f"filter: no document has the key {key!r:.60}; {hint}")
        kinds = {kind: example for kind, example in seen[key].items() if kind}
        for value in _elements(wanted):
            # the types of numpy are subclasses
            own = next((_KINDS[kind] for kind in _KINDS if isinstance(value, kind)), None)
            if kinds and own is not None and own not in kinds:
                others = " or ".join(f"{kind}, such as {brief(example)}" for kind, example in kinds.items())
                raise BadValueError(
                    f"filter: {key!r} {sign} {brief(value)} is {own}; documents have {others}"
                )


def _conditions(where: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return the conditions one by one, checked.

    Raises:
        BadValueError: An operator or a value makes no sense.
    """
    if not isinstance(where, Mapping) or not all(isinstance(key, str) for key in where):
        raise BadValueError(
            f"filter: got {brief(where, 100)}, expected a dictionary such as {{'year': {{'>=': 2000}}}}"
        )
    conditions = []
    for key, given in where.items():
        if not isinstance(given, Mapping):
            given = {"in" if isinstance(given, list | tuple) else "==": given}
        if not given:
            raise BadValueError(f"filter: {key!r} has no condition; expected a value, or {{'>=': 2000}}")
        conditions += [(key, sign, _checked(key, sign, wanted)) for sign, wanted in given.items()]
    return conditions


def _checked(key: str, sign: Any, wanted: Any) -> Any:
    if not isinstance(sign, str) or sign not in _SIGNS:
        raise BadValueError(
            f"filter: {key!r} has the operator {brief(sign)}, expected one of {' '.join(_SIGNS)}"
        )
    choices = _elements(wanted)
    if sign in _ORDER:
        usable = _comparable(wanted, wanted)
    else:
        usable = all(isinstance(choice, bool | int | float | str | None) for choice in choices)
    usable = usable and not any(isinstance(choice, float) and choice != choice for choice in choices)  # NaN
    if not usable or (sign == "in") != isinstance(wanted, list | tuple):
        expected = "a number or a string" if sign in _ORDER else "a number, a string, a boolean or null"
        if sign == "in":
            expected = f"a list, each {expected}"
        raise BadValueError(f"filter: {key!r} {sign} {brief(wanted, 100)}; expected {expected}")
    return wanted


def _test(sign: str, wanted: Any) -> Callable[[JSON], bool]:
    choices = _elements(wanted)
    if sign == "!=":
        return lambda value: not any(_same(element, wanted) for element in _elements(value))
    if sign in _ORDER:
        above = _ORDER[sign]
        return lambda value: any(
            _comparable(element, wanted) and above(element, wanted) for element in _elements(value)
        )
    return lambda value: any(_same(element, choice) for element in _elements(value) for choice in choices)


def _elements(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _same(left: Any, right: Any) -> bool:
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)  # in Python, True == 1


def _comparable(left: Any, right: Any) -> bool:
    """Return whether these are two strings, or two numbers."""
    if isinstance(left, str) or isinstance(right, str):
        return isinstance(left, str) and isinstance(right, str)
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in (left, right))
