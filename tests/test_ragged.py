"""Ragged rows: round trips, selection, and refusal of what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from irkit import Ragged
from irkit.errors import BadTypeError, BadValueError

rows_of_numbers = st.lists(st.lists(st.integers(-1000, 1000), max_size=7), max_size=9)


def as_lists(ragged: Ragged) -> list[list[int]]:
    return [row.tolist() for row in ragged]


@given(rows_of_numbers)
def test_rows_come_back(rows: list[list[int]]) -> None:
    ragged = Ragged.from_rows(rows, dtype=torch.int64)
    assert as_lists(ragged) == rows
    assert ragged.offsets.dtype == torch.int32
    assert ragged.offsets.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
    assert [ragged[i].tolist() for i in range(-len(rows), len(rows))] == rows * 2
    assert ragged.row_ids().tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert ragged.positions().tolist() == [place for row in rows for place in range(len(row))]


@given(rows_of_numbers, st.integers(0, 3))
def test_padding_round_trip(rows: list[list[int]], extra: int) -> None:
    ragged = Ragged.from_rows(rows, dtype=torch.int64)
    values, mask = ragged.to_padded(padding=7, length=ragged.max_length + extra)
    assert values.shape == mask.shape == (len(rows), ragged.max_length + extra)
    assert values[~mask].eq(7).all()
    assert as_lists(Ragged.from_padded(values, mask)) == rows
    assert as_lists(Ragged.from_padded(values.flip(1), mask.flip(1).long())) == [row[::-1] for row in rows]


@given(rows_of_numbers, st.data())
def test_selection_is_that_of_a_list(rows: list[list[int]], data: st.DataObject) -> None:
    ragged = Ragged.from_rows(rows, dtype=torch.int64)
    cut = data.draw(st.slices(len(rows)))
    assert as_lists(ragged[cut]) == rows[cut]
    if rows:
        chosen = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=12))
        assert as_lists(ragged[chosen]) == [rows[i] for i in chosen]
        mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
        kept = [row for row, keep in zip(rows, mask, strict=True) if keep]
        assert as_lists(ragged[torch.tensor(mask)]) == as_lists(ragged[np.array(mask)]) == kept


@given(st.lists(rows_of_numbers, min_size=1, max_size=4))
def test_concat(parts: list[list[list[int]]]) -> None:
    ragged = Ragged.concat([Ragged.from_rows(rows, dtype=torch.int64) for rows in parts])
    assert as_lists(ragged) == [row for rows in parts for row in rows]


def test_trailing_shapes_and_types_are_kept() -> None:
    ragged = Ragged.from_rows([np.ones((2, 3), np.float32), [], torch.zeros(1, 3)])
    assert ragged.values.shape == (3, 3)
    assert ragged.lengths.tolist() == [2, 0, 1]
    assert ragged.to(dtype=torch.bfloat16).values.dtype == torch.bfloat16
    assert Ragged.from_rows([]).values.shape == (0,)
    assert ragged[1:].values.data_ptr() == ragged.values[2:].data_ptr()  # neighbours are a view


def test_selection_keeps_gradients() -> None:
    values = torch.randn(4, 2, requires_grad=True)
    Ragged(values, torch.tensor([1, 3]))[[1]].values.sum().backward()
    assert values.grad is not None
    assert values.grad.sum(1).tolist() == [0, 2, 2, 2]


def test_bad_input_is_named() -> None:
    ragged = Ragged.from_rows([[1, 2], [3]])
    with pytest.raises(BadValueError, match="add up to 4"):
        Ragged(torch.zeros(3), torch.tensor([2, 2]))
    with pytest.raises(BadValueError, match=">= 0"):
        Ragged(torch.zeros(3), torch.tensor([4, -1]))
    with pytest.raises(BadValueError, match="trailing shapes differ"):
        Ragged.from_rows([torch.zeros(1, 2), torch.zeros(1, 3)])
    with pytest.raises(BadValueError, match="first two dimensions"):
        Ragged.from_padded(torch.zeros(2, 3), torch.ones(2, 4))
    with pytest.raises(BadValueError, match="longest row 2"):
        ragged.to_padded(length=1)
    with pytest.raises(BadValueError, match="expected 3 elements"):
        ragged.with_values(torch.zeros(4))
    with pytest.raises(BadValueError, match="at least one"):
        Ragged.concat([])
    for wrong in (None, "a", [["a"]]):
        with pytest.raises(BadTypeError, match="Ragged: values: got"):
            Ragged(wrong, [1])
        with pytest.raises(BadTypeError, match="Ragged: lengths: got"):
            Ragged(torch.zeros(1), wrong)
    with pytest.raises(BadTypeError, match="from_rows: got None"):
        Ragged.from_rows(None)
    with pytest.raises(BadTypeError, match=r"wrap one row as \[row\]"):
        Ragged.from_rows([1, 2])
    with pytest.raises(BadTypeError, match="integers or booleans"):
        ragged[torch.tensor([0.5])]
    with pytest.raises(IndexError):
        ragged[2]
    with pytest.raises(IndexError):
        ragged[[5]]
