"""Compare the values of a column with operands: numbers exactly, strings without decoding them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from irkit.index.array_files import Array
from irkit.index.field_encoding import BOOL, FLOAT, HUGE, INT, NULL, STRING
from irkit.index.fields import Column, Fields

ORDER: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SMALLEST, _LARGEST = -(1 << 63), (1 << 63) - 1
_BEYOND = 1 << 64
_FEW = 16  # values that are compared one by one


def is_number(value: object) -> bool:
    """Return whether a value is a number and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def match_entries(fields: Fields, column: Column, kind: int, sign: str, operand: Any) -> Array | None:
    """Return ``(n,)`` bool, which entries of a column meet a condition; None if none can.

    Args:
        fields: The fields of the column.
        column: Entries of type ``kind``.
        kind: Type of the values.
        sign: ``in``, ``prefix`` or one of `ORDER`.
        operand: Values for ``in``, otherwise one value.
    """
    values: Sequence[Any] = operand if sign == "in" else [operand]
    strings = [text.encode("utf-8", "surrogatepass") for text in values if isinstance(text, str)]
    numbers = [number for number in values if is_number(number)]
    if kind == NULL:
        return np.ones(len(column.rows), np.bool_) if None in values else None
    if kind == BOOL:
        flags = [int(flag) for flag in values if isinstance(flag, bool)]
        return _any_equal(column.values, flags) if flags else None
    if kind == STRING and strings:
        return _match_strings(fields, column, sign, strings)
    if kind == HUGE and numbers:
        return _match_huge(fields, column, sign, numbers)
    if kind in (INT, FLOAT) and numbers and sign != "prefix":
        if sign == "in":
            exact = (to_int if kind == INT else to_float)(numbers)
            return _any_equal(column.values, exact) if exact else None
        sign, bound = (int_bound if kind == INT else float_bound)(sign, numbers[0])
        mask: Array = ORDER[sign](column.values, bound)
        return mask
    return None


def _any_equal(values: Array, candidates: Sequence[Any]) -> Array:
    if len(candidates) > _FEW:
        return np.isin(values, np.array(candidates, values.dtype))
    mask: Array = values == candidates[0]
    for value in candidates[1:]:
        mask |= values == value
    return mask


def to_int(numbers: Sequence[Any]) -> list[int]:
    """Return the numbers that are integers of 64 bits."""
    whole = [int(number) for number in numbers if isinstance(number, int) or number.is_integer()]
    return [number for number in whole if _SMALLEST <= number <= _LARGEST]


def to_float(numbers: Sequence[Any]) -> list[float]:
    """Return the numbers that a float64 is equal to."""
    return [as_float for number in numbers if (as_float := _nearest(number)) == number]


def _nearest(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else -float("inf")


def int_bound(sign: str, number: Any) -> tuple[str, int]:
    """Return a comparison of integers of 64 bits that holds for the same integers."""
    if isinstance(number, float):
        if math.isinf(number):
            number = math.copysign(_BEYOND, number)
        elif not number.is_integer():  # x < 2.5 and x <= 2.5 if x <= 2
            sign = "<=" if sign[0] == "<" else ">"
        number = math.floor(number)
    if number > _LARGEST:
        return ("<=" if sign[0] == "<" else ">"), _LARGEST
    if number < _SMALLEST:
        return ("<" if sign[0] == "<" else ">="), _SMALLEST
    return sign, int(number)


def float_bound(sign: str, number: Any) -> tuple[str, float]:
    """Return a comparison of float64 that holds for the same float64."""
    bound = _nearest(number)
    if bound > number:
        sign = "<" if sign[0] == "<" else ">="
    elif bound < number:
        sign = "<=" if sign[0] == "<" else ">"
    return sign, bound


def _match_huge(fields: Fields, column: Column, sign: str, numbers: Sequence[Any]) -> Array:
    """Compare integers that 64 bits cannot hold; they are few."""
    known = column.strings[0]
    values = fields.integers(known)
    if sign == "in":
        fine = [value in numbers for value in values]
    else:
        fine = [sign in ORDER and ORDER[sign](value, numbers[0]) for value in values]
    return _entries_of(fields, column, known[np.array(fine, np.bool_)])


def _match_strings(fields: Fields, column: Column, sign: str, candidates: Sequence[bytes]) -> Array:
    text = Strings(fields.strings()[0], *column.strings[1:])
    if sign == "in":
        positions = text.equal(candidates)
    elif sign == "prefix":
        positions = text.starting(candidates[0])
    else:
        positions = np.flatnonzero(ORDER[sign](text.compare(candidates[0]), 0))
    return _entries_of(fields, column, column.strings[0][positions])


def _entries_of(fields: Fields, column: Column, numbers: Array) -> Array:
    """Return which entries have one of these strings."""
    if len(numbers) <= 2:
        return _any_equal(column.values, numbers.tolist() or [-1])
    if len(column.values) * 8 < len(fields.strings()[1]):
        return np.isin(column.values, numbers)
    is_match = np.zeros(len(fields.strings()[1]), np.bool_)
    is_match[numbers] = True
    mask: Array = is_match[column.values]
    return mask


class Strings:
    """Strings in ``blob (bytes,)``, compared eight bytes at a time.

    Args:
        blob: All strings.
        starts: ``(n,)`` where each string starts.
        lengths: ``(n,)`` bytes of each.
    """

    def __init__(self, blob: Array, starts: Array, lengths: Array) -> None:
        self._blob, self._starts, self._lengths = blob, starts, lengths
        if len(self._blob) < 8:
            self._blob = np.concatenate([self._blob, np.zeros(8, np.uint8)])
        self._words = np.ndarray((len(self._blob) - 7,), "<u8", self._blob, strides=(1,))

    def equal(self, texts: Sequence[bytes]) -> Array:
        """Return the positions of the strings that equal one of ``texts``."""
        if len(texts) <= _FEW:
            matches = [self._containing(np.flatnonzero(self._lengths == len(text)), text) for text in texts]
            return np.concatenate(matches)
        sizes = np.array([len(text) for text in texts])
        last = np.array([int.from_bytes(text[-8:], "little") for text in texts], np.uint64)
        positions: Array = np.flatnonzero(np.isin(self._lengths, np.unique(sizes)))
        at = self._starts[positions] + np.maximum(self._lengths[positions] - 8, 0)
        words = self._read(at) & _masks(self._lengths[positions])
        positions = positions[np.isin(words, np.unique(last))]
        known, data = set(texts), self._blob.data
        starts, ends = self._starts[positions], self._starts[positions] + self._lengths[positions]
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        return positions[np.array([bytes(data[start:end]) in known for start, end in spans], np.bool_)]

    def starting(self, prefix: bytes) -> Array:
        """Return the positions of the strings that begin with a prefix."""
        return self._containing(np.flatnonzero(self._lengths >= len(prefix)), prefix)

    def compare(self, text: bytes) -> Array:
        """Return ``(n,)`` -1, 0 or 1: the order of each string and ``text``, byte by byte."""
        result = np.zeros(len(self._starts), np.int8)
        positions, starts, lengths = np.arange(len(result)), self._starts, self._lengths
        for offset in range(0, len(text), 8):
            part = text[offset : offset + 8].ljust(8, b"\0")
            if lengths.min(initial=offset + 8) < offset + 8:
                words = self._read(starts + np.minimum(offset, lengths)) & _masks(lengths - offset)
            else:
                words = self._read(starts + offset)
            same = words == np.uint64(int.from_bytes(part, "little"))
            if not same.all():
                words, word = words.byteswap(), int.from_bytes(part, "big")
                result[positions] = (words > word).astype(np.int8) - (words < word)
                positions, starts, lengths = positions[same], starts[same], lengths[same]
        result[positions] = np.sign(lengths - len(text))
        return result

    def _containing(self, positions: Array, text: bytes) -> Array:
        """Return the positions whose strings begin with a text; no string is shorter than the text.

        The end of the text is compared first, as addresses and paths differ there.
        """
        for end in range(len(text), 0, -8):
            start = max(end - 8, 0)
            mask = np.uint64((1 << 8 * (end - start)) - 1)
            word = np.uint64(int.from_bytes(text[start:end], "little"))
            positions = positions[self._read(self._starts[positions] + start) & mask == word]
        return positions

    def _read(self, positions: Array) -> Array:
        """Return the eight bytes at each position as numbers, the first byte lowest; zeros after the end."""
        last = len(self._words) - 1
        words: Array
        if positions.max(initial=0) <= last:
            words = self._words[positions]
            return words
        late = positions > last
        words = self._words[np.minimum(positions, last)]
        shifts = (8 * (positions[late] - last)).astype(np.uint64)
        words[late] = np.where(shifts < 64, words[late] >> np.minimum(shifts, np.uint64(63)), np.uint64(0))
        return words


def _masks(lengths: Array) -> Array:
    """Return a mask of the bytes that the next eight of each string have."""
    table = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
    masks: Array = table[np.clip(lengths, 0, 8)]
    return masks
