"""Marks: keywords that make an engine distinguish metadata that it would otherwise confuse.

Engines confuse a missing key, null and an empty list, and some do not find booleans. So each exported
document has a list of marks: ``["key"]`` for a key that exists, ``["key",null]`` for null and
``["key",true]`` for a boolean, each as a string of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MARKS = "marks"
"""Name of the field of marks."""


def mark(key: str, *value: bool | None) -> str:
    """Return the mark of a key, or of a key and its value.

    Examples:
        >>> mark("draft"), mark("draft", True), mark("draft", None)
        ('["draft"]', '["draft",true]', '["draft",null]')
    """
    return json.dumps([key, *value], separators=(",", ":"), ensure_ascii=False)


def marks(metadata: Mapping[str, Any]) -> list[str]:
    """Return the marks of one document: one per key, and one more per boolean and null.

    Examples:
        >>> marks({"draft": True, "year": 2000, "tags": []})
        ['["draft"]', '["draft",true]', '["year"]', '["tags"]']
    """
    result = []
    for key, value in metadata.items():
        values = value if isinstance(value, list) else [value]
        flags = [item for item in values if item is None or isinstance(item, bool)]
        result += [mark(key), *(mark(key, flag) for flag in flags)]
    return list(dict.fromkeys(result))
