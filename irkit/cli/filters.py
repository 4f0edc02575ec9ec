"""Conditions on metadata as they are written on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from irkit.errors import BadValueError

__all__ = ["parse_filters"]

_CONDITION = re.compile(r"\s*([^=!<>]+?)\s*(==|!=|<=|>=|=|<|>)(?![=<>!])\s*(.*?)\s*", re.DOTALL)


def parse_filters(conditions: Iterable[str]) -> dict[str, Any] | None:
    """Make one filter, as `Retriever.search` takes it, that demands all conditions; None if there are none.

    Args:
        conditions: ``KEY OPERATOR VALUE`` with an operator of ``= != < <= > >=`` and a value in JSON or
            else a string; or a filter in JSON. The key ``_id`` is the id of the document.

    Raises:
        BadValueError: A condition is malformed, or says the same of a key as another.

    Examples:
        >>> parse_filters(["year>=2000", "year<2010", "lang=de", 'kind=["a", "b"]'])
        {'year': {'>=': 2000, '<': 2010}, 'lang': 'de', 'kind': ['a', 'b']}
    """
    merged: dict[str, Any] = {}
    for condition in conditions:
        for key, test in _parse(condition).items():
            before = merged.setdefault(key, {})
            if before == {}:
                merged[key] = test
            elif isinstance(before, dict) and isinstance(test, dict) and not before.keys() & test.keys():
                merged[key] = before | test
            else:
                raise BadValueError(f"filter {condition!r}: another condition says the same of {key!r}")
    return merged or None


def _parse(condition: str) -> dict[str, Any]:
    if condition.lstrip().startswith("{"):
        try:
            return dict(json.loads(condition))
        except ValueError as error:
            raise BadValueError(f"filter {condition!r}: not valid JSON: {error}") from error
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise BadValueError(
            f"filter {condition!r}: expected something like year>=2000, lang=de or JSON in braces"
        )
    key, sign, value = match.groups()
    wanted: Any = value
    if key != "_id" or value.startswith("["):  # ids are strings, also those that look like numbers
        try:
            wanted = json.loads(value)
        except ValueError:
            wanted = value
    return {key: wanted if sign in ("=", "==") else {sign: wanted}}
