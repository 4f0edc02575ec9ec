"""Parse conditions on metadata, the values of ``--filter``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from irkit.errors import BadValueError

_CONDITION = re.compile(r"\s*([^=!<>]+?)\s*(==|!=|<=|>=|=|<|>)(?![=<>!])\s*(.*?)\s*", re.DOTALL)


def parse_filters(conditions: Iterable[str]) -> dict[str, Any] | None:
    """Return the filter for `irkit.Retriever.search` that demands all conditions; None for no condition.

    Args:
        conditions: ``KEY OPERATOR VALUE``, with an operator of ``= != < <= > >=`` and a value in JSON or
            a plain string; or a whole filter in JSON. The key ``_id`` stands for the id of a document.

    Raises:
        BadValueError: A condition is malformed, or two conditions test a key with the same operator.

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
    operand: Any = value
    if key != "_id" or value.startswith("["):  # ids are strings, even if they look like numbers
        try:
            operand = json.loads(value)
        except ValueError:
            operand = value
    return {key: operand if sign in ("=", "==") else {sign: operand}}
