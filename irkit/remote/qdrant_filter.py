"""Translate filters of irkit to filters of Qdrant."""

from __future__ import annotations

from typing import Any

from irkit.arguments import brief
from irkit.errors import BadValueError
from irkit.exporting.marks import MARKS, mark
from irkit.index.filters import Condition, Group, Parsed

_BOUNDS = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}
_END = 1 << 53  # below it every whole number is a float64, which Qdrant compares; 2**53 + 1 is not


def qdrant_filter(parsed: Parsed, models: Any) -> Any:
    """Return a filter of Qdrant.

    Booleans, null and the existence of a key are looked up among the marks of a document, see
    `irkit.exporting.marks`, because Qdrant does not tell a missing key from null or an empty list, and Qdrant
    Edge finds no booleans.

    Args:
        parsed: From `irkit.index.filters.parse_filter`.
        models: Module of the classes of filters: ``qdrant_client.models`` or ``qdrant_edge``.

    Raises:
        BadValueError: Qdrant has no such condition.
    """
    if isinstance(parsed, Condition):
        return _condition(parsed, models)
    parts = [qdrant_filter(part, models) for part in parsed.parts]
    if parsed.sign == "$not":
        return models.Filter(must_not=parts)
    return models.Filter(should=parts) if parsed.sign == "$or" else models.Filter(must=parts)


def _condition(condition: Condition, models: Any) -> Any:
    key, sign, operand = condition.key, condition.sign, condition.operand
    if key == "_id":
        named = models.FieldCondition(key="_id", match=models.MatchAny(any=list(operand)))
        if not operand:
            named = _never(models)
        return models.Filter(must_not=[named]) if sign in ("!=", "not in") else models.Filter(must=[named])
    exists = _marked(models, mark(key))
    if sign == "exists":
        return models.Filter(must=[exists]) if operand else models.Filter(must_not=[exists])
    values = list(operand) if isinstance(operand, tuple) else [operand]
    if sign in ("==", "in", "!=", "not in", "all"):
        equal = [_equal(key, value, models) for value in values]
        if sign == "all":
            return models.Filter(must=[exists, *equal])
        if sign in ("!=", "not in"):
            return models.Filter(must=[exists], must_not=equal)
        return models.Filter(should=equal) if equal else _never(models)
    if sign == "prefix":
        return _field(models, key, match=models.MatchPrefix(prefix=operand))
    if isinstance(operand, str):
        raise BadValueError(
            f"filter: {key!r} {sign} {brief(operand)}: Qdrant has no order of strings; compare numbers, or "
            "use in or prefix"
        )
    return _range(key, models, **{_BOUNDS[sign]: _number(key, operand)})


def _equal(key: str, value: Any, models: Any) -> Any:
    if value is None or isinstance(value, bool):
        return _marked(models, mark(key, value))
    if isinstance(value, str):
        return _field(models, key, match=models.MatchValue(value=value))
    number = _number(key, value)
    return _range(key, models, gte=number, lte=number)


def _number(key: str, value: float) -> float:
    if isinstance(value, int) and abs(value) >= _END:
        raise BadValueError(
            f"filter: {key!r} {brief(value)}: Qdrant compares whole numbers below 2**53; store larger ones "
            "as strings"
        )
    return float(value)


def _range(key: str, models: Any, **bounds: float) -> Any:
    kind = models.RangeFloat if hasattr(models, "RangeFloat") else models.Range
    return _field(models, key, range=kind(**bounds))


def _field(models: Any, key: str, **condition: Any) -> Any:
    if '"' in key:
        raise BadValueError(f"filter: {key!r}: Qdrant has no keys with quotes; rename the key")
    return models.FieldCondition(key=f'metadata."{key}"', **condition)


def _marked(models: Any, keyword: str) -> Any:
    return models.FieldCondition(key=MARKS, match=models.MatchValue(value=keyword))


def _never(models: Any) -> Any:
    impossible = _marked(models, "")
    return models.Filter(must=[impossible])


def whole_filter(where: Group, models: Any) -> Any:
    """Return a filter for a search; None if it has no conditions."""
    return qdrant_filter(where, models) if where.parts else None
