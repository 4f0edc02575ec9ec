"""Typed values over LLVM IR: what the code computes, and what is refused while it is written."""

from __future__ import annotations

import ctypes
import re
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels import _typed
from irkit_kernels._jit import compile_ir
from irkit_kernels._typed import Function, Struct, module, size_of, vector

Array = np.ndarray[Any, Any]

TYPES = {"i64": np.int64, "u8": np.uint8, "u16": np.uint16, "i32": np.int32, "float": np.float32}


def runs(function: Function, *arrays: Array) -> None:
    """Run a public function, whose parameters are all arrays, on arrays."""
    name = re.search(r"@(\w+)\(", function.text())
    assert name is not None
    code = compile_ir(module(function), name[1], [ctypes.c_void_p] * len(arrays))
    code(*(array.ctypes.data for array in arrays))


def test_the_example_of_the_module() -> None:
    example = (_typed.__doc__ or "").partition("count them::\n\n")[2].partition("**Kinds**")[0]
    names = {"Function": Function, "module": module, "compile_ir": compile_ir, **vars(ctypes)}
    exec(textwrap.dedent(example), names)  # the example is its own test
    for numbers in (np.arange(10), np.array([5, np.nan, 5.5]), np.array([])):
        values, out = numbers.astype(np.float32), np.zeros(2, np.float32)
        names["add_high"](values.ctypes.data, len(values), 4.5, out.ctypes.data)
        high = values[values > 4.5]
        assert out.tolist() == [high.sum(), len(high)]


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "less": lambda a, b: a < b,
    "most": lambda a, b: a <= b,
    "more": lambda a, b: a > b,
    "least": lambda a, b: a >= b,
    "equal": lambda a, b: a == b,
    "other": lambda a, b: a != b,
}


@pytest.mark.parametrize("kind", ["i64", "u8", "u16", "i32"])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_integers_compute_as_those_of_numpy(kind: str, data: Any) -> None:
    """Two numbers each, in a vector and alone; `compare` widens what is true to 1."""
    dtype, lanes = TYPES[kind], 4
    low, high = (0, 2**15) if kind == "u16" else (0, 255) if kind == "u8" else (-(2**15), 2**15)
    numbers = st.lists(st.integers(low, high), min_size=lanes, max_size=lanes)
    a, b = (np.array(data.draw(numbers), dtype) for _ in range(2))
    x = Function("run", public=True, a=f"{kind}*", b=f"{kind}*", out=f"{kind}*", vectors=f"{kind}*")
    left, right, out, many = x.parameters
    for place, operation in enumerate(OPERATIONS.values()):
        for lane in range(lanes):
            result = operation(left[lane], right[lane])
            out[place * lanes + lane] = result.to(kind) if result.kind == "i1" else result
        result = operation(left.vectors(lanes)[0], right.vectors(lanes)[0])
        many.vectors(lanes)[place * lanes] = result.to(kind) if result.element == "i1" else result
    found = np.zeros((2, len(OPERATIONS), lanes), dtype)
    runs(x, a, b, found[0], found[1])
    expected = np.array([operation(a, b) for operation in OPERATIONS.values()]).astype(dtype)
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(found[1], expected)


@given(st.integers(-128, 127), st.floats(-1000, 1000, width=32))
@settings(max_examples=20, deadline=None)
def test_conversions(number: int, real: float) -> None:
    x = Function("run", public=True, byte="i8*", real="float*", out="i64*", reals="float*")
    byte, given, out, reals = x.parameters
    signed, unsigned = byte[0], byte.cast("u8")[0]
    out[0], out[1], out[2] = signed.to("i64"), unsigned.to("i64"), given[0].to("i64")
    out[3], out[4] = signed.shift_signed(1).to("i64"), (signed >> 1).cast("u8").to("i64")
    out[5] = (unsigned > 127).to("i64") + (signed < 0).to("i64") * 2
    out[6] = x.maximum(signed.to("i64"), 3)
    out[7] = x.where(signed < 0, 0 - signed.to("i64"), signed.to("i64")) % 10
    reals[0], reals[1] = signed.to("float"), unsigned.to("float")
    reals[2] = x.minimum(given[0], 1.5) / -2.0
    reals[3], reals[4] = -0.0, 0.0
    found, floats = np.zeros(8, np.int64), np.ones(5, np.float32)
    runs(x, np.array([number], np.int8), np.array([real], np.float32), found, floats)
    bits = number % 256
    assert found[:5].tolist() == [number, bits, int(real), number >> 1, bits >> 1]
    assert found[5:].tolist() == [3 if number < 0 else 0, max(number, 3), abs(number) % 10]
    assert floats[:3].tolist() == [number, bits, np.float32(min(real, 1.5)) / np.float32(-2)]
    assert np.signbit(floats[3:]).tolist() == [True, False]


@given(st.lists(st.integers(-50, 50), max_size=40), st.integers(-60, 60))
@settings(max_examples=30, deadline=None)
def test_blocks(numbers: list[int], limit: int) -> None:
    """A loop in a branch in a loop, a bisection with a repeated block, and a loop that a condition ends."""
    ordered = np.sort(np.array(numbers, np.int64))
    x = Function("run", public=True, numbers="i64*", given="i64*", out="i64*")
    array, given, out = x.parameters
    n, wanted = given[0], given[1]

    with x.range(0, n, pairs=0, parts=[0, 0]) as outer:
        with x.when(array[outer.i] > wanted, pairs=outer.pairs) as branch:
            with x.range(outer.i + 1, n, pairs=branch.pairs) as inner:
                inner.pairs += 1
            branch.pairs = inner.pairs
        outer.pairs = branch.pairs
        outer.parts = [outer.parts[0] + 1, outer.parts[1] + array[outer.i]]
    out[0], out[1], out[2] = outer.pairs, outer.parts[0], outer.parts[1]

    low, high = x.local("i64"), x.local("i64")
    low.value, high.value = 0, n
    with x.when(n > 0), x.repeat() as again:  # the first number above the limit
        middle = (low.value + high.value) >> 1
        above = array[x.minimum(middle, n - 1)] > wanted
        high.value = x.where(above, middle, high.value)
        low.value = x.where(above, low.value, x.minimum(middle + 1, n))
        again.again_if(low.value < high.value)
    out[3] = low.value

    def goes_on(i: Any) -> Any:
        return (i < n) & (array[x.minimum(i, n - 1)] <= wanted)

    with x.when(n > 0, first=0) as branch:
        with x.count(0, goes_on) as loop:
            pass
        branch.first = loop.i
    out[4] = branch.first

    found = np.zeros(5, np.int64)
    runs(x, np.append(ordered, 0), np.array([len(ordered), limit]), found)
    place = int(np.searchsorted(ordered, limit, "right"))
    above = len(ordered) - place
    assert found.tolist() == [above * (above - 1) // 2, len(ordered), ordered.sum(), place, place]


def test_records() -> None:
    pick = Struct(place="i64", end="i64", share="float")
    packed = Struct(4, place="i64", range="i32", share="float")
    frame = Struct(8, picks=[pick], bytes="u8*", n="i64", share="float").extended(first=pick)
    assert (pick.size, packed.size, frame.size) == (24, 16, 40)
    assert list(packed.offsets.values()) == [0, 8, 12]
    x = Function("run", public=True, f=frame)
    (f,) = x.parameters
    with x.range(0, f.n) as loop:
        record = f.picks[loop.i]
        record.end = record.place + f.bytes[loop.i].to("i64")
        record.share = record.share * f.share
    f.first = f.picks.at(1)
    f.share = f.first.share
    picks = np.zeros(3, np.dtype([("place", "<i8"), ("end", "<i8"), ("share", "<f4"), ("pad", "<i4")]))
    picks["place"], picks["share"], bytes_ = [1, 2, 3], [1.5, 2.5, 3.5], np.array([10, 20, 255], np.uint8)
    words = np.array([picks.ctypes.data, bytes_.ctypes.data, 3, 0, 0])
    words[3:4].view(np.float32)[0] = 2
    runs(x, words)
    assert picks["end"].tolist() == [11, 22, 258]
    assert picks["share"].tolist() == [3, 5, 7]
    assert words[3:4].view(np.float32)[0] == 5
    assert words[4] == picks[1:].ctypes.data


def test_vectors() -> None:
    lanes = 8
    x = Function("run", public=True, numbers="float*", out="float*", counts="i64*")
    numbers, out, counts = x.parameters
    some, last = numbers.vectors(lanes, 4)[0], numbers.vectors(lanes)[lanes]
    many = out.vectors(lanes)
    many[0] = x.where(some > 2.0, some, 0)
    many[lanes] = x.shuffle(some, last, range(lanes - 1, 2 * lanes - 1))
    many[2 * lanes] = x.fma(some, last, x.constants("float", range(lanes)))
    many[3 * lanes] = numbers[0].broadcast(lanes)
    out[4 * lanes] = x.intrinsic("vector.reduce.fmax", "float", some)
    high = (some > 2.0).cast("u8")
    counts[0], counts[1] = high.count_ones().to("i64"), high.lowest_bit().to("i64")
    counts[2] = x.intrinsic("vector.reduce.add", "i32", (some > 2.0).mask("i32")).to("i64")
    values, found, ones = np.arange(16, dtype=np.float32), np.zeros(33, np.float32), np.zeros(3, np.int64)
    runs(x, values, found, ones)
    a, b = values[:8], values[8:]
    expected = np.concatenate([np.where(a > 2, a, 0), values[7:15], a * b + a, np.zeros(8), [7]])
    np.testing.assert_array_equal(found, expected)
    assert ones.tolist() == [5, 3, -5]
    assert (size_of(vector(8, "float")), size_of("i64"), size_of("ptr")) == (32, 8, 8)


def test_mistakes_are_refused_where_they_are_written() -> None:
    x = Function("run", n="i64", share="float", bytes="u8*", record=Struct(place="i64"))
    n, share, array, record = x.parameters
    for wrong in (lambda: n + share, lambda: array[0] + n, lambda: x.where(n > 0, n, share)):
        with pytest.raises(TypeError, match="convert one of them"):
            wrong()
    with pytest.raises(TypeError, match="an index is i64, not u8"):
        array[array[0]]
    with pytest.raises(TypeError, match=r"1.5 is no constant of kind i64"):
        n + 1.5
    with pytest.raises(TypeError, match=r"0.5 is no constant of kind <4 x u8>"):
        array.vectors(4)[0] & 0.5
    with pytest.raises(TypeError, match=r"%share is a value of another function"):
        Function("other", share="float").parameters[0] + share
    with pytest.raises(TypeError, match=r"use x.when"):
        bool(n > 0)
    with pytest.raises(AttributeError, match="no field end among place"):
        record.end  # noqa: B018
    with pytest.raises(AttributeError, match="no field end among place"):
        record.end = n
    with pytest.raises(TypeError, match="again_if"), x.repeat():
        pass
    with x.range(0, n, total=0) as loop:
        with pytest.raises(AttributeError, match="other is not carried"):
            loop.other = n
        with pytest.raises(TypeError, match="convert one of them"):
            loop.total = share
        with x.when(n > 0), pytest.raises(TypeError, match="total is assigned in another block"):
            loop.total = n
    with pytest.raises(TypeError, match="total is assigned in another block"):
        loop.total = n
