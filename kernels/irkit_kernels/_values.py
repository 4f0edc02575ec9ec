"""Values, arrays and records of the LLVM IR that `_typed` writes; `_typed` explains them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn, Protocol

__all__ = [
    "Array",
    "Operand",
    "Record",
    "Struct",
    "Value",
    "is_value",
    "llvm_type",
    "parts",
    "size_of",
    "suffix",
    "vector",
]

Operand = Any  # a Value, or a number that takes the kind of the value beside it

_FLOAT = {"half": 2, "bfloat": 2, "float": 4}  # bytes


class Writer(Protocol):
    """The function that values belong to; see `_typed.Function`."""

    def value(self, kind: str, text: str) -> Value: ...

    def do(self, text: str) -> None: ...

    def typed(self, spec: Any, name: str) -> Any: ...

    def constant(self, kind: str, value: float) -> Value: ...

    def shuffle(self, a: Value, b: Value | int | None, lanes: Sequence[int]) -> Value: ...

    def call(self, name: str, *given: Any, kind: str = "", flags: str = "") -> Value: ...

    def intrinsic(self, name: str, kind: str, *given: Any, flags: str = "") -> Value: ...


def vector(lanes: int, kind: str) -> str:
    """Return the kind of a vector."""
    return f"<{lanes} x {kind}>"


@cache
def size_of(kind: str) -> int:
    """Return the bytes of a value."""
    lanes, element = parts(kind)
    return (lanes or 1) * (_FLOAT.get(element) or (8 if element == "ptr" else _bits(element) // 8))


class Value:
    """A value of a kind, whose operators append instructions.

    ``>>`` fills with zeros, also if the number is signed. Comparisons of floats are false if one of them is
    NaN; `compare` has others. Signed and unsigned integers of one size mix, and the left one decides.

    Attributes:
        kind: The kind.
        lanes: The number of lanes of a vector; 0 if the value is not a vector.
        element: The kind of a lane, or of the value.
    """

    __hash__ = None  # type: ignore[assignment]  # == compares at run time

    def __init__(self, code: Writer, kind: str, name: str) -> None:
        self.code, self.kind, self._name = code, kind, name
        self.lanes, self.element = parts(kind)

    def __str__(self) -> str:
        return self._name

    def __bool__(self) -> NoReturn:
        raise TypeError("the value is known when the code runs: use x.when, x.where, & and |")

    def __add__(self, other: Operand) -> Value:
        return self._arithmetic("add", other)

    def __sub__(self, other: Operand) -> Value:
        return self._arithmetic("sub", other)

    def __mul__(self, other: Operand) -> Value:
        return self._arithmetic("mul", other)

    def __radd__(self, other: Operand) -> Value:
        return self.like(other) + self

    def __rsub__(self, other: Operand) -> Value:
        return self.like(other) - self

    def __rmul__(self, other: Operand) -> Value:
        return self.like(other) * self

    def __neg__(self) -> Value:
        return self.code.value(self.kind, f"fneg {self.typed}") if self._floating else 0 - self

    def __truediv__(self, other: Operand) -> Value:
        return self._binary("fdiv", other)

    def __rtruediv__(self, other: Operand) -> Value:
        return self.like(other) / self

    def __floordiv__(self, other: Operand) -> Value:
        """Divide integers, rounding towards 0."""
        return self._binary("udiv" if self._unsigned else "sdiv", other)

    def __mod__(self, other: Operand) -> Value:
        """Return the remainder of `__floordiv__`."""
        return self._binary("urem" if self._unsigned else "srem", other)

    def __and__(self, other: Operand) -> Value:
        return self._binary("and", other)

    def __or__(self, other: Operand) -> Value:
        return self._binary("or", other)

    def __xor__(self, other: Operand) -> Value:
        return self._binary("xor", other)

    def __lshift__(self, other: Operand) -> Value:
        return self._binary("shl", other)

    def __rlshift__(self, other: Operand) -> Value:
        return self.like(other) << self

    def __rshift__(self, other: Operand) -> Value:
        return self._binary("lshr", other)

    def __invert__(self) -> Value:
        return self._binary("xor", True if self.element == "i1" else -1)

    def __lt__(self, other: Operand) -> Value:
        return self._ordered("lt", other)

    def __le__(self, other: Operand) -> Value:
        return self._ordered("le", other)

    def __gt__(self, other: Operand) -> Value:
        return self._ordered("gt", other)

    def __ge__(self, other: Operand) -> Value:
        return self._ordered("ge", other)

    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]
        return self.compare("oeq" if self._floating else "eq", other)

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]
        return self.compare("one" if self._floating else "ne", other)

    def compare(self, test: str, other: Operand) -> Value:
        """Compare by LLVM's name of a test, such as ``ult`` (unsigned) or ``ugt`` (true of NaN)."""
        kind = vector(self.lanes, "i1") if self.lanes else "i1"
        return self._binary(f"{'fcmp' if self._floating else 'icmp'} {test}", other, kind)

    def shift_signed(self, other: Operand) -> Value:
        """Shift right, filling with the sign."""
        return self._binary("ashr", other)

    def to(self, element: str) -> Value:
        """Convert the value, or all lanes of it. Floats become integers by rounding towards 0."""
        old, new = self.element, element
        wider = _width(new) > _width(old)
        if old in _FLOAT:
            action = ("fpext" if wider else "fptrunc") if new in _FLOAT else "fpto" + _sign(new)
        elif new in _FLOAT:
            action = f"{_sign(old)}tofp"
        elif _width(old) == _width(new):
            return self.cast(vector(self.lanes, new) if self.lanes else new)
        else:
            action = ("zext" if _sign(old) == "ui" else "sext") if wider else "trunc"
        return self._convert(action, new)

    def mask(self, element: str) -> Value:
        """Convert i1 to integers: all bits are set if the value is true, else none."""
        return self._convert("sext", element)

    def cast(self, kind: str) -> Value:
        """Return the same bits as a value of another kind."""
        if llvm_type(kind) == llvm_type(self.kind):
            return Value(self.code, kind, str(self))
        return self.code.value(kind, f"bitcast {self.typed} to {llvm_type(kind)}")

    def broadcast(self, lanes: int) -> Value:
        """Return a vector with the value in every lane."""
        kind, code = vector(lanes, self.kind), self.code
        one = code.value(kind, f"insertelement {llvm_type(kind)} poison, {self.typed}, i64 0")
        zeros = f"<{lanes} x i32> zeroinitializer"
        return code.value(kind, f"shufflevector {one.typed}, {llvm_type(kind)} poison, {zeros}")

    def count_ones(self) -> Value:
        """Return the number of bits that are set."""
        return self.code.intrinsic("ctpop", self.kind, self)

    def lowest_bit(self) -> Value:
        """Return the number of the lowest bit that is set; at least one must be."""
        return self.code.intrinsic("cttz", self.kind, self, True)

    def like(self, other: Operand) -> Value:
        """Return a number or a value as a value of this kind; refuse values of other kinds."""
        if isinstance(other, Value):
            if other.code is not self.code:
                raise TypeError(f"{other} is a value of another function")
            if llvm_type(other.kind) != llvm_type(self.kind):
                raise TypeError(f"{self.kind} and {other.kind}: convert one of them by .to(...)")
            return other
        return self.code.constant(self.kind, other)

    @property
    def typed(self) -> str:
        """The type and the name, as LLVM writes arguments."""
        return f"{llvm_type(self.kind)} {self}"

    @property
    def _floating(self) -> bool:
        return self.element in _FLOAT

    @property
    def _unsigned(self) -> bool:
        return self.element[0] == "u"

    def _binary(self, action: str, other: Operand, kind: str = "") -> Value:
        return self.code.value(kind or self.kind, f"{action} {self.typed}, {self.like(other)}")

    def _arithmetic(self, action: str, other: Operand) -> Value:
        if self._floating:
            return self._binary("f" + action, other)
        return self._binary(f"{action} nsw" if llvm_type(self.kind) == "i64" else action, other)

    def _ordered(self, test: str, other: Operand) -> Value:
        return self.compare(("o" if self._floating else "u" if self._unsigned else "s") + test, other)

    def _convert(self, action: str, element: str) -> Value:
        kind = vector(self.lanes, element) if self.lanes else element
        return self.code.value(kind, f"{action} {self.typed} to {llvm_type(kind)}")


class Struct:
    """The layout of a record: its fields, one after the other.

    Args:
        align: Bytes of which the place of each field is a multiple; None means the size of the field.
        fields: The kind of each field.

    Attributes:
        offsets: The byte at which each field begins.
        size: Bytes from one record to the next.
    """

    def __init__(self, align: int | None = None, /, **fields: Any) -> None:
        self.align, self.fields, self.offsets = align, fields, dict[str, int]()
        end, most = 0, align or 1
        for name, kind in fields.items():
            size = _spec_size(kind)
            start = -(-end // (align or size)) * (align or size)
            self.offsets[name], end, most = start, start + size, max(most, align or size)
        self.size = -(-end // most) * most

    def extended(self, **fields: Any) -> Struct:
        """Return a layout with more fields at its end."""
        return Struct(self.align, **self.fields, **fields)


class Record:
    """A record in memory: ``record.field`` reads, ``record.field = value`` writes."""

    def __init__(self, struct: Struct, address: Array) -> None:
        self.__dict__.update(struct=struct, address=address)

    def __getattr__(self, name: str) -> Any:
        field = self._field(name)
        return self.address.code.typed(self.struct.fields[name], str(field[self.struct.offsets[name]]))

    def __setattr__(self, name: str, value: Any) -> None:
        field = self._field(name)
        if field.kind == "ptr":
            value = Value(field.code, "ptr", str(value))
        field[self.struct.offsets[name]] = value

    def __str__(self) -> str:
        return str(self.address)

    def _field(self, name: str) -> Array:
        """Return the record as an array of a field's kind, indexed by bytes."""
        if name not in self.struct.fields:
            raise AttributeError(f"no field {name} among {', '.join(self.struct.fields)}")
        spec = self.struct.fields[name]
        kind = spec if is_value(spec) else "ptr"
        return Array(self.address.code, kind, str(self.address), self.struct.align or size_of(kind), 1)


class Array:
    """Memory of elements of one kind: ``a[i]`` reads, ``a[i] = value`` writes.

    Attributes:
        kind: What is read at an index: a kind, or a `Struct`.
        align: Bytes of which each address is a multiple.
        step: Bytes from one index to the next.
    """

    def __init__(
        self, code: Writer, kind: Any, name: str, align: int | None = None, step: int | None = None
    ) -> None:
        self.code, self.kind, self._name = code, kind, name
        size = kind.size if isinstance(kind, Struct) else size_of(kind)
        self.align, self.step = align or size, step or size

    def __str__(self) -> str:
        return self._name

    def at(self, index: Operand) -> Array:
        """Return the array that begins at an index of this one."""
        if isinstance(index, Value):
            if llvm_type(index.kind) != "i64":
                raise TypeError(f"an index is i64, not {index.kind}")
            offset: Value | int = index * self.step if self.step > 1 else index
        else:
            offset = index * self.step
        name = self.code.value("ptr", f"getelementptr i8, ptr {self}, i64 {offset}")
        return Array(self.code, self.kind, str(name), self.align, self.step)

    def __getitem__(self, index: Operand) -> Any:
        element = self.at(index)
        if isinstance(self.kind, Struct):
            return Record(self.kind, element.cast("u8", 1))
        return self.code.value(self.kind, f"load {llvm_type(self.kind)}, ptr {element}, align {self.align}")

    def __setitem__(self, index: Operand, value: Operand) -> None:
        value = Value(self.code, self.kind, "").like(value)
        self.code.do(f"store {value.typed}, ptr {self.at(index)}, align {self.align}")

    @property
    def value(self) -> Any:
        """The first element."""
        return self[0]

    @value.setter
    def value(self, value: Operand) -> None:
        self[0] = value

    def cast(self, kind: Any, align: int | None = None, step: int | None = None) -> Array:
        """Return the same memory with elements of another kind, ``step`` bytes apart."""
        return Array(self.code, kind, str(self), align, step)

    def vectors(self, lanes: int, align: int | None = None) -> Array:
        """Return the same memory with vectors as elements; a vector may begin at any index of this array."""
        return Array(self.code, vector(lanes, self.kind), str(self), align or self.align, self.step)

    def exists(self) -> Value:
        """Return whether the address is not null."""
        return self.code.value("i1", f"icmp ne ptr {self}, null")


@cache
def parts(kind: str) -> tuple[int, str]:
    """Return the number of lanes of a vector and the kind of a lane; 0 and ``kind`` for a scalar."""
    if kind[:1] != "<":
        return 0, kind
    lanes, _, element = kind[1:-1].partition(" x ")
    return int(lanes), element


def _bits(element: str) -> int:
    return int(element[1:])


def _width(element: str) -> int:
    return 8 * _FLOAT[element] if element in _FLOAT else _bits(element)


def _sign(element: str) -> str:
    """Return ``ui`` or ``si``, as LLVM's conversions to and from floats are named; i1 is unsigned."""
    return "ui" if element[0] == "u" or element == "i1" else "si"


@cache
def llvm_type(kind: str) -> str:
    """Return LLVM's type of a kind."""
    return re.sub(r"\bu(?=\d)", "i", kind)


def suffix(kind: str) -> str:
    """Return the ending that LLVM's overloaded functions have for a kind, such as ``v16f32``."""
    lanes, element = parts(llvm_type(kind))
    element = {"float": "f32", "half": "f16", "bfloat": "bf16", "ptr": "p0"}.get(element, element)
    return f"v{lanes}{element}" if lanes else element


def is_value(spec: Any) -> bool:
    return isinstance(spec, str) and spec[-1] != "*"


def _spec_size(spec: Any) -> int:
    return size_of(spec) if is_value(spec) else 8
