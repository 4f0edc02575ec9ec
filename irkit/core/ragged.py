"""`Ragged`: rows of different lengths stored back to back, the only form of token sequences in irkit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from irkit.arguments import brief, is_count
from irkit.errors import BadTypeError, BadValueError

_MAX_TOTAL = 2**31 - 1  # offsets are int32, as attention kernels read them (cu_seqlens)


def as_tensor(operation: str, values: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Convert values to a tensor, as `torch.as_tensor` does; an error names the operation and the values.

    Raises:
        BadTypeError: The values cannot be converted.
    """
    if dtype is None and isinstance(values, Tensor):
        return values
    try:
        return torch.as_tensor(values, dtype=dtype, device=getattr(values, "device", "cpu"))
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as error:
        raise BadTypeError(f"{operation}: got {brief(values)}, expected numbers: {error}") from error


def to_device(values: Tensor, device: torch.device | str) -> Tensor:
    """Return ``values`` on a device.

    A copy from the CPU to CUDA goes through pinned memory, so the host does not wait for it.
    """
    if values.is_cpu and torch.device(device).type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


class Ragged:
    """A batch of ``n`` rows of different lengths without padding.

    Attributes:
        values: ``(total, ...)``, all rows one after the other.
        offsets: ``(n + 1,)`` int32 on the device of ``values``; row ``i`` is
            ``values[offsets[i]:offsets[i + 1]]`` (the field calls it ``cu_seqlens``).
        lengths: ``(n,)`` int64 on the CPU, so that Python can read them without waiting for a device.

    Examples:
        >>> rows = Ragged.from_rows([[1, 2, 3], [], [4]])
        >>> rows.lengths.tolist(), rows[2].tolist()
        ([3, 0, 1], [4])
    """

    __slots__ = ("_host", "_longest", "lengths", "offsets", "values")

    values: Tensor
    offsets: Tensor
    lengths: Tensor
    _host: Ragged | None  # the rows on the CPU, if `to` copied them from there
    _longest: int | None  # `max_length`, once it is known

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        """Split ``values (total, ...)`` into rows of ``lengths (n,)``.

        Raises:
            BadValueError: The lengths are negative or do not add up to ``total``.
        """
        values = as_tensor("Ragged: values", values)
        lengths = as_tensor("Ragged: lengths", lengths, torch.int64).cpu()
        total = int(lengths.sum())
        if lengths.dim() != 1 or (len(lengths) and int(lengths.min()) < 0):
            raise BadValueError(
                f"Ragged: lengths must be a row of numbers >= 0, got {lengths.tolist()!s:.200}"
            )
        if values.dim() == 0 or total != values.shape[0]:
            raise BadValueError(
                f"Ragged: lengths add up to {total}, but values have shape {tuple(values.shape)}; "
                "the first dimension must be the sum of the lengths"
            )
        if total > _MAX_TOTAL:
            raise BadValueError(f"Ragged: {total} elements in one batch exceed 2^31 - 1; split the batch")
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(lengths, 0, out=offsets[1:])
        self.values = values
        self.lengths = lengths
        self.offsets = to_device(offsets, values.device)
        self._host = self._longest = None

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Tensor | np.ndarray[Any, Any] | Sequence[Any]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Ragged:
        """Pack rows, each ``(length, ...)`` with equal trailing shapes.

        Args:
            rows: Tensors, arrays or lists. Empty lists take the trailing shape of the others.
            dtype: Dtype of the values; the default is the dtype of the first row that is not empty.
        """
        if not isinstance(rows, Iterable):
            raise BadTypeError(f"Ragged.from_rows: got {brief(rows)}, expected a sequence of rows")
        parts = [as_tensor("Ragged.from_rows: a row", row, dtype) for row in rows]
        if any(part.dim() == 0 for part in parts):
            raise BadTypeError("Ragged.from_rows: got a number, expected rows; wrap one row as [row]")
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64, device="cpu")
        filled = [part for part in parts if len(part)] or parts[:1]
        if not filled:
            return cls(torch.empty(0, dtype=dtype, device="cpu"), lengths)
        shapes = {part.shape[1:] for part in filled}
        if len(shapes) > 1:
            raise BadValueError(f"Ragged.from_rows: trailing shapes differ: {sorted(map(tuple, shapes))}")
        return cls(torch.cat(filled), lengths)

    @classmethod
    def from_padded(cls, values: Tensor, mask: Tensor) -> Ragged:
        """Pack the values that ``mask`` marks.

        Args:
            values: ``(n, length, ...)``.
            mask: ``(n, length)``, true (or 1) where a value belongs to the row. Padding may be anywhere in a
                row.
        """
        values, mask = as_tensor("Ragged.from_padded", values), as_tensor("Ragged.from_padded", mask)
        if mask.dim() != 2 or values.shape[:2] != mask.shape:
            raise BadValueError(
                f"Ragged.from_padded: values {tuple(values.shape)} and mask {tuple(mask.shape)} must agree "
                "in their first two dimensions"
            )
        mask = mask.bool()
        return cls(values[mask], mask.sum(1))

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all ``parts``, in order; at least one part."""
        if not isinstance(parts, list | tuple) or not all(isinstance(part, Ragged) for part in parts):
            raise BadTypeError(f"Ragged.concat: got {brief(parts)}, expected a list of Ragged")
        if not parts:
            raise BadValueError("Ragged.concat: got no parts, expected at least one")
        return cls(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def to_padded(self, padding: float = 0, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Pad the rows on the right to one length.

        Args:
            padding: Value of the added elements.
            length: Length of the padded rows; default: the longest row's length.

        Returns:
            ``values (n, length, ...)`` and a boolean ``mask (n, length)``, False at padding.
        """
        length = self.max_length if length is None else length
        if not is_count(length, 0):
            raise BadTypeError(f"Ragged.to_padded: length is {brief(length)}, expected a whole number")
        if length < self.max_length:
            raise BadValueError(
                f"Ragged.to_padded: length {length} is under the longest row {self.max_length}"
            )
        shape = len(self), length, *self.values.shape[1:]
        padded = self.values.new_full((shape[0] * length, *shape[2:]), padding)
        padded.index_copy_(0, self.slots(length), self.values)
        mask = torch.arange(length, device=self.device) < self.offsets.diff()[:, None]
        return padded.view(shape), mask

    def slots(self, length: int) -> Tensor:
        """Return the index of each element in rows padded to ``length`` and flattened: ``(total,)`` int64.

        The element at position ``p`` of row ``i`` has the index ``i * length + p``. Indexing so needs no wait
        for the device. With a mask instead, the host waits until the device has counted the elements.
        """
        shifts = length * torch.arange(len(self), device=self.device) - self.offsets[:-1]
        return torch.arange(self.values.shape[0], device=self.device) + self._repeated(shifts)

    def with_values(self, values: Tensor) -> Ragged:
        """Return rows of the same lengths with other ``values (total, ...)``."""
        values = as_tensor("Ragged.with_values", values)
        if values.shape[:1] != self.values.shape[:1] or values.device != self.offsets.device:
            raise BadValueError(
                f"Ragged.with_values: expected {self.values.shape[0]} elements on {self.offsets.device}, "
                f"got shape {tuple(values.shape)} on {values.device}"
            )
        twin = object.__new__(Ragged)
        twin.values, twin.lengths, twin.offsets, twin._host = values, self.lengths, self.offsets, None
        twin._longest = self._longest
        return twin

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Ragged:
        """Return a Ragged whose values are on a device and of a dtype; None keeps the present one."""
        if device is None or torch.device(device).type == self.device.type == "cpu":
            return self.with_values(self.values.to(dtype=dtype))
        values = to_device(self.values, device).to(dtype=dtype)
        if values.device == self.offsets.device:
            return self.with_values(values)
        moved = Ragged(values, self.lengths)
        moved._host = self if self.values.is_cpu else None
        return moved

    def host(self) -> Ragged:
        """Return the rows on the CPU.

        Rows that `to` has moved from the CPU are not copied back: a copy would wait for the device.
        """
        return self.to("cpu") if self._host is None else self._host

    def part_positions(self, starts: Tensor, lengths: Tensor) -> Ragged:
        """Return the positions in ``values`` of one part of each row.

        Args:
            starts: ``(n,)`` int64 on the CPU: start of the part in its row.
            lengths: ``(n,)`` int64 on the CPU: length of the part.

        Returns:
            Ragged int64 positions in ``values``, on their device.

        Examples:
            >>> rows = Ragged.from_rows([[5, 6, 7], [8]])
            >>> rows.part_positions(torch.tensor([1, 0]), torch.tensor([2, 1])).values.tolist()
            [1, 2, 3]
        """
        return self._part_positions(starts + (torch.cumsum(self.lengths, 0) - self.lengths), lengths)

    def _part_positions(self, starts: Tensor, lengths: Tensor) -> Ragged:
        """Like `part_positions`, but ``starts`` are positions in ``values``, not in the row."""
        total, device = int(lengths.sum()), self.device
        parts = Ragged(torch.arange(total, device=device), lengths)
        shifts = to_device(starts - (torch.cumsum(lengths, 0) - lengths), device)
        parts.values = parts.values + parts._repeated(shifts)
        return parts

    def where(self, mask: Tensor) -> Ragged:
        """Keep the elements that ``mask (total,)`` marks; a mask on the CPU avoids waiting for a device."""
        before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
        if mask.is_cpu and not self.values.is_cpu:
            ends = torch.nn.functional.pad(torch.cumsum(self.lengths, 0), (1, 0))
            positions = to_device(mask.nonzero().squeeze(1), self.device)
            return Ragged(self.values[positions], before[ends].diff())
        return Ragged(self.values[mask], before[self.offsets.long()].diff())

    @property
    def max_length(self) -> int:
        """Length of the longest row; 0 without rows."""
        if self._longest is None:
            self._longest = int(self.lengths.max()) if len(self) else 0
        return self._longest

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    def row_ids(self) -> Tensor:
        """Return the row number of each element, ``(total,)`` int64 on the device of ``values``."""
        return self._repeated(torch.arange(len(self), device=self.device))

    def positions(self) -> Tensor:
        """Return each element's position in its row, from 0: ``(total,)`` int64, on ``values``' device."""
        return torch.arange(self.values.shape[0], device=self.device) - self._repeated(self.offsets[:-1])

    def _repeated(self, values: Tensor) -> Tensor:
        """Repeat the i-th of ``values (n,)`` once per element of row i: ``(total,)``, on the same device."""
        lengths = self.lengths if self.values.is_cpu else self.offsets.diff()
        return torch.repeat_interleave(values, lengths, output_size=self.values.shape[0])

    def __len__(self) -> int:
        return self.lengths.shape[0]  # three times as fast as len

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.split(self.values, self.lengths.tolist()))

    @overload
    def __getitem__(self, rows: int) -> Tensor: ...

    @overload
    def __getitem__(self, rows: slice | Sequence[int] | Tensor | np.ndarray[Any, Any]) -> Ragged: ...

    def __getitem__(
        self, rows: int | slice | Sequence[int] | Tensor | np.ndarray[Any, Any]
    ) -> Tensor | Ragged:
        """Return one row as a tensor, or several (slice, indices, boolean mask) as a Ragged."""
        if isinstance(rows, int | np.integer):
            index = range(len(self))[rows]  # IndexError and negative indices as for lists
            start = int(self.lengths[:index].sum())
            return self.values[start : start + int(self.lengths[index])]
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:  # neighbours are a view
                stop = max(start, stop)
                begin = int(self.lengths[:start].sum())
                lengths = self.lengths[start:stop]
                part = Ragged(self.values[begin : begin + int(lengths.sum())], lengths)
                part._host = None if self._host is None else self._host[rows]
                return part
            chosen = torch.tensor(range(start, stop, step), dtype=torch.int64, device="cpu")
        else:
            chosen = as_tensor("Ragged: rows", rows).cpu()
            if chosen.dtype == torch.bool:
                chosen = chosen.nonzero().squeeze(1)
            elif chosen.numel() == 0:
                chosen = chosen.long()
            elif chosen.is_floating_point():
                raise BadTypeError(f"Ragged: rows are chosen by integers or booleans, got {chosen.dtype}")
            chosen = torch.arange(len(self), device="cpu")[chosen]
        lengths = self.lengths[chosen]
        starts = (torch.cumsum(self.lengths, 0) - self.lengths)[chosen]
        positions = self._part_positions(starts, lengths)
        return positions.with_values(self.values[positions.values])

    def __repr__(self) -> str:
        return (
            f"Ragged({len(self)} rows, values {tuple(self.values.shape)} {self.values.dtype} {self.device})"
        )
