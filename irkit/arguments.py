"""Checks of arguments, and short forms of values for messages."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any

from irkit.errors import BadTypeError, BadValueError


def brief(value: object, width: int = 60) -> str:
    """Return the first ``width`` characters of ``repr(value)``, or its type if ``repr`` fails.

    It fails for lists that are nested too deeply and for integers with thousands of digits.

    Examples:
        >>> brief([1, 2]), brief("abc" * 99, 9)
        ('[1, 2]', "'abcabcab")
    """
    try:
        return repr(value)[:width]
    except Exception:
        return f"<{type(value).__name__}>"


def suggest(name: str, known: Collection[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return a hint about an unknown name: the nearest known one, else ``otherwise`` or all known ones.

    Examples:
        >>> suggest("lenght", ["length", "kind"]), suggest("x", ["length", "kind"])
        ("did you mean 'length'?", 'known: length, kind')
    """
    near = difflib.get_close_matches(name, known, 1, cutoff)
    return f"did you mean {near[0]!r}?" if near else otherwise or f"known: {', '.join(known)}"


def is_count(value: object, least: int = 1) -> bool:
    """Return True if ``value`` is an integer from ``least`` to the largest index, and not a boolean."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)  # also integers of numpy
    return is_whole and least <= value <= sys.maxsize  # type: ignore[operator]


def is_finite(value: object) -> bool:
    """Return True if ``value`` is a real number that a float holds, and not a boolean."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)  # also numbers of numpy
    return is_number and bool(abs(value) <= sys.float_info.max)  # type: ignore[arg-type]


def check_counts(operation: str, **counts: object) -> None:
    """Check that counts are whole numbers of 1 or more.

    Raises:
        BadValueError: A count is not; the message names it.
    """
    for name, value in counts.items():
        if not is_count(value):
            raise BadValueError(
                f"{operation}: {name} is {brief(value)}; expected a whole number of 1 or more"
            )


def check_flags(operation: str, **flags: object) -> None:
    """Check that flags are True or False, not ``"no"`` for example.

    Raises:
        BadTypeError: A flag is neither; the message names it.
    """
    for name, value in flags.items():
        if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "bool":  # numpy.bool
            raise BadTypeError(f"{operation}: {name} is {brief(value)}; expected True or False")


def check_functions(operation: str, **functions: Any) -> None:
    """Check that values are functions or None.

    Raises:
        BadTypeError: A value is neither; the message names it.
    """
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise BadTypeError(f"{operation}: {name} is {brief(value)}; expected a function or None")


def check_names(operation: str, **names: object) -> None:
    """Check that values are strings or None.

    Raises:
        BadTypeError: A value is neither; the message names it.
    """
    for name, value in names.items():
        if not isinstance(value, str | None):
            raise BadTypeError(f"{operation}: {name} is {brief(value)}; expected a string")


def check_options(operation: str, options: Iterable[str], known: Collection[str]) -> None:
    """Check the names of options that a function takes as ``**options``.

    Raises:
        BadTypeError: An option is unknown; the message names the nearest one.
    """
    for name in options:
        if name not in known:
            hint = suggest(name, known, f"there are {', '.join(known)}")
            raise BadTypeError(f"{operation}: no option is named {name!r}; {hint}")


def check_path(operation: str, path: object) -> None:
    """Check that a file can have this name.

    Raises:
        BadValueError: The name has an unpaired surrogate or a null character.
    """
    check_utf8(operation, [str(path)])
    if "\0" in str(path):
        raise BadValueError(
            f"{operation}: {brief(str(path))} has a null character; expected the name of a file"
        )


def check_utf8(operation: str, names: Iterable[str]) -> None:
    """Check that names can be encoded as UTF-8.

    Raises:
        BadValueError: A name has an unpaired surrogate.
    """
    text = "".join(names)
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise BadValueError(
            f"{operation}: a name has an unpaired surrogate ({text[error.start]!a}), which no UTF-8 text can "
            "hold; repair or drop it"
        ) from None
