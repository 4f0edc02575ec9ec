"""Checks of arguments that many operations share, and how messages show what was given."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from irkit.errors import BadTypeError, BadValueError

__all__ = [
    "check_counts",
    "check_flags",
    "check_functions",
    "check_names",
    "check_path",
    "check_utf8",
    "is_count",
    "shown",
]


def shown(value: object, width: int = 60) -> str:
    """The first ``width`` characters of ``repr(value)``, or its type if it has no repr.

    Lists nested too deep have none, nor have integers of thousands of digits.

    Examples:
        >>> shown([1, 2]), shown("abc" * 99, 9)
        ('[1, 2]', "'abcabcab")
    """
    try:
        return repr(value)[:width]
    except Exception:
        return f"<{type(value).__name__}>"


def is_count(value: object, least: int = 1) -> bool:
    """Whether ``value`` is a whole number, and no boolean, of ``least`` or more that an index can be."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)  # of numpy, too
    return whole and least <= value <= sys.maxsize  # type: ignore[operator]


def check_counts(operation: str, **counts: object) -> None:
    """Refuse numbers of things that are not whole numbers of 1 or more.

    Raises:
        BadValueError: One is not; the message names it.
    """
    for name, value in counts.items():
        if not is_count(value):
            raise BadValueError(
                f"{operation}: {name} is {shown(value)}; expected a whole number of 1 or more"
            )


def check_flags(operation: str, **flags: object) -> None:
    """Refuse what is neither True nor False where one of them is expected, such as ``"no"``.

    Raises:
        BadTypeError: One is not; the message names it.
    """
    for name, value in flags.items():
        if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "bool":  # of numpy
            raise BadTypeError(f"{operation}: {name} is {shown(value)}; expected True or False")


def check_functions(operation: str, **functions: Any) -> None:
    """Refuse what is neither None nor can be called.

    Raises:
        BadTypeError: One is not; the message names it.
    """
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise BadTypeError(f"{operation}: {name} is {shown(value)}; expected a function or None")


def check_names(operation: str, **names: object) -> None:
    """Refuse what is neither None nor a string.

    Raises:
        BadTypeError: One is not; the message names it.
    """
    for name, value in names.items():
        if not isinstance(value, str | None):
            raise BadTypeError(f"{operation}: {name} is {shown(value)}; expected a string")


def check_path(operation: str, path: object) -> None:
    """Refuse names that no file can have.

    Raises:
        BadValueError: It has an unpaired surrogate or a null character.
    """
    check_utf8(operation, [str(path)])
    if "\0" in str(path):
        raise BadValueError(
            f"{operation}: {shown(str(path))} has a null character; expected the name of a file"
        )


def check_utf8(operation: str, names: Iterable[str]) -> None:
    """Refuse names that no file, no index and no library in C can hold.

    Raises:
        BadValueError: One has an unpaired surrogate.
    """
    text = "".join(names)
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise BadValueError(
            f"{operation}: a name has an unpaired surrogate ({text[error.start]!a}), which no UTF-8 text can "
            "hold; repair or drop it"
        ) from None
